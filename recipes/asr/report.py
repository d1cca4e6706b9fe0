"""Tables and plots of error rates by duration, and against the hop."""

import csv
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from fairseq_user_dir.asr.scoring import count_errors
from recipes.lab.runs import Result
from recipes.lab.steps import write_lines, writing
from recipes.mt.report import markdown_table

ALL = "all"


class Rates(NamedTuple):
    """Word and letter error rate in percent, and the number of words and recordings."""

    wer: float
    ler: float
    words: int
    count: int


class Text(NamedTuple):
    """What was said and what was understood in a recording of so many seconds."""

    seconds: float
    reference: str
    hypothesis: str


def rates(texts: Sequence[Text]) -> Rates:
    """By jiwer."""
    counts = count_errors([one.reference for one in texts], [one.hypothesis for one in texts])
    wer, ler = (
        100.0 * counts[f"{unit}_errors"] / max(1, counts[f"{unit}s"]) for unit in ("word", "letter")
    )
    return Rates(wer, ler, counts["words"], len(texts))


def by_duration(texts: Sequence[Text], bins: Sequence[float]) -> dict[str, Rates]:
    """Rates of each bin that has recordings, and of all; `bins` are upper ends in seconds."""
    edges = [0, *bins]
    names = [f"{low:g}-{high:g} s" for low, high in pairwise(edges)]
    names.append(f"over {edges[-1]:g} s")
    groups: dict[int, list[Text]] = {}
    for one in texts:
        groups.setdefault(sum(one.seconds > end for end in bins), []).append(one)
    found = {names[index]: rates(groups[index]) for index in sorted(groups)}
    return {**found, ALL: rates(texts)}


def write_csv(path: Path, results: Sequence[Result], first: str = "duration") -> None:
    """One row for each model and group; what is not known of a model is left empty."""
    with writing(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "seed", "train_seconds", first, *Rates._fields])
        for result in results:
            for label, one in result.scores.items():
                values = (f"{one.wer:.4f}", f"{one.ler:.4f}", one.words, one.count)
                table.writerow([result.variant, result.seed, result.seconds, label, *values])


def write_markdown(
    path: Path,
    title: str,
    results: Sequence[Result],
    labels: Sequence[str],
    facts: Mapping[str, str],
    models: Mapping[str, str],
) -> None:
    """The report for people: facts to repeat it, tables, what the models are."""
    seeds = sorted({result.seed for result in results})
    spread = "" if len(seeds) == 1 else f" Mean of seeds {', '.join(map(str, seeds))} (range)."
    lines = [f"# {title}", "", *(f"- **{name}**: {value}" for name, value in facts.items())]
    for metric, name in (("wer", "Word error rate, %"), ("ler", "Letter error rate, %")):
        lines += ["", f"## {name}", "", *([spread.strip(), ""] if spread else [])]
        lines += markdown_table(results, metric, labels)
    lines += ["", "## Models", ""]
    for variant in dict.fromkeys(result.variant for result in results):
        times = [result.seconds for result in results if result.variant == variant]
        known = [seconds for seconds in times if seconds is not None]
        trained = f", trained in {mean(known):.0f} s (mean)" if known else ""
        lines.append(f"- **{variant}**: `{models[variant]}`{trained}")
    write_lines(path, lines)


def write_plot(path: Path, results: Sequence[Result], labels: Sequence[str], trained: int) -> None:
    """Word error rate by duration: mean over seeds, with a band from lowest to highest.

    Args:
        trained: Number of the first labels that occur in training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(labels))
    names = list(dict.fromkeys(result.variant for result in results))
    colours = {name: number for number, name in enumerate(dict.fromkeys(map(_plain, names)))}
    for name in names:
        rows = [result.scores for result in results if result.variant == name]
        values = [[row[label].wer for row in rows] for label in labels]
        style = {"color": f"C{colours[_plain(name)]}", "ls": "-" if name == _plain(name) else "--"}
        axes.plot(places, list(map(mean, values)), marker="o", ms=3, label=name, **style)
        low, high = list(map(min, values)), list(map(max, values))
        axes.fill_between(places, low, high, alpha=0.12, color=style["color"])
    if trained:
        axes.axvspan(-0.5, trained - 0.5, color="0.92", zorder=0, label="occurs in training")
    axes.set_xticks(places, labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set(xlabel="duration", ylabel="word error rate, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _plain(name: str) -> str:
    """The model without its batches: those without padding have the colour of the padded."""
    return name.removesuffix(" (padding-free)")


def write_hop_plot(path: Path, curves: Mapping[str, Sequence[tuple[float, float, float]]]) -> None:
    """Word error rate against throughput, a cross for each hop (CAPE Figure 17).

    Args:
        curves: Hop in seconds, word error rate in percent and seconds of audio per second.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        hops, wers, speeds = zip(*points, strict=True)
        left.plot([1000 * hop for hop in hops], wers, marker="x", label=name)
        right.plot(speeds, wers, marker="x", label=name)
    left.set(xlabel="hop, ms", ylabel="word error rate, %")
    right.set(xlabel="throughput, seconds of audio per second")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    left.legend(fontsize="small")
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=110)
