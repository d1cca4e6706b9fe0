"""What takes the place of ``embed_positions`` in fairseq's encoder and decoder stacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import utils
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from cape_plugins import Draw, PositionEncoder, token_position_at, token_positions

# The table-free embeddings have no maximum; fairseq wants a number, this is its own for sinusoids.
MAX_POSITIONS = int(1e5)


class TokenPositionEmbedding(nn.Module):
    """Embeds token positions in fairseq's call signature; owns no parameters and no state.

    The first token is at ``padding_idx + 1``, as in fairseq, so that an unaugmented sinusoid is
    bit for bit fairseq's own.

    Args:
        encoder: The core's position encoder.
        padding_idx: Index of the padding symbol.
        source_scale: Alpha on a source side, 1 on a target side.
    """

    def __init__(
        self, encoder: PositionEncoder, padding_idx: int, source_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.padding_idx = padding_idx
        self.source_scale = source_scale
        self.max_positions = MAX_POSITIONS
        self.bound: list[Draw | None] = []
        # follows .half() and .to(): the dtype that the host adds to
        self.register_buffer("result_like", torch.empty(0), persistent=False)

    @contextmanager
    def using(self, draw: Draw | None) -> Iterator[None]:
        """Hands `draw` through a host method that has no argument for it, for this call only."""
        self.bound.append(draw)
        try:
            yield
        finally:
            self.bound.pop()

    def draw(self, batch_size: int, device: torch.device) -> Draw | None:
        """A new draw for the batch; None in evaluation."""
        if not (self.training and self.encoder.config.random):
            return None
        return self.encoder.draw(batch_size, device, rank_generator(device))

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
        dtype, start = self.result_like.dtype, self.padding_idx + 1
        if incremental_state is not None:
            last = token_position_at(input.shape[1] - 1, input.device, self.source_scale, start)
            return self.encoder(last, dtype=dtype).expand(input.shape[0], 1, -1)
        draw = self.bound[-1] if self.bound else None
        random = draw is not None and self.training and self.encoder.config.max_local_shift
        return self.encoder(
            token_positions(input.ne(self.padding_idx), self.source_scale, start),
            draw,
            dtype=dtype,
            generator=rank_generator(input.device) if random else None,
        )


class WrappingPositionalEmbedding(LearnedPositionalEmbedding):
    """fairseq's learned table, wrapping around beyond its last row: E(t) = E(t mod N) (CAPE
    section 5.2). Within the table, and in its checkpoints, the same as fairseq's."""

    @classmethod
    def take_over(cls, table: LearnedPositionalEmbedding) -> WrappingPositionalEmbedding:
        """A wrapping table with the parameter of `table`."""
        wrapping = cls(1 + table.padding_idx, table.embedding_dim, table.padding_idx)
        wrapping.weight = table.weight
        wrapping.num_embeddings = table.num_embeddings
        wrapping.max_positions = MAX_POSITIONS
        return wrapping

    def forward(
        self, input: Tensor, incremental_state: Any | None = None, positions: Any | None = None
    ) -> Tensor:
        """See :meth:`TokenPositionEmbedding.forward`."""
        first, rows = self.padding_idx + 1, self.num_embeddings - self.padding_idx - 1
        if incremental_state is not None:
            row = first + (input.shape[1] - 1) % rows
            return self.weight[row].expand(input.shape[0], 1, -1)
        row = utils.make_positions(input, self.padding_idx)
        row = torch.where(row < first, row, first + (row - first) % rows)
        return F.embedding(row, self.weight, self.padding_idx)


def rank_generator(device: torch.device) -> torch.Generator:
    """A generator that continues fairseq's own random stream but differs between ranks.

    fairseq reseeds the default generator with seed + update on every rank alike; a number drawn
    from it on the CPU keeps resumed training bit-exact and micro-batches apart, costs no device
    synchronisation and leaves the dropout stream of a GPU untouched. The rank enters by a factor
    that keeps the seeds of neighbouring ranks far apart (2^64 divided by the golden ratio).
    """
    seed = int(torch.randint(2**31 - 1, ()))
    rank = distributed_utils.get_data_parallel_rank() if distributed.is_initialized() else 0
    generator = torch.Generator(device=device)
    return generator.manual_seed((seed + rank * 0x9E3779B97F4A7C15) % 2**63)
