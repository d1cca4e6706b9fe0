"""Tables (CSV, Markdown) and a plot (PNG) of scores by length, and how to repeat them."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from recipes.lab.runs import Result
from recipes.lab.steps import write_lines, writing
from recipes.mt.length_corpus import Lengths
from recipes.mt.scoring import METRICS

PACKAGES = ("torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "num2words")
ALL = "all"  # the group of all sentences together


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One row per model and length: variant, seed, training seconds, length, count, metrics."""
    with writing(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["variant", "seed", "train_seconds", "length", "count", *METRICS])
        for result in results:
            for label, score in result.scores.items():
                values = (f"{getattr(score, metric):.4f}" for metric in METRICS)
                table.writerow(
                    [result.variant, result.seed, result.seconds, label, score.count, *values]
                )


def summarise(results: Sequence[Result], metric: str, label: str) -> dict[str, list[float]]:
    """Values of one metric for one group by variant, one for each seed."""
    values: dict[str, list[float]] = {}
    for result in results:
        values.setdefault(result.variant, []).append(getattr(result.scores[label], metric))
    return values


def markdown_table(results: Sequence[Result], metric: str, labels: Sequence[str]) -> list[str]:
    """Rows are variants, columns are lengths; mean over seeds, and the range of several seeds."""
    digits = 1 if metric == "bleu" else 2
    columns = {label: summarise(results, metric, label) for label in labels}
    lines = [f"| variant | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    for variant in dict.fromkeys(result.variant for result in results):
        cells = []
        for label in labels:
            values = columns[label][variant]
            cell = f"{mean(values):.{digits}f}"
            if len(values) > 1 and max(values) - min(values) >= 0.5 * 10**-digits:
                cell += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
            cells.append(cell)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def write_markdown(
    path: Path,
    results: Sequence[Result],
    lengths: Lengths,
    facts: Mapping[str, str],
    notes: Mapping[str, str],
) -> None:
    """The report for people: facts to repeat it, one table per metric, what the variants are."""
    seeds = sorted({result.seed for result in results})
    seen = f"The first {lengths.trained} lengths occur in training"
    spread = (
        "" if len(seeds) == 1 else f" Mean of seeds {', '.join(map(str, seeds))} (lowest-highest)."
    )
    lines = ["# Quickstart: scores by length", ""]
    lines += [f"- **{name}**: {value}" for name, value in facts.items()]
    for metric, title in METRICS.items():
        lines += [
            "",
            f"## {title} by {lengths.name}",
            "",
            f"{seen}, longer ones do not.{spread}",
            "",
        ]
        lines += markdown_table(results, metric, [*lengths.labels, ALL])
    lines += [
        "",
        "## Variants",
        "",
        "| variant | flags | training time (s, mean) |",
        "|---|---|---|",
    ]
    for variant in dict.fromkeys(result.variant for result in results):
        seconds = mean(result.seconds for result in results if result.variant == variant)
        lines.append(f"| {variant} | `{notes[variant]}` | {seconds:.0f} |")
    lines += [
        "",
        "Exact match: share of sentences translated without any error. BLEU: sacrebleu, 13a. Token"
        " accuracy: share of positions with the right subword, of the longer of hypothesis and"
        " reference.",
    ]
    write_lines(path, lines)


def write_plot(path: Path, results: Sequence[Result], lengths: Lengths) -> None:
    """One panel per metric: mean over seeds by length, with a band from lowest to highest seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    places = range(len(lengths.labels))
    for axes, (metric, title) in zip(
        figure.subplots(1, len(METRICS)), METRICS.items(), strict=True
    ):
        by_label = [summarise(results, metric, label) for label in lengths.labels]
        for number, variant in enumerate(by_label[0]):
            values = [group[variant] for group in by_label]
            style = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
            axes.plot(places, list(map(mean, values)), marker="o", ms=3, label=variant, **style)
            axes.fill_between(
                places,
                list(map(min, values)),
                list(map(max, values)),
                alpha=0.15,
                color=style["color"],
            )
        axes.axvspan(-0.5, lengths.trained - 0.5, color="0.92", zorder=0)
        axes.set_xticks(places, lengths.labels)
        axes.set_xlim(-0.5, len(lengths.labels) - 0.5)
        axes.set(title=title, xlabel=f"{lengths.name} (grey: occur in training)")
        axes.set_ylim(0, 102 if metric == "bleu" else 1.02)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
