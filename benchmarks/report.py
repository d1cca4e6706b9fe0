"""Result files of a benchmark: every number (CSV), what people read (Markdown), a plot (PNG)."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Setup, Timing


@dataclass
class Report:
    """What a benchmark hands back.

    Attributes:
        title: Heading.
        text: What is measured, how and what is to be reached; paragraphs of Markdown.
        rows: Every number, one dict per row; rows may differ in their keys.
        tables: Markdown by heading.
        plot: Draws on an empty figure.
    """

    title: str
    text: Sequence[str]
    rows: list[dict[str, object]] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    plot: Callable | None = None


def distinct(rows: Iterable[Mapping[str, object]], name: str) -> list[object]:
    """Values of a column, in order of appearance."""
    return list(dict.fromkeys(row[name] for row in rows))


def timing_columns(timing: Timing) -> dict[str, object]:
    """A timing as columns of a row."""
    return {
        "milliseconds": round(timing.milliseconds, 4),
        "ratio": round(timing.ratio, 4),
        "ratio_low": round(timing.low, 4),
        "ratio_high": round(timing.high, 4),
        "rounds": timing.rounds,
    }


def ratio_cell(row: Mapping[str, object]) -> str:
    """A ratio with its interval, for a Markdown table."""
    return f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; the first column holds names, the others numbers."""
    lines = [f"| {' | '.join(map(str, header))} |", "|---|" + "---:|" * (len(header) - 1)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def ratio_tables(rows: Sequence[Mapping[str, object]], x: str) -> dict[str, list[str]]:
    """Ratios and times, variants by the values of column `x`."""
    header = ["", *(f"{x} {value}" for value in distinct(rows, x))]
    tables = {}
    for heading, cell in (
        ("Time / time of the reference", ratio_cell),
        ("Milliseconds", lambda row: f"{row['milliseconds']:#.4g}"),
    ):
        lines = (
            [name, *(cell(row) for row in rows if row["variant"] == name)]
            for name in distinct(rows, "variant")
        )
        tables[heading] = markdown_table(header, lines)
    return tables


def write(report: Report, name: str, setup: Setup, facts: Mapping[str, str], folder: Path) -> Path:
    """Writes ``<name>-<device>-torch<version>.{csv,md,png}`` (the dtype is in the name if it is
    not float32) and returns the path of the Markdown file."""
    dtype = "" if setup.dtype == torch.float32 else f"-{str(setup.dtype).removeprefix('torch.')}"
    version = torch.__version__.partition("+")[0]
    stem = folder / f"{name}-{setup.device.type}{dtype}-torch{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{stem}.csv", "w", encoding="utf-8", newline="") as file:
        columns = list(dict.fromkeys(key for row in report.rows for key in row))
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(report.rows)
    _plot(report, f"{stem}.png")
    lines = [f"# {report.title}", ""]
    lines += [f"- **{key}**: {value}" for key, value in facts.items()]
    for paragraph in report.text:
        lines += ["", paragraph]
    for heading, table in report.tables.items():
        lines += ["", f"## {heading}", "", *table]
    lines += ["", f"![plot]({stem.name}.png)"]
    path = Path(f"{stem}.md")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _plot(report: Report, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    report.plot(figure)
    figure.savefig(path, format="png", dpi=120)


def plot_ratios(axes, rows: Sequence[Mapping[str, object]], x: str, limit: float) -> None:
    """Ratios with their intervals, one group of points per value of column `x`."""
    groups, names = distinct(rows, x), distinct(rows, "variant")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [row for row in rows if row["variant"] == name]
        ratios = np.array([row["ratio"] for row in found])
        ends = np.array([[row["ratio_low"], row["ratio_high"]] for row in found]).T
        places = [groups.index(row[x]) + (number - len(names) / 2 + 0.5) * width for row in found]
        axes.errorbar(places, ratios, np.abs(ends - ratios), fmt="o", ms=4, label=name)
    axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), [f"{x} {group}" for group in groups])
    axes.set_ylabel(f"time / time of the reference (dotted: {limit})")
    axes.grid(axis="y", alpha=0.3)


def legend_below(figure, axes) -> None:
    """One legend for all panels, that of `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize="small")
