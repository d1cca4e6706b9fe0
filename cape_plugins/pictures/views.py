"""Numbers behind the pictures: embeddings of inputs of given sizes, their similarities,
augmentation step by step, and the positions that training draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cape_plugins.checkpoints.stack import Size, Stack
from cape_plugins.mathematics.augmentation import Draw, augment, draw_local
from cape_plugins.mathematics.encoder import PositionEncoder
from cape_plugins.mathematics.positions import Positions


def similarity(embeddings: np.ndarray) -> dict[str, np.ndarray]:
    """Similarities of all pairs of ``[T, K]`` embeddings: "dot product" and "cosine", ``[T, T]``
    each."""
    embeddings = embeddings.astype(np.float64)
    dots = embeddings @ embeddings.T
    norms = np.sqrt(np.diag(dots)).clip(min=1e-12)
    return {"dot product": dots, "cosine": dots / norms / norms[:, None]}


def similarity_by_distance(matrix: np.ndarray, farthest: int) -> np.ndarray:
    """Similarity by distance, ``[farthest + 1, 3]``: mean, smallest and largest similarity of
    positions at distances 0 .. `farthest`."""
    rows = (np.diagonal(matrix, distance) for distance in range(farthest + 1))
    return np.array([(row.mean(), row.min(), row.max()) for row in rows])


def draw_positions(
    encoder: PositionEncoder, positions: Positions, number: int, generator: torch.Generator
) -> tuple[Draw, Tensor | None]:
    """Draws of `number` forwards in training: the random numbers that the positions of a sample
    share, and local shifts ``[number, T, D]`` or None."""
    limit = encoder.max_local_shift
    draw = encoder.train().draw(number, generator=generator) or Draw()
    # as in training, where source and target of a pair take the same number of entries of the order
    if draw.order is not None:
        draw = draw.covering(encoder.num_positions(positions.valid).expand(number))
    if not limit:
        return draw, None
    rows, step = encoder.rows_and_step(positions)
    return draw, draw_local(rows, step, limit, number, generator, draw.augmented)


def augmentation_stages(
    encoder: PositionEncoder, positions: Positions, draw: Draw, local_shift: Tensor | None
) -> dict[str, Tensor]:
    """Positions ``[1 or B, T, D]`` in the unit of the domain after each step of the augmentation
    that changes anything. Order of the steps (CAPE section 4): positions are drawn instead of
    counted, mean-normalisation, global shift or offset, local shift, global scale."""
    config = encoder.config
    steps: dict[str, dict[str, Any]] = {"positions": {}}
    if config.mean_normalize:
        steps["mean-normalised"] = {"mean_normalize": True}
    if draw.shift is not None:
        steps["+ global shift"] = {"draw": draw._replace(scale=None)}
    if draw.offset is not None:
        steps["+ offset"] = {"draw": draw._replace(scale=None)}
    if local_shift is not None:
        steps["+ local shift"] = {"local_shift": local_shift}
    if draw.scale is not None:
        steps["× global scale"] = {"draw": draw}
    rows, step = encoder.rows_and_step(positions)
    arguments: dict[str, Any] = {"step": step}
    stages = {}
    if draw.order is not None:
        stages["positions"] = encoder.unit * rows
        rows = encoder.start + encoder.sampled(positions, draw) * step
        steps = {"drawn and sorted": steps.pop("positions"), **steps}
    for label, more_arguments in steps.items():
        arguments |= more_arguments
        stages[label] = encoder.unit * augment(rows, **arguments)
    return stages


def training_positions(
    stack: Stack, size: Size, draws: int, generator: torch.Generator
) -> np.ndarray:
    """Positions that training encodes: ``[draws, T, D]``, or ``[1, T, D]`` if nothing is random."""
    positions = stack.positions(size)
    draw_and_shift = draw_positions(stack.encoder, positions, draws, generator)
    *_, last = augmentation_stages(stack.encoder, positions, *draw_and_shift).values()
    return last.numpy()


def evaluation_positions(stack: Stack, size: Size) -> np.ndarray:
    """Positions that evaluation encodes, ``[T, D]``."""
    stages = augmentation_stages(stack.encoder, stack.positions(size), Draw(), None)
    *_, last = stages.values()
    return last[0].numpy()


class View(NamedTuple):
    """One input as a model sees it.

    Attributes:
        size: Size of the input.
        state: "evaluation", or the number of the draw, or the label of a relative table.
        places: ``[T, D]``, positions before mean-normalisation and augmentation, or distances.
        embedding: ``[T, K]``.
    """

    size: Size
    state: str
    places: np.ndarray
    embedding: np.ndarray


@torch.no_grad()
def views(
    stack: Stack, sizes: Sequence[Size], draws: int, generator: torch.Generator
) -> list[View]:
    """Each size in evaluation, and in `draws` forwards of training."""
    result = []
    for size in sizes:
        positions = stack.positions(size)
        states, rows = ["evaluation"], stack.encoder(positions, random=False)
        if draws:
            draw, local_shift = draw_positions(stack.encoder, positions, draws, generator)
            augmented = stack.encoder(positions, draw, local_shift)
            states += [f"draw {i + 1}" for i in range(draws)]
            rows = torch.cat((rows, augmented))
        places = (stack.encoder.rows_and_step(positions)[0][0] * stack.encoder.unit).numpy()
        for state, embedding in zip(states, rows.numpy(), strict=True):
            result.append(View(size, state, places, embedding))
    return result


def relative_views(stack: Stack) -> list[View]:
    """The embeddings of each relative table, T = C + 1 or 2 C + 1."""
    first = -stack.config.relative_context
    return [
        View(len(rows), label, np.arange(first, first + len(rows))[:, None], rows.numpy())
        for label, rows in stack.relative.items()
    ]
