"""Encoders and decoders of tokens, and models of both, for all families of text.

Parameters and their names stay stock, so that checkpoints load both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from cape_plugins import Draw, Positions, token_positions
from cape_plugins.mathematics.binding import Bound
from hf_models.host import cached_tokens, find_cache, is_generation_step, without_cache
from hf_models.seams.attention import (
    add_positions_to_attention,
    keys_and_queries,
    positions_for_layers,
)
from hf_models.seams.bos_hint import (
    CapeEncoderOutput,
    Hint,
    place_hint,
    prepend,
    prepend_embedding,
    with_hint,
    without_bos,
    without_hint,
)
from hf_models.seams.packed import refuse_packed_sources
from hf_models.seams.tokens import embedding_of_tokens
from hf_models.switching.install import PARTS, LearnedTable, PositionHost, PositionSlot
from hf_models.switching.modeling import (
    InitializesPositions,
    build_positions,
    content_of_call,
    decoder_positions,
    draw_positions,
    process_generator,
    text_span,
)


class TextStack(Bound, PositionHost, InitializesPositions):
    """Mixin over a stock encoder or decoder of tokens; holds the draw of a forward.

    Attributes:
        side: "encoder" or "decoder".
        limit: Attribute that holds the number of rows of the stock table.
        padding_by_id: Whether padding tokens are not counted if a caller gives no mask, as in the
            stock model; else all tokens are counted.
    """

    side: str
    limit: str
    padding_by_id = False

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        rows = getattr(self, self.limit)
        self.positions = build_positions(config, self.side, rows, config.init_std)
        stock = PARTS.get(type(self.embed_positions), PositionSlot)
        if self.positions.config.encoding.counts and issubclass(stock, LearnedTable):
            self.positions.encoding = None  # the stock table has the rows
        else:
            self.embed_positions = PositionSlot()
        attentions = (layer.self_attn for layer in self.layers)
        self.stack_positions = add_positions_to_attention(
            attentions, self.positions.config, self.positions, causal=self.side == "decoder"
        )

    def valid_tokens(
        self, mask: Tensor | None, ids: Tensor | None, content: Tensor, length: int
    ) -> Tensor:
        """``[B, T]`` bool, False on padding: from a mask ``[B, T]``, from the ids ``[B, T]`` if
        `padding_by_id`, else True for B samples of `content` and T = `length`."""
        is_token = ids.ne(self.padding_idx) if self.padding_by_id and ids is not None else None
        if mask is not None and mask.dim() == 2:
            span = text_span(mask)
            return span if is_token is None else span & (is_token | mask.bool())
        if is_token is not None and mask is None:
            return is_token
        return content.new_ones((content.shape[0], length), dtype=torch.bool)

    def embedding(
        self, positions: Positions, content: Tensor, length: int, draw: Draw | None
    ) -> Tensor | None:
        """Embeddings to add to the last `length` tokens, in the precision of the content.

        Args:
            positions: Positions of all tokens, or of the last tokens.
            content: Ids ``[B, T]`` or embeddings ``[B, T, C]``.
            length: Number of last tokens to which embeddings are added.
            draw: Random numbers from the caller; default the bound draw.
        """
        draw = self.bound if draw is None else draw
        table, word_table = self.embed_positions, self.embed_tokens.weight
        return embedding_of_tokens(
            self.positions, table, positions, draw, content, word_table, length
        )

    def positions_for_layers(
        self, positions: Positions, draw: Draw | None, query_positions: Positions | None = None
    ) -> dict[str, Any]:
        """See :func:`~hf_models.seams.attention.positions_for_layers`."""
        return positions_for_layers(
            self.stack_positions,
            self.positions,
            positions,
            self.bound if draw is None else draw,
            process_generator,
            query_positions,
        )


class SourceStack(TextStack):
    """Mixin over an encoder of tokens: alpha scales the positions, the BOS hint marks the first."""

    side, limit = "encoder", "max_source_positions"

    @property
    def has_hint(self) -> bool:
        """Whether BOS is put before the source."""
        return self.positions.config.source_bos

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        draw: Draw | None = None,
        hint: Hint | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput | CapeEncoderOutput:
        """Encodes the source; not augmented without a draw, also in training mode.

        Args:
            input_ids: ``[B, S]``.
            attention_mask: ``[B, S]``, 0 on padding, on whichever side.
            inputs_embeds: ``[B, S, C]`` instead of `input_ids`.
            draw: From :meth:`~cape_plugins.PositionEncoder.draw`; default the bound draw.
            hint: Place of the BOS hint, if the caller has computed it.

        Returns:
            stock output with S positions; with the BOS hint :class:`CapeEncoderOutput`.
        """
        refuse_packed_sources(kwargs)
        content = content_of_call(input_ids, inputs_embeds)
        expected = tuple(content.shape[:2])
        mask = attention_mask
        if mask is not None and mask.dim() == 2 and mask.shape != expected:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; allowed: {expected}, "
                "[batch, source length] of the tokens. Give the mask of these tokens."
            )
        if self.has_hint:
            hint = place_hint(attention_mask) if hint is None else hint
            mask = hint.mask
            if inputs_embeds is None:
                input_ids = prepend(input_ids, hint, self.bos_token, self.padding_idx)
            else:
                # stock code scales the embeddings of ids, but not embeddings from the caller
                token = content.new_full((1, 1), self.bos_token, dtype=torch.long)
                bos = self.embed_tokens(token) * getattr(self, "embed_scale", 1.0)
                inputs_embeds = prepend_embedding(inputs_embeds, hint, bos)
        length = expected[1] + self.has_hint
        positions = token_positions(self.valid_tokens(mask, input_ids, content, length))
        kwargs.update(self.positions_for_layers(positions, draw))
        with self.embed_positions.using(self.embedding(positions, content, length, draw)):
            output = super().forward(
                input_ids=input_ids,
                attention_mask=mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        return without_hint(output, attention_mask) if self.has_hint else output

    @property
    def bos_token(self) -> int:
        """The token of the hint; Marian and Pegasus have no BOS and take EOS. The vector of the
        token has been trained, and stock checkpoints load without new parameters."""
        token = getattr(self.config, "bos_token_id", None)
        token = self.config.eos_token_id if token is None else token
        return token[0] if isinstance(token, list) else token


class TargetStack(TextStack):
    """Mixin over a decoder of tokens.

    Attributes:
        is_alone: Whether no model around the decoder draws, so that the decoder draws itself.
    """

    side, limit = "decoder", "max_target_positions"
    is_alone = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers; `draw` as in :meth:`SourceStack.forward`. `position_ids` ``[B or 1,
        T]`` may be integers of any size."""
        content = content_of_call(input_ids, inputs_embeds, "decoder_")
        length, device = content.shape[1], content.device
        cache = find_cache(*kwargs.values())
        past = cached_tokens(cache)
        ids = kwargs.get("position_ids")  # not all stock decoders take position_ids
        positions = decoder_positions(length, past, attention_mask, device, ids)
        by_id = self.padding_by_id and inputs_embeds is None
        # behind a cache the ids are the last tokens only, and padding before them is not seen
        if by_id and attention_mask is None and cache is None and ids is None:
            positions = token_positions(input_ids.ne(self.padding_idx))
        if self.is_alone and draw is None and not is_generation_step(kwargs):
            draw = draw_positions(self.positions, content)
        if self.stack_positions is not None:
            keys, queries = keys_and_queries(positions, length, past, cache)
            kwargs.update(self.positions_for_layers(keys, draw, queries))
        with self.embed_positions.using(self.embedding(positions, content, length, draw)):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )


class DecoderAlone(PositionHost):
    """Mixin over a stock model of a :class:`TargetStack` without an encoder (ForCausalLM)."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        self.model.decoder.is_alone = True


class TranslationModel:
    """Mixin over a model with a :class:`SourceStack` and a :class:`TargetStack`, which share one
    draw of shift, scale or offset per training forward."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        draw: Draw | None = None,
        decoder_draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            encoder_outputs: Whole output of the encoder, an object or a tuple: with the BOS hint
                the last hidden state alone is not enough.
            draw: Random numbers for this forward; by default drawn in training. With
                `encoder_outputs` nothing is drawn, because the encoder has run already.
            decoder_draw: Random numbers of the decoder; default the draw of the encoder if the
                configuration synchronises them, else another draw.

        Raises:
            ValueError: for `encoder_outputs` without the state of the BOS hint.
        """
        content = content_of_call(input_ids, inputs_embeds) if encoder_outputs is None else None
        # also with encoder_outputs, because the decoder needs the mask with the hint
        hint = place_hint(attention_mask) if self.encoder.has_hint else None
        if content is not None:
            if draw is None and not is_generation_step({**kwargs, "use_cache": use_cache}):
                draw = draw_positions(self.encoder.positions, content)
            synchronize = self.encoder.positions.config.synchronize
            if draw is not None and draw.order is not None and synchronize:
                target = (decoder_attention_mask, decoder_input_ids, decoder_inputs_embeds)
                sides = (attention_mask, input_ids, inputs_embeds), target
                draw = draw.covering(*self._spans(*sides))
            with self.encoder.using(draw):
                encoder_outputs = self.encoder(
                    input_ids,
                    attention_mask,
                    inputs_embeds,
                    hint=hint,
                    return_dict=True,
                    **without_cache(kwargs),
                )
            if decoder_draw is None and draw is not None:
                decoder_draw = draw
                if not synchronize:
                    decoder_draw = draw_positions(self.decoder.positions, content, draw)
        states, cross_mask = encoder_outputs, attention_mask
        if self.encoder.has_hint:
            states, encoder_outputs = with_hint(encoder_outputs)
            cross_mask = hint.mask
        with self.decoder.using(decoder_draw):
            output = super().forward(
                input_ids=input_ids,  # some stock decoders make their input from the source
                attention_mask=cross_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=states,
                decoder_inputs_embeds=decoder_inputs_embeds,
                use_cache=use_cache,
                return_dict=True,
                **kwargs,
            )
        if self.encoder.has_hint:
            output.encoder_last_hidden_state = encoder_outputs.last_hidden_state
            output.cross_attentions = without_bos(output.cross_attentions, attention_mask)
        return output

    def _spans(self, *sides: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Number ``[B]`` of positions that each side spans, from the side's mask, ids and
        embeddings; no entry for a target that the stock forward makes from the source."""
        spans = []
        for stack, (mask, ids, embeds) in zip((self.encoder, self.decoder), sides, strict=True):
            content = ids if embeds is None else embeds
            if content is None:
                continue
            valid = stack.valid_tokens(mask, ids, content, content.shape[1])
            if stack is self.encoder and stack.has_hint:
                valid = place_hint(valid).mask
            spans.append(stack.positions.num_positions(valid))
        return spans
