"""The swap test of SHAPE (section 3.2, table 1).

Each test line holds several sentences with the separator <sep> between them (see interpolate), or
is made so by --join. It is translated as it is, and with its first sentence moved to the end; the
last sentence of that translation is moved back to the front, and both are scored against the same
reference. What BLEU loses says how much the model has tied words to positions. The paper
translates 10,000 lines of training text, so that no sentence is new to the model.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from sacrebleu.metrics import BLEU

from recipes.lab.options import positive
from recipes.lab.steps import CommandError
from recipes.mt.analysis.options import (
    Estimate,
    add_decoding_options,
    decoding,
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
from recipes.mt.analysis.text import first_to_end, last_to_front
from recipes.mt.corpus import Pair
from recipes.mt.prepare import SEPARATOR, join_neighbours

ORDERS = ("original", "swapped")
COLUMNS = (*ORDERS, "drop", "separated")


FEW = 50  # percent of separated translations below which a drop means little


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "join N neighbouring lines of the test text first (SHAPE: 10)"
    parser.add_argument("--join", type=positive, default=1, metavar="N", help=text)
    add_decoding_options(parser)


def swap_bleu(
    translate: Callable[[Sequence[str], str], Sequence[str]],
    sources: Sequence[str],
    references: Sequence[str],
    metric: BLEU,
    readable: Callable[[Sequence[str]], list[str]] = list,
) -> dict[str, float]:
    """BLEU in both orders.

    Args:
        translate: Hypotheses of sources; its second argument is "original" or "swapped".
        sources: Joined sentences.
        references: For the original order.
        metric: Of sacrebleu.
        readable: From hypotheses in their right order to the form of the references.

    Returns:
        BLEU of each order, its drop, and how many hypotheses of the swapped order, in percent, have
        as many separators as their source: in others the last sentence is not found, or a wrong
        one, and their BLEU says little about positions.
    """
    bleu, separated = {}, 0.0
    for order in ORDERS:
        swapped = order == "swapped"
        given = list(map(first_to_end, sources)) if swapped else list(sources)
        found = translate(given, order)
        if swapped:
            rows = zip(found, given, strict=True)
            kept = [text.count(SEPARATOR) == source.count(SEPARATOR) for text, source in rows]
            separated = 100 * sum(kept) / len(kept)
        found = list(map(last_to_front, found)) if swapped else list(found)
        bleu[order] = metric.corpus_score(readable(found), [list(references)]).score
    return {**bleu, "drop": bleu["original"] - bleu["swapped"], "separated": separated}


def joined_pairs(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """The test text in lines of several sentences.

    Raises:
        CommandError: if no line has two.
    """
    joined = list(join_neighbours(pairs, count)) if count > 1 else list(pairs)
    if not any(f" {SEPARATOR} " in source for source, _ in joined):
        raise CommandError(
            f"--test: no line has the separator {SEPARATOR} between words, so there is nothing to"
            " swap; make such text by `python -m recipes.mt.analyze interpolate`, or give --join 10"
        )
    return joined


def run(args: argparse.Namespace) -> None:
    how = decoding(args)
    pairs = joined_pairs(test_pairs(args), args.join)
    models = open_models(args)
    sources, references = zip(*pairs, strict=True)
    metric = BLEU()
    scores: dict[str, list[dict[str, float]]] = {}
    for name, group in models.items():
        for number, translator in enumerate(group, 1):
            title, model = f"{name} {number}", translator

            def translate(
                lines: Sequence[str], order: str, model=model, title=title
            ) -> Sequence[str]:
                folder = args.output / "translations"
                return translations(model, lines, how, folder, f"{title} {order}")

            plain = list(map(translator.plain, references))
            scores.setdefault(name, []).append(swap_bleu(translate, sources, plain, metric))
    write_csv(
        args.output / "swap.csv",
        ["model", "seed", *(f"bleu_{column}" for column in COLUMNS[:-1]), "separated", "lines"],
        (
            (name, number, *(f"{seed[column]:.4f}" for column in COLUMNS), len(pairs))
            for name, group in scores.items()
            for number, seed in enumerate(group, 1)
        ),
    )
    estimates = {
        name: over_seeds([np.array([seed[column] for column in COLUMNS]) for seed in group])
        for name, group in scores.items()
    }
    plot(args, estimates)
    rows = [
        [name, *(found.cell(index, 2) for index in range(len(COLUMNS)))]
        for name, found in estimates.items()
    ]
    lines = [
        *markdown(["model", *COLUMNS[:-1], "separated (%)"], rows),
        "",
        f"BLEU of {len(pairs)} lines of joined sentences, as they are and with the first sentence"
        f" moved to the end. {metric.get_signature()}",
        "",
        f"Separated: translations of the swapped order with as many {SEPARATOR} as their source. In"
        " others the sentence that belongs to the front is not known.",
        *joined(args),
    ]
    for name, found in estimates.items():
        if found.mean[-1] < FEW:
            share = f"**{name}: only {found.mean[-1]:.0f} % are, so that its drop means little;"
            lines += ["", f"{share} the test is for models trained on joined sentences.**"]
    write_report(args, "Swapped sentences (SHAPE table 1)", lines, facts(args, models))


def plot(args: argparse.Namespace, estimates: dict[str, Estimate]) -> None:
    """Two bars per model."""
    figure = new_figure(2.5 + 1.1 * len(estimates), 4.2)
    axes = figure.subplots()
    places = np.arange(len(estimates))
    for index, order in enumerate(ORDERS):
        heights = [found.mean[index] for found in estimates.values()]
        errors = [found.high[index] - found.mean[index] for found in estimates.values()]
        where = places + 0.4 * (index - 0.5)
        axes.bar(where, heights, 0.38, label=f"{order} order", yerr=np.nan_to_num(errors))
    axes.set_xticks(places, list(estimates))
    axes.set(xlabel="model", ylabel="BLEU")
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper center", ncols=2)
    write_figure(args.output / "swap.png", figure)
