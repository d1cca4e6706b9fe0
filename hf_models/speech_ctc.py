"""The acoustic model of CAPE (Appendix C): speech recognition by CTC."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.marian.modeling_marian import MarianAttention, MarianEncoderLayer
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextAttention,
    Speech2TextEncoderLayer,
)
from transformers.utils import can_return_tuple

from cape_plugins import Draw, build_position_encoder
from hf_models.configuration import CapeSpeechConfig
from hf_models.modeling import PositionModelMixin, draw_positions
from hf_models.speech import SpeechEncoder, Subsampler, encoder_lengths

# Layers that normalise after (the paper) or before each block.
_LAYERS = {"post": MarianEncoderLayer, "pre": Speech2TextEncoderLayer}


class CapeSpeechModel(SpeechEncoder):
    """Log-mel frames to hidden states."""

    config_class = CapeSpeechConfig
    base_model_prefix = "encoder"
    input_modalities = ("audio",)
    _can_compile_fullgraph = True
    _no_split_modules: ClassVar = [layer.__name__ for layer in _LAYERS.values()]
    _can_record_outputs: ClassVar = {
        "hidden_states": list(_LAYERS.values()),
        "attentions": [MarianAttention, Speech2TextAttention],
    }

    def __init__(self, config: CapeSpeechConfig) -> None:
        positions = build_position_encoder(
            config.position_config,
            config.d_model,
            start=config.window_seconds / 2,
            layout="sin_cos_blocks",
            table_size=config.max_position_embeddings,
            table_std=config.init_std,
        )
        subsampler = Subsampler(
            [config.num_mel_bins, config.d_model],
            config.conv_layers,
            scale=1.0,
            positions=positions,
            dropout=config.feature_dropout,
        )
        layers = [_LAYERS[config.layer_norm](config) for _ in range(config.encoder_layers)]
        post = config.layer_norm == "post"
        layer_norm = nn.Identity() if post else nn.LayerNorm(config.d_model)
        super().__init__(config, subsampler, layers, layer_norm, dropout=0.0)

    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """See :meth:`~hf_models.speech.SpeechEncoder.forward`; draws in training if no `draw` is
        given. Hidden states are ``[B, T', C]`` with T' = ceil(T / stride)."""
        if draw is None:
            draw = draw_positions(self.conv.positions, input_features)
        return super().forward(
            input_features, attention_mask, hop_nanoseconds, draw, frame_nanoseconds, **kwargs
        )


class CapeSpeechForCTC(PositionModelMixin, PreTrainedModel):
    """A linear classifier on :class:`CapeSpeechModel`, trained by CTC; `pad_token_id` is the
    blank."""

    config_class = CapeSpeechConfig
    base_model_prefix = "encoder"
    main_input_name = "input_features"
    input_modalities = ("audio",)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = CapeSpeechModel._no_split_modules

    def __init__(self, config: CapeSpeechConfig) -> None:
        super().__init__(config)
        self.encoder = CapeSpeechModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def freeze_feature_encoder(self) -> None:
        """For scripts that were written for models with a pretrained feature encoder; there is
        none here."""

    def _get_feat_extract_output_lengths(self, input_lengths: Tensor) -> Tensor:
        return encoder_lengths(self.config, input_lengths)

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Scores of the classes at each position.

        Args:
            input_features: ``[B, T, bins]``, padded on the right.
            attention_mask: ``[B, T]``, 0 on padding.
            labels: ``[B, U]``, negative on padding.
            hop_nanoseconds: Distance of frames, a number or ``[B]`` integers, which no host casts
                to half precision; default that of the configuration.
            draw: Random numbers of this forward, to inject; default drawn in training.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, where some were skipped (:mod:`cape_plugins.speech.batching`).

        Returns:
            logits ``[B, T', classes]`` with T' = ceil(T / stride), and the loss if there are
            labels.

        Raises:
            ValueError: for a label that is no class.
        """
        output = self.encoder(
            input_features,
            attention_mask,
            hop_nanoseconds,
            draw,
            frame_nanoseconds,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(output.last_hidden_state)
        loss = None if labels is None else self._ctc_loss(logits, attention_mask, labels)
        return CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def _ctc_loss(self, logits: Tensor, mask: Tensor | None, labels: Tensor) -> Tensor:
        if labels.numel() and labels.max() >= self.config.vocab_size:
            raise ValueError(
                f"label {int(labels.max())} is not allowed; allowed: 0 to "
                f"{self.config.vocab_size - 1} (vocab_size), negative on padding. Does the "
                "tokenizer belong to this model?"
            )
        lengths = logits.new_full((len(logits),), logits.shape[1], dtype=torch.long)
        if mask is not None:
            lengths = encoder_lengths(self.config, mask.sum(-1)).long()
        given = labels >= 0
        with torch.backends.cudnn.flags(enabled=False):
            return F.ctc_loss(
                logits.log_softmax(-1, dtype=torch.float32).transpose(0, 1),
                labels.masked_select(given),
                lengths,
                given.sum(-1),
                blank=self.config.pad_token_id,
                reduction=self.config.ctc_loss_reduction,
                zero_infinity=self.config.ctc_zero_infinity,
            )
