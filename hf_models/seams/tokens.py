"""Models of one stack of tokens, in which a module embeds tokens and positions (BERT)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import Draw, PositionEncoder, Positions
from cape_plugins.mathematics.binding import Bound
from hf_models.host import cached_tokens, find_cache, is_generation_step, past_name
from hf_models.seams.attention import (
    add_positions_to_attention,
    keys_and_queries,
    positions_for_layers,
)
from hf_models.seams.packed import keep_borders
from hf_models.switching.install import LearnedTable, PositionHost, PositionSlot, stock_class
from hf_models.switching.modeling import (
    build_positions,
    content_of_call,
    decoder_positions,
    draw_positions,
    embed_positions,
    process_generator,
)


class TokenTable(LearnedTable, nn.Embedding):
    """Mixin over a table without rows in front."""


class TokenEmbeddings(Bound, PositionHost):
    """Mixin over stock embeddings of tokens, token types and positions (BERT); holds the mask and
    the draw of a forward."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        self.past_name = past_name(stock_class(type(self)).forward)
        self.positions = build_positions(config, "encoder", std=config.initializer_range)
        if self.positions.config.encoding.counts:
            self.positions.encoding = None  # the stock table has the rows
            self.position_embeddings.__class__ = TokenTable
        else:
            self.position_embeddings = PositionSlot()

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """See transformers; `position_ids` may be integers of any size."""
        content = input_ids if inputs_embeds is None else inputs_embeds
        (batch, length), device = content.shape[:2], content.device
        mask, draw = self.bound or (None, None)
        past = kwargs.get(self.past_name, 0)
        positions = decoder_positions(length, past, mask, device, position_ids)
        table, word_table = self.position_embeddings, self.word_embeddings.weight
        addend = embedding_of_tokens(
            self.positions, table, positions, draw, content, word_table, length
        )
        # zeros instead of stock buffers, which end with the table, if a caller gives no values
        numbers = torch.zeros(batch, length, dtype=torch.long, device=device)
        token_type_ids = numbers if token_type_ids is None else token_type_ids
        with self.position_embeddings.using(addend):
            return super().forward(
                input_ids=input_ids,
                token_type_ids=token_type_ids,
                position_ids=numbers,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )


class TokenModel(PositionHost):
    """Mixin over a stock model of one stack with :class:`TokenEmbeddings` as ``embeddings``."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        attentions = (layer.attention.self for layer in self.encoder.layer)
        self.stack_positions = add_positions_to_attention(
            attentions, config.position_config, causal=config.is_decoder
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]``, 0 on padding, on whichever side: positions are counted from
                the first token on.
            position_ids: See :func:`~hf_models.seams.packed.keep_borders`.
            inputs_embeds: ``[B, T, C]`` instead of `input_ids`.
            draw: Random numbers for this forward; by default drawn in training.
        """
        content = content_of_call(input_ids, inputs_embeds)
        encoder = self.embeddings.positions
        if draw is None and not is_generation_step(kwargs):
            draw = draw_positions(encoder, content)
        if self.stack_positions is not None:
            cache, length = find_cache(*kwargs.values()), content.shape[1]
            past, device = cached_tokens(cache), content.device
            positions = decoder_positions(length, past, attention_mask, device, position_ids)
            keys, queries = keys_and_queries(positions, length, past, cache)
            kwargs |= positions_for_layers(
                self.stack_positions, encoder, keys, draw, process_generator, queries
            )
        with self.embeddings.using((attention_mask, draw)):
            # only for the layers: positions count by the mask of the caller
            attention_mask = keep_borders(self, content, attention_mask, position_ids)
            return super().forward(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
            )


def embedding_of_tokens(
    encoder: PositionEncoder,
    table: nn.Module,
    positions: Positions,
    draw: Draw | None,
    content: Tensor,
    word_table: Tensor,
    length: int,
) -> Tensor | None:
    """Embeddings to add to the last `length` tokens of `content`, ids ``[B, T]`` or embeddings
    ``[B, T, C]``: rows of the stock table if the table stays, else embeddings of `positions` in the
    precision of the content or of `word_table`."""
    if isinstance(table, LearnedTable):
        addend = table.look_up(positions, len(content))
    else:
        dtype_source = content if content.is_floating_point() else word_table
        addend = embed_positions(encoder, positions, draw, dtype_source)
    return None if addend is None else addend[:, -length:]
