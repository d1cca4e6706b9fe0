"""Draws figures: lines with bands, bars and heat maps. Bands show ± the standard deviation that the
tables show."""

from collections.abc import Collection, Sequence
from math import nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from cape_plugins.utils.files import writing
from recipes.lab.tables import Cells, of_seeds

# lowest part of the whole that the vertical axis spans; a smaller part makes noise look large
LEAST_SPAN = 0.05
DIGITS = 4  # significant digits of a number below an axis
DASHES = ("-", "--", ":", "-.")


class Panel(NamedTuple):
    """A panel of a figure of lines."""

    cells: Cells  # values by line and x, which is a label or a number on the axis
    ylabel: str
    title: str = ""
    whole: float = 100  # the highest possible value: 1 of shares, 100 of percentages


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display, and its panels ``[rows, columns]``; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def write_figure(path: Path, figure: Any) -> None:
    """Writes a PNG file in one step: an interrupted program leaves no partial file."""
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def write_lines_figure(
    path: Path, panels: Sequence[Panel], xlabel: str, trained: Collection[Any] = ()
) -> None:
    """Writes a figure with a line for each row of each panel; x in `trained` are grey."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(max(7, 5.2 * columns), 4.4 * rows, rows, columns)
    for axes, panel in zip(grid.flat, panels, strict=False):
        draw_lines(axes, panel.cells, trained)
        axes.set(title=panel.title, xlabel=xlabel)
        axes.set_ylabel(f"{panel.ylabel}\n({of_seeds(panel.cells)})")
        widen(axes, panel.whole)
        axes.grid(alpha=0.3)
        if len(panel.cells) <= 6:
            axes.legend(fontsize="small")
        elif panel is panels[-1]:  # the legend is beside the panels, where it hides no line
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    write_figure(path, figure)


def draw_lines(axes: Any, cells: Cells, trained: Collection[Any] = ()) -> None:
    """Draws a line with its band for each row. A row whose name begins with the name of another row
    ("cape TTA" after "cape") has the same colour, dashed; a row that would hide another line is
    also dashed."""
    xs = dict.fromkeys(x for row in cells.values() for x in row)
    named = any(isinstance(x, str) for x in xs)
    position = {x: number if named else x for number, x in enumerate(xs)}
    styles: dict[str, int] = {}
    for number, (name, row) in enumerate(cells.items()):
        base = next((other for other in styles if name.startswith(f"{other} ")), name)
        dashes = styles[base] = styles.get(base, -1) + 1
        dashes += list(cells.values())[:number].count(row)
        colour = list(styles).index(base)
        style = {"color": f"C{colour % 10}", "ls": DASHES[(dashes + colour // 10) % len(DASHES)]}
        middle = [mean(values) if values else nan for values in row.values()]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in row.values()]
        where = [position[x] for x in row]
        draw_band(axes, where, middle, spread, label=name, marker="o", ms=4, **style)
    for x in xs:
        if x in trained:
            first = "occurs in training" if x == next(iter(trained)) else None
            axes.axvspan(position[x] - 0.5, position[x] + 0.5, color="0.92", zorder=0, label=first)
    if all(row.keys() == xs.keys() for row in cells.values()):
        labels = list(map(_label, xs))
        turned = 45 if sum(len(label) + 2 for label in labels) > 60 else 0
        axes.set_xticks(list(position.values()), labels, rotation=turned)


def _label(x: Any) -> str:
    if isinstance(x, float):
        return np.format_float_positional(x, DIGITS, fractional=False, trim="-")
    return str(x)


def draw_band(
    axes: Any, at: Sequence[float], middle: Sequence[float], spread: Sequence[float], **style: Any
) -> None:
    """Draws a line with a band of ± `spread`; a spread of 0 or NaN gives no band."""
    middle, spread = np.asarray(middle), np.nan_to_num(spread)
    (line,) = axes.plot(at, middle, **style)
    if spread.any():
        low, high = middle - spread, middle + spread
        axes.fill_between(at, low, high, alpha=0.15, color=line.get_color(), linewidth=0)


def draw_bars(axes: Any, cells: Cells) -> None:
    """Draws a group of bars for each row, a bar for each column."""
    labels = list(dict.fromkeys(label for row in cells.values() for label in row))
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        values = [row[label] for row in cells.values()]
        where = np.arange(len(cells)) + (number - (len(labels) - 1) / 2) * width
        spread = [stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
        axes.bar(where, list(map(mean, values)), 0.95 * width, label=label, yerr=spread)
    axes.set_xticks(range(len(cells)), list(cells))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)


def draw_matrix(axes: Any, values: np.ndarray, texts: Sequence[Sequence[str]], **scale: Any) -> Any:
    """Draws a heat map with a text in each cell, in a colour that can be read on the cell."""
    picture = axes.imshow(values, aspect="auto", **scale)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if np.isfinite(values[row, column]):
                red, green, blue, _ = picture.cmap(picture.norm(values[row, column]))
                colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
                style = {"ha": "center", "va": "center", "fontsize": "x-small", "color": colour}
                axes.text(column, row, text, **style)
    return picture


def widen(axes: Any, whole: float) -> None:
    """Makes the vertical axis span at least :data:`LEAST_SPAN` of the `whole`, so that a
    meaningless difference does not look large. Numbers lie between 0 and the whole."""
    low, high = axes.get_ylim()
    least = LEAST_SPAN * whole
    if high - low < least:
        margin = 0.45 * least  # leaves room, so that a line at the end of the range stays visible
        middle = max((low + high) / 2, margin)
        if middle < whole:  # values above the whole stay visible: error rates may be above 100
            middle = min(middle, whole - margin)
        axes.set_ylim(middle - least / 2, middle + least / 2)
