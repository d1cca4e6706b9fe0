"""Tables (CSV, Markdown) and plots (PNG) of the evaluation of image models."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, NamedTuple

import numpy as np

from recipes.lab.scores import LEAST_SPAN, widen
from recipes.lab.steps import write_lines, writing
from recipes.vit.protocol import MAX, MIN

Row = Mapping[str, Any]
# label of a row or line: label of a column or place: values of the seeds
Table = dict[str, dict[Any, list[float]]]

TITLES = {
    "accuracy": "Accuracy by size",
    "tta": "Test-time augmentation",
    "gamma": "Factor on the grid of positions",
    "bins": "Best size by size of the original",
    "throughput": "Accuracy against throughput",
}
TOP = {"top1": "Top-1 accuracy, %", "top5": "Top-5 accuracy, %"}
BEST = "best of each bin"
ALL = "all"


def pivot(rows: Sequence[Row], row: str, column: str, value: str) -> Table:
    """Values by two keys, in the order they come in; those of several seeds in one list."""
    table: Table = {}
    for one in rows:
        table.setdefault(one[row], {}).setdefault(one[column], []).append(one[value])
    return table


def cell(values: Sequence[float]) -> str:
    """Mean, and the standard deviation where there are several; "-" for none."""
    if not values:
        return "-"
    if isinstance(values[0], int):
        return str(values[0])
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{spread}"


def markdown(table: Table, corner: str) -> list[str]:
    """A Markdown table; `corner` says what the rows are."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    lines = [f"| {corner} | {' | '.join(map(str, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in table.items():
        cells = (cell(row.get(column, ())) for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def by(rows: Sequence[Row], *keys: str) -> dict[str, list[Row]]:
    """Rows by the values of keys, joined to a heading."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return groups


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line for each row; percentages and images per second with four decimals."""
    with writing(path) as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        for row in rows:
            table.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})


def write_markdown(
    path: Path, title: str, tables: Mapping[str, Sequence[str]], facts: Mapping[str, str]
) -> list[str]:
    """Tables by heading, then the facts to repeat them.

    Returns:
        The lines without the facts and the tables of top-5 accuracy.
    """
    parts = {heading: ["", f"## {heading}", "", *table] for heading, table in tables.items()}
    lines = [f"# {title}", *(line for part in parts.values() for line in part), ""]
    write_lines(path, [*lines, *(f"- **{name}**: {text}" for name, text in facts.items())])
    shown = (part for heading, part in parts.items() if not heading.startswith(TOP["top5"]))
    return [f"# {title}", *(line for part in shown for line in part)]


# ---- best size by bin --------------------------------------------------------------------------


class Bins(NamedTuple):
    """CAPE Table 5 of one model on one data set.

    Attributes:
        table: Values by bin and strategy, without those that were not tried.
        images: Number of images of each bin.
        sizes: Size in pixels by bin and strategy, "own" where images keep theirs.
        best: Best strategy of each bin, by the mean over the seeds.
        overall: Of all images, by those strategies that were tried in every bin, and by
            :data:`BEST`: means over the bins, weighted by their images.
    """

    table: Table
    images: dict[str, int]
    sizes: dict[str, dict[str, Any]]
    best: dict[str, str]
    overall: dict[str, list[float]]


def summarise_bins(rows: Sequence[Row], value: str = "top1") -> Bins:
    """Of rows of one model on one data set, a row for each bin, strategy and seed."""
    table = pivot(rows, "bin", "strategy", value)
    images = {row["bin"]: row["images"] for row in rows}
    sizes: dict[str, dict[str, Any]] = {}
    for row in rows:
        sizes.setdefault(row["bin"], {})[row["strategy"]] = row["size"]
    best = {
        label: max(tried, key=lambda name, tried=tried: mean(tried[name]))
        for label, tried in table.items()
    }

    def weighted(choice: Mapping[str, str]) -> list[float]:
        seeds = zip(*(table[label][name] for label, name in choice.items()), strict=True)
        return [fmean(values, images.values()) for values in seeds]

    names = dict.fromkeys(row["strategy"] for row in rows)
    everywhere = [name for name in names if all(name in tried for tried in table.values())]
    overall = {name: weighted(dict.fromkeys(table, name)) for name in everywhere}
    return Bins(table, images, sizes, best, {**overall, BEST: weighted(best)})


def bin_markdown(bins: Bins) -> list[str]:
    """A row for each bin with the best strategy in bold, then all images."""
    names = list(dict.fromkeys(name for tried in bins.table.values() for name in tried))
    lines = [f"| shorter side | images | {' | '.join(names)} | {BEST} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for label, tried in bins.table.items():
        cells = [label, str(bins.images[label])]
        for name in names:
            text = cell(tried.get(name, ()))
            text = f"**{text}**" if name == bins.best[label] else text
            shown = name in (MIN, MAX) and name in tried
            cells.append(f"{text} ({bins.sizes[label][name]})" if shown else text)
        cells.append(cell(tried[bins.best[label]]))
        lines.append(f"| {' | '.join(cells)} |")
    cells = [ALL, str(sum(bins.images.values()))]
    cells += [cell(bins.overall.get(name, ())) for name in [*names, BEST]]
    return [*lines, f"| {' | '.join(cells)} |"]


# ---- plots -------------------------------------------------------------------------------------


def draw_lines(
    path: Path, panels: Mapping[str, Table], xlabel: str, ylabel: str = TOP["top1"]
) -> None:
    """A panel for each table, a line for each of its rows with a band of one standard deviation
    over the seeds; rows whose name ends in TTA are dashed, in the colour of the row before."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7, 5.2 * columns), 4.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, table) in zip(grid, panels.items(), strict=False):
        _draw_panel(axes, table)
        axes.set(title=title, xlabel=xlabel, ylabel=f"{ylabel}\n({said_of_seeds(table)})")
        widen(axes, 100 * LEAST_SPAN, top=100)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in grid[len(panels) :]:
        axes.remove()
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def said_of_seeds(table: Table) -> str:
    """What a band is, and where there is none."""
    counts = {len(values) for row in table.values() for values in row.values() if values}
    band = "band: ± standard deviation over seeds"
    if counts == {1}:
        return "one seed each"
    return f"{band}, none of one" if 1 in counts else band


def _draw_panel(axes: Any, table: Table) -> None:
    labels = list(dict.fromkeys(label for row in table.values() for label in row))
    named = isinstance(labels[0], str)
    places = {label: place if named else label for place, label in enumerate(labels)}
    colour = -1
    for name, row in table.items():
        dashed = name.endswith(" TTA")
        colour += not dashed
        style = {"color": f"C{colour % 10}", "ls": "--" if dashed else "-"}
        at = [places[label] for label in row]
        middle = np.array([mean(values) if values else nan for values in row.values()])
        spread = np.array([stdev(v) if len(v) > 1 else 0.0 for v in row.values()])
        axes.plot(at, middle, marker="o", ms=4, label=name, **style)
        if spread.any():
            band = {"color": style["color"], "alpha": 0.15, "lw": 0}
            axes.fill_between(at, middle - spread, middle + spread, **band)
    axes.set_xticks(list(places.values()), list(map(str, labels)), rotation=45 if named else 0)


def draw_throughput(path: Path, rates: Table, accuracies: Table) -> None:
    """Accuracy against images per second, a line for each model through its sizes (CAPE Fig. 4)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, row in rates.items():
        points = [(mean(row[size]), mean(accuracies[name][size])) for size in row]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in map(accuracies[name].get, row)]
        style = {"yerr": spread if any(spread) else None, "capsize": 2, "marker": "o", "ms": 4}
        axes.errorbar(*zip(*points, strict=True), label=name, **style)
        for size, point in zip(row, points, strict=True):
            axes.annotate(str(size), point, (4, 4), textcoords="offset points", fontsize="small")
    axes.set_xscale("log")
    axes.set_xlabel("images per second (numbers: size in pixels)")
    axes.set_ylabel(f"{TOP['top1']}\n({said_of_seeds(accuracies).replace('band', 'bars')})")
    widen(axes, 100 * LEAST_SPAN, top=100)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


# ---- everything --------------------------------------------------------------------------------


def write_all(
    folder: Path, rows: Mapping[str, Sequence[Row]], facts: Mapping[str, str]
) -> Iterator[list[str]]:
    """Writes ``KIND.csv``, ``KIND.md`` and ``KIND.png`` for each kind of :data:`TITLES` that there
    are rows of, and yields the lines of its first tables.

    Args:
        facts: What is needed to repeat the tables; one with the name of a kind belongs to it alone.
    """
    for kind, found in rows.items():
        if kind == "bins":
            shown = _write_bins(folder / "bins.png", found)
        elif kind == "throughput":
            shown = _write_throughput(folder / "throughput.png", found, rows["accuracy"])
        else:
            shown = _write_sizes(folder / f"{kind}.png", found, kind)
        write_csv(folder / f"{kind}.csv", found)
        own = {name: text for name, text in facts.items() if name not in TITLES or name == kind}
        yield write_markdown(folder / f"{kind}.md", TITLES[kind], shown, own)


def _write_sizes(path: Path, rows: Sequence[Row], kind: str) -> dict[str, list[str]]:
    """Plot and tables of what has a value for each size."""
    lines = []
    for row in rows:
        name = row["model"] + (" TTA" if row.get("tta") == "+" else "")
        name += f", gamma {row['gamma']}" if kind == "gamma" else ""
        lines.append({**row, "line": name})
    keys = ("data", "model") if kind == "gamma" else ("data",)
    panels = {
        title: pivot(group, "line", "size", "top1") for title, group in by(lines, *keys).items()
    }
    draw_lines(path, panels, "size in pixels")
    shown = {}
    for name, group in by(lines, "data").items():
        for metric, title in TOP.items():
            heading = f"{title} ({name}, {group[0]['images']} images)"
            shown[heading] = markdown(pivot(group, "line", "size", metric), "model")
    return shown


def _write_bins(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    found = {title: summarise_bins(group) for title, group in by(rows, "data", "model").items()}
    panels = {}
    for title, bins in found.items():
        names = dict.fromkeys(name for tried in bins.table.values() for name in tried)
        panels[title] = {
            name: {label: tried.get(name, []) for label, tried in bins.table.items()}
            for name in names
        }
    draw_lines(path, panels, "shorter side of the original in pixels")
    return {f"{TOP['top1']} ({title})": bin_markdown(bins) for title, bins in found.items()}


def _write_throughput(
    path: Path, rows: Sequence[Row], accuracies: Sequence[Row]
) -> dict[str, list[str]]:
    """Accuracy is that on the first data set."""
    name, accuracies = next(iter(by(accuracies, "data").items()))
    rates = pivot(rows, "model", "size", "images_per_second")
    right = pivot(accuracies, "model", "size", "top1")
    draw_throughput(path, rates, right)
    return {
        "Images per second": markdown(rates, "model"),
        "Batch size": markdown(pivot(rows, "model", "size", "batch"), "model"),
        f"{TOP['top1']} ({name}, {accuracies[0]['images']} images)": markdown(right, "model"),
    }
