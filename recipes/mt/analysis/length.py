"""BLEU (sacrebleu) and exact match by source length (SHAPE figure 3).

Lengths count words of the test text, so that models with different subwords share the bins.
"""

import argparse

from recipes.lab.options import bins, positive
from recipes.lab.scores import write_scores
from recipes.mt.analysis import options
from recipes.mt.analysis.translators import Translator
from recipes.mt.scoring import METRICS, METRICS_ARE, Score, groups_by_length, score_groups


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "upper ends of the bins of source words (default: 5 10 15 20 30 50)"
    default = (5, 10, 15, 20, 30, 50)
    parser.add_argument("--bins", nargs="+", type=positive, default=default, metavar="N", help=text)
    options.add_decoding_options(parser)


def run(args: argparse.Namespace) -> None:
    bins(args.bins, "--bins")  # refuses bad ones before any work
    how, pairs = options.decoding(args), options.test_pairs(args)
    models = options.open_models(args)
    sources = [source for source, _ in pairs]

    def measure(model: Translator) -> dict[str, Score]:
        hypotheses = options.translations(model, how, args.output / "translations", sources)
        plain, references = (
            [model.plain(text) for text in side] for side in zip(*pairs, strict=True)
        )
        return score_groups(hypotheses, references, *groups_by_length(plain, args.bins))

    metrics = {metric: METRICS[metric] for metric in ("bleu", "exact_match")}
    rows = [
        {**columns, "source_words": label, **{n: getattr(score, n) for n in ("count", *metrics)}}
        for columns, model in options.each(models)
        for label, score in measure(model).items()
    ]
    counts = {row["source_words"]: row["count"] for row in rows}
    sentences = ", ".join(f"{label}: {count}" for label, count in counts.items())
    facts = options.facts(args, models, sentences=sentences, metrics=METRICS_ARE)
    more = {"name": "length", "groups_are": "source words"}
    write_scores(
        args.output, "Scores by source length", rows, "source_words", metrics, facts, **more
    )
