"""Tables (CSV, Markdown) and figures of the evaluation of image models."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any, NamedTuple

from recipes.lab.figures import Panel, new_figure, widen, write_figure, write_lines_figure
from recipes.lab.tables import (
    ALL,
    Cells,
    Row,
    cell,
    grouped,
    markdown,
    of_seeds,
    pivot,
    seed_table,
    write_csv,
    write_page,
)
from recipes.vit.protocol import MAX, MIN

TITLES = {
    "accuracy": "Accuracy by size",
    "tta": "Test-time augmentation",
    "gamma": "Factor on the grid of positions",
    "bins": "Best size by size of the original",
    "throughput": "Accuracy against throughput",
}
TOP = {"top1": "Top-1 accuracy, %", "top5": "Top-5 accuracy, %"}
BEST = "best of each bin"


# ---- best size by bin --------------------------------------------------------------------------


class Bins(NamedTuple):
    """CAPE Table 5 of one model on one data set.

    Attributes:
        cells: Values by bin and strategy, without those that were not tried.
        images: Number of images of each bin.
        sizes: Size in pixels by bin and strategy, "own" where images keep theirs.
        best: Best strategy of each bin, by the mean over the seeds.
        overall: Of all images, by those strategies that were tried in every bin, and by
            :data:`BEST`: means over the bins, weighted by their images.
    """

    cells: Cells
    images: dict[str, int]
    sizes: dict[str, dict[str, Any]]
    best: dict[str, str]
    overall: dict[str, list[float]]

    @property
    def strategies(self) -> list[str]:
        """Those that were tried in any bin."""
        return list(dict.fromkeys(name for tried in self.cells.values() for name in tried))


def summarise_bins(rows: Sequence[Row], value: str = "top1") -> Bins:
    """Summarises rows of one model on one data set, a row for each bin, strategy and seed."""
    cells = pivot(rows, "bin", "strategy", value)
    images = {row["bin"]: row["images"] for row in rows}
    sizes: dict[str, dict[str, Any]] = {}
    for row in rows:
        sizes.setdefault(row["bin"], {})[row["strategy"]] = row["size"]
    best = {
        label: max(tried, key=lambda name, tried=tried: mean(tried[name]))
        for label, tried in cells.items()
    }

    def weighted(choice: Mapping[str, str]) -> list[float]:
        seeds = zip(*(cells[label][name] for label, name in choice.items()), strict=True)
        return [fmean(values, images.values()) for values in seeds]

    names = dict.fromkeys(row["strategy"] for row in rows)
    everywhere = [name for name in names if all(name in tried for tried in cells.values())]
    overall = {name: weighted(dict.fromkeys(cells, name)) for name in everywhere}
    return Bins(cells, images, sizes, best, {**overall, BEST: weighted(best)})


def bin_table(bins: Bins) -> list[str]:
    """A row for each bin with the best strategy in bold, then all images."""
    rows = []
    for label, tried in bins.cells.items():
        cells = []
        for name in bins.strategies:
            text = cell(tried.get(name, ()))
            text = f"**{text}**" if name == bins.best[label] else text
            shown = name in (MIN, MAX) and name in tried
            cells.append(f"{text} ({bins.sizes[label][name]})" if shown else text)
        rows.append([label, bins.images[label], *cells, cell(tried[bins.best[label]])])
    overall = [cell(bins.overall.get(name, ())) for name in [*bins.strategies, BEST]]
    rows.append([ALL, sum(bins.images.values()), *overall])
    corner = f"shorter side ({of_seeds(bins.cells)})"
    return markdown([corner, "images", *bins.strategies, BEST], rows)


# ---- throughput --------------------------------------------------------------------------------


def draw_throughput(path: Path, rates: Cells, accuracies: Cells) -> None:
    """Accuracy against images per second, a line for each model through its sizes (CAPE Fig. 4)."""
    figure, ((axes,),) = new_figure(7, 4.8)
    for name, row in rates.items():
        points = [(mean(row[size]), mean(accuracies[name][size])) for size in row]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in map(accuracies[name].get, row)]
        style = {"yerr": spread if any(spread) else None, "capsize": 2, "marker": "o", "ms": 4}
        axes.errorbar(*zip(*points, strict=True), label=name, **style)
        for size, point in zip(row, points, strict=True):
            axes.annotate(str(size), point, (4, 4), textcoords="offset points", fontsize="small")
    axes.set_xscale("log")
    axes.set_xlabel("images per second (numbers: size in pixels)")
    axes.set_ylabel(f"{TOP['top1']}\n({of_seeds(accuracies)})")
    widen(axes, 100)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    write_figure(path, figure)


# ---- everything --------------------------------------------------------------------------------


def write_all(
    folder: Path, rows: Mapping[str, Sequence[Row]], facts: Mapping[str, str]
) -> Iterator[list[str]]:
    """Writes ``KIND.csv``, ``KIND.md`` and ``KIND.png`` for each kind of :data:`TITLES` that there
    are rows of, and yields the lines of its tables.

    Args:
        facts: What is needed to repeat the tables; one with the name of a kind belongs to it alone.
    """
    for kind, measured in rows.items():
        if kind == "bins":
            tables = _write_bins(folder / "bins.png", measured)
        elif kind == "throughput":
            tables = _write_throughput(folder / "throughput.png", measured, rows["accuracy"])
        else:
            tables = _write_sizes(folder / f"{kind}.png", measured, kind)
        write_csv(folder / f"{kind}.csv", measured)
        own = {name: text for name, text in facts.items() if name not in TITLES or name == kind}
        yield write_page(folder / f"{kind}.md", TITLES[kind], tables, own)


def _write_sizes(path: Path, rows: Sequence[Row], kind: str) -> dict[str, list[str]]:
    """Figure and tables of what has a value for each size."""
    lines = []
    for row in rows:
        name = row["model"] + (" TTA" if row.get("tta") == "+" else "")
        name += f", gamma {row['gamma']}" if kind == "gamma" else ""
        lines.append({**row, "line": name})
    panels = [
        Panel(pivot(group, "line", "size", "top1"), TOP["top1"], title)
        for title, group in grouped(lines, "data", *(["model"] * (kind == "gamma"))).items()
    ]
    write_lines_figure(path, panels, "size in pixels")
    return {
        f"{title} ({name}, {group[0]['images']} images)": seed_table(
            pivot(group, "line", "size", metric), "model"
        )
        for name, group in grouped(lines, "data").items()
        for metric, title in TOP.items()
    }


def _write_bins(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    summaries = {
        title: summarise_bins(group) for title, group in grouped(rows, "data", "model").items()
    }
    panels = []
    for title, bins in summaries.items():
        lines = {
            name: {label: tried.get(name, []) for label, tried in bins.cells.items()}
            for name in bins.strategies
        }
        panels.append(Panel(lines, TOP["top1"], title))
    write_lines_figure(path, panels, "shorter side of the original in pixels")
    return {f"{TOP['top1']} ({title})": bin_table(bins) for title, bins in summaries.items()}


def _write_throughput(
    path: Path, rows: Sequence[Row], accuracies: Sequence[Row]
) -> dict[str, list[str]]:
    """Accuracy is that on the first data set."""
    name, accuracies = next(iter(grouped(accuracies, "data").items()))
    rates = pivot(rows, "model", "size", "images_per_second")
    right = pivot(accuracies, "model", "size", "top1")
    draw_throughput(path, rates, right)
    return {
        "Images per second": seed_table(rates, "model"),
        "Batch size": seed_table(pivot(rows, "model", "size", "batch"), "model"),
        f"{TOP['top1']} ({name}, {accuracies[0]['images']} images)": seed_table(right, "model"),
    }
