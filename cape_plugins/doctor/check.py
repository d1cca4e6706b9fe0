"""Parts of the doctor that all hosts share: a check, its result and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.options import COUNTED
from cape_plugins.settings.registry import DEFAULT_TYPE, types_of

OK, FAILED, SKIPPED, NOTE = "ok", "FAIL", "skip", "note"
# Largest difference relative to the largest compared number: correct models of any depth differ by
# 1e-6 in float32, models with wrong positions by 1e-2 and more.
LIMIT = 1e-4


class Check(NamedTuple):
    """The result of one comparison.

    Attributes:
        name: Name of the comparison.
        status: "ok", "FAIL" or "skip"; "note" for facts that a report of an error needs.
        text: The difference and its limit, or the reason.
    """

    name: str
    status: str
    text: str

    @property
    def failed(self) -> bool:
        """Whether there is a difference."""
        return self.status == FAILED


class Mismatch(Exception):
    """A difference that is not a number: a shape, a name, a missing weight."""


class NotApplicable(Exception):
    """Raised if a model has nothing to compare; the text gives the reason."""


def check(name: str, compare: Callable[[], float | str]) -> Check:
    """Runs one comparison.

    Args:
        name: Name of the comparison.
        compare: Function that returns the largest relative difference, which passes up to
            :data:`LIMIT`, or a text that says what is right.

    Returns:
        The check. Any error of `compare` fails the check: a new release of a host may call our
        modules in another way, which can raise any error.
    """
    try:
        result = compare()
    except NotApplicable as reason:
        return Check(name, SKIPPED, str(reason))
    except Mismatch as reason:
        return Check(name, FAILED, str(reason))
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        return Check(name, FAILED, f"raises {type(error).__name__}: {message}")
    if isinstance(result, str):
        return Check(name, OK, result)
    status = OK if result <= LIMIT else FAILED  # NaN fails
    return Check(name, status, f"relative difference {result:.2g}, at most {LIMIT:g}")


def unless_stock_fails(row: Check, compare_stock: Callable[[], float | str] | None) -> Check:
    """The check, but skipped instead of failed if the stock model fails it, too. Examples: beam
    search stops with a vocabulary of five words; RoPE of the type `dynamic` gives other outputs in
    cached steps than in one forward.

    Args:
        row: The check of a model of this package.
        compare_stock: The same comparison of the stock model; runs only if the check failed.
            None if there is no stock model.
    """
    if not row.failed or compare_stock is None:
        return row
    stock_row = check(row.name, compare_stock)
    if not stock_row.failed:
        return row
    return Check(row.name, SKIPPED, f"the stock model fails it, too: {stock_row.text}")


def relative_difference(expected: Tensor, got: Tensor) -> float:
    """Largest difference of two tensors of one shape, relative to the largest number of `expected`;
    infinite if a number is not finite."""
    difference = (expected - got).abs().max() / expected.abs().max().clamp(min=1e-12)
    return difference.item() if difference.isfinite() else float("inf")


def wishes(
    settings: Mapping[str, Any] | None, domain: str, architecture: str
) -> list[dict[str, Any]]:
    """Settings of the position embeddings with which the doctor trains a model.

    Args:
        settings: ``{"type": ..., option: value}``; None for the default type, and for a second type
            with relative attention if the architecture has one.
        domain: Domain of the model.
        architecture: Architecture of the model.

    Returns:
        A list of settings. A source scale that would have to be counted in data is replaced by 1.

    Raises:
        ValueError: if a model of this architecture cannot have the settings.
    """
    if settings is not None:
        wish_list = [settings]
    else:
        rows = types_of(architecture, domain).items()
        relative = [name for name, row in rows if "relative_context" in row.options]
        wish_list = [{"type": name} for name in (DEFAULT_TYPE, *relative[:1])]
    configs = (PositionConfig.from_dict(wish, domain, architecture) for wish in wish_list)
    return [
        {**wish, "source_scale": "1"} if config.source_scale in COUNTED else {**wish}
        for wish, config in zip(wish_list, configs, strict=True)
    ]
