"""Whisper, recognition, translation and classification of speech, at the natural length of
recordings and with any position embedding.

The encoder counts time in steps of 20 ms, as in stock sinusoids; the decoder keeps its trained
table unless `decoder_position_embedding` is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import WhisperConfig
from transformers.models.whisper import modeling_whisper as stock

from cape_plugins.mathematics.binding import Bound
from cape_plugins.settings.domains import HOP_SECONDS
from hf_models.processors.recognition import BinsFirstPipeline, recognise_as
from hf_models.seams.frames import hop_in_seconds
from hf_models.seams.natural_length import (
    ClassifiesRecordings,
    MaskedDecoder,
    MaskedDecoderLayer,
    NaturalLengthEncoder,
    NaturalLengthSettings,
    RecognisesRecordings,
    join_mask,
)
from hf_models.seams.speech import takes_frames
from hf_models.seams.text import TargetStack
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, LearnedTable, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeWhisperConfig(NaturalLengthSettings, PositionEmbeddingMixin, WhisperConfig):
    """Recognition, translation and classification of speech.

    `position_embedding` belongs to the encoder (seconds), `decoder_position_embedding` to the
    decoder (tokens), by default the trained table; time and text do not share a draw.
    With `natural_length`, masks keep padding out of attention, and generation does not pad
    recordings to 30 s; by default true for all types except the type of the stock model.
    """

    model_type = "cape_whisper"

    natural_length: bool | None = None
    hop_seconds: float | int = HOP_SECONDS
    position_embedding: dict | None = None
    decoder_position_embedding: dict | None = None


class CapeWhisperPositionalEmbedding(LearnedTable, stock.WhisperPositionalEmbedding):
    """The stock table of the decoder, if the type has a table."""


class CapeWhisperEncoder(NaturalLengthEncoder, PositionModelMixin, stock.WhisperEncoder):
    """Encoder of recordings of any length, a part of the other models or a model alone. Alone it
    also loads folders of whole models, and draws positions in training."""


class CapeWhisperDecoderLayer(MaskedDecoderLayer, stock.WhisperDecoderLayer):
    """Takes a mask of the recording."""


class CapeWhisperDecoder(TargetStack, MaskedDecoder, stock.WhisperDecoder):
    """Text side: positions are tokens, with a separate draw."""


class CapeWhisperModel(RecognisesRecordings, PositionModelMixin, stock.WhisperModel):
    """Encoder and decoder; ``forward(..., hop_nanoseconds=, draw=, decoder_draw=)``."""


class CapeWhisperForConditionalGeneration(
    Bound, PositionModelMixin, stock.WhisperForConditionalGeneration
):
    """Recognition or translation; ``forward(..., hop_nanoseconds=, draw=)`` and ``generate()``.
    ``generate()`` runs stock code with segments of other lengths; the configuration that stock code
    reads meanwhile is bound to the model."""

    forward = takes_frames(stock.WhisperForConditionalGeneration.forward)

    @property
    def config(self) -> Any:
        """The model's configuration; during generate() the temporary configuration that the stock
        code reads (per thread)."""
        return self.__dict__["config"] if self.bound is None else self.bound

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config

    def finish(self) -> None:
        """Lifts the limit of labels: a table begins anew after its last row."""
        super().finish()
        if self.config.at_natural_length:
            self.max_target_positions = math.inf

    def generate(
        self,
        input_features: Tensor | None = None,
        generation_config: Any = None,
        *args: Any,
        one_piece: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers. At natural length segments are not padded to 30 s and keep their masks;
        otherwise generation is stock generation.

        Args:
            input_features: ``[B, bins, T]``.
            generation_config: See transformers; the fields count like arguments of this call.
            args: See transformers, also for `kwargs`, which may have `hop_nanoseconds`.
            one_piece: Whether recordings over 30 s are encoded as a whole, not in segments as in
                stock models; default if segments are impossible: without timestamps, or with frames
                at other distances than 10 ms.

        Raises:
            ValueError: for `one_piece` without natural length or without features, and for
                timestamps that the model cannot have.
        """
        config, stock_view = self.config, copy(self.config)
        stock_view.model_type = WhisperConfig.model_type  # stock code knows models by this name
        if config.at_natural_length and input_features is not None:
            configs = (generation_config, self.generation_config)
            input_features = self._prepare(input_features, one_piece, kwargs, configs, stock_view)
        elif one_piece:
            raise ValueError(
                f"one_piece={one_piece} needs input_features and a model at natural length; given: "
                f"natural_length={config.natural_length} and position embedding "
                f"{config.position_embedding['type']!r}; allowed: False. Load the model with "
                "natural_length=True, or give input_features."
            )
        with self.using(stock_view):
            return super().generate(input_features, generation_config, *args, **kwargs)

    def _prepare(
        self,
        features: Tensor,
        one_piece: bool | None,
        kwargs: dict[str, Any],
        configs: Sequence[Any],
        stock_view: Any,
    ) -> Tensor:
        """Features with their mask. Sets in `stock_view`, the configuration that stock code reads,
        the frames and tokens that stock code allows. Options that `kwargs` lack come from the first
        of the `configs` of generation."""

        def requested(name: str) -> Any:
            sources = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in sources if value is not None), None)

        batch, _, frames = features.shape
        features, kwargs["attention_mask"] = join_mask(features, kwargs.get("attention_mask"))
        hop = hop_in_seconds(kwargs.get("hop_nanoseconds"), stock_view.hop_seconds, batch, False)
        stock_hop = isinstance(hop, float | int) and math.isclose(hop, HOP_SECONDS)
        positions = self._get_feat_extract_output_lengths(frames)
        pieces = math.ceil(positions / stock_view.max_source_positions)
        timestamps = requested("return_timestamps") or kwargs.get("return_token_timestamps")
        if one_piece is None:
            segments = stock_hop and requested("no_timestamps_token_id") is not None
            one_piece = requested("return_timestamps") is False or not segments
        counts_frames = timestamps or (pieces > 1 and not one_piece)  # stock frames have 10 ms
        if (counts_frames and not stock_hop) or (timestamps and one_piece and pieces > 1):
            raise ValueError(
                f"return_timestamps={bool(timestamps)} for {frames} frames, {hop} s apart, in "
                f"{'one piece' if one_piece else 'segments'} is not allowed: timestamps and "
                "segments need frames of 10 ms, timestamps end at 30 s, and segments need "
                "no_timestamps_token_id in the generation_config. Give return_timestamps=False "
                "with one_piece=True, or frames of 10 ms and a model that writes timestamps."
            )
        lengths = [requested(name) or 0 for name in ("max_new_tokens", "max_length")]
        if "max_length" not in kwargs and lengths[1] == stock_view.max_target_positions:
            lengths[1] = 0  # every stock checkpoint has this value, which no caller chose
        if one_piece:
            stock_view.max_source_positions *= pieces
            stock_view.max_target_positions *= pieces
            if pieces > 1 and not any(lengths):
                kwargs["max_length"] = stock_view.max_target_positions
        # stock code refuses a text with a prompt, of up to half the positions, that exceeds them
        if max(lengths) > stock_view.max_target_positions // 2:
            stock_view.max_target_positions += max(lengths)
        return features

    def _set_return_timestamps(self, generation_config: Any, **kwargs: Any) -> int:
        """The id of the first timestamp. Without timestamps an id beyond the vocabulary, so that
        stock code finds no timestamp and reads a recording once."""
        first = super()._set_return_timestamps(generation_config=generation_config, **kwargs)
        no_timestamps = self.config.at_natural_length and not generation_config.return_timestamps
        return self.config.vocab_size + 1 if no_timestamps else first

    def _get_input_segment(self, num_segment_frames: int, **kwargs: Any) -> Tensor | None:
        if self.config.at_natural_length:
            longest = int(kwargs["seek_num_frames"][kwargs["batch_idx_map"]].max())
            num_segment_frames = min(num_segment_frames, longest)
        return super()._get_input_segment(num_segment_frames=num_segment_frames, **kwargs)

    def _retrieve_max_frames_and_seek(self, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        frames, seek = super()._retrieve_max_frames_and_seek(
            attention_mask=attention_mask, **kwargs
        )
        if self.config.at_natural_length and attention_mask is not None:
            frames = attention_mask.sum(-1).cpu().clamp(min=1)
        return frames, seek


class CapeWhisperForAudioClassification(
    ClassifiesRecordings, PositionModelMixin, stock.WhisperForAudioClassification
):
    """Whisper with a head that classifies recordings. ``forward`` also takes `attention_mask`,
    `hop_nanoseconds`, `frame_nanoseconds` and `draw`; padding does not count in the mean over
    time."""


recognise_as(CapeWhisperConfig.model_type, "seq2seq_whisper", BinsFirstPipeline)
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
