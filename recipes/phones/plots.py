"""Pictures of training, confusions, attention and similarities."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from cape_plugins.pictures import plot
from recipes.lab.figures import Panel, new_figure, write_lines_figure
from recipes.phones.train import History

COLUMNS = {  # of histories: what they are, and the most that they can be
    "train_loss": ("training loss, nats", 1),
    "dev_per": ("PER of dev, %", 100),
    "near_attention": ("share of attention at most 5 frames away", 1),
}
save = partial(plot.save, dpi=72)


def draw_histories(path: Path, histories: Mapping[str, History]) -> None:
    """Writes loss, PER of dev and near attention of each model by epoch."""
    panels = [
        Panel(
            {
                name: {int(row["epoch"]): [row[column]] for row in history}
                for name, history in histories.items()
            },
            title,
            whole=whole,
        )
        for column, (title, whole) in COLUMNS.items()
    ]
    write_lines_figure(path, panels, "epoch")


def draw_confusions(path: Path, matrices: Mapping[str, np.ndarray], classes: Sequence[str]) -> None:
    """Writes confusions without the diagonal, a panel for each model, in one colour scale."""
    shown = {name: matrix - np.diag(np.diag(matrix)) for name, matrix in matrices.items()}
    highest = max(matrix.max() for matrix in shown.values())
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = new_figure(6.5 * columns, 6 * rows, rows, columns)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    ticks = np.arange(len(classes))
    for axis, (name, matrix) in zip(axes.flat, shown.items(), strict=False):
        image = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=highest)
        axis.set(title=name, xlabel="predicted", ylabel="target")
        axis.set_xticks(ticks, classes, rotation=90, fontsize=6)
        axis.set_yticks(ticks, classes, fontsize=6)
    used = list(axes.flat[: len(shown)])
    figure.colorbar(image, ax=used, label="% of the frames of the target", shrink=0.6)
    save(figure, path)


def draw_attention(path: Path, weights: np.ndarray, title: str) -> None:
    """Writes attention maps ``[layers, H, T, T]``, layers in rows, heads and their mean in columns.

    Each map has its own colours, up to its 99th percentile: few large weights would hide the rest.
    """
    layers, heads = weights.shape[:2]
    figure, axes = new_figure(1.9 * (heads + 1), 2 * layers + 0.5, layers, heads + 1)
    for layer, row in enumerate(axes):
        maps = [*weights[layer], weights[layer].mean(0)]
        names = [*(f"H{head + 1}" for head in range(heads)), "mean"]
        for axis, name, weight in zip(row, names, maps, strict=True):
            axis.imshow(weight, cmap="magma_r", vmin=0, vmax=np.percentile(weight, 99) or 1)
            axis.set_title(f"L{layer + 1} {name}", fontsize=8)
            axis.tick_params(labelsize=6)
            axis.label_outer()
    figure.supxlabel("key (frame)", fontsize=8)
    figure.supylabel("query (frame)", fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def draw_similarities(path: Path, embeddings: np.ndarray, title: str) -> None:
    """Writes dot products and cosines of ``[T, K]`` position embeddings."""
    save(plot.similarity_figure({"": embeddings}, title, "frames"), path)
