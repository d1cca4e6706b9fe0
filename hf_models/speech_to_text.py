"""Speech2Text, recognition or translation with encoder and decoder, with any position embedding.

Stock checkpoints load with every parameter: frames are counted as there, from `pad_token_id` + 1
on, in steps of the encoder; seconds of the configuration are turned into such steps.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Speech2TextForConditionalGeneration, Speech2TextModel
from transformers.cache_utils import Cache
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextAttention,
    Speech2TextDecoder,
    Speech2TextDecoderLayer,
    Speech2TextEncoderLayer,
    Speech2TextPreTrainedModel,
)

from cape_plugins import Draw, PositionConfig, PositionEncoder, build_position_encoder
from hf_models.configuration import CapeSpeech2TextConfig
from hf_models.modeling import (
    NoAddend,
    PositionModelMixin,
    add_positions,
    decoder_positions,
    draw_positions,
)
from hf_models.relative import add_relative_positions
from hf_models.speech import SpeechEncoder, Subsampler, encoder_lengths, encoder_stride


class CapeSpeech2TextEncoder(SpeechEncoder):
    """See :class:`~hf_models.speech.SpeechEncoder`."""

    config_class = CapeSpeech2TextConfig
    _can_record_outputs: ClassVar = {
        "hidden_states": Speech2TextEncoderLayer,
        "attentions": Speech2TextAttention,
    }

    def __init__(self, config: CapeSpeech2TextConfig) -> None:
        unit = config.hop_seconds * encoder_stride(config)
        inner = [config.conv_channels // 2] * (config.num_conv_layers - 1)
        subsampler = Subsampler(
            [config.input_feat_per_channel * config.input_channels, *inner, config.d_model],
            config.conv_layers,
            scale=_content_scale(config),
            positions=_position_encoder(
                config, config.position_config, config.max_source_positions, unit
            ),
        )
        layers = [Speech2TextEncoderLayer(config) for _ in range(config.encoder_layers)]
        layer_norm = nn.LayerNorm(config.d_model)
        super().__init__(config, subsampler, layers, layer_norm, dropout=config.dropout)


class CapeSpeech2TextDecoder(PositionModelMixin, Speech2TextDecoder):
    """Text side; its positions are tokens, with a draw of its own."""

    config_class = CapeSpeech2TextConfig
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: CapeSpeech2TextConfig) -> None:
        Speech2TextPreTrainedModel.__init__(self, config)
        self.dropout = config.dropout
        self.layerdrop = config.decoder_layerdrop
        self.padding_idx = config.pad_token_id
        self.max_target_positions = config.max_target_positions
        self.embed_scale = _content_scale(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, self.padding_idx)
        self.embed_positions = NoAddend()
        settings = config.decoder_position_config
        self.positions = _position_encoder(config, settings, config.max_target_positions)
        layers = [
            Speech2TextDecoderLayer(config, layer_idx=i) for i in range(config.decoder_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.LayerNorm(config.d_model)
        add_relative_positions((layer.self_attn for layer in layers), settings)
        self.gradient_checkpointing = False
        self.post_init()

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
        """See transformers; not augmented without a `draw`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of decoder_input_ids and decoder_inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids) * self.embed_scale
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        length, device = inputs_embeds.shape[1], inputs_embeds.device
        positions = decoder_positions(length, past, attention_mask, device)
        return super().forward(
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=add_positions(inputs_embeds, self.positions, positions, draw),
            use_cache=use_cache,
            **kwargs,
        )


class CapeSpeech2TextModel(PositionModelMixin, Speech2TextModel):
    """Encoder and decoder."""

    config_class = CapeSpeech2TextConfig
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: CapeSpeech2TextConfig) -> None:
        Speech2TextPreTrainedModel.__init__(self, config)
        self.encoder = CapeSpeech2TextEncoder(config)
        self.decoder = CapeSpeech2TextDecoder(config)
        self.post_init()

    def _get_feat_extract_output_lengths(self, input_lengths: Tensor) -> Tensor:
        return encoder_lengths(self.config, input_lengths)

    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any | None = None,
        past_key_values: Cache | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        decoder_draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            hop_nanoseconds: Distance of frames, a number or ``[B]`` integers, which no host casts
                to half precision; default that of the configuration.
            draw: Random numbers of the encoder in this forward; by default drawn in training. With
                `encoder_outputs` nothing is drawn, because the encoder has run without.
            decoder_draw: The same for the decoder.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, where some were skipped (:mod:`cape_plugins.speech.batching`).
        """
        if encoder_outputs is None:
            if draw is None:
                draw = draw_positions(self.encoder.conv.positions, input_features)
            encoder_outputs = self.encoder(
                input_features, attention_mask, hop_nanoseconds, draw, frame_nanoseconds, **kwargs
            )
            if decoder_draw is None and self.training:
                decoder_draw = draw_positions(self.decoder.positions, input_features)
        return super().forward(
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            draw=decoder_draw,
            **kwargs,
        )


class CapeSpeech2TextForConditionalGeneration(
    PositionModelMixin, Speech2TextForConditionalGeneration
):
    """Recognition or translation; ``forward(..., hop_nanoseconds=, draw=)`` and ``generate()``."""

    config_class = CapeSpeech2TextConfig
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: CapeSpeech2TextConfig) -> None:
        Speech2TextPreTrainedModel.__init__(self, config)
        self.model = CapeSpeech2TextModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def _get_feat_extract_output_lengths(self, input_lengths: Tensor) -> Tensor:
        return encoder_lengths(self.config, input_lengths)


# The speech recognition pipeline tells models with a decoder by this table. Entered here and not
# where the Auto classes are, because a folder with its own code loads this file alone.
MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[CapeSpeech2TextConfig.model_type] = (
    CapeSpeech2TextForConditionalGeneration.__name__
)


def _content_scale(config: CapeSpeech2TextConfig) -> float:
    return math.sqrt(config.d_model) if config.scale_embedding else 1.0


def _position_encoder(
    config: CapeSpeech2TextConfig, settings: PositionConfig, rows: int, unit: float = 1.0
) -> PositionEncoder:
    return build_position_encoder(
        settings,
        config.d_model,
        start=config.pad_token_id + 1,
        unit=unit,
        frequencies="fairseq",
        layout="sin_cos_blocks",
        table_size=rows,
        table_std=config.init_std,
    )
