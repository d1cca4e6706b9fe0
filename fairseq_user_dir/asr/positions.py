"""Parts that the speech models share: adding the times of frames, and the encoder's output for a
decoder."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from cape_plugins import Draw, PositionEncoder
from cape_plugins.speech.features import HOP_SECONDS
from cape_plugins.speech.subsampling import ConvSubsampler, subsampled_positions
from fairseq_user_dir.attention import StackAttention
from fairseq_user_dir.embedding import process_generator


class TimedEncoder:
    """Adds positions to frames; a mixin over a fairseq encoder.

    Attributes:
        positions: Position encoder.
        subsample: Convolutions before the position encoder.
        stack_attention: Module that holds the positions for the layers; None if no position acts in
            attention.
    """

    positions: PositionEncoder
    subsample: ConvSubsampler
    stack_attention: StackAttention | None

    @contextmanager
    def add_times(
        self,
        hidden: Tensor,
        lengths: Tensor,
        hop_nanoseconds: Tensor | None,
        frame_nanoseconds: Tensor | None,
    ) -> Iterator[tuple[Tensor, Draw | None]]:
        """Adds the position embedding of the times of subsampled frames. If the type acts in
        attention, layers that are called in the body of the ``with`` statement use the times there.

        Args:
            hidden: ``[B, T', C]``, the output of `subsample`.
            lengths: ``[B]``, valid frames of `hidden`.
            hop_nanoseconds: ``[B]`` distance between frames before `subsample`; default 10 ms.
            frame_nanoseconds: ``[B, T]`` centre of each frame, if frames were skipped.

        Yields:
            ``[B, T', C]`` with positions, and the draw of this forward in training, None in
            evaluation. Ranks draw differently.
        """
        hop = HOP_SECONDS if hop_nanoseconds is None else hop_nanoseconds.float() * 1e-9
        positions = subsampled_positions(
            lengths, hidden.shape[1], self.subsample.stride, hop, frame_nanoseconds
        )
        # one generator for the draw and the local shifts
        generator = functools.cache(process_generator)
        draw = self.positions.draw(hidden.shape[0], hidden.device, generator)
        embedding = self.positions(positions, draw, dtype=hidden.dtype, generator=generator)
        hidden = hidden if embedding is None else hidden + embedding
        if self.stack_attention is None:
            yield hidden, draw
            return
        with self.stack_attention.using(self.stack_attention.of(positions, draw, generator)):
            yield hidden, draw


class TimedModel:
    """Hands the times of frames to the encoder; a mixin over a fairseq model with a decoder."""

    encoder: Any
    decoder: Any

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor, **times: Tensor
    ) -> Any:
        """See fairseq; `times` are the last two arguments of :meth:`TimedEncoder.add_times`."""
        encoder_out = self.encoder(src_tokens=src_tokens, src_lengths=src_lengths, **times)
        return self.decoder(prev_output_tokens=prev_output_tokens, encoder_out=encoder_out)


def encoder_output(
    hidden: Tensor, padding: Tensor, draw: Draw | None, states: list[Tensor] | None = None
) -> dict[str, list[Any]]:
    """Output of an encoder, in the form that fairseq's decoders and beam search take.

    Args:
        hidden: States ``[T, B, C]``.
        padding: ``[B, T]``, True on padding.
        draw: Draw of the encoder.
        states: Outputs of all layers, if the caller asks for them.
    """
    return {
        "encoder_out": [hidden],
        "encoder_padding_mask": [padding] if padding.any() else [],
        "encoder_embedding": [],
        "encoder_states": states or [],
        "src_tokens": [],
        "src_lengths": [],
        # the decoder augments the same samples
        "position_draw": [] if draw is None else [draw],
    }
