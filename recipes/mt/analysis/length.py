"""BLEU (sacrebleu) and exact match by source length (SHAPE figure 3).

Lengths count words of the test text, so that models with different subwords share the bins.
Several seeds are shown as their mean, in brackets the 95 % band (Student's t).
"""

import argparse
from collections.abc import Sequence

import numpy as np

from recipes.lab.options import positive
from recipes.mt.analysis.options import (
    Estimate,
    add_decoding_options,
    bins,
    decoding,
    draw_band,
    facts,
    joined,
    markdown,
    new_figure,
    open_models,
    over_seeds,
    test_pairs,
    translations,
    write_csv,
    write_figure,
    write_report,
)
from recipes.mt.corpus import Pair
from recipes.mt.scoring import Score, score

ALL = "all"
METRICS = {"bleu": ("BLEU", 1), "exact_match": ("Exact match", 3)}  # title, digits


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "upper ends of the bins of source words (default: 5 10 15 20 30 50)"
    default = (5, 10, 15, 20, 30, 50)
    parser.add_argument("--bins", nargs="+", type=positive, default=default, metavar="N", help=text)
    add_decoding_options(parser)


def score_by_length(
    pairs: Sequence[Pair], hypotheses: Sequence[str], edges: Sequence[int]
) -> dict[str, Score]:
    """Scores of the bins that have sentences, and of all sentences."""
    rows = [
        (ours, target, ours.split(), target.split(), len(source.split()))
        for ours, (source, target) in zip(hypotheses, pairs, strict=True)
    ]
    groups = {
        label: [row for row in rows if low <= row[-1] <= high]
        for label, low, high in bins(edges, "--bins")
    }
    groups = {label: group for label, group in groups.items() if group}
    columns = {label: list(zip(*group, strict=True)) for label, group in groups.items()}
    columns[ALL] = list(zip(*rows, strict=True))
    return {label: score(*group[:4]) for label, group in columns.items()}


def run(args: argparse.Namespace) -> None:
    bins(args.bins, "--bins")
    how, pairs, models = decoding(args), test_pairs(args), open_models(args)
    sources = [source for source, _ in pairs]
    scores: dict[str, list[dict[str, Score]]] = {}
    for name, group in models.items():
        for number, translator in enumerate(group, 1):
            folder = args.output / "translations"
            found = translations(translator, sources, how, folder, f"{name} {number}")
            plain = [tuple(map(translator.plain, pair)) for pair in pairs]
            scores.setdefault(name, []).append(score_by_length(plain, found, args.bins))
    labels = list(next(iter(scores.values()))[0])
    write_csv(
        args.output / "length.csv",
        ["model", "seed", "source_words", "count", *METRICS],
        (
            (name, number, label, row.count, f"{row.bleu:.4f}", f"{row.exact_match:.4f}")
            for name, group in scores.items()
            for number, seed in enumerate(group, 1)
            for label, row in seed.items()
        ),
    )
    counts = next(iter(scores.values()))[0]
    lines = []
    for metric, (title, digits) in METRICS.items():
        rows = []
        for name, group in scores.items():
            found = _estimate(group, metric, labels)
            rows.append([name, *(found.cell(index, digits) for index in range(len(labels)))])
        sizes = ["sentences", *(str(counts[label].count) for label in labels)]
        lines += [f"## {title} by source words", "", *markdown(["model", *labels], [*rows, sizes])]
        lines.append("")
    lines.append("BLEU: sacrebleu, 13a. Exact match: share of sentences without any difference.")
    lines += joined(args)
    plot(args, scores, [label for label in labels if label != ALL])
    write_report(args, "Scores by source length", lines, facts(args, models))


def _estimate(group: Sequence[dict[str, Score]], metric: str, labels: Sequence[str]) -> Estimate:
    return over_seeds(
        [np.array([getattr(seed[label], metric) for label in labels]) for seed in group]
    )


def plot(
    args: argparse.Namespace, scores: dict[str, list[dict[str, Score]]], labels: Sequence[str]
) -> None:
    """One panel per metric, one line per model."""
    figure = new_figure(11, 4.4)
    panels = figure.subplots(1, len(METRICS))
    for axes, (metric, (title, _)) in zip(panels, METRICS.items(), strict=True):
        for name, group in scores.items():
            found = _estimate(group, metric, labels)
            draw_band(axes, range(len(labels)), found, label=name, marker="o", ms=3)
        axes.set_xticks(range(len(labels)), labels)
        axes.set(xlabel="source length (words)", ylabel=title)
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # lines at 0 can be seen
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize="small")
    write_figure(args.output / "length.png", figure)
