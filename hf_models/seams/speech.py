"""The encoder of speech: log-mel frames, convolutions, positions in time, layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from cape_plugins import Draw, PositionConfig, PositionEncoder
from cape_plugins.mathematics.binding import Bound
from cape_plugins.speech.subsampling import (
    ConvSubsampler,
    subsampled_lengths,
)
from hf_models.host import is_generation_step, without_cache
from hf_models.seams.attention import add_positions_to_attention
from hf_models.seams.frames import (
    Frames,
    add_positions,
    attention_arguments,
    check_mask,
    check_seconds,
    hop_in_seconds,
)
from hf_models.switching.install import PositionHost, PositionSlot
from hf_models.switching.modeling import (
    InitializesPositions,
    build_positions,
    draw_positions,
)


class Subsampler(Bound, ConvSubsampler):
    """Convolutions; then positions are added to the scaled content. Holds :class:`Frames`.

    Args:
        channels: Input channels, then the channels of each convolution after its gate.
        layers: Kernel size and stride of each convolution.
        scale: Factor on the content.
        positions: Position encoder.
        dropout: Dropout before positions are added.
        conv_layers: Convolutions of the stock model; default new ones.
    """

    def __init__(
        self,
        channels: Sequence[int],
        layers: Sequence[tuple[int, int]],
        scale: float,
        positions: PositionEncoder,
        dropout: float = 0.0,
        conv_layers: nn.ModuleList | None = None,
    ) -> None:
        super().__init__(channels, layers, conv_layers)
        self.scale, self.dropout = scale, dropout
        self.positions = positions

    def forward(self, features: Tensor) -> Tensor:
        """``[B, T, bins]`` to ``[B, T', C]``."""
        frames = self.bound
        # Values on padding must not reach the last frames through a kernel. In the stock model they
        # reach them after the first convolution, so a sample depends on its batch.
        hidden, lengths = self.subsample(features, frames.lengths)
        hidden = F.dropout(hidden * self.scale, self.dropout, self.training)
        return add_positions(self.positions, hidden, frames._replace(lengths=lengths), self.stride)


class EncodesSpeech:
    """Mixin over a stock model with a :class:`SpeechEncoder`. Allows every attention function of
    transformers: the stock parts refuse all but eager attention, so the model is built with eager
    attention and then gets the function of the configuration."""

    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        attention, config._attn_implementation = config._attn_implementation, "eager"
        try:
            super().__init__(config, *args, **kwargs)
        finally:  # the configuration belongs to the caller
            config._attn_implementation = attention
        self.config._attn_implementation = self._check_and_adjust_attn_implementation(
            attention, is_init_check=True
        )

    def _get_feat_extract_output_lengths(self, input_lengths: Tensor) -> Tensor:
        return encoder_lengths(self.config, input_lengths)


class SpeechEncoder(EncodesSpeech, PositionHost, InitializesPositions):
    """Mixin over Speech2Text's encoder, with a :class:`Subsampler` as convolutions."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`; stock convolutions stay."""
        stock = getattr(self, "conv", None)
        self.conv = self.make_subsampler(config, None if stock is None else stock.conv_layers)
        self.embed_scale = 1  # the subsampler scales the content, before positions are added
        self.embed_positions = PositionSlot()
        self.stack_positions = add_positions_to_attention(
            (layer.self_attn for layer in self.layers), config.position_config, self.positions
        )

    def make_subsampler(self, config: Any, conv_layers: nn.ModuleList | None) -> Subsampler:
        """The convolutions of a family: those of the stock model, if it has any."""
        raise NotImplementedError

    @property
    def positions(self) -> PositionEncoder:
        """The position encoder, which is a part of the convolutions."""
        return self.conv.positions

    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encodes frames; not augmented without a `draw`, also in training mode.

        Args:
            input_features: ``[B, T, bins]``, padded on the right.
            attention_mask: ``[B, T]``, 0 on padding.
            hop_nanoseconds: Distance of frames, a number or ``[B]`` integers, which no host casts
                to half precision; default from the configuration.
            draw: Random numbers from :meth:`~cape_plugins.PositionEncoder.draw`.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, if frames were skipped (:mod:`cape_plugins.speech.batching`).
        """
        bins = self.conv.conv_layers[0].in_channels
        if input_features.dim() != 3 or input_features.shape[2] != bins:
            raise ValueError(
                f"input_features has shape {tuple(input_features.shape)}; allowed: [batch, frames, "
                f"{bins}], {bins} being the mel bins of the configuration. Take the feature "
                "extractor that belongs to the checkpoint."
            )
        batch, length = input_features.shape[:2]
        if 0 in (batch, length):
            raise ValueError(
                "input_features has no frame; allowed: at least one. Leave out empty recordings."
            )
        if attention_mask is None:
            lengths = torch.full((batch,), length, device=input_features.device)
        else:
            attention_mask = attention_mask.long()
            # generate() hands over a mask of three dimensions
            mask = attention_mask if attention_mask.dim() == 2 else attention_mask[:, :, -1]
            check_mask(mask, batch, length, self.training)
            lengths = mask.sum(-1)
        hop = hop_in_seconds(hop_nanoseconds, self.config.hop_seconds, batch, self.training)
        if self.stack_positions is not None:
            frames = Frames(encoder_lengths(self.config, lengths), hop, frame_nanoseconds, draw)
            size = encoder_lengths(self.config, length)
            kwargs |= attention_arguments(self, frames, size, self.conv.stride)
        with self.conv.using(Frames(lengths, hop, frame_nanoseconds, draw)):
            return super().forward(input_features, attention_mask=attention_mask, **kwargs)


# the flags keep __init__, __repr__ and __eq__ of the stock configuration
@dataclass(init=False, repr=False, eq=False, kw_only=True)
class RecognitionSettings:
    """Mixin over Speech2Text's configuration, with the distance and length of frames."""

    stock_difference: ClassVar = (
        "padding: no longer reaches the last frames of shorter recordings through a convolution"
    )

    hop_seconds: float | int = 0.01
    window_seconds: float | int = 0.025

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


class RecognitionEncoder(SpeechEncoder):
    """Mixin over Speech2Text's encoder, in a model with :class:`RecognitionSettings`."""

    def make_subsampler(self, config: Any, conv_layers: nn.ModuleList | None) -> Subsampler:
        """Convolutions with kernel 5 and stride 2, if the configuration has no others."""
        inner = [config.conv_channels // 2] * (config.num_conv_layers - 1)
        return Subsampler(
            [config.input_feat_per_channel * config.input_channels, *inner, config.d_model],
            config.conv_layers,
            scale=self.embed_scale,
            positions=build_positions(
                config, "encoder", config.max_source_positions, config.init_std
            ),
            conv_layers=conv_layers,
        )


@dataclass
class MaskedOutput(BaseModelOutput):
    """Output of an encoder, for a decoder that takes the encoder's mask.

    Attributes:
        attention_mask: ``[B, T']`` bool, False on padding; None if padding is not masked.
    """

    attention_mask: Tensor | None = None


class RecognitionModel:
    """Mixin over a stock model with an encoder of frames, such as :class:`SpeechEncoder`, and a
    text decoder. Both sides draw separately. The mask of a :class:`MaskedOutput` goes to the
    decoder."""

    def frames_to_augment(self, features: Tensor, mask: Tensor | None) -> Tensor | None:
        """Features for a forward with random positions, masked as in the stock model; None if the
        forward draws no positions."""
        return features

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any | None = None,
        *,
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
                to half precision; default from the configuration.
            draw: Random numbers for the encoder in this forward; by default drawn in
                training. With `encoder_outputs` nothing is drawn, because the encoder has run
                already.
            decoder_draw: Random numbers of the decoder.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, if frames were skipped (:mod:`cape_plugins.speech.batching`).
        """
        if encoder_outputs is None:
            frames = self.frames_to_augment(input_features, attention_mask)
            input_features = input_features if frames is None else frames
            is_step = is_generation_step({**kwargs, "use_cache": use_cache})
            if draw is None and frames is not None and not is_step:
                draw = draw_positions(self.encoder.positions, frames)
            encoder_outputs = self.encoder(
                input_features,
                attention_mask,
                hop_nanoseconds,
                draw,
                frame_nanoseconds,
                return_dict=True,
                **without_cache(kwargs),
            )
            if decoder_draw is None and frames is not None and not is_step:
                decoder_draw = draw_positions(self.decoder.positions, frames, draw)
        if getattr(encoder_outputs, "attention_mask", None) is not None:
            kwargs["encoder_attention_mask"] = encoder_outputs.attention_mask
        with self.decoder.using(decoder_draw):
            return super().forward(
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=encoder_outputs,
                decoder_inputs_embeds=decoder_inputs_embeds,
                use_cache=use_cache,
                return_dict=True,
                **kwargs,
            )


def takes_frames(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a stock model with the encoder's arguments in the signature, too: the
    Trainer drops columns of the data that are not in the signature."""

    @functools.wraps(forward)
    def forward_with_frames(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    signature = inspect.signature(forward)
    *parameters, keywords = signature.parameters.values()
    names = ("hop_nanoseconds", "frame_nanoseconds")
    frame_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names
    ]
    forward_with_frames.__signature__ = signature.replace(
        parameters=[*parameters, *frame_parameters, keywords]
    )
    return forward_with_frames


class TakesFrames:
    """Mixin directly over a stock model, whose forward gets the arguments of
    :func:`takes_frames`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if TakesFrames in cls.__bases__:  # else a subclass of the user
            cls.forward = takes_frames(cls.__bases__[-1].forward)


def encoder_lengths(config: Any, lengths: Any) -> Any:
    """Number of encoder positions for a number of frames."""
    return subsampled_lengths(config.conv_layers, lengths)
