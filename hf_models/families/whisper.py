"""Whisper, recognition, translation and classification of speech, at the natural length of
recordings and with any position embedding.

The encoder counts time in steps of 20 ms, as stock sinusoids do; the decoder keeps its trained
table unless told otherwise.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import (
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
)
from transformers.models.whisper.modeling_whisper import (
    WhisperDecoder,
    WhisperDecoderLayer,
    WhisperEncoder,
    WhisperPositionalEmbedding,
)
from transformers.utils import can_return_tuple

from cape_plugins import Draw
from cape_plugins.families import find_family
from hf_models.configuration import PositionEmbeddingMixin
from hf_models.modeling import PositionModelMixin, draw_positions
from hf_models.natural_length import (
    ClassifiesRecordings,
    MaskedDecoder,
    MaskedDecoderLayer,
    NaturalLengthEncoder,
    split_mask,
)
from hf_models.switching import FamilyClasses, LearnedTable, add_parts
from hf_models.text import TargetStack
from hf_models.whisper_generation import GeneratesAtNaturalLength, recognise_as_whisper


@strict
class CapeWhisperConfig(PositionEmbeddingMixin, WhisperConfig):
    """Recognition, translation and classification of speech.

    `position_embedding` is that of the encoder (seconds), `decoder_position_embedding` that of the
    decoder (tokens), by default the trained table; time and text do not share a draw.
    `natural_length` says whether masks keep padding out and recordings are not padded to 30 s in
    generation; by default they are with all types but that of the stock model.
    """

    model_type = "cape_whisper"

    natural_length: bool | None = None
    hop_seconds: float | int = 0.01
    position_embedding: dict | None = None
    decoder_position_embedding: dict | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "decoder_position_embedding" and value is None:
            value = {"type": self.stock_type("decoder")}
        super().__setattr__(name, value)

    @property
    def at_natural_length(self) -> bool:
        """`natural_length`, or what follows from the type."""
        if self.natural_length is None:
            return self.position_embedding["type"] != self.stock_type("encoder")
        return self.natural_length

    @classmethod
    def stock_type(cls, side: str) -> str:
        """Type of position embedding of the stock model, of "encoder" or "decoder"."""
        return find_family(cls.model_type).stock_type({}, side)

    @property
    def stock_difference(self) -> str:
        """See :class:`~hf_models.configuration.PositionEmbeddingMixin`."""
        words = "padding: masked where a mask is given, and no longer added up to 30 s"
        return words if self.at_natural_length else ""


class CapeWhisperPositionalEmbedding(LearnedTable, WhisperPositionalEmbedding):
    """The stock table of the decoder, where the type has one."""

    offset = 0


class CapeWhisperEncoder(NaturalLengthEncoder, WhisperEncoder):
    """Recordings of any length."""


class CapeWhisperDecoderLayer(MaskedDecoderLayer, WhisperDecoderLayer):
    """Takes a mask of the recording."""


class CapeWhisperDecoder(TargetStack, MaskedDecoder, WhisperDecoder):
    """Text side; its positions are tokens, with a draw of its own."""


class CapeWhisperModel(PositionModelMixin, WhisperModel):
    """Encoder and decoder; ``forward(..., hop_nanoseconds=, draw=, decoder_draw=)``."""

    config_class = CapeWhisperConfig

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        decoder_draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers and :meth:`CapeWhisperEncoder.forward`.

        Args:
            draw: Random numbers of the encoder in this forward, to inject; by default drawn in
                training. With `encoder_outputs`, and with a mask among the features, as in
                generation, nothing is drawn.
            decoder_draw: Random numbers of the decoder.
        """
        if encoder_outputs is None:
            features, mask = split_mask(input_features, attention_mask, self.config)
            if features.shape == input_features.shape:
                if features.shape[2] >= self.config.mask_time_length:  # else no span has room
                    input_features = self._mask_input_features(features, mask)
                draw = draw_positions(self.encoder.positions, features) if draw is None else draw
                if decoder_draw is None:
                    decoder_draw = draw_positions(self.decoder.positions, features, draw)
            encoder_outputs = self.encoder(
                input_features,
                attention_mask,
                hop_nanoseconds,
                draw,
                frame_nanoseconds,
                return_dict=True,
                **kwargs,
            )
        with self.decoder.using(decoder_draw):
            return super().forward(
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=encoder_outputs,
                encoder_attention_mask=getattr(encoder_outputs, "attention_mask", None),
                return_dict=True,
                **kwargs,
            )


class CapeWhisperForConditionalGeneration(
    GeneratesAtNaturalLength, PositionModelMixin, WhisperForConditionalGeneration
):
    """Recognition or translation; ``forward(..., hop_nanoseconds=, draw=)`` and ``generate()``."""

    config_class = CapeWhisperConfig


class CapeWhisperForAudioClassification(
    ClassifiesRecordings, PositionModelMixin, WhisperForAudioClassification
):
    """Classifier of recordings; ``forward(..., attention_mask=, hop_nanoseconds=, draw=)``."""

    config_class = CapeWhisperConfig


recognise_as_whisper(CapeWhisperConfig.model_type)
FAMILY = add_parts(
    FamilyClasses(
        CapeWhisperConfig,
        (
            CapeWhisperPositionalEmbedding,
            CapeWhisperEncoder,
            CapeWhisperDecoderLayer,
            CapeWhisperDecoder,
            CapeWhisperModel,
            CapeWhisperForConditionalGeneration,
            CapeWhisperForAudioClassification,
        ),
    )
)
