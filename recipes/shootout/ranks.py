"""Compares types on a question: which differ by more than their seeds, and the ranks that follow.

A type is ahead of another if Welch's t-test of their seeds has p < 0.05. The rank of a type is an
interval: from one more than the number of types ahead of it, to the number of types that it is not
ahead of. Types whose intervals do not overlap differ; types whose intervals overlap may be tied.
Nothing is corrected for the number of comparisons: of twenty pairs without a difference, one
differs by chance.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from scipy.stats import ttest_ind

from recipes.shootout.cells import Cell
from recipes.shootout.tasks import Task

LEVEL = 0.05  # of the t-test
Values = dict[str, list[float]]  # of the seeds, by type


class Rank(NamedTuple):
    """Best and worst rank that a type may have, among `of` types."""

    best: int
    worst: int
    of: int


class Answer(NamedTuple):
    """Values and ranks of one task for a question."""

    task: Task
    values: Values
    ranks: Mapping[str, Rank]


class Balance(NamedTuple):
    """Mean shares of the other types that a type is ahead of and behind, over families of tasks."""

    ahead: float
    behind: float
    families: int


def values_of(task: Task, question: str, cells: Iterable[Cell]) -> Values:
    """The value of each seed by type: the mean of the groups of a question. Seeds that lack a group
    do not count."""
    groups = task.tests.get(question, ())
    by_seed: dict[str, dict[int, dict[str, float]]] = {}
    for cell in cells:
        if cell.task == task.name and cell.group in groups:
            by_seed.setdefault(cell.type, {}).setdefault(cell.seed, {})[cell.group] = cell.value
    values = {
        name: [mean(row.values()) for _, row in sorted(seeds.items()) if len(row) == len(groups)]
        for name, seeds in by_seed.items()
    }
    return {name: values[name] for name in task.types() if values.get(name)}


def is_ahead(values: Sequence[float], others: Sequence[float], lower_is_better: bool) -> bool:
    """Whether `values` are better than `others` by more than their seeds differ. One seed tells
    nothing about this."""
    if min(len(values), len(others)) < 2:
        return False
    if (mean(values) < mean(others)) != lower_is_better or mean(values) == mean(others):
        return False
    if len({*values}) == len({*others}) == 1:  # the t-test divides by the deviation
        return True
    with warnings.catch_warnings():
        # scipy warns of nearly equal values, which seeds with hardly any error really have
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        return bool(ttest_ind(values, others, equal_var=False).pvalue < LEVEL)


def ranks_of(values: Values, lower_is_better: bool) -> dict[str, Rank]:
    """The rank of each type that has two seeds or more."""
    several = {name: numbers for name, numbers in values.items() if len(numbers) > 1}
    ranks = {}
    for name, numbers in several.items():
        others = [row for other, row in several.items() if other != name]
        better = sum(is_ahead(row, numbers, lower_is_better) for row in others)
        worse = sum(is_ahead(numbers, row, lower_is_better) for row in others)
        ranks[name] = Rank(1 + better, len(several) - worse, len(several))
    return ranks


def answers(tasks: Iterable[Task], question: str, cells: Sequence[Cell]) -> list[Answer]:
    """Values and ranks for a question, of each task that has cells."""
    answered = []
    for task in tasks:
        if values := values_of(task, question, cells):
            answered.append(Answer(task, values, ranks_of(values, task.lower_is_better)))
    return answered


def balance(answered: Iterable[Answer], name: str) -> Balance | None:
    """The balance of a type: the mean of each family's mean; None without ranks."""
    families: dict[str, list[tuple[float, float]]] = {}
    for answer in answered:
        if name in answer.ranks:
            best, worst, of = answer.ranks[name]
            shares = ((of - worst) / max(of - 1, 1), (best - 1) / max(of - 1, 1))
            families.setdefault(answer.task.family, []).append(shares)
    if not families:
        return None
    means = [tuple(map(mean, zip(*rows, strict=True))) for rows in families.values()]
    ahead, behind = map(mean, zip(*means, strict=True))
    return Balance(ahead, behind, len(families))
