"""Shared by the speech encoders: the distance of frames, and positions that are added to them."""

from __future__ import annotations

import functools

from torch import Tensor

from cape_plugins import Draw, PositionEncoder, Positions
from cape_plugins.speech.features import HOP_SECONDS
from fairseq_user_dir.embedding import rank_generator


class TimedEncoder:
    """Adds positions to frames; a mixin over a fairseq encoder.

    Attributes:
        positions: Position encoder.
    """

    positions: PositionEncoder

    def hop_seconds(self, hop_nanoseconds: Tensor | None) -> Tensor | float:
        """Distance of frames; 10 ms where the task does not say."""
        return HOP_SECONDS if hop_nanoseconds is None else hop_nanoseconds.float() * 1e-9

    def add_positions(self, hidden: Tensor, positions: Positions) -> tuple[Tensor, Draw | None]:
        """``[B, T, C]``, and the draw of this forward in training, different on each rank."""
        generator = functools.cache(rank_generator)  # one for the draw and the local shifts
        draw = self.positions.draw(hidden.shape[0], hidden.device, generator)
        embedding = self.positions(positions, draw, dtype=hidden.dtype, generator=generator)
        return hidden if embedding is None else hidden + embedding, draw
