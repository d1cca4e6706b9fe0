"""Marian translation models with any position embedding.

Parameters and their names are those of the stock models, so that checkpoints load both ways; the
position embedding is added to the content before the stock forward sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import MarianModel, MarianMTModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqModelOutput
from transformers.models.marian.modeling_marian import (
    MarianDecoder,
    MarianDecoderLayer,
    MarianEncoder,
    MarianEncoderLayer,
    MarianPreTrainedModel,
)
from transformers.utils import can_return_tuple

from cape_plugins import Draw, PositionEncoder, build_position_encoder, token_positions
from hf_models.configuration import CapeMarianConfig
from hf_models.modeling import (
    NoAddend,
    PositionModelMixin,
    add_positions,
    decoder_positions,
    draw_positions,
)
from hf_models.relative import add_relative_positions


@dataclass
class CapeEncoderOutput(BaseModelOutput):
    """What the encoder returns with the BOS hint: all of it fits the source of the caller, and one
    more state, for the decoder.

    Attributes:
        leading_state: ``[B, 1, C]``, the state before the first column of the source. The hint, or
            padding in a shorter sentence that is padded on the left: there, the hint stands in the
            last column of its padding.
    """

    leading_state: Tensor | None = None


class _Stack(PositionModelMixin, MarianPreTrainedModel):
    """What encoder and decoder are built of; in place of the stock ``__init__``, which would fill
    a table of sinusoids that nobody reads."""

    def _build(
        self, config: CapeMarianConfig, vocab_size: int, layers: list[nn.Module], side: str
    ) -> None:
        self.dropout = config.dropout
        self.padding_idx = config.pad_token_id
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, self.padding_idx)
        self.content_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_positions = NoAddend()
        self.positions = _position_encoder(config, side)
        self.layers = nn.ModuleList(layers)
        add_relative_positions((layer.self_attn for layer in layers), config.position_config)
        self.gradient_checkpointing = False
        self.post_init()


class CapeMarianEncoder(_Stack, MarianEncoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""

    config_class = CapeMarianConfig

    def __init__(self, config: CapeMarianConfig) -> None:
        MarianPreTrainedModel.__init__(self, config)
        self.layerdrop = config.encoder_layerdrop
        self.max_source_positions = config.max_position_embeddings
        layers = [MarianEncoderLayer(config) for _ in range(config.encoder_layers)]
        self._build(config, config.vocab_size, layers, "source")
        # Embeddings that the caller gives are taken as they are
        self.embed_scale = 1.0

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
        **kwargs: Any,
    ) -> BaseModelOutput | CapeEncoderOutput:
        """Encodes the source; not augmented without a `draw`, also in training mode.

        Args:
            input_ids: ``[B, S]``.
            attention_mask: ``[B, S]``, 0 on padding, on whichever side.
            inputs_embeds: ``[B, S, C]`` in the place of `input_ids`.
            draw: From :meth:`~cape_plugins.PositionEncoder.draw`.

        Returns:
            stock output, of S positions; with the BOS hint :class:`CapeEncoderOutput`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids) * self.content_scale
        caller_mask = attention_mask
        expected = tuple(inputs_embeds.shape[:2])
        if caller_mask is not None and caller_mask.dim() == 2 and caller_mask.shape != expected:
            raise ValueError(
                f"attention_mask has shape {tuple(caller_mask.shape)}; allowed: {expected}, "
                "[batch, source length] of the tokens. Give the mask that came with them."
            )
        if self.has_hint:
            inputs_embeds, attention_mask = self._prepend_bos(inputs_embeds, attention_mask)
        valid = attention_mask
        if valid is None or valid.dim() != 2:
            valid = inputs_embeds.new_ones(inputs_embeds.shape[:2])
        positions = token_positions(valid.bool())
        inputs_embeds = add_positions(inputs_embeds, self.positions, positions, draw)
        output = super().forward(
            attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        return _without_hint(output, caller_mask) if self.has_hint else output

    def _prepend_bos(self, content: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``[B, S + 1, C]`` with BOS directly before the first token, and its mask."""
        longer_mask = extend_mask(mask)
        token = self.config.bos_token_id
        if token is None:
            token = self.config.eos_token_id
        token = token[0] if isinstance(token, list) else token
        bos = self.embed_tokens.weight[token] * self.content_scale
        longer = torch.cat((torch.zeros_like(content[:, :1]), content), dim=1)
        here = torch.arange(longer.shape[1], device=content.device) == first_valid(mask, content)
        longer = torch.where(here[..., None], bos.to(content.dtype), longer)
        return longer, longer_mask


class CapeMarianDecoder(_Stack, MarianDecoder):
    """Target side; uses the draw of the source if the two are synchronised."""

    config_class = CapeMarianConfig

    def __init__(self, config: CapeMarianConfig) -> None:
        MarianPreTrainedModel.__init__(self, config)
        self.layerdrop = config.decoder_layerdrop
        self.max_target_positions = config.max_position_embeddings
        layers = [MarianDecoderLayer(config, layer_idx=i) for i in range(config.decoder_layers)]
        self._build(config, config.decoder_vocab_size, layers, "target")
        self.embed_scale = 1.0  # the stock forward multiplies what it is given, too

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers; `draw` as in :meth:`CapeMarianEncoder.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of decoder_input_ids and decoder_inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        inputs_embeds = inputs_embeds * self.content_scale
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        device = inputs_embeds.device
        positions = decoder_positions(inputs_embeds.shape[1], past, attention_mask, device)
        inputs_embeds = add_positions(inputs_embeds, self.positions, positions, draw)
        return super().forward(
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class CapeMarianModel(PositionModelMixin, MarianModel):
    """Encoder and decoder, which share one draw of shift, scale or offset per training forward."""

    config_class = CapeMarianConfig

    def __init__(self, config: CapeMarianConfig) -> None:
        MarianPreTrainedModel.__init__(self, config)
        self._tied_weights_keys = None
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "decoder.embed_tokens.weight": "shared.weight",
                "encoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = CapeMarianEncoder(config)
        self.decoder = CapeMarianDecoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        draw: Draw | None = None,
        decoder_draw: Draw | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """See transformers.

        Args:
            encoder_outputs: What the encoder has returned, as it is or as a tuple: with the BOS
                hint its last hidden state alone is not enough.
            draw: Random numbers of this forward, to inject; by default drawn in training. With
                `encoder_outputs` nothing is drawn, because the encoder has run without.
            decoder_draw: The same for the decoder alone; default the draw of the encoder if the
                configuration synchronises them, else one of its own.

        Raises:
            ValueError: for `encoder_outputs` without the state of the BOS hint.
        """
        if encoder_outputs is None:
            content = input_ids if inputs_embeds is None else inputs_embeds
            if draw is None:
                draw = draw_positions(self.encoder.positions, content)
            encoder_outputs = self.encoder(
                input_ids, attention_mask, inputs_embeds, draw=draw, return_dict=True, **kwargs
            )
            if decoder_draw is None and draw is not None:
                decoder_draw = draw
                if not self.encoder.positions.config.synchronize:
                    decoder_draw = draw_positions(self.decoder.positions, content)
        seen, cross_mask = encoder_outputs, attention_mask
        if self.encoder.has_hint:
            seen, encoder_outputs = _with_hint(encoder_outputs)
            cross_mask = extend_mask(attention_mask)
        output = super().forward(
            attention_mask=cross_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=seen,
            past_key_values=past_key_values,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            draw=decoder_draw,
            **kwargs,
        )
        if self.encoder.has_hint:
            output.encoder_last_hidden_state = encoder_outputs.last_hidden_state
            output.cross_attentions = without_bos(output.cross_attentions, attention_mask)
        return output


class CapeMarianMTModel(PositionModelMixin, MarianMTModel):
    """Translation model; ``forward(..., draw=)`` and ``generate()`` as in the stock class."""

    config_class = CapeMarianConfig
    _keys_to_ignore_on_load_missing: ClassVar = ["final_logits_bias"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"embed_positions\.weight"]
    _keys_to_ignore_on_save = None

    def __init__(self, config: CapeMarianConfig) -> None:
        MarianPreTrainedModel.__init__(self, config)
        self.model = CapeMarianModel(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {
                "lm_head.weight": "model.shared.weight",
                "model.decoder.embed_tokens.weight": "model.shared.weight",
                "model.encoder.embed_tokens.weight": "model.shared.weight",
            }
        shared = config.share_encoder_decoder_embeddings
        size = config.vocab_size if shared else config.decoder_vocab_size
        self.final_logits_bias = nn.Buffer(torch.zeros((1, size)))
        self.lm_head = nn.Linear(config.d_model, size, bias=False)
        self.post_init()

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Cache:
        """Sized by the states that the encoder shows; the decoder sees the BOS hint as well."""
        cache = super()._prepare_static_cache(*args, **kwargs)
        if self.model.encoder.has_hint:
            for layer in cache.cross_attention_cache.layers:
                layer.max_cache_len += 1
        return cache


def _position_encoder(config: CapeMarianConfig, side: str) -> PositionEncoder:
    return build_position_encoder(
        config.position_config,
        config.d_model,
        side=side,
        frequencies="marian",
        layout="sin_cos_blocks",
        table_size=config.max_position_embeddings,
        table_std=config.init_std,
    )


# -------------------------------------------------------------------------------------- BOS hint


def first_valid(mask: Tensor | None, content: Tensor) -> Tensor:
    """``[B, 1]``, column of the first token of each sentence."""
    if mask is None:
        return torch.zeros(content.shape[0], 1, dtype=torch.long, device=content.device)
    return mask.ne(0).int().argmax(dim=1, keepdim=True)


def extend_mask(mask: Tensor | None) -> Tensor | None:
    """``[B, S]`` to ``[B, S + 1]`` with BOS directly before the first token.

    Raises:
        ValueError: for a mask of another kind.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; with source_bos=True only "
            "[batch, source length] is allowed, because the source grows by the BOS hint. "
            "Give such a mask, or set source_bos to False."
        )
    slot = mask.ne(0).int().argmax(dim=1, keepdim=True)
    return torch.cat((torch.zeros_like(mask[:, :1]), mask), dim=1).scatter(1, slot, 1)


def without_bos(
    attentions: tuple[Tensor, ...] | None, mask: Tensor | None, queries: bool = False
) -> tuple[Tensor, ...] | None:
    """Attention ``[B, H, T, S + 1]`` over the caller's S tokens; with `queries` from them as well.

    In a shorter sentence that is padded on the left, BOS stands where the last pad was: it is set
    to zero, as on all padding.
    """
    if attentions is None:
        return None
    pads = None if mask is None else mask.eq(0)[:, None, None]
    trimmed = []
    for attention in attentions:
        attention = attention[:, :, 1:, 1:] if queries else attention[..., 1:]
        trimmed.append(attention if pads is None else attention.masked_fill(pads, 0.0))
    return tuple(trimmed)


def _without_hint(output: BaseModelOutput, mask: Tensor | None) -> CapeEncoderOutput:
    """What S + 1 positions gave, over the caller's S."""
    hidden_states = output.hidden_states
    if hidden_states is not None:  # None where a caller has selected others
        hidden_states = tuple(None if state is None else state[:, 1:] for state in hidden_states)
    return CapeEncoderOutput(
        last_hidden_state=output.last_hidden_state[:, 1:],
        hidden_states=hidden_states,
        attentions=without_bos(output.attentions, mask, queries=True),
        leading_state=output.last_hidden_state[:, :1],
    )


def _with_hint(outputs: Any) -> tuple[BaseModelOutput, CapeEncoderOutput]:
    """What the decoder sees, S + 1 states, and the `outputs` of the encoder that were given."""
    if not isinstance(outputs, BaseModelOutput):
        *shown, leading = outputs
        if shown and isinstance(leading, Tensor):
            outputs = CapeEncoderOutput(*shown, leading_state=leading)
    leading = getattr(outputs, "leading_state", None)
    # not len(), which would fix the batch size of exported programs
    if leading is None or leading.shape[0] != outputs.last_hidden_state.shape[0]:
        rows = "none" if leading is None else f"one of {leading.shape[0]} rows"
        raise ValueError(
            "encoder_outputs need a leading_state, for the BOS hint (source_bos=True), with as "
            f"many rows as last_hidden_state; given: {rows}. Hand over all that the encoder has "
            "returned, as it is or as a tuple; repeat rows of leading_state where you repeat rows."
        )
    states = torch.cat((leading, outputs.last_hidden_state), dim=1)
    return BaseModelOutput(states, outputs.hidden_states, outputs.attentions), outputs
