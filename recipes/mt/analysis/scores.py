"""Computes the share of reference tokens that the first model scores higher than the second model
(SHAPE figure 4). Both models get the reference tokens before each token (teacher forcing). The
share counts tokens to which the first --model gives a higher log probability than the second, among
all tokens of the test text except the end of sentence. Shares are shown by position in the sentence
and by frequency in --train-target (default: in the test text). The n-th seed of one model is
compared with the n-th seed of the other. The CSV has rows of each seed; the table shows mean ±
sample standard deviation.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from recipes.lab.command_line import bins, positive
from recipes.lab.figures import draw_matrix, new_figure
from recipes.lab.steps import CommandError
from recipes.lab.tables import cell, markdown, of_seeds
from recipes.mt.analysis.arguments import open_models, test_pairs, write_report
from recipes.mt.analysis.translators import Translator
from recipes.mt.corpus import fingerprint, read_lines

POSITIONS = (5, 10, 15, 20, 30, 50, 100)
FREQUENCIES = (10, 100, 1000, 10000)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bins",
        nargs="+",
        type=positive,
        default=POSITIONS,
        metavar="N",
        help="upper ends of the bins of positions, counted from 0 (default: 5 10 15 20 30 50 100)",
    )
    parser.add_argument(
        "--frequency-bins",
        nargs="+",
        type=positive,
        default=FREQUENCIES,
        metavar="N",
        help="upper ends of the bins of frequencies (default: 10 100 1000 10000)",
    )
    parser.add_argument(
        "--train-target",
        type=Path,
        metavar="FILE",
        help="target side of the training text, for counting subwords",
    )


def compare(
    better: Sequence[np.ndarray],
    worse: Sequence[np.ndarray],
    frequencies: Sequence[Sequence[int]],
    position_edges: Sequence[int],
    frequency_edges: Sequence[int],
) -> np.ndarray:
    """Returns ``[2, frequency bins, position bins]``: the number of tokens that `better` scores
    higher than `worse`, and the number of all tokens with `frequencies` (the end of sentence has no
    frequency). Tokens with equal scores do not count as higher."""
    tally = np.zeros((2, len(frequency_edges) + 1, len(position_edges) + 1), int)
    for ours, theirs, often in zip(better, worse, frequencies, strict=True):
        column = np.searchsorted(position_edges, np.arange(len(often)))
        row = np.searchsorted(frequency_edges, often)
        higher = ours[: len(often)] > theirs[: len(often)]
        np.add.at(tally, (slice(None), row, column), [higher, np.ones_like(higher)])
    return tally


def run(args: argparse.Namespace) -> None:
    edges = {"--frequency-bins": args.frequency_bins, "--bins": args.bins}
    labels = [[label for label, *_ in bins(numbers, option)] for option, numbers in edges.items()]
    pairs = test_pairs(args)
    models = open_models(args)
    if len(models) != 2:
        remedy = "scores compares two, as in shape=A.pt sinpos=B.pt"
        raise CommandError(f"--model: {len(models)} given; {remedy}")
    (first, ours), (second, theirs) = models.items()
    if len(ours) != len(theirs):
        counts = f"{first} has {len(ours)} seeds, {second} has {len(theirs)}"
        raise CommandError(f"--model: {counts}; give as many of each")
    tokens = counted = _tokens([*ours, *theirs], [target for _, target in pairs])
    if args.train_target:
        counted = _tokens(ours[:1], list(read_lines(args.train_target, "--train-target")))
    frequency_of = Counter(token for line in counted for token in line)
    frequencies = [[frequency_of[token] for token in line] for line in tokens]

    def log_probabilities(model: Translator) -> list[np.ndarray]:
        return model.log_probabilities(pairs)

    tallies = np.array([
        compare(*map(log_probabilities, seeds), frequencies, args.bins, args.frequency_bins)
        for seeds in zip(ours, theirs, strict=True)
    ])  # fmt: skip
    counts = tallies[0, 1]  # the tokens of all seeds are the same
    rows_kept, columns_kept = (np.flatnonzero(counts.sum(axis)) for axis in (1, 0))
    wins = tallies[:, 0][:, rows_kept][:, :, columns_kept]
    counts = counts[rows_kept][:, columns_kept]
    often, positions = (
        list(np.take(names, indices))
        for names, indices in zip(labels, (rows_kept, columns_kept), strict=True)
    )
    ratios = np.where(counts > 0, wins / np.maximum(counts, 1), np.nan)
    columns = ("seed", "frequency", "position", "count", "higher", "ratio")
    rows = []
    for seed, (i, j) in product(range(len(ours)), np.argwhere(counts)):
        at = (seed, i, j)
        values = seed + 1, often[i], positions[j], counts[i, j], wins[at], ratios[at]
        rows.append(dict(zip(columns, values, strict=True)))
    cells = [[label, *("" for _ in positions)] for label in often]
    for i, j in np.argwhere(counts):
        cells[i][1 + j] = f"{cell(ratios[:, i, j].tolist())} ({counts[i, j]})"
    meaning = f"share of tokens that {first} scores higher than {second}"
    shares = cell((wins.sum((1, 2)) / counts.sum()).tolist(), 4)
    corner = "frequency / position"
    if len(ours) > 1:
        corner += f" ({of_seeds({'': {'': list(ours)}})})"
    lines = markdown([corner, *positions], cells)
    lines += [
        "",
        f"S{meaning[1:]}, and the number of tokens; of all {counts.sum()} tokens {shares}.",
    ]
    where = fingerprint(args.train_target, "--train-target") if args.train_target else "test text"
    title = "Scores of the right tokens (SHAPE figure 4)"
    figure = plot(ratios.mean(0), counts, often, positions, meaning)
    write_report(args, models, title, rows, figure, lines, frequencies=where)


def _tokens(models: Sequence[Translator], texts: Sequence[str]) -> list[list[str]]:
    """Returns subwords of the texts without the end of sentence. All models must share these
    subwords."""
    tokens = [[model.subwords(model.target_ids(text)[:-1]) for text in texts] for model in models]
    if any(lines != tokens[0] for lines in tokens):
        raise CommandError(
            "--model: the models have different subwords, so their scores of single tokens cannot"
            " be compared; give models that were trained with the same vocabulary"
        )
    return tokens[0]


def plot(
    ratio: np.ndarray, counts: np.ndarray, rows: Sequence[str], columns: Sequence[str], title: str
) -> Any:
    """Draws Figure 4 with rare tokens at the bottom."""
    figure, ((axes,),) = new_figure(2.5 + 0.85 * len(columns), 2 + 0.6 * len(rows))
    reach = max(0.05, np.nanmax(np.abs(ratio - 0.5)))
    texts = [
        [f"{share:.2f}\n{count}" for share, count in zip(*line, strict=True)]
        for line in zip(ratio, counts, strict=True)
    ]
    scale = {"vmin": 0.5 - reach, "vmax": 0.5 + reach, "cmap": "RdBu"}
    picture = draw_matrix(axes, ratio, texts, origin="lower", **scale)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="target position (subwords)", ylabel="frequency of the subword", title=title)
    figure.colorbar(picture, ax=axes, label="share (below it: number of tokens)")
    return figure
