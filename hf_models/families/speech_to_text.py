"""Speech2Text, recognition or translation with encoder and decoder, with any position embedding.

Frames are counted as in stock checkpoints, from `pad_token_id` + 1 on, in steps of the encoder.
"""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration, Speech2TextModel
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextDecoder,
    Speech2TextEncoder,
)

from cape_plugins import PositionConfig
from hf_models.seams.frames import check_seconds
from hf_models.seams.speech import (
    EncodesSpeech,
    RecognitionModel,
    SpeechEncoder,
    Subsampler,
    takes_frames,
)
from hf_models.seams.text import TargetStack
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin, build_positions


@strict
class CapeSpeech2TextConfig(PositionEmbeddingMixin, Speech2TextConfig):
    """Speech recognition or translation with encoder and decoder.

    `position_embedding` belongs to the encoder (seconds), `decoder_position_embedding` to the
    decoder (tokens), by default with the same type; time and text do not share a draw.
    """

    model_type = "cape_speech_to_text"
    stock_difference: ClassVar = (
        "padding: no longer reaches the last frames of shorter recordings through a convolution"
    )

    hop_seconds: float | int = 0.01
    window_seconds: float | int = 0.025
    position_embedding: dict | None = None
    decoder_position_embedding: dict | None = None

    def validate_seconds(self) -> None:
        """Part of strict validation."""
        check_seconds(self, "hop_seconds", "window_seconds")

    @property
    def decoder_position_config(self) -> PositionConfig:
        """All settings of the position embedding of the decoder."""
        return self.position_settings("decoder_position_embedding")

    @property
    def conv_layers(self) -> list[tuple[int, int]]:
        """Kernel size and stride of each convolution."""
        return [(kernel, 2) for kernel in self.conv_kernel_sizes]


class CapeSpeech2TextEncoder(SpeechEncoder, Speech2TextEncoder):
    """See :class:`~hf_models.seams.speech.SpeechEncoder`."""

    def make_subsampler(self, config: CapeSpeech2TextConfig) -> Subsampler:
        """Convolutions with kernel 5 and stride 2, if the configuration has no others."""
        inner = [config.conv_channels // 2] * (config.num_conv_layers - 1)
        return Subsampler(
            [config.input_feat_per_channel * config.input_channels, *inner, config.d_model],
            config.conv_layers,
            scale=self.embed_scale,
            positions=build_positions(
                config, "encoder", config.max_source_positions, config.init_std
            ),
        )


class CapeSpeech2TextDecoder(TargetStack, Speech2TextDecoder):
    """Text side: positions are tokens, with a separate draw."""

    _supports_sdpa = True
    _supports_flash_attn = True


class CapeSpeech2TextModel(EncodesSpeech, RecognitionModel, PositionModelMixin, Speech2TextModel):
    """Encoder and decoder."""


class CapeSpeech2TextForConditionalGeneration(
    EncodesSpeech, PositionModelMixin, Speech2TextForConditionalGeneration
):
    """Recognition or translation; ``forward(..., hop_nanoseconds=, draw=)`` and ``generate()``."""

    forward = takes_frames(Speech2TextForConditionalGeneration.forward)


FAMILY = add_parts(
    FamilyClasses(
        CapeSpeech2TextConfig,
        (
            CapeSpeech2TextEncoder,
            CapeSpeech2TextDecoder,
            CapeSpeech2TextModel,
            CapeSpeech2TextForConditionalGeneration,
        ),
    )
)
