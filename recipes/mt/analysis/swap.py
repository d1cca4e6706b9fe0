"""The swap test of SHAPE (section 3.2, table 1).

Each test line holds several sentences with the separator <sep> between them (see interpolate), or
--join makes such lines. A line is translated unchanged, and with its first sentence moved to the
end. The last sentence of the second translation is moved back to the front, and both translations
are scored against the same reference. The drop of BLEU shows how much the translation of a sentence
depends on its position. The paper translates 10,000 lines of training text, so that the model knows
all sentences.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, mean
from typing import Any

from sacrebleu.metrics import BLEU

from recipes.lab.command_line import positive
from recipes.lab.figures import draw_bars, new_figure
from recipes.lab.steps import CommandError
from recipes.lab.tables import Cells, of_seeds, seed_table
from recipes.mt.analysis import arguments
from recipes.mt.corpus import SEPARATOR, join_neighbours, languages_of
from recipes.mt.scoring import sacrebleu

ORDERS = ("original", "swapped")
BLEUS = (*ORDERS, "drop")
COLUMNS = (*BLEUS, "separated")
FEW = 50  # percentage of separated translations below which the drop of BLEU means little


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join",
        type=positive,
        default=1,
        metavar="N",
        help="join N neighbouring lines of the test text first (default: 1, none; SHAPE: 10)",
    )
    arguments.add_decoding_options(parser)


def first_to_end(text: str) -> str:
    """Moves the first of the joined sentences to the end."""
    first, *others = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([*others, first])


def last_to_front(text: str) -> str:
    """Inverts :func:`first_to_end` for a translation, in which separators may be missing."""
    *others, last = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([last, *others])


def swap_bleu(
    translate: Callable[[Sequence[str], str], Sequence[str]],
    sources: Sequence[str],
    references: Sequence[str],
    metric: BLEU,
    readable: Callable[[Sequence[str]], list[str]] = list,
) -> dict[str, float]:
    """Returns BLEU of each order, the drop, and the percentage of hypotheses of the swapped order
    with as many separators as their source. BLEU of hypotheses with fewer or more separators shows
    little about positions.

    Args:
        translate: Returns hypotheses of sources; its second argument is "original" or "swapped".
        readable: Turns hypotheses in their right order into the form of the references.
    """
    moved = list(map(first_to_end, sources))
    original, swapped = translate(sources, "original"), translate(moved, "swapped")
    rows = zip(swapped, moved, strict=True)
    separated = [text.count(SEPARATOR) == source.count(SEPARATOR) for text, source in rows]
    before, after = (
        metric.corpus_score(readable(hypotheses), [list(references)]).score
        for hypotheses in (original, list(map(last_to_front, swapped)))
    )
    values = (before, after, before - after, 100 * fmean(separated))
    return dict(zip(COLUMNS, values, strict=True))


def run(args: argparse.Namespace) -> None:
    decoding, pairs = arguments.decoding(args), arguments.test_pairs(args)
    if args.join > 1:
        pairs = list(join_neighbours(pairs, args.join))
    if not any(f" {SEPARATOR} " in source for source, _ in pairs):
        raise CommandError(
            f"--test: no line has the separator {SEPARATOR} between words, so there is nothing to"
            " swap; make such text by `python -m recipes.mt.analyze interpolate`, or give --join 10"
        )
    models, metric = arguments.open_models(args), sacrebleu(languages_of(*args.test)[1])
    sources, references = zip(*pairs, strict=True)
    cells: Cells = {}
    rows = []
    for columns, model in arguments.each(models):
        translate = partial(arguments.translations, model, decoding, args.output / "translations")
        bleu = swap_bleu(translate, sources, list(map(model.plain, references)), metric)
        named = {f"bleu_{name}" if name in BLEUS else name: bleu[name] for name in COLUMNS}
        rows.append({**columns, **named, "lines": len(pairs)})
        for name, value in bleu.items():
            cells.setdefault(columns["model"], {}).setdefault(name, []).append(value)
    lines = [
        *seed_table(cells, "model"),
        "",
        f"BLEU of {len(pairs)} lines of joined sentences, in their order and with the first"
        f" sentence moved to the end. {metric.get_signature()}",
        "",
        f"Separated: translations of the swapped order with as many {SEPARATOR} as their source, "
        "in percent. In other translations it is not known which sentence to move to the front.",
    ]
    for name, row in cells.items():
        if (share := mean(row["separated"])) < FEW:
            few = f"**{name}: only {share:.0f} % are, so that its drop means little;"
            lines += ["", f"{few} the test is for models trained on joined sentences.**"]
    title = "Swapped sentences (SHAPE table 1)"
    arguments.write_report(args, models, title, rows, plot(cells), lines, digits=4)


def plot(cells: Cells) -> Any:
    """Draws two bars for each model."""
    figure, ((axes,),) = new_figure(2.5 + 1.1 * len(cells), 4.2)
    orders = {name: {f"{n} order": row[n] for n in ORDERS} for name, row in cells.items()}
    draw_bars(axes, orders)
    axes.set(xlabel="model", ylabel=f"BLEU\n({of_seeds(orders)})")
    figure.legend(loc="outside upper center", ncols=2)
    return figure
