"""BLEU (sacrebleu) and exact match by source length (SHAPE figure 7).

Lengths are numbers of words of the test text, so models with different subwords have the same bins.
--stack N ... first joins N neighbouring sentences at a time, as the analysis stack does (CAPE
section 5.3). The whole test text is joined for each N, and scores are shown by N.
"""

import argparse
from collections.abc import Sequence

from recipes.lab.command_line import bins, positive
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError
from recipes.mt.analysis import arguments
from recipes.mt.analysis.stack import stack_groups
from recipes.mt.corpus import Pair, languages_of
from recipes.mt.scoring import METRICS, groups_by_length, metrics_are, score_groups


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bins",
        nargs="+",
        type=positive,
        default=(5, 10, 15, 20, 30, 50),
        metavar="N",
        help="upper ends of the bins of source words (default: 5 10 15 20 30 50)",
    )
    parser.add_argument(
        "--stack",
        nargs="+",
        type=positive,
        metavar="N",
        help="join N neighbouring sentences to one, and show scores by N (default: by source "
        "words)",
    )
    arguments.add_decoding_options(parser)


def stack_all(pairs: Sequence[Pair], counts: Sequence[int]) -> tuple[list[Pair], list[str]]:
    """Stacks with each number of sentences in `counts`, and the number of each stack as a label."""
    if sorted(set(counts)) != list(counts) or counts[-1] > len(pairs):
        numbers = " ".join(map(str, counts))
        raise CommandError(
            f"--stack {numbers}: allowed: increasing numbers up to {len(pairs)}, the pairs of the"
            " test text; give for example --stack 1 2 4"
        )
    stacked = {count: stack_groups(pairs, count) for count in counts}
    groups = [str(count) for count, rows in stacked.items() for _ in rows]
    return [pair for rows in stacked.values() for pair in rows], groups


def run(args: argparse.Namespace) -> None:
    bins(args.bins, "--bins")  # refuses bad numbers before any work
    decoding, pairs = arguments.decoding(args), arguments.test_pairs(args)
    column, groups_are, name, stacks = "source_words", "source words", "length", None
    if args.stack:
        pairs, stacks = stack_all(pairs, args.stack)
        column, groups_are, name = "sentences", "number of stacked sentences", "length-stacked"
    _, language = languages_of(*args.test)
    measured = metrics_are(language)  # an error now, and not after decoding
    models = arguments.open_models(args)
    sides = list(zip(*pairs, strict=True))
    metrics = {metric: METRICS[metric] for metric in ("bleu", "exact_match")}
    rows = []
    for columns, model in arguments.each(models):
        hypotheses = arguments.translations(model, decoding, args.output / "translations", sides[0])
        sources, references = (list(map(model.plain, side)) for side in sides)
        groups = (stacks, args.stack) if stacks else groups_by_length(sources, args.bins)
        labels = list(map(str, groups[1]))
        scored = score_groups(hypotheses, references, groups[0], labels, language=language)
        for label, score in scored.items():
            values = {metric: score[metric] for metric in ("count", *metrics)}
            rows.append({**columns, column: label, **values})
    counts = {row[column]: row["count"] for row in rows}
    sentences = ", ".join(f"{label}: {count}" for label, count in counts.items())
    facts = arguments.facts(args, models, sentences=sentences, metrics=measured)
    title = f"Scores by {groups_are}" if stacks else "Scores by source length"
    write_scores(args.output, title, rows, column, metrics, facts, name=name, groups_are=groups_are)
