"""Sinusoids that a stock module keeps in a table and makes longer where needed, as in XGLM, NLLB
and Kosmos, for all such families.

The stock code decides which row each token has, and counts from behind the padding token, over ids
or over embeddings, behind a cache. For another type of position embedding the stock code runs over
a table whose rows hold row numbers, so the output tells the row of each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_models.seams.rows import CountedRows, is_position_table

# A caller may give positions behind the end of a text, for which stock code makes no longer table.
_LEAST_ROWS = 1 << 16
_NAMES = ("make_weights", "get_embedding", "num_positions")


class SinusoidTable(CountedRows):
    """Takes the place of a stock module with a buffer ``weights`` ``[N, C]``, the sinusoids, with
    methods ``make_weights`` and ``get_embedding`` and with ``num_positions``.

    Attributes:
        keeps_table: Whether the sinusoids of the stock module stay.
    """

    keeps_table: bool

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with the name of positions that can
        make their table longer."""
        for path, module in model.named_modules():
            table = module._buffers.get("weights")
            makes_rows = all(hasattr(module, name) for name in _NAMES)
            if table is None or not makes_rows or isinstance(module, cls):
                continue
            if is_position_table(path.rpartition(".")[2]):
                yield path, module, {}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        padding = getattr(self, "padding_idx", None)
        # XGLM has both a padding token and an offset; it adds the offset to given positions
        counts_ids = hasattr(self, "create_position_ids_from_input_ids")
        offset = getattr(self, "offset", 0)
        self.first_row = padding + 1 if counts_ids and padding is not None else offset
        table = self.weights
        settings = self.build(
            config,
            table,
            self.num_positions,  # the table may have grown with a text
            start=float(self.first_row),
            frequencies="fairseq",
            layout="sin_cos_blocks",
        )
        self.keeps_table = settings.type == config.stock_type(self.side)
        if self.keeps_table:
            self.positions.encoding = None  # the stock module has the sinusoids
        else:
            self.remember(table)
            rows = self.get_embedding(len(table)).to(table.device)
            self.weights = nn.Buffer(rows, persistent=False)

    def get_embedding(self, num_embeddings: int, *args: Any, **kwargs: Any) -> Tensor:
        """The table that the stock code looks up: sinusoids ``[num_embeddings, C]``, or row numbers
        ``[num_embeddings or more, 1]`` int64."""
        if getattr(self, "keeps_table", True):
            return super().get_embedding(num_embeddings, *args, **kwargs)
        return torch.arange(max(num_embeddings, _LEAST_ROWS))[:, None]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings ``[B, T, C]`` of the stock module, or embeddings ``[B or 1, T, C]`` of the
        positions that the stock module counts; takes the arguments of the stock forward."""
        embedding_or_rows = super().forward(*args, **kwargs)
        return embedding_or_rows if self.keeps_table else self.embed(embedding_or_rows[..., 0])
