"""Helpers that the tests of the core share: encoders and positions by registry row, and probes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import (
    DOMAINS,
    ENCODINGS,
    TYPES,
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
    build_stack_positions,
)
from cape_plugins.settings.registry import types_of
from tests.support.expected import DOMAIN_SAMPLES, LENGTH, MOVED

DIM = 8
BATCH = 3
LENGTHS = (6, 4, 1)  # of the samples of a padded batch
FRAMES = torch.tensor(LENGTHS)

SINUSOID_TYPES = [name for name, row in TYPES.items() if row.encoding == "sinusoid"]
ADDING_TYPES = [name for name, row in TYPES.items() if ENCODINGS[row.encoding].adds]
RANDOM_TYPES = [name for name in TYPES if PositionConfig(name).random]
SAMPLED_TYPES = [name for name, row in TYPES.items() if row.sampling]
EVERYWHERE = [
    (name, domain) for domain, row in DOMAINS.items() for name in types_of(row.architecture, domain)
]
ADDING = [pair for pair in EVERYWHERE if pair[0] in ADDING_TYPES]
SINUSOIDS = [pair for pair in EVERYWHERE if pair[0] in SINUSOID_TYPES]
RANDOM_ADDING = [pair for pair in EVERYWHERE if pair[0] in RANDOM_TYPES]
RANDOM = RANDOM_ADDING + [(name, domain) for domain in DOMAINS for name in MOVED]
SEQUENCES = [name for name, row in DOMAINS.items() if not row.grid]


def make_encoder(
    type_name: str = "cape",
    domain: str = "text",
    dim: int = DIM,
    layout: str = "cos_sin_interleaved",
    **options: Any,
) -> PositionEncoder:
    """Encoder in training mode, the mode of new modules, of a type or a row of `MOVED`; `options`
    may also hold the arguments side, start and unit of an encoder."""
    size = DOMAIN_SAMPLES[domain].size
    placing = {name: options.pop(name) for name in ("side", "start", "unit") if name in options}
    settings = {**MOVED.get(type_name, {"type": type_name}), **options}
    config = PositionConfig(**settings, domain=domain)
    return build_position_encoder(config, dim, layout=layout, table_size=size, **placing)


def valid_mask(lengths: tuple[int, ...] = LENGTHS, length: int = LENGTH, left: bool = False):
    """``[B, T]`` bool, padded on the right or on the left."""
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


def make_positions(domain: str, lengths: tuple[int, ...] = LENGTHS) -> Positions:
    """A padded batch of B samples; samples of a grid share their positions."""
    samples = DOMAIN_SAMPLES[domain]
    return samples.positions(valid_mask(lengths), samples.size)


def whole_positions(domain: str, batch: int, larger: bool = False) -> Positions:
    """A batch of samples without padding, of the larger size if that is asked for."""
    samples = DOMAIN_SAMPLES[domain]
    size = samples.larger if larger else samples.size
    length = LENGTH if DOMAINS[domain].grid else size
    return samples.positions(torch.ones(batch, length, dtype=torch.bool), size)


def embed(
    encoder: PositionEncoder,
    positions: Positions,
    draw: Draw | None = None,
    random: bool | None = None,
    generator: Any = None,
) -> Tensor | None:
    """What a forward computes: embeddings, or coordinates for attention, zero on padding."""
    if not encoder.config.encoding.in_attention:
        return encoder(positions, draw, random=random, generator=generator)
    random = encoder.draws if random is None else random
    stack = build_stack_positions(encoder.config, DIM, 2, encoder.unit)
    keys = stack(encoder, positions, draw, generator=generator, random=random).key
    return positions.clear_padding(keys)


class Readout(nn.Module):
    """Stands for an encoding and returns the coordinates, so a test sees what was encoded."""

    def forward(self, coords: Tensor) -> Tensor:
        return coords.clone()

    grid = forward


def reading_coords(encoder: PositionEncoder) -> PositionEncoder:
    if not encoder.config.encoding.in_attention:  # whose coordinates no encoding takes
        encoder.encoding = Readout()
    return encoder


@contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """Fails if torch's global random numbers are consumed inside."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "random numbers were consumed"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Loaders of models change the default dtype while they build."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def with_a_draw_in_evaluation(monkeypatch: Any) -> None:
    """Breaks all position encoders: they draw in evaluation, too, and throw the numbers away."""
    draw = PositionEncoder.draw

    def always(self: PositionEncoder, *args: Any, **kwargs: Any) -> Any:
        training, self.training = self.training, True
        try:
            numbers = draw(self, *args, **kwargs)
        finally:
            self.training = training
        return numbers if training else None

    monkeypatch.setattr(PositionEncoder, "draw", always)
