"""BLEU (sacrebleu) and exact match by source length (SHAPE figure 3).

Lengths count words of the test text, so that models with different subwords share the bins.
"""

import argparse

from recipes.lab.options import bins, positive
from recipes.lab.scores import write_scores
from recipes.mt.analysis import options
from recipes.mt.scoring import METRICS, METRICS_ARE, groups_by_length, score_groups


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "upper ends of the bins of source words (default: 5 10 15 20 30 50)"
    default = (5, 10, 15, 20, 30, 50)
    parser.add_argument("--bins", nargs="+", type=positive, default=default, metavar="N", help=text)
    options.add_decoding_options(parser)


def run(args: argparse.Namespace) -> None:
    bins(args.bins, "--bins")  # refuses bad ones before any work
    how, pairs = options.decoding(args), options.test_pairs(args)
    models = options.open_models(args)
    sides = list(zip(*pairs, strict=True))
    metrics = {metric: METRICS[metric] for metric in ("bleu", "exact_match")}
    rows = []
    for columns, model in options.each(models):
        hypotheses = options.translations(model, how, args.output / "translations", sides[0])
        sources, references = (list(map(model.plain, side)) for side in sides)
        groups = groups_by_length(sources, args.bins)
        for label, score in score_groups(hypotheses, references, *groups).items():
            values = {name: score[name] for name in ("count", *metrics)}
            rows.append({**columns, "source_words": label, **values})
    counts = {row["source_words"]: row["count"] for row in rows}
    sentences = ", ".join(f"{label}: {count}" for label, count in counts.items())
    facts = options.facts(args, models, sentences=sentences, metrics=METRICS_ARE)
    title, more = "Scores by source length", {"name": "length", "groups_are": "source words"}
    write_scores(args.output, title, rows, "source_words", metrics, facts, **more)
