"""Two tests of the papers that go with a trained translation model.

stack   sentences stacked to 300 and more target tokens, loss by position (CAPE 5.3, figure 8)
swap    the first of ten joined sentences moved to the end (SHAPE 3.2, table 1)
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from sacrebleu.metrics import BLEU

from recipes.mt.corpus import Pair, read_pairs, write_columns
from recipes.mt.pipeline import LIMITS, binarise, generate
from recipes.mt.prepare import SEPARATOR
from recipes.mt.stages import (
    Experiment,
    detokenise,
    load_model,
    prepared_with,
    read_text,
    selected_checkpoint,
    undo_segmentation,
)
from recipes.steps import CommandError, step, write_lines, writing

BIN = 50  # positions per row of the table
SWAPPED_SENTENCES = 10_000


# ---- stacked sentences -------------------------------------------------------------------------


def continue_sentence(text: str) -> str:
    """The end of a stacked sentence that is not the last: its full stop becomes a comma."""
    return f"{text[:-1]}," if text.endswith(".") else text


def stack_sentences(sentences: Sequence[str]) -> str:
    """One long sentence; all but the first begin in lower case."""
    first, *others = sentences
    parts = [first, *(text[:1].lower() + text[1:] for text in others)]
    return " ".join([*map(continue_sentence, parts[:-1]), parts[-1]])


def stack_pairs(
    pairs: Iterable[Pair], target_length: Callable[[str], int], minimum: int
) -> Iterator[Pair]:
    """Stack consecutive pairs until the target has `minimum` tokens by `target_length(text)`.

    What is left at the end and too short is dropped.
    """
    group: list[Pair] = []
    for pair in pairs:
        group.append(pair)
        source, target = (stack_sentences(side) for side in zip(*group, strict=True))
        if target_length(target) >= minimum:
            yield source, target
            group = []


def loss_by_position(scores: Sequence[str]) -> list[tuple[int, float, int]]:
    """Rows of position, mean negative log likelihood (nats) and count.

    `scores` has the base-2 log probabilities of the tokens of a sentence in each line.
    """
    sums: list[float] = []
    counts: list[int] = []
    for line in scores:
        for position, value in enumerate(map(float, line.split())):
            if position == len(sums):
                sums.append(0.0)
                counts.append(0)
            sums[position] -= value * math.log(2)
            counts[position] += 1
    return [
        (position, total / count, count)
        for position, (total, count) in enumerate(zip(sums, counts, strict=True))
    ]


def stack(experiment: Experiment) -> None:
    """Loss by position on the stacked first test set: ``run/stacked.csv``, and a summary."""
    recipe, work = experiment.recipe, experiment.work
    languages, length = recipe.languages, recipe.stacked_length
    tokens = work / ("tokenised" if recipe.segmentation == "bpe" else "text")
    model = load_model(experiment)

    def make(folder: Path) -> None:
        pairs = read_pairs(*(tokens / f"test.{language}" for language in languages), "--test")
        stacked = stack_pairs(pairs, lambda text: len(model.encode(text).split()), length)
        rows = (tuple(map(model.encode, pair)) for pair in stacked)
        if not write_columns([folder / f"test.{language}" for language in languages], rows):
            raise CommandError(
                f"--work {work}: its test set has fewer than {length} target subwords, too few for"
                " one stacked sentence; prepare a larger one"
            )
        binarise_test(experiment, ["test"], folder)

    folder = step(work / "stacked", {"length": length, **prepared_with(experiment)}, make)
    scores = generate(
        folder / "binary",
        selected_checkpoint(experiment),
        experiment.run / "stacked",
        [*experiment.device_flags, *LIMITS, "--score-reference", "--batch-size", "16"],
        kind="P",
        count=len(read_text(folder / f"test.{languages[0]}")),
        threads=experiment.threads,
    )
    rows = loss_by_position(scores)
    with writing(experiment.run / "stacked.csv") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["position", "mean_nll", "count"])
        table.writerows((n, f"{loss:.4f}", count) for n, loss, count in rows)
    print(f"{len(scores)} stacked sentences; mean negative log likelihood (nats) by position")
    for start in range(0, len(rows), BIN):
        part = rows[start : start + BIN]
        total = sum(count for _, _, count in part)
        loss = sum(loss * count for _, loss, count in part) / total
        print(f"{start:5d}-{start + len(part) - 1:<5d} {loss:8.3f}   {total} tokens")


# ---- swapped sentences -------------------------------------------------------------------------


def first_to_end(text: str) -> str:
    """Move the first of the joined sentences to the end."""
    first, *others = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([*others, first])


def last_to_front(text: str) -> str:
    """The inverse of :func:`first_to_end`, for a translation, which may lack separators."""
    *others, last = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([last, *others])


def swap(experiment: Experiment) -> None:
    """BLEU on training sentences in original and in swapped order: ``run/swap.md``."""
    recipe, work = experiment.recipe, experiment.work
    if recipe.join == 1:
        raise CommandError(
            "the stage swap needs joined sentences; choose the recipe wmt16_en_de_interpolate"
        )
    languages = recipe.languages

    def make(folder: Path) -> None:
        files = [work / "subwords" / f"train.{language}" for language in languages]
        pairs = list(islice(read_pairs(*files, "--train"), SWAPPED_SENTENCES))
        swapped = [(first_to_end(source), target) for source, target in pairs]
        for name, rows in (("test", pairs), ("test1", swapped)):
            write_columns([folder / f"{name}.{language}" for language in languages], rows)
        binarise_test(experiment, ["test", "test1"], folder)

    folder = step(work / "swap", prepared_with(experiment), make)
    targets = read_text(folder / f"test.{languages[1]}")
    references = detokenise(experiment, undo_segmentation(experiment, targets))
    metric = BLEU(lowercase=recipe.lowercase)
    bleu = {}
    for name, order in (("test", "original"), ("test1", "swapped")):
        pieces = generate(
            folder / "binary",
            selected_checkpoint(experiment),
            experiment.run / "swap" / order,
            [*experiment.decode_flags, *experiment.device_flags, "--gen-subset", name],
            count=len(targets),
            threads=experiment.threads,
        )
        tokens = undo_segmentation(experiment, pieces)
        if order == "swapped":
            tokens = list(map(last_to_front, tokens))
        bleu[order] = metric.corpus_score(detokenise(experiment, tokens), [references]).score
    lines = [
        f"| model | {' | '.join(bleu)} | drop |",
        "|---|---|---|---|",
        f"| {experiment.run.name} | {bleu['original']:.2f} | {bleu['swapped']:.2f} |"
        f" {bleu['original'] - bleu['swapped']:.2f} |",
        "",
        f"{len(targets)} training sentences; {metric.get_signature()}",
    ]
    write_lines(experiment.run / "swap.md", lines)
    print("\n".join(lines))


# ---- both --------------------------------------------------------------------------------------


def binarise_test(experiment: Experiment, splits: Sequence[str], folder: Path) -> None:
    """Binarise new test sets with the dictionary of the training data."""
    languages = experiment.recipe.languages
    prefixes = {"test": ",".join(str(folder / split) for split in splits)}
    dictionary = experiment.data / f"dict.{languages[0]}.txt"
    binarise(prefixes, languages, 1, folder / "binary", dictionary)
