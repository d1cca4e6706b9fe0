"""The encoder of speech: log-mel frames, convolutions, positions in time, layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from cape_plugins import Draw, PositionEncoder, Positions
from cape_plugins.mathematics.binding import Bound
from cape_plugins.speech.subsampling import (
    ConvSubsampler,
    subsampled_lengths,
    subsampled_positions,
)
from hf_models.host import without_cache
from hf_models.seams.attention import add_positions_to_attention, positions_for_layers
from hf_models.switching.install import PositionHost, PositionSlot
from hf_models.switching.modeling import (
    InitializesPositions,
    draw_positions,
    embed_positions,
    process_generator,
)

# Nanoseconds: one sample at 50 kHz, and the limit of `hop_seconds` in configurations
MIN_HOP, MAX_HOP = 20_000, 10_000_000_000


class Frames(NamedTuple):
    """Values bound to the subsampler in each forward.

    Attributes:
        lengths: ``[B]``, frames of each sample without padding.
        hop_seconds: Distance of frames, a number or ``[B]`` float32.
        nanoseconds: ``[B, T]`` integers, the centres of the frames if frames are irregular.
        draw: Random numbers of this forward.
    """

    lengths: Tensor
    hop_seconds: Tensor | float
    nanoseconds: Tensor | None
    draw: Draw | None


class Subsampler(Bound, ConvSubsampler):
    """Convolutions; then positions are added to the scaled content. Holds :class:`Frames`.

    Args:
        channels: Input channels, then the channels of each convolution after its gate.
        layers: Kernel size and stride of each convolution.
        scale: Factor on the content.
        positions: Position encoder.
        dropout: Dropout before positions are added.
    """

    def __init__(
        self,
        channels: Sequence[int],
        layers: Sequence[tuple[int, int]],
        scale: float,
        positions: PositionEncoder,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, layers)
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
        subsampler = self.make_subsampler(config)
        if hasattr(self, "conv"):
            subsampler.conv_layers = self.conv.conv_layers
        self.conv = subsampler
        self.embed_scale = 1  # the subsampler scales the content, before positions are added
        self.embed_positions = PositionSlot()
        self.stack_positions = add_positions_to_attention(
            (layer.self_attn for layer in self.layers), config.position_config, self.positions
        )

    def make_subsampler(self, config: Any) -> Subsampler:
        """The convolutions of a family."""
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
        """Features of a forward that is augmented in training, changed as in the stock model; None
        if nothing is to be drawn."""
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
            draw: Random numbers of the encoder in this forward, to inject; by default drawn in
                training. With `encoder_outputs` nothing is drawn, because the encoder has run
                already.
            decoder_draw: Random numbers of the decoder.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, if frames were skipped (:mod:`cape_plugins.speech.batching`).
        """
        if encoder_outputs is None:
            frames = self.frames_to_augment(input_features, attention_mask)
            if frames is not None:
                input_features = frames
                draw = draw_positions(self.encoder.positions, frames) if draw is None else draw
            encoder_outputs = self.encoder(
                input_features,
                attention_mask,
                hop_nanoseconds,
                draw,
                frame_nanoseconds,
                return_dict=True,
                **without_cache(kwargs),
            )
            if decoder_draw is None and frames is not None:
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


def add_positions(encoder: PositionEncoder, hidden: Tensor, frames: Frames, stride: int) -> Tensor:
    """`hidden` ``[B, T', C]`` plus position embeddings in time, if the type adds any.

    Args:
        encoder: Position encoder.
        hidden: One position for each `stride` frames.
        frames: Frames of the recordings, with the lengths of `hidden`.
        stride: Frames per position.
    """
    if encoder.encoding is None:
        return hidden
    positions, draw = _positions_and_draw(encoder, frames, hidden.shape[1], stride)
    addend = embed_positions(encoder, positions, draw, hidden)
    return hidden if addend is None else hidden + addend


def attention_arguments(stack: Any, frames: Frames, length: int, stride: int) -> dict[str, Any]:
    """The argument of the layers of a stack with positions in attention; for the arguments see
    :func:`add_positions`.

    Args:
        stack: Encoder with `positions` and `stack_positions`.
        frames: Frames of the recordings, with the lengths of the hidden states.
        length: Number of hidden states.
        stride: Frames per position.
    """
    positions, draw = _positions_and_draw(stack.positions, frames, length, stride)
    return positions_for_layers(
        stack.stack_positions, stack.positions, positions, draw, process_generator
    )


def _positions_and_draw(
    encoder: PositionEncoder, frames: Frames, length: int, stride: int
) -> tuple[Positions, Draw | None]:
    """Positions of `length` hidden states, and the draw of the forward."""
    positions = subsampled_positions(
        frames.lengths, length, stride, frames.hop_seconds, frames.nanoseconds
    )
    draw = frames.draw
    if draw is None and not encoder.training:  # for types that draw in evaluation, too
        # not len, which would fix the size in exported programs
        draw = encoder.draw(frames.lengths.shape[0], frames.lengths.device, process_generator)
    return positions, draw


def check_seconds(config: Any, *names: str) -> None:
    """Refuses impossible distances and lengths of frames.

    Raises:
        ValueError: unless the fields of these names are numbers above 0 and below 10.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10:
            raise ValueError(
                f"{name}={value!r} is not allowed; allowed: more than 0 and less than 10 seconds, "
                "such as 0.01."
            )


def values_to_check(values: Tensor, training: bool) -> np.ndarray | None:
    """Values of an input, to be checked. None in a compiled program, which has no values, and in
    training on a GPU, because each step would wait: a GPU trains on a wrong mask until the first
    evaluation."""
    if torch.compiler.is_compiling() or (training and not values.is_cpu):
        return None
    # float(), because numpy has no bfloat16; on a CPU no other operation has to wait
    return (values.float() if values.is_floating_point() else values).numpy(force=True)


def check_mask(mask: Tensor, batch: int, length: int, training: bool) -> None:
    """Raises ValueError for a mask that is not ``[B, T]``, or that pads on the left or within, as
    far as :func:`values_to_check` shows."""
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(batch, length)}, [batch, "
            "frames] of input_features. Give the mask that the feature extractor returned with "
            "them."
        )
    visible = values_to_check(mask, training)
    if visible is not None and ((visible[:, 1:] != 0) & (visible[:, :-1] == 0)).any():
        raise ValueError(
            "attention_mask has padding before frames; allowed: padding after the last frame of a "
            "recording, because time is counted from the first frame. Set padding_side='right' "
            "of the feature extractor."
        )


def hop_in_seconds(
    hop_nanoseconds: Tensor | int | None, default: float, batch: int, training: bool
) -> Tensor | float:
    """Distance of frames, a number or ``[B]`` float32.

    Args:
        hop_nanoseconds: A number or ``[B]`` integers, from the call of the model.
        default: Seconds, used if `hop_nanoseconds` is None.
        batch: B.
        training: Whether a step of training runs; see :func:`values_to_check`.

    Raises:
        ValueError: unless `hop_nanoseconds` is an integer that can be a hop: people think in
            seconds.
    """
    if hop_nanoseconds is None:
        return default
    allowed = (
        f"allowed: one integer or [{batch}] integers from {MIN_HOP} to {MAX_HOP} (10 s), "
        "such as 10_000_000 for 10 ms."
    )
    if isinstance(hop_nanoseconds, Tensor):
        if hop_nanoseconds.is_floating_point():
            raise ValueError(f"hop_nanoseconds has dtype {hop_nanoseconds.dtype}; {allowed}")
        if hop_nanoseconds.shape not in ((), (1,), (batch,)):
            shape = tuple(hop_nanoseconds.shape)
            raise ValueError(f"hop_nanoseconds has shape {shape}; {allowed}")
        hops = values_to_check(hop_nanoseconds, training)
        if hops is not None:
            low, high = hops.min(), hops.max()
            if low < MIN_HOP or high > MAX_HOP:
                worst = low if low < MIN_HOP else high
                raise ValueError(f"hop_nanoseconds holds {worst}; {allowed}")
        return hop_nanoseconds.float() * 1e-9
    if (
        isinstance(hop_nanoseconds, bool)
        or not isinstance(hop_nanoseconds, int | torch.SymInt)
        or not MIN_HOP <= hop_nanoseconds <= MAX_HOP
    ):
        raise ValueError(f"hop_nanoseconds={hop_nanoseconds!r} is not allowed; {allowed}")
    return hop_nanoseconds * 1e-9


def encoder_lengths(config: Any, lengths: Any) -> Any:
    """Number of encoder positions for a number of frames."""
    return subsampled_lengths(config.conv_layers, lengths)
