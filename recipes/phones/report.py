"""Tables and pictures of one comparison, and the page that shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from cape_plugins.pictures import plot
from recipes.lab.figures import Panel, new_figure, write_lines_figure
from recipes.lab.steps import folder_name
from recipes.lab.tables import Row, markdown, pivot, seed_table, write_csv, write_page
from recipes.phones.analysis import top_confusions
from recipes.phones.train import CONDITIONS, NEAR, NO_POSITIONS, History

PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "espeakng-loader")
COUNTS = ("per", "changes", "type1", "type2", "type3", "long_runs")
COLUMNS = {  # of histories: what they are, and the most that they can be
    "train_loss": ("training loss, nats", 1),
    "dev_per": ("PER of dev, %", 100),
    "near_attention": ("share of attention at most 5 frames away", 1),
}
save = partial(plot.save, dpi=72)


@dataclass
class Result:
    """What was measured with one position embedding; all but the rows are of the first seed."""

    name: str
    target_changes: int  # of the class between consecutive frames in the labels of the test
    # models of all seeds under the test conditions: type, trained, tested, seed, COUNTS
    rows: list[Row] = field(default_factory=list)
    histories: dict[str, History] = field(default_factory=dict)  # by condition of training
    confusions: dict[str, np.ndarray] = field(default_factory=dict)  # [targets, predictions], %
    heads: list[Row] = field(default_factory=list)  # by condition of training, layer, head
    similarities: list[Row] = field(default_factory=list)  # by distance in frames

    def folder(self, condition: str | None = None) -> str:
        """Name of the folder of pictures, of all models or one: those that were trained without
        positions are shared by all types."""
        own = condition is None or CONDITIONS[condition].positions
        return folder_name(self.name) if own else NO_POSITIONS.type


def draw_histories(path: Path, histories: Mapping[str, History]) -> None:
    """Writes loss, PER of dev and near attention of each model by epoch."""
    rows = [{**row, "model": name} for name, history in histories.items() for row in history]
    panels = [
        Panel(pivot(rows, "model", "epoch", column), title, whole=whole)
        for column, (title, whole) in COLUMNS.items()
    ]
    write_lines_figure(path, panels, "epoch")


def draw_confusions(path: Path, matrices: Mapping[str, np.ndarray], classes: Sequence[str]) -> None:
    """Writes confusions without the diagonal, a panel for each model, in one colour scale."""
    shown = {name: matrix - np.diag(np.diag(matrix)) for name, matrix in matrices.items()}
    highest = np.max([*shown.values()])
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = new_figure(6.5 * columns, 6 * rows, rows, columns)
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, (name, matrix) in zip(axes.flat, shown.items(), strict=False):
        image = axis.imshow(matrix, cmap="magma_r", vmin=0, vmax=highest)
        axis.set(title=name, xlabel="predicted", ylabel="target")
        axis.set_xticks(range(len(classes)), classes, rotation=90, fontsize=6)
        axis.set_yticks(range(len(classes)), classes, fontsize=6)
    figure.colorbar(image, ax=figure.axes, label="% of the frames of the target", shrink=0.6)
    save(figure, path)


def draw_attention(path: Path, weights: np.ndarray, title: str) -> None:
    """Writes attention maps ``[layers, H, T, T]``, layers in rows, heads and their mean in columns,
    each in colours up to its 99th percentile: few large weights would hide the rest."""
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


def rate_table(rows: Sequence[Row]) -> list[str]:
    """Error rates with models in rows, test conditions in columns."""
    rows = [{**row, "model": f"{row['type']} M-{row['trained']}"} for row in rows]
    cells = pivot(rows, "model", "tested", "per")
    tests = [name for name in CONDITIONS if any(name in row for row in cells.values())]
    ordered = {name: {test: row.get(test, []) for test in tests} for name, row in cells.items()}
    return seed_table(ordered, "model by test")


def write_results(
    output: Path, facts: Mapping[str, str], classes: Sequence[str], results: Sequence[Result]
) -> list[str]:
    """Writes all tables: ``results.md``, ``measurements.csv``, and those of each type in its
    folder. Returns the lines of the table of error rates."""
    measurements = [row for result in results for row in result.rows]
    write_csv(output / "measurements.csv", measurements)
    rates = rate_table(measurements)
    sections = {"PER": ["Wrong frames in percent of all frames of the test.", "", *rates]}
    for result in results:
        folder = output / result.folder()
        for name, matrix in result.confusions.items():
            rows = [
                {"target": target, **dict(zip(classes, row, strict=True))}
                for target, row in zip(classes, matrix.tolist(), strict=True)
            ]
            write_csv(output / result.folder(name) / f"confusions-{name}.csv", rows)
        epochs = [{"trained": name, **row} for name, h in result.histories.items() for row in h]
        write_csv(folder / "training.csv", epochs)
        write_csv(folder / "heads.csv", result.heads)
        if result.similarities:
            write_csv(folder / "similarity.csv", result.similarities)
        sections[result.name] = _section(result, classes)
    write_page(output / "results.md", "Phone classification", sections, facts)
    return rates


def _section(result: Result, classes: Sequence[str]) -> list[str]:
    """The page's part on one type, of its first seed."""
    pictures = [f"{result.folder()}/{name}" for name in ("training", "confusions")]
    pictures += [f"{result.folder(name)}/attention-{name}" for name in result.confusions]
    pictures += [f"{result.folder()}/similarity"] if result.similarities else []
    first = [row for row in result.rows if row["seed"] == result.rows[0]["seed"]]
    counts = [[f"M-{r['trained']}", r["tested"], *(r[name] for name in COUNTS)] for r in first]
    tops = {f"M-{name}": top_confusions(m, classes, 8) for name, m in result.confusions.items()}
    confused = (
        [f"{target} as {predicted} {percent:.1f}" for target, predicted, percent in row]
        for row in zip(*tops.values(), strict=True)
    )
    heads = ({**row, "trained": f"M-{row['trained']}"}.values() for row in result.heads)
    return [
        *(f"![{place.partition('/')[2]}]({place}.png)" for place in pictures),
        "",
        "Smoothness (class changes between consecutive frames; the labels have "
        f"{result.target_changes}) and wrong frames by type of error:",
        "",
        *markdown(["trained", "tested", *COUNTS], counts),
        "",
        "Largest confusions, in percent of the frames of the target:",
        "",
        *markdown(list(tops), confused),
        "",
        "Attention by head, for one utterance: the distance of key and query with the largest mean "
        f"weight, that weight, and the share of keys at most {NEAR} frames away:",
        "",
        *markdown([*result.heads[0]], heads),
    ]
