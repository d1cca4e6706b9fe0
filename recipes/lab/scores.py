"""Tables and plot of the Hugging Face recipes: scores by variant and group, of some seeds."""

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import accelerate

from recipes.lab.steps import machine, shown_command, started_as, versions, writing

# name of the variant: scores by group (length, duration, size ...), a list of those of all seeds
# where there are several
Scores = Mapping[str, Mapping[str, float | Sequence[float]]]


SHARES = ("accuracy", "exact match")  # metrics of 0 to 1; of the others 100 is all
LEAST_SPAN = 0.05  # of all, on the axis of a plot


def report(
    folder: Path,
    scores: Scores,
    metric: str,
    group: str,
    trained: Sequence[str],
    more: Mapping[str, Scores] | None = None,
    seeds: Sequence[int] = (),
) -> None:
    """Writes ``scores.json``, ``.csv``, ``.md`` and ``.png``, and prints the table; the last thing
    that the processes of a training do.

    Args:
        scores: By variant and group; lists in the order of `seeds` if these are given.
        metric: What the numbers are.
        group: What the groups are.
        trained: Groups that occur in training, marked in the plot.
        more: Scores by other metrics, for the tables.
        seeds: Tables and plot then show the mean, and the range from lowest to highest.
    """
    metrics = {metric: scores, **(more or {})}
    state = accelerate.PartialState()
    main_process = state.is_main_process
    state.destroy_process_group()
    if not main_process:
        return
    with writing(folder / "scores.json") as file:
        json.dump(scores, file, indent=1)
    _write_csv(folder / "scores.csv", metrics, group, seeds)
    lines = [line for title, by_name in metrics.items() for line in _table(title, by_name, group)]
    if len(seeds) > 1:
        lines += [f"Mean of seeds {', '.join(map(str, seeds))} (lowest-highest)", ""]
    program = started_as()
    if state.num_processes > 1:
        launch = f"torchrun --nproc_per_node {state.num_processes}"
        program = f"{launch} {program.removeprefix('python ')}"
    lines += [
        f"`{shown_command(program, sys.argv[1:])}`",
        f"{machine()}; {versions(('torch', 'transformers', 'accelerate'))}",
    ]
    with writing(folder / "scores.md") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    _plot(folder / "scores.png", scores, metric, group, trained)
    print(f"tables and plot: {folder}/scores.md, scores.csv, scores.json, scores.png")


def widen(axes: Any, least: float, top: float) -> None:
    """Lets the vertical axis span at least so much, so that a difference that says nothing does not
    look large; 0 and `top` are the ends of what the numbers can be."""
    low, high = axes.get_ylim()
    if high - low < least:
        margin = 0.45 * least  # a line at the end is seen
        middle = min(max((low + high) / 2, margin), top - margin)
        axes.set_ylim(middle - least / 2, middle + least / 2)


def _values(score: float | Sequence[float]) -> list[float]:
    return list(score) if isinstance(score, Sequence) else [score]


def _write_csv(path: Path, metrics: Mapping[str, Scores], group: str, seeds: Sequence[int]) -> None:
    """A row per variant, seed (if there are any) and group."""
    scores = next(iter(metrics.values()))
    with writing(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["variant", *(["seed"] if seeds else []), group, *metrics])
        for name, row in scores.items():
            for place, seed in enumerate(seeds or [None]):
                for key in row:
                    values = (_values(by_name[name][key])[place] for by_name in metrics.values())
                    own = [] if seed is None else [seed]
                    table.writerow([name, *own, key, *(f"{value:.4f}" for value in values)])


def _table(title: str, scores: Scores, group: str) -> list[str]:
    """Lines of Markdown."""
    groups = list(next(iter(scores.values())))
    lines = [f"{title} by {group}", "", f"| variant | {' | '.join(groups)} |"]
    lines.append("|---" * (len(groups) + 1) + "|")
    for name, row in scores.items():
        cells = []
        for key in groups:
            values = _values(row[key])
            spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{mean(values):.2f}{spread}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _plot(path: Path, scores: Scores, metric: str, group: str, trained: Sequence[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    groups = list(next(iter(scores.values())))
    for name, row in scores.items():
        values = [_values(row[key]) for key in groups]
        (line,) = axes.plot(groups, [mean(one) for one in values], marker="o", label=name)
        low, high = ([pick(one) for one in values] for pick in (min, max))
        if low != high:
            axes.fill_between(groups, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    for index, key in enumerate(groups):
        if key in trained:
            axes.axvspan(index - 0.5, index + 0.5, color="0.92", zorder=0)
    count = max(len(_values(score)) for row in scores.values() for score in row.values())
    seeds = f"mean of {count} seeds, band: lowest to highest" if count > 1 else "one seed"
    axes.set(xlabel=f"{group} (grey: in training)", ylabel=f"{metric}\n({seeds})")
    whole = 1 if metric in SHARES else 100
    widen(axes, LEAST_SPAN * whole, top=whole if metric in SHARES else math.inf)
    axes.legend()
    axes.grid(alpha=0.3)
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
