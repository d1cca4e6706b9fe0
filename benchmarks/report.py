"""Result files of a benchmark: every number (CSV), tables for readers (Markdown), a plot (PNG)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Setup, Timing
from recipes.lab.figures import write_figure
from recipes.lab.tables import markdown, write_csv, write_page


@dataclass
class Report:
    """The result of a benchmark.

    Attributes:
        title: Heading.
        text: Paragraphs of Markdown: the measurement, its method, and the numbers to reach.
        rows: Every number, a dict for each row; rows may differ in their keys.
        tables: Markdown by heading.
        plot: Draws on an empty figure.
        in_parentheses: Description of the numbers in parentheses in tables.
    """

    title: str
    text: Sequence[str]
    rows: list[dict[str, object]] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)
    plot: Callable | None = None
    in_parentheses: str = "95 % bootstrap interval"

    def add(self, columns: Mapping[str, object], timings: Mapping[str, Timing]) -> None:
        """Adds a row for each variant."""
        for name, timing in timings.items():
            self.rows.append({**columns, "variant": name} | timing_columns(timing))

    def compare(self, x: str, limit: float) -> None:
        """Makes tables and plot of the added rows: variants by the values of column `x`."""
        self.tables = ratio_tables(self.rows, x)

        def plot(figure: Any) -> None:
            axes = figure.subplots()
            plot_ratios(axes, self.rows, x, limit)
            legend_below(figure, axes)

        self.plot = plot


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


def variant_table(
    rows: Sequence[Mapping[str, object]], x: str, cell: Callable[[Mapping], str]
) -> list[str]:
    """Variants by the values of column `x`."""
    header = ["", *(f"{x} {value}" for value in distinct(rows, x))]
    lines = (
        [name, *(cell(row) for row in rows if row["variant"] == name)]
        for name in distinct(rows, "variant")
    )
    return markdown(header, lines)


def ratio_tables(rows: Sequence[Mapping[str, object]], x: str) -> dict[str, list[str]]:
    """Ratios and times, variants by the values of column `x`."""
    return {
        "Time / time of the reference": variant_table(rows, x, ratio_cell),
        "Milliseconds": variant_table(rows, x, lambda row: f"{row['milliseconds']:#.4g}"),
    }


def write(report: Report, name: str, setup: Setup, facts: Mapping[str, str], folder: Path) -> Path:
    """Writes ``<name>-<device>-torch<version>.{csv,md,png}`` (the dtype is in the name if it is
    not float32) and returns the path of the Markdown file."""
    from matplotlib.figure import Figure

    dtype = "" if setup.dtype == torch.float32 else f"-{str(setup.dtype).removeprefix('torch.')}"
    version = torch.__version__.partition("+")[0]
    stem = folder / f"{name}-{setup.device.type}{dtype}-torch{version}"
    write_csv(Path(f"{stem}.csv"), report.rows)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    report.plot(figure)
    write_figure(Path(f"{stem}.png"), figure)
    text = [line for paragraph in report.text for line in (paragraph, "")]
    sections = {"": text[:-1], **report.tables, "Figure": [f"![figure]({stem.name}.png)"]}
    write_page(Path(f"{stem}.md"), report.title, sections, facts)
    return Path(f"{stem}.md")


def plot_ratios(axes, rows: Sequence[Mapping[str, object]], x: str, limit: float) -> None:
    """Ratios with their intervals, a group of points for each value of column `x`."""
    groups, names = distinct(rows, x), distinct(rows, "variant")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        variant_rows = [row for row in rows if row["variant"] == name]
        ratios = np.array([row["ratio"] for row in variant_rows])
        ends = np.array([[row["ratio_low"], row["ratio_high"]] for row in variant_rows]).T
        xs = [
            groups.index(row[x]) + (number - len(names) / 2 + 0.5) * width for row in variant_rows
        ]
        axes.errorbar(xs, ratios, np.abs(ends - ratios), fmt="o", ms=4, label=name)
    axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), [f"{x} {group}" for group in groups])
    axes.set_ylabel(f"time / time of the reference (dotted: {limit})")
    axes.grid(axis="y", alpha=0.3)


def plot_columns(axes, rows: Sequence[Mapping[str, object]], x: str, y: str, **style) -> None:
    """Column `y` of the rows against column `x`."""
    axes.plot([row[x] for row in rows], [row[y] for row in rows], marker="o", **style)


def legend_below(figure, axes, columns: int = 6) -> None:
    """Draws the legend of `axes` below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
