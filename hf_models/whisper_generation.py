"""Generation by Whisper without padding to 30 s: stock code with segments of other lengths.

The mask travels with the features, as one more bin, because stock code cuts, picks and repeats
these, but not the mask that belongs to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AutomaticSpeechRecognitionPipeline, WhisperForConditionalGeneration

from hf_models.natural_length import STRIDE
from hf_models.speech import hop_in_seconds

_STOCK_HOP = 0.01  # hop of models that write timestamps, in seconds
_stock = WhisperForConditionalGeneration


class GeneratesAtNaturalLength:
    """Mixin over Whisper's model for generation."""

    def finish(self) -> None:
        """Lifts the limit of labels: a table begins anew after its last row."""
        super().finish()
        if self.config.at_natural_length:
            self.max_target_positions = math.inf

    def generate(
        self,
        input_features: Tensor | None = None,
        *args: Any,
        one_piece: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers. At natural length segments are not padded to 30 s and their masks are
        kept; otherwise this is stock generation.

        Args:
            input_features: ``[B, bins, T]``.
            args: See transformers; so are `kwargs`, such as `attention_mask` ``[B, T]`` and
                `hop_nanoseconds` of all models of speech.
            one_piece: Whether recordings over 30 s are encoded as a whole, instead of in segments
                as stock models do; default where these cannot be: without timestamps, or with
                frames at other distances than 10 ms.

        Raises:
            ValueError: if the model is not at natural length and is to generate in one piece, or if
                timestamps are wanted that it cannot have.
        """
        config = self.config
        if not config.at_natural_length or input_features is None:
            if one_piece:
                raise ValueError(
                    f"one_piece={one_piece} is not allowed for natural_length="
                    f"{config.natural_length} and position embedding "
                    f"{config.position_embedding['type']!r}, which needs 30 s, or without "
                    "input_features; allowed: False. Load the model with natural_length=True."
                )
            return super().generate(input_features, *args, **kwargs)
        batch, _, frames = input_features.shape
        mask = kwargs.get("attention_mask")
        if mask is None:
            mask = input_features.new_ones(batch, frames)
        kwargs["attention_mask"] = mask = mask.long()
        hop = hop_in_seconds(kwargs.get("hop_nanoseconds"), config.hop_seconds, batch)
        stock_hop = isinstance(hop, float | int) and math.isclose(hop, _STOCK_HOP)
        pieces = math.ceil(frames / (STRIDE * config.max_source_positions))
        timestamps = kwargs.get("return_timestamps") or kwargs.get("return_token_timestamps")
        known = hasattr(self.generation_config, "no_timestamps_token_id")
        if one_piece is None:
            one_piece = kwargs.get("return_timestamps") is False or not (known and stock_hop)
        segments = pieces > 1 and not one_piece
        if (timestamps and (one_piece and pieces > 1)) or (
            (timestamps or segments) and not stock_hop
        ):
            raise ValueError(
                f"one_piece={one_piece} with return_timestamps={bool(timestamps)} is not allowed "
                f"for {frames} frames, {hop} s apart; timestamps and recordings in segments need "
                "10 ms, because a timestamp is 0.02 s, which generation takes for two frames, and "
                "timestamps end at 30 s. Give one_piece=True, return_timestamps=False, or frames "
                "of 10 ms in segments."
            )
        features = torch.cat((input_features, mask[:, None].to(input_features)), dim=1)
        with self._limits(pieces if one_piece else 1, kwargs):
            return super().generate(features, *args, **kwargs)

    @contextmanager
    def _limits(self, pieces: int, kwargs: dict[str, Any]) -> Iterator[None]:
        """Frames and tokens that stock code allows, which it reads from the configuration."""
        config = self.config
        source, target = config.max_source_positions, config.max_target_positions
        lengths = [kwargs.get(name) or 0 for name in ("max_new_tokens", "max_length")]
        if pieces > 1 and not any(lengths) and not self.generation_config.max_new_tokens:
            kwargs["max_length"] = pieces * target
        longer = max(lengths) if max(lengths) > pieces * target // 2 else 0
        config.max_source_positions = pieces * source
        config.max_target_positions = pieces * target + longer
        try:
            yield
        finally:
            config.max_source_positions, config.max_target_positions = source, target

    def _set_return_timestamps(
        self, return_timestamps: bool | None, is_shortform: bool, generation_config: Any
    ) -> int:
        """The first timestamp; without timestamps none, so that a recording is read once."""
        first = super()._set_return_timestamps(return_timestamps, is_shortform, generation_config)
        if self.config.at_natural_length and not generation_config.return_timestamps:
            return self.config.vocab_size + 1
        return first

    def _get_input_segment(
        self,
        input_features: Tensor | None,
        seek: Tensor,
        seek_num_frames: Tensor,
        num_segment_frames: int,
        cur_bsz: int,
        batch_idx_map: list[int],
    ) -> Tensor | None:
        if self.config.at_natural_length and input_features is not None:
            longest = int(seek_num_frames[batch_idx_map].max())
            num_segment_frames = min(num_segment_frames, longest)
        return _stock._get_input_segment(
            input_features, seek, seek_num_frames, num_segment_frames, cur_bsz, batch_idx_map
        )

    def _retrieve_max_frames_and_seek(
        self,
        batch_size: int,
        attention_mask: Tensor | None,
        total_input_frames: int,
        is_shortform: bool,
    ) -> tuple[Tensor, Tensor]:
        if self.config.at_natural_length and attention_mask is not None:
            lengths = attention_mask.sum(-1).cpu().clamp(min=1)
            return lengths, torch.zeros_like(lengths)
        return _stock._retrieve_max_frames_and_seek(
            batch_size, attention_mask, total_input_frames, is_shortform
        )

    def _prepare_decoder_input_ids_for_generation(
        self,
        batch_size: int,
        model_input_name: str,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Leaves out a second start token before a prompt, as stock code has it by model type."""
        if "decoder_input_ids" in model_kwargs:
            return model_kwargs.pop("decoder_input_ids"), model_kwargs
        return super()._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )


class NaturalLengthPipeline(AutomaticSpeechRecognitionPipeline):
    """The recognition pipeline, with recordings of different lengths in a batch. Stock code pads
    the first dimension of each, so that this is time between the extractor and the model.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """See transformers."""
        for item in super().preprocess(*args, **kwargs):
            yield _turned(item)

    def _forward(self, model_inputs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super()._forward(_turned(model_inputs), *args, **kwargs)


def _turned(item: dict[str, Any]) -> dict[str, Any]:
    """``[B, bins, T]`` to ``[B, T, bins]`` and back."""
    return {**item, "input_features": item["input_features"].transpose(1, 2)}


def recognise_as_whisper(model_type: str) -> None:
    """Lets the pipeline of transformers take a model type for Whisper, whose own it knows by
    name."""
    stock_parameters = AutomaticSpeechRecognitionPipeline._sanitize_parameters

    @functools.wraps(stock_parameters)
    def sanitize_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.config.model_type == model_type:
            self.type = "seq2seq_whisper"
            if type(self) is AutomaticSpeechRecognitionPipeline:  # not a subclass of the caller
                self.__class__ = NaturalLengthPipeline
        return stock_parameters(self, *args, **kwargs)

    AutomaticSpeechRecognitionPipeline._sanitize_parameters = sanitize_parameters
