"""Compares types on a question: which differ by more than their seeds, and the ranks that follow.

A type is ahead of another if Welch's t-test of their seeds has p < 0.05. The rank of a type is an
interval: from one more than the number of types ahead of it, to the number of types that it is not
ahead of. Types whose intervals overlap are tied. Nothing is corrected for the number of
comparisons: one pair in twenty without a difference differs by chance.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from recipes.shootout.cells import Cell
from recipes.shootout.tasks import Task

LEVEL = 0.05  # of the t-test
Values = dict[str, list[float]]  # of the seeds, by type


class Rank(NamedTuple):
    """Best and worst rank that a type may have, among `of` types."""

    best: int
    worst: int
    of: int

    @property
    def ahead(self) -> float:
        """Share of the other types that this type is ahead of."""
        return (self.of - self.worst) / (self.of - 1) if self.of > 1 else 0.0

    @property
    def behind(self) -> float:
        """Share of the other types that are ahead of this type."""
        return (self.best - 1) / (self.of - 1) if self.of > 1 else 0.0


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
    from scipy.stats import ttest_ind

    if min(len(values), len(others)) < 2:
        return False
    if (mean(values) < mean(others)) != lower_is_better or mean(values) == mean(others):
        return False
    if len({*values}) == len({*others}) == 1:  # the t-test divides by the deviation
        return True
    with warnings.catch_warnings():
        # seeds that are all right, or nearly: the deviation of one side is known, and near zero
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        return bool(ttest_ind(values, others, equal_var=False).pvalue < LEVEL)


def ranks_of(values: Values, lower_is_better: bool) -> Mapping[str, Rank]:
    """The rank of each type that has two seeds or more."""
    several = {name: numbers for name, numbers in values.items() if len(numbers) > 1}
    ranks = {}
    for name, numbers in several.items():
        others = [row for other, row in several.items() if other != name]
        better = sum(is_ahead(row, numbers, lower_is_better) for row in others)
        worse = sum(is_ahead(numbers, row, lower_is_better) for row in others)
        ranks[name] = Rank(1 + better, len(several) - worse, len(several))
    return ranks
