"""Pictures of training, confusions, attention and similarities."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from cape_plugins.pictures import plot

DPI = 72


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file atomically."""
    plot.save(figure, path, DPI)
    plt.close(figure)


def draw_histories(path: Path, histories: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Loss, PER of dev and near attention of each model by epoch."""
    columns = {
        "train_loss": "training loss (nats)",
        "dev_per": "PER of dev (%)",
        "near_attention": "share of attention at most 5 frames away",
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, (column, title) in zip(axes, columns.items(), strict=True):
        for name, history in histories.items():
            axis.plot(
                *zip(*((row["epoch"], row[column]) for row in history), strict=True), label=name
            )
        axis.set(xlabel="epoch", title=title, ylim=(0, None))
    axes[0].legend(fontsize="small")
    save(figure, path)


def draw_confusions(path: Path, matrices: Mapping[str, np.ndarray], classes: Sequence[str]) -> None:
    """Row-normalised confusions without the diagonal, a panel for each model, one colour scale."""
    shown = {name: matrix - np.diag(np.diag(matrix)) for name, matrix in matrices.items()}
    highest = max(matrix.max() for matrix in shown.values())
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.5 * columns, 6 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    ticks = np.arange(len(classes))
    for axis, (name, matrix) in zip(axes.flat, shown.items(), strict=False):
        image = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=highest)
        axis.set(title=name, xlabel="predicted", ylabel="target")
        axis.set_xticks(ticks, classes, rotation=90, fontsize=6)
        axis.set_yticks(ticks, classes, fontsize=6)
    figure.colorbar(image, ax=axes, label="% of the frames of the target", shrink=0.6)
    save(figure, path)


def draw_attention(path: Path, weights: np.ndarray, title: str) -> None:
    """Attention maps ``[layers, H, T, T]``, layers in rows, heads and their mean in columns.

    Each map has its own colours, up to its 99th percentile: few large weights would hide the rest.
    """
    layers, heads = weights.shape[:2]
    figure, axes = plt.subplots(
        layers, heads + 1, figsize=(1.9 * (heads + 1), 2 * layers + 0.5), layout="constrained",
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for layer, row in enumerate(axes):
        maps = [*weights[layer], weights[layer].mean(0)]
        names = [f"L{layer + 1} H{head + 1}" for head in range(heads)] + [f"L{layer + 1} mean"]
        for axis, name, one in zip(row, names, maps, strict=True):
            axis.imshow(one, cmap="magma_r", vmin=0, vmax=np.percentile(one, 99) or 1)
            axis.set_title(name, fontsize=8)
            axis.tick_params(labelsize=6)
    figure.supxlabel("key (frame)", fontsize=8)
    figure.supylabel("query (frame)", fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def draw_similarities(path: Path, embeddings: np.ndarray, title: str) -> None:
    """Dot products and cosines of ``[T, K]`` position embeddings."""
    save(plot.similarity_figure({"": embeddings}, title, "frames"), path)
