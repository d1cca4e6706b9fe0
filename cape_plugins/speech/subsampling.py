"""Convolutions that shorten log-mel frames, and the times of their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.mathematics.positions import Positions, frame_positions, timed_frame_positions
from cape_plugins.speech.features import WINDOW_SECONDS


class ConvSubsampler(nn.Module):
    """Convolutions with gated linear units, each padded by half of its odd kernel.

    The centre of the receptive field of output i is input frame i * stride, so output i has the
    time of this frame. This is the true time, also after frames were skipped. (The code of CAPE
    spreads positions evenly from 0 to the duration.) Padding stays zero, so a recording has the
    same outputs alone and in a batch. Parameters have the names and shapes of Speech2Text in
    fairseq and transformers.

    Args:
        channels: Input channels, then the channels of each convolution after its gate.
        layers: Kernel size and stride of each convolution.
        conv_layers: Convolutions to take instead of new ones; `channels` is then not read.

    Raises:
        ValueError: for an even kernel.
    """

    def __init__(
        self,
        channels: Sequence[int],
        layers: Sequence[tuple[int, int]],
        conv_layers: nn.ModuleList | None = None,
    ) -> None:
        super().__init__()
        for kernel, _ in layers:
            if kernel % 2 == 0:
                raise ValueError(
                    f"kernel size {kernel} is not allowed; allowed: odd, so that the centre of "
                    "each output is a frame. Take one more or one less."
                )
        self.layers = [tuple(layer) for layer in layers]
        self.stride = total_stride(self.layers)  # frames per output
        self.conv_layers = conv_layers or nn.ModuleList(
            nn.Conv1d(channels[i], 2 * channels[i + 1], kernel, stride, padding=kernel // 2)
            for i, (kernel, stride) in enumerate(self.layers)
        )

    def subsample(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, T', C]`` and their lengths ``[B]``, for ``[B, T, bins]`` and ``[B]``;
        T' = ceil(T / stride)."""
        hidden = _zero_padding(features, lengths)
        for conv, (kernel, stride) in zip(self.conv_layers, self.layers, strict=True):
            hidden = F.glu(conv(hidden.transpose(1, 2).contiguous()), dim=1).transpose(1, 2)
            lengths = _output_lengths(lengths, kernel, stride)
            hidden = _zero_padding(hidden, lengths)
        return hidden.contiguous(), lengths


def subsampled_lengths(layers: Sequence[tuple[int, int]], lengths: Any) -> Any:
    """Number of outputs for `lengths` frames, a number or ``[B]``."""
    for kernel, stride in layers:
        lengths = _output_lengths(lengths, kernel, stride)
    return lengths


def total_stride(layers: Sequence[tuple[int, int]]) -> int:
    """Frames per output."""
    return math.prod(stride for _, stride in layers)


def subsampled_positions(
    lengths: Tensor,
    max_length: int,
    stride: int,
    hop_seconds: Tensor | float,
    frame_nanoseconds: Tensor | None = None,
) -> Positions:
    """Positions of the outputs in seconds since the centre of the first frame, for regular and
    irregular frames.

    Args:
        lengths: ``[B]``, outputs of each sample without padding.
        max_length: T'.
        stride: Frames per output.
        hop_seconds: Distance of frames, a number or ``[B]``.
        frame_nanoseconds: ``[B, T]``, centres of the frames since the beginning of the recording,
            if frames are irregular (:func:`~cape_plugins.speech.batching.equal_length` skips
            some). Integers, because hosts cast floats to half precision.

    Raises:
        ValueError: if `frame_nanoseconds` has another dtype or shape.
    """
    step = hop_seconds * stride
    if frame_nanoseconds is None:
        return frame_positions(lengths, step, max_length)
    if frame_nanoseconds.dim() != 2 or frame_nanoseconds.is_floating_point():
        raise ValueError(
            f"frame_nanoseconds has shape {tuple(frame_nanoseconds.shape)} and dtype "
            f"{frame_nanoseconds.dtype}; allowed: [batch, frames] integers, the centre of each "
            "frame, such as 12_500_000 for the first one of 25 ms."
        )
    seconds = frame_nanoseconds[:, ::stride].float() * 1e-9
    if seconds.shape != (len(lengths), max_length):
        raise ValueError(
            f"frame_nanoseconds has shape {tuple(frame_nanoseconds.shape)}; allowed: one time for "
            f"each frame, which gives ({len(lengths)}, {max_length}) outputs at stride {stride}."
        )
    return timed_frame_positions(seconds - WINDOW_SECONDS / 2, lengths, step)


def _output_lengths(lengths: Any, kernel: int, stride: int) -> Any:
    padded = 2 * (kernel // 2) - kernel + stride
    return (lengths + padded) // stride if padded or stride > 1 else lengths


def _zero_padding(hidden: Tensor, lengths: Tensor) -> Tensor:
    """``[B, T, C]`` with zeros from the length of each sample on."""
    valid = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden * valid[..., None].to(hidden.dtype)
