"""Modules that replace ``embed_positions`` in fairseq's encoder and decoder."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, distributed, nn

from cape_plugins import (
    Draw,
    PositionEncoder,
    Positions,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.augmentation import rank_generator
from cape_plugins.mathematics.binding import Bound
from cape_plugins.mathematics.tables import counted_rows

# Embeddings without a table have no maximum, but fairseq needs a number; fairseq's sinusoids have
# this number.
MAX_POSITIONS = int(1e5)


class TokenPositionEmbedding(Bound, nn.Module):
    """Embeds token positions; takes the arguments of fairseq's modules, and holds the draw of a
    forward. Has no parameters and no stored buffers, unless `encoder` has a learned table.

    Args:
        encoder: Position encoder of :mod:`cape_plugins`.
        padding_idx: Index of the padding symbol.
    """

    def __init__(self, encoder: PositionEncoder, padding_idx: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.padding_idx = padding_idx
        self.max_positions = MAX_POSITIONS
        # .half() and .to() convert this buffer too, so it has the dtype of the token embeddings
        self.register_buffer("result_like", torch.empty(0), persistent=False)

    def draw(
        self, batch_size: int, device: torch.device, partner: Draw | None = None
    ) -> Draw | None:
        """A new draw for the batch; `partner` is the draw of the other side, if there is one. None
        in evaluation, and if nothing is random."""
        return self.encoder.draw(batch_size, device, process_generator, partner)

    def forward(
        self,
        input: Tensor,
        incremental_state: Any | None = None,
        timestep: Tensor | None = None,
        positions: Any | None = None,
    ) -> Tensor:
        """Position embeddings.

        Args:
            input: ``[B, T]`` tokens; in incremental decoding the whole prefix, without padding.
            incremental_state: Not None in incremental decoding.
            timestep: Not supported.
            positions: Not supported.

        Returns:
            ``[B, T, K]``, zero on padding; ``[B, 1, K]`` for the last token in incremental
            decoding.

        Raises:
            ValueError: for `timestep` or `positions`, and in training without a draw.
        """
        if timestep is not None or positions is not None:
            raise ValueError(
                "timestep and positions are not supported by cape position embeddings: positions "
                "follow from the tokens. Call with tokens only."
            )
        positions = _raw_positions(input, self.padding_idx, incremental_state)
        draw = self.bound if incremental_state is None else None
        dtype = self.result_like.dtype
        embedding = self.encoder(positions, draw, dtype=dtype, generator=process_generator)
        return embedding.expand(input.shape[0], -1, -1)


class WrappingPositionalEmbedding(LearnedPositionalEmbedding):
    """fairseq's learned table, which begins again at the first row after the last row: E(t) = E(t
    mod N) (CAPE section 5.2). For positions within the table, and in checkpoints, this class equals
    fairseq's class."""

    @classmethod
    def take_over(cls, table: LearnedPositionalEmbedding) -> WrappingPositionalEmbedding:
        """A table of this class with the parameter of `table`."""
        wrapping = cls(1 + table.padding_idx, table.embedding_dim, table.padding_idx)
        wrapping.weight = table.weight
        wrapping.num_embeddings = table.num_embeddings
        wrapping.max_positions = MAX_POSITIONS
        return wrapping

    def forward(
        self, input: Tensor, incremental_state: Any | None = None, positions: Any | None = None
    ) -> Tensor:
        """See :meth:`TokenPositionEmbedding.forward`."""
        raw = _raw_positions(input, self.padding_idx, incremental_state)
        table = self.weight[self.padding_idx + 1 :]
        rows = raw.gather(counted_rows(table, raw), self.weight.dtype)
        return rows.expand(input.shape[0], -1, -1)


def _raw_positions(tokens: Tensor, padding_idx: int, incremental_state: Any | None) -> Positions:
    """All positions of a batch; in incremental decoding the position of the last token."""
    if incremental_state is None:
        return token_positions(tokens.ne(padding_idx))
    return token_position_at(tokens.shape[1] - 1, tokens.device)


def process_generator(device: torch.device) -> torch.Generator:
    """A generator that continues fairseq's random stream, but differs between ranks. fairseq seeds
    each update with seed + update, on every rank alike. Therefore a resumed training repeats its
    draws exactly, and trainings with the seeds s and s + 1 have the same draws, one update apart.
    Independent trainings need seeds that are far apart."""
    rank = distributed_utils.get_data_parallel_rank() if distributed.is_initialized() else 0
    return rank_generator(device, rank)
