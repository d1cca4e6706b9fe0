"""Loss by target position on stacked sentences (CAPE section 5.3, figure 8).

Consecutive test pairs are joined until the target has --target-tokens subwords for the model with
the fewest subwords, so all models see the same text and reach that position. Later positions hold
the last words and the end of a text: these are easier, and some texts do not reach them. The CSV
marks later positions as tail; table and figure leave them out. Bands show the standard deviation
over seeds, or the standard error over sentences for a single seed.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from recipes.lab.command_line import positive
from recipes.lab.figures import draw_band, new_figure
from recipes.lab.steps import CommandError
from recipes.lab.tables import Row, markdown, plus_minus
from recipes.mt.analysis.arguments import each, open_models, test_pairs, write_report
from recipes.mt.analysis.translators import Translator
from recipes.mt.corpus import Pair, write_columns

TABLE_BIN = 50  # positions per column of the table
Losses = Sequence[np.ndarray]  # for each sentence, by position


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target-tokens",
        type=positive,
        default=300,
        metavar="N",
        help="lowest number of target tokens of a stacked sentence (default: %(default)s)",
    )
    parser.add_argument(
        "--smooth",
        type=positive,
        default=10,
        metavar="N",
        help="positions per point of the plot (default: %(default)s)",
    )


def lower_first(text: str) -> str:
    """Puts the first letter in lower case; sentencepiece's mark may precede the letter."""
    first = int(text.startswith("\u2581"))
    return text[:first] + text[first : first + 1].lower() + text[first + 1 :]


def stack_sentences(sentences: Sequence[str]) -> str:
    """Joins sentences to one sentence. Later sentences begin in lower case, and a full stop between
    sentences becomes a comma; other punctuation stays."""
    *parts, last = sentences[0], *map(lower_first, sentences[1:])
    parts = [f"{part[:-1]}," if part.endswith(".") else part for part in parts]
    return " ".join([*parts, last])


def stack_pairs(
    pairs: Iterable[Pair], target_length: Callable[[str], int], minimum: int
) -> Iterator[Pair]:
    """Stacks consecutive pairs until the target has `minimum` tokens; drops a shorter last one."""
    group: list[Pair] = []
    for pair in pairs:
        group.append(pair)
        source, target = (stack_sentences(side) for side in zip(*group, strict=True))
        if target_length(target) >= minimum:
            yield source, target
            group = []


def stack_groups(pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Stacks of `count` neighbouring pairs each; a shorter last stack is dropped."""
    groups = (pairs[start : start + count] for start in range(0, len(pairs) - count + 1, count))
    return [tuple(stack_sentences(side) for side in zip(*group, strict=True)) for group in groups]


def stack_for(models: Iterable[Translator], pairs: Sequence[Pair], minimum: int) -> list[Pair]:
    """Returns stacked pairs whose targets have at least `minimum` subwords of each model. All
    models of a plot share the text: sentences are added until the model with the fewest subwords
    has `minimum` subwords. Positions after `minimum` belong to the end of the last sentence, which
    is easier on average: table and picture leave these positions out, and the CSV marks them."""
    lengths = [model.target_length for model in models]
    stacked = list(stack_pairs(pairs, lambda text: min(count(text) for count in lengths), minimum))
    if not stacked:
        raise CommandError(
            f"--target-tokens {minimum}: the test text of {len(pairs)} pairs has fewer target"
            " subwords, too few for one stacked sentence; give a smaller number or more text"
        )
    return stacked


def totals_by_bin(losses: Losses, width: int) -> np.ndarray:
    """Sums of losses, numbers of tokens: ``[2, sentences, bins]``, in bins of `width` positions."""
    number = -(-max(map(len, losses)) // width)
    bins = [np.arange(len(values)) // width for values in losses]
    sums = [np.bincount(*both, number) for both in zip(bins, losses, strict=True)]
    counts = [np.bincount(of_sentence, minlength=number) for of_sentence in bins]
    return np.stack([sums, counts])


def position_rows(losses: Losses, end: int) -> list[Row]:
    """Mean loss at each position over the sentences that reach the position, and the number of
    these sentences; positions from `end` on are tail."""
    totals = enumerate(totals_by_bin(losses, 1).sum(1).T.tolist())
    return [
        {"position": n, "mean_nll": total / count, "count": int(count), "tail": int(n >= end)}
        for n, (total, count) in totals
    ]


def estimate(
    seeds: Sequence[Losses], width: int, end: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss per token by bin of positions before `end`, and its sample standard deviation over
    the seeds; for a single seed, the standard error over sentences, or NaN for fewer than two
    sentences."""
    totals = [totals_by_bin([values[:end] for values in losses], width) for losses in seeds]
    means = np.stack([sums.sum(0) / counts.sum(0) for sums, counts in totals])
    if len(seeds) > 1:
        return means.mean(0), means.std(0, ddof=1)
    ((sums, counts),), (mean,) = totals, means
    # standard error of a ratio of two sums over sentences, because losses within a sentence are
    # correlated
    sentences = (counts > 0).sum(0)
    squares = ((sums - mean * counts) ** 2).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(squares * sentences / (sentences - 1)) / counts.sum(0)
    return mean, np.where(sentences > 1, error, np.nan)


def run(args: argparse.Namespace) -> None:
    models, end = open_models(args), args.target_tokens
    stacked = stack_for([model for _, model in each(models)], test_pairs(args), end)
    for name, group in models.items():
        if len({tuple(seed.target_length(text) for _, text in stacked) for seed in group}) > 1:
            raise CommandError(
                f"--model {name}: its seeds have different subwords, so positions differ; give "
                "each seed another name"
            )
    names = [args.output / f"stack.{side}" for side in ("source", "target")]
    write_columns(names, stacked)
    losses = {
        name: [[-scores for scores in model.log_probabilities(stacked)] for model in group]
        for name, group in models.items()
    }
    rows = [{**at, **row} for at, seed in each(losses) for row in position_rows(seed, end)]
    lines = [
        *table(losses, end),
        "",
        f"Negative log likelihood (nats per token) by target position, {len(stacked)} stacked"
        f" sentences ({', '.join(path.name for path in names)}). Not shown: positions from"
        f" {end} on, which hold the ends of the texts (tail 1 in stack.csv).",
    ]
    if len({tuple(map(len, group[0])) for group in losses.values()}) > 1:
        lines += [
            "",
            "The models have different subwords: compare the shapes of their curves, not the "
            "values.",
        ]
    title = "Loss by target position on stacked sentences (CAPE figure 8)"
    write_report(args, models, title, rows, plot(losses, args.smooth, end), lines)


def spread_of(losses: Mapping[str, Sequence[Losses]]) -> str:
    counts = sorted({len(group) for group in losses.values()})
    parts = ["mean ± standard error over sentences"] if counts[0] == 1 else []
    parts += [f"mean ± sample standard deviation of {count} seeds" for count in counts if count > 1]
    return ", or ".join(parts)


def table(losses: Mapping[str, Sequence[Losses]], end: int) -> list[str]:
    """A row for each model, columns of :data:`TABLE_BIN` positions, up to position `end`."""
    columns = (f"{n}-{min(n + TABLE_BIN, end) - 1}" for n in range(0, end, TABLE_BIN))
    rows = []
    for name, group in losses.items():
        numbers = zip(*estimate(group, TABLE_BIN, end), strict=True)
        rows.append([name, *(plus_minus(n, None if np.isnan(by) else by) for n, by in numbers)])
    return markdown([f"model ({spread_of(losses)})", *columns], rows)


def plot(losses: Mapping[str, Sequence[Losses]], smooth: int, end: int) -> Any:
    """Draws Figure 8: a line for each model."""
    figure, ((axes,),) = new_figure(8, 4.8)
    for name, group in losses.items():
        mean, spread = estimate(group, smooth, end)
        positions = (np.arange(len(mean)) + 0.5) * smooth - 0.5
        draw_band(axes, positions, mean, spread, label=name)
    axes.set(xlabel=f"target position (subwords; up to {end}, where stacking ends)")
    axes.set(ylabel=f"negative log likelihood (nats per token)\n({spread_of(losses)})")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
