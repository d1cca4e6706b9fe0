"""Frames of recordings: their hop and mask, checked, and their positions in time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cape_plugins import Draw, PositionEncoder, Positions
from cape_plugins.speech.subsampling import subsampled_positions
from hf_models.seams.attention import positions_for_layers
from hf_models.switching.modeling import embed_positions, process_generator

# Nanoseconds: one sample at 50 kHz, and the limit of `hop_seconds` in configurations
MIN_HOP, MAX_HOP = 20_000, 10_000_000_000


class Frames(NamedTuple):
    """Lengths, times and draw of a batch of frames, which the subsampler and the attention read in
    one forward pass.

    Attributes:
        lengths: ``[B]``, number of frames of each sample, without padding.
        hop_seconds: Distance of neighbouring frames in seconds, a number or ``[B]`` float32.
        nanoseconds: ``[B, T]`` integers, the centres of the frames if frames are irregular.
        draw: Random numbers of this forward pass, or None.
    """

    lengths: Tensor
    hop_seconds: Tensor | float
    nanoseconds: Tensor | None
    draw: Draw | None


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
    """The keyword argument that the layers of a stack with positions in attention take.

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
    if draw is None and not encoder.training:  # some types draw in evaluation, too
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
    """Values of an input to check. None in a compiled program, which has no values, and in training
    on a GPU, where each step would wait for the values: the first evaluation finds a wrong mask."""
    if torch.compiler.is_compiling() or (training and not values.is_cpu):
        return None
    # float(), because numpy has no bfloat16; on a CPU no other operation has to wait
    return (values.float() if values.is_floating_point() else values).numpy(force=True)


def check_mask(mask: Tensor, batch: int, length: int, training: bool) -> None:
    """Raises ValueError for a mask that is not ``[B, T]``, and for padding before a frame, if
    :func:`values_to_check` returns values."""
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(batch, length)}, [batch, "
            "frames] of input_features. Give the mask that the feature extractor returned with "
            "input_features."
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
        ValueError: unless `hop_nanoseconds` is an integer in the range of hops: a smaller number
            may be meant as seconds.
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
