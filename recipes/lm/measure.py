"""Measures loss by position on texts, for language models of fairseq and of Hugging Face."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cape_plugins.settings.options import OPTION_FIELDS
from recipes.lm.data import blocks

LOSS = {"loss": "Loss in nats per token"}


def positions_reaching(settings: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Settings of a position embedding. Positions that ``draw_positions`` draws reach to the end of
    the longest test, unless the settings say otherwise."""
    counted = OPTION_FIELDS["draw_positions"].metadata["off"]
    if settings.get("draw_positions", counted) == counted:
        return dict(settings)  # positions are counted, not drawn
    return {"max_position": longest, **settings}


def ranges(ends: Sequence[int]) -> list[str]:
    """Labels of the ranges of positions from 0 on, with these ends.

    >>> ranges([64, 128])
    ['0-63', '64-127']
    """
    return [f"{low}-{end - 1}" for low, end in zip((0, *ends), ends, strict=False)]


def trained_ranges(ends: Sequence[int], length: int) -> list[str]:
    """Labels of the ranges that lie within a training block of this length."""
    return [label for label, end in zip(ranges(ends), ends, strict=True) if end <= length]


def stretches(tokens: Sequence[Any], length: int, limit: int) -> list[Sequence[Any]]:
    """At most `limit` contiguous stretches of a validation text, evenly spread."""
    whole = blocks(tokens, length, "validation")
    return whole[:: -(-len(whole) // limit)]


def by_position(values: Tensor, ends: Sequence[int]) -> dict[str, float]:
    """Means of losses ``[stretches, T - 1]`` over :func:`ranges`; the first token, at position 0,
    is not predicted."""
    sizes = [end - low for low, end in zip((1, *ends), ends, strict=False)]
    parts = values[:, : ends[-1] - 1].split(sizes, dim=1)
    return {label: part.mean().item() for label, part in zip(ranges(ends), parts, strict=True)}
