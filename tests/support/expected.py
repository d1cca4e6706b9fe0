"""Two tables: what tests expect of each type of the registry, and the samples with which they test
each domain.

A new row of the registry costs one line here. tests/core/test_config.py holds both tables to the
registry, and its types to what is expected of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cape_plugins import (
    ENCODINGS,
    Encoding,
    Positions,
    frame_positions,
    patch_positions,
    token_positions,
)
from cape_plugins.settings.registry import types_of

LENGTH = 6  # positions of a sample
HOP = 0.03  # seconds per frame
TUBELET = 0.25  # seconds from tubelet to tubelet


class Expected(NamedTuple):
    """What is expected of a type with its default settings.

    Attributes:
        pictures: Pictures that have something to show of it; the others refuse it.
        adds: Whether it adds to the content; types in attention never do.
        random: Whether training draws.
        zero: Settings with which a sinusoid is sinpos, bit for bit; None for other encodings.
        unreached: Domains in which training of the demo, if it draws, has fewer positions than the
            longest test.
    """

    pictures: str
    adds: bool = True
    random: bool = False
    zero: Mapping[str, Any] | None = None
    unreached: Collection[str] = ()


ALL = "components similarity augmentation coverage"
NO_SHIFTS = {"max_global_shift": 0.0, "max_local_shift": 0.0, "max_global_scale": 1.0}
EXPECTED = {
    "nopos": Expected("", adds=False),
    "sinpos": Expected("components similarity coverage", zero={}),
    "abspos": Expected("components similarity"),
    "relpos": Expected("components similarity", adds=False),
    "shape": Expected(ALL, random=True, zero={"max_offset": 0}),
    "cape": Expected(ALL, random=True, zero={**NO_SHIFTS, "mean_normalize": False}),
    "randpos": Expected(ALL, random=True, zero={"max_position": 0}),
    "rfs": Expected(ALL, random=True, zero={"max_position": 0}),
    "rope": Expected("coverage", adds=False),
    "alibi": Expected("coverage", adds=False),
    "fire": Expected("coverage", adds=False),
}


def types_whose(holds: Callable[[Encoding], bool], domain: str | None = None) -> list[str]:
    """Types, in any domain or in `domain`, by a property of their encodings."""
    types = types_of("encoder", domain)
    return [name for name, row in types.items() if holds(ENCODINGS[row.encoding])]


def acts_in_attention(encoding: Encoding) -> bool:
    """Whether layers take the positions; no seam adds them to the content."""
    return encoding.in_attention or encoding.relative


IN_ATTENTION = types_whose(acts_in_attention)
MOVES = {"max_local_shift": 0.5, "max_global_scale": 1.4}


def moved_types(architecture: str = "encoder") -> dict[str, dict[str, Any]]:
    """Settings of the types whose positions these options move, although the types are not random
    by default: types in attention."""
    return {
        f"{name}, moved": {"type": name, **MOVES}
        for name, row in types_of(architecture).items()
        if MOVES.keys() <= row.options.keys() and not EXPECTED[name].random
    }


MOVED = moved_types()


class Samples(NamedTuple):
    """Samples with which a domain is tested.

    Attributes:
        positions: Makes positions from ``[B, T]`` bool, False on padding, and a size. The
            batch shares positions of a grid, which are never padding.
        size: Size of LENGTH positions, and of a learned table.
        larger: Size of which no axis has less than three positions, and one has five or more.
        reach: What coordinates reach in practice, in the unit of the domain.
        shown: Sizes on the command line of pictures.
    """

    positions: Callable[[Tensor, Any], Positions]
    size: int | tuple[int, ...]
    larger: int | tuple[int, ...]
    reach: float
    shown: tuple[str, ...]


def _tokens(valid: Tensor, size: int) -> Positions:
    return token_positions(valid)


def _frames(valid: Tensor, size: int) -> Positions:
    """Of hops that differ within a batch."""
    hops = torch.tensor([HOP, 0.02, 0.04], dtype=torch.float32).repeat(len(valid) // 3 + 1)
    return frame_positions(valid.sum(1), hops[: len(valid)], max_frames=valid.shape[1])


def _patches(valid: Tensor, size: tuple[int, ...]) -> Positions:
    return patch_positions(*size, device=valid.device)


def _tubelets(valid: Tensor, size: tuple[int, ...]) -> Positions:
    return patch_positions(*size, device=valid.device, seconds=TUBELET)


DOMAIN_SAMPLES = {
    "text": Samples(_tokens, LENGTH, 40, 2000.0, ("6", "9")),
    "audio": Samples(_frames, LENGTH, 40, 60.0, ("0.3", "0.5")),
    "image": Samples(_patches, (2, 3), (3, 5), 2.0, ("4", "3x5")),
    "video": Samples(_tubelets, (3, 1, 2), (5, 3, 3), 2.0, ("3", "4x3x3")),
}
