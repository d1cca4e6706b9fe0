"""Pictures of one comparison: trainings, confusions, attention."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cape_plugins.pictures import plot
from recipes.lab.figures import Panel, new_figure, write_lines_figure
from recipes.lab.tables import Row, pivot
from recipes.phones.analysis import SILENCE, group_of

COLUMNS = {  # columns of histories: label, and highest possible value
    "train_loss": ("training loss, nats", 1),
    "dev_per": ("PER of dev, %", 100),
    "near_attention": ("share of attention at most 5 frames away", 1),
}
NOT_SHOWN = ("sil", "nsn")  # target and prediction that the thesis leaves out of its pictures
LARGEST_DOUBLINGS = 3  # colours of attention reach from 1/8 to 8 times uniform attention
save = partial(plot.save, dpi=72)


def draw_histories(path: Path, histories: Sequence[Row]) -> None:
    """Draws loss, PER on dev and attention to near frames of each model by epoch, with bands over
    seeds."""
    panels = [
        Panel(pivot(histories, "trained", "epoch", column), title, whole=whole)
        for column, (title, whole) in COLUMNS.items()
    ]
    write_lines_figure(path, panels, "epoch")


def off_diagonal(matrix: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """Confusions without the diagonal and :data:`NOT_SHOWN`, as in the pictures of the thesis."""
    errors = matrix - np.diag(np.diag(matrix))
    target, predicted = NOT_SHOWN
    if {*NOT_SHOWN} <= {*classes}:
        errors[classes.index(target), classes.index(predicted)] = 0
    return errors


def draw_confusions(
    path: Path, matrices: Mapping[str, np.ndarray], classes: Sequence[str], highest: float
) -> None:
    """Draws confusions, with a panel for each model. The colours of a panel reach up to `highest`,
    or up to the largest value of the panel if this value is higher."""
    errors = {name: off_diagonal(matrix, classes) for name, matrix in matrices.items()}
    columns = min(2, len(errors))
    rows = -(-len(errors) // columns)
    figure, axes = new_figure(6.5 * columns, 6 * rows, rows, columns)
    for axis in axes.flat[len(errors) :]:
        axis.remove()
    for axis, (name, matrix) in zip(axes.flat, errors.items(), strict=False):
        image = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=max(highest, matrix.max()))
        axis.set(title=name, xlabel="predicted", ylabel="target")
        name_classes(axis, classes)
        figure.colorbar(image, ax=axis, label="% of the frames of the target", shrink=0.6)
    save(figure, path)


def name_classes(axis: Any, classes: Sequence[str]) -> None:
    axis.set_xticks(range(len(classes)), classes, rotation=90, fontsize=6)
    axis.set_yticks(range(len(classes)), classes, fontsize=6)


def draw_attention(path: Path, rows: Mapping[str, np.ndarray], title: str) -> None:
    """Draws attention maps ``[H, T, T]``: a row for each name, such as "L1", and columns for the
    heads and their mean. The colours of a map end at its 99th percentile, because a few large
    weights would hide the others."""
    heads = len(next(iter(rows.values())))
    figure, axes = new_figure(1.9 * (heads + 1), 2 * len(rows) + 0.5, len(rows), heads + 1)
    for (label, weights), row in zip(rows.items(), axes, strict=True):
        maps = [*weights, weights.mean(0)]
        names = [*(f"H{head + 1}" for head in range(heads)), "mean"]
        for axis, name, weight in zip(row, names, maps, strict=True):
            axis.imshow(weight, cmap="magma_r", vmin=0, vmax=np.percentile(weight, 99) or 1)
            axis.set_title(f"{label} {name}", fontsize=8)
            axis.tick_params(labelsize=6)
            axis.label_outer()
    figure.supxlabel("key (frame)", fontsize=8)
    figure.supylabel("query (frame)", fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def draw_class_attention(
    path: Path, attention: np.ndarray, uniform: np.ndarray, classes: Sequence[str], title: str
) -> None:
    """Draws attention between classes (the mean over the heads) as multiples of uniform attention,
    with a panel for each layer. Vowels come first, then consonants, then silence; pairs of classes
    that no utterance has are white."""
    groups = ("vowel", "consonant", SILENCE)
    order = sorted(range(len(classes)), key=lambda number: groups.index(group_of(classes[number])))
    expected = np.where(uniform > 0, uniform, np.nan)
    times = (attention.mean(1) / expected)[:, order][:, :, order]
    figure, axes = new_figure(5.5 * len(times), 5.2, 1, len(times))
    for layer, (axis, values) in enumerate(zip(axes[0], times, strict=True)):
        logarithm = np.log2(np.maximum(values, 2.0**-LARGEST_DOUBLINGS))
        limits = {"vmin": -LARGEST_DOUBLINGS, "vmax": LARGEST_DOUBLINGS}
        image = axis.imshow(logarithm, cmap="RdBu_r", **limits)
        axis.set(title=f"L{layer + 1}", xlabel="class of the key", ylabel="class of the query")
        name_classes(axis, [classes[number] for number in order])
    bar = figure.colorbar(image, ax=[*axes[0]], shrink=0.7, label="times uniform attention")
    ticks = range(-LARGEST_DOUBLINGS, LARGEST_DOUBLINGS + 1)
    bar.set_ticks(ticks, labels=[f"{2.0**tick:g}" for tick in ticks])
    figure.suptitle(title, fontsize=9)
    save(figure, path)
