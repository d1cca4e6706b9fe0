"""Tasks, one row for each domain: the label of a place is the symbol at a fixed offset from the
place. Symbols are independent, so only positions lead to the label. A model without positions can
only prefer the most frequent symbol of the input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cape_plugins.mathematics.positions import (
    Positions,
    frame_positions,
    patch_positions,
    token_positions,
)

SYMBOLS = 4  # number of symbols, which are equally frequent
CHANCE = 100 * (1 - 1 / SYMBOLS)  # errors of a guess, in percent


class Batch(NamedTuple):
    """Inputs with their labels.

    Attributes:
        symbols: ``[B, T]`` int64; for an image, T is the number of patches.
        labels: ``[B, T]`` int64.
        scored: ``[T]`` bool, False if the offset leads out of the input.
    """

    symbols: Tensor
    labels: Tensor
    scored: Tensor


class Task(NamedTuple):
    """A row of :data:`TASKS`.

    Attributes:
        summary: The label, in words.
        train: Size of inputs in training: frames, tokens, or patches on a side of an image.
        tests: Sizes of inputs in tests, in order.
        batch: Function that makes inputs, from their number, their size, and a generator.
        positions: Function that makes positions, from the number and the size of the inputs, and a
            device.
        on_axis: Function that turns a size into the number that tables and pictures show.
        axis: Meaning of these numbers.
        options: Values of options that fit the tests, for the types that have the option: positions
            drawn in training reach as far as the largest test, and relative distances stay within
            the inputs of training.
    """

    summary: str
    train: int
    tests: Sequence[int]
    batch: Callable[[int, int, torch.Generator], Batch]
    positions: Callable[[int, int, torch.device], Positions]
    on_axis: Callable[[int], float]
    axis: str
    options: Mapping[str, Any]


FRAME_SECONDS = 0.1
LAG = 3  # frames or tokens
CELLS = 4  # on a side of an image


def lagged(count: int, length: int, generator: torch.Generator) -> Batch:
    """Sequences; the label of a place is the symbol :data:`LAG` places before. The first
    labels wrap around, and are not scored."""
    symbols = torch.randint(SYMBOLS, (count, length), generator=generator)
    return Batch(symbols, symbols.roll(LAG, 1), torch.arange(length) >= LAG)


def frames(count: int, length: int, device: torch.device) -> Positions:
    """Frames at a distance of :data:`FRAME_SECONDS`, without padding."""
    return frame_positions(torch.full((count,), length, device=device), FRAME_SECONDS, length)


def tokens(count: int, length: int, device: torch.device) -> Positions:
    """Tokens without padding."""
    return token_positions(torch.ones(count, length, dtype=torch.bool, device=device))


def mosaics(count: int, side: int, generator: torch.Generator) -> Batch:
    """Square images of CELLS x CELLS symbols; a symbol covers (side / CELLS)^2 patches. Patches are
    in order of rows; the label is the symbol of the cell one up and one to the left."""
    cells = torch.randint(SYMBOLS, (count, CELLS, CELLS), generator=generator)
    width = side // CELLS
    images = cells.repeat_interleave(width, 1).repeat_interleave(width, 2)
    inside = torch.arange(side) >= width
    labels = images.roll((width, width), (1, 2))
    return Batch(images.flatten(1), labels.flatten(1), (inside[:, None] & inside).flatten())


def grids(count: int, side: int, device: torch.device) -> Positions:
    """Patches of square images; all images of the batch share their positions."""
    return patch_positions(side, side, device=device)


TASKS: dict[str, Task] = {
    "audio": Task(
        f"the symbol that stood {LAG * FRAME_SECONDS:g} s before",
        40,
        (40, 80, 160, 320, 640),
        lagged,
        frames,
        lambda length: length * FRAME_SECONDS,
        "length (s)",
        {"max_global_shift": 30.0, "max_offset": 600, "max_position": 640, "relative_context": 16},
    ),
    "text": Task(
        f"the token that stood {LAG} tokens before",
        40,
        (40, 80, 160, 320),
        lagged,
        tokens,
        float,
        "length (tokens)",
        {"max_global_shift": 280.0, "max_offset": 280, "max_position": 320, "relative_context": 16},
    ),
    "image": Task(
        f"the symbol 1/{CELLS} of the image up and 1/{CELLS} to the left",
        8,
        (4, 8, 12, 16, 24, 32),
        mosaics,
        grids,
        float,
        "side (patches)",
        {"max_offset": 8, "relative_context": 8},
    ),
}
