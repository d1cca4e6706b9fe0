"""BLEU (sacrebleu) and exact match by source length (SHAPE figure 3).

Lengths count words of the test text, so that models with different subwords share the bins.
"""

import argparse

from recipes.lab.options import bins, positive
from recipes.lab.scores import write_scores
from recipes.mt.analysis.options import (
    add_decoding_options,
    decoding,
    facts,
    of_each,
    open_models,
    seed_rows,
    test_pairs,
    translations,
)
from recipes.mt.analysis.translators import Translator
from recipes.mt.scoring import METRICS, METRICS_ARE, Score, score_by_length


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "upper ends of the bins of source words (default: 5 10 15 20 30 50)"
    default = (5, 10, 15, 20, 30, 50)
    parser.add_argument("--bins", nargs="+", type=positive, default=default, metavar="N", help=text)
    add_decoding_options(parser)


def run(args: argparse.Namespace) -> None:
    bins(args.bins, "--bins")  # refuses bad ones before any work
    how, pairs, models = decoding(args), test_pairs(args), open_models(args)
    sources = [source for source, _ in pairs]

    def measure(translator: Translator, title: str) -> dict[str, Score]:
        hypotheses = translations(translator, sources, how, args.output / "translations", title)
        plain = [tuple(map(translator.plain, pair)) for pair in pairs]
        return score_by_length(plain, hypotheses, args.bins)

    metrics = {metric: METRICS[metric] for metric in ("bleu", "exact_match")}
    columns = ("count", *metrics)
    rows = seed_rows(
        of_each(models, measure),
        lambda scores: (
            {"source_words": label, **{name: getattr(score, name) for name in columns}}
            for label, score in scores.items()
        ),
    )
    counts = {row["source_words"]: row["count"] for row in rows}
    sentences = ", ".join(f"{label}: {count}" for label, count in counts.items())
    write_scores(
        args.output,
        "Scores by source length",
        rows,
        "source_words",
        metrics,
        facts(args, models, sentences=sentences, metrics=METRICS_ARE),
        name="length",
        groups_are="source words",
    )
