"""The BOS hint: one token before the source, which the caller does not see.

The encoder adds the hint and removes its state from the output; the decoder attends to the hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput


@dataclass
class CapeEncoderOutput(BaseModelOutput):
    """Output of the encoder with the BOS hint: all fields have the length of the caller's source,
    and one more field holds the state that only the decoder needs.

    Attributes:
        leading_state: ``[B, 1, C]``, the state before the first column of the source: the hint, or
            padding in a shorter sentence that is padded on the left. In such a sentence the hint
            stands in the last column of the padding.
    """

    leading_state: Tensor | None = None


class Hint(NamedTuple):
    """Place of the hint in a batch of sentences of up to S tokens.

    Attributes:
        column: ``[B, 1]``, directly before the first token of each sentence; None for column 0, if
            no sentence is padded.
        mask: ``[B, S + 1]``, 0 on padding; None if nothing is padded.
    """

    column: Tensor | None = None
    mask: Tensor | None = None


def place_hint(mask: Tensor | None) -> Hint:
    """The place of the hint in sentences with the mask ``[B, S]``.

    Raises:
        ValueError: for a mask that is not ``[B, S]``.
    """
    if mask is None:
        return Hint()
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; with source_bos=True only "
            "[batch, source length] is allowed, because the source grows by the BOS hint. "
            "Give such a mask, or set source_bos to False."
        )
    column = mask.ne(0).int().argmax(dim=1, keepdim=True)
    return Hint(column, F.pad(mask, (1, 0)).scatter(1, column, 1))


def prepend(ids: Tensor, hint: Hint, token: int, padding: int) -> Tensor:
    """``[B, S]`` to ``[B, S + 1]`` with `token` at the place of the hint, and `padding` before."""
    if hint.column is None:
        return F.pad(ids, (1, 0), value=token)
    return F.pad(ids, (1, 0), value=padding).scatter(1, hint.column, token)


def prepend_embedding(embeddings: Tensor, hint: Hint, vector: Tensor) -> Tensor:
    """``[B, S, C]`` to ``[B, S + 1, C]`` with `vector` ``[1, 1, C]`` at the place of the hint, and
    zero before."""
    vector = vector.to(embeddings.dtype).expand(embeddings.shape[0], 1, -1)
    if hint.column is None:
        return torch.cat((vector, embeddings), dim=1)
    column = hint.column[..., None].expand_as(vector)
    return F.pad(embeddings, (0, 0, 1, 0)).scatter(1, column, vector)


def without_bos(
    attentions: tuple[Tensor, ...] | None, mask: Tensor | None, queries: bool = False
) -> tuple[Tensor, ...] | None:
    """Reduces attention ``[B, H, T, S + 1]`` to the caller's S tokens; `queries` reduces T as well.

    In a shorter sentence that is padded on the left, BOS stands in the place of the last pad; the
    attention to BOS is set to zero there, as on all padding.
    """
    if attentions is None:
        return None
    pads = None if mask is None else mask.eq(0)[:, None, None]
    trimmed = []
    for attention in attentions:
        attention = attention[:, :, 1:, 1:] if queries else attention[..., 1:]
        trimmed.append(attention if pads is None else attention.masked_fill(pads, 0.0))
    return tuple(trimmed)


def without_hint(output: BaseModelOutput, mask: Tensor | None) -> CapeEncoderOutput:
    """Reduces an output of S + 1 positions to the caller's S positions. The returned tensors are
    parts of the computed tensors: ``retain_grad()`` on the parts receives no gradient, hooks on the
    layers do."""
    hidden_states = output.hidden_states
    if hidden_states is not None:  # None if a caller has selected other outputs
        hidden_states = tuple(None if state is None else state[:, 1:] for state in hidden_states)
    # one operation instead of two slices, also in the backward pass
    leading, states = output.last_hidden_state.split((1, output.last_hidden_state.shape[1] - 1), 1)
    return CapeEncoderOutput(
        last_hidden_state=states,
        hidden_states=hidden_states,
        attentions=without_bos(output.attentions, mask, queries=True),
        leading_state=leading,
    )


def with_hint(outputs: Any) -> tuple[BaseModelOutput, CapeEncoderOutput]:
    """The S + 1 states that the decoder sees, and the encoder's `outputs` for the caller."""
    if not isinstance(outputs, BaseModelOutput):
        *caller_outputs, leading = outputs
        if caller_outputs and isinstance(leading, Tensor):
            outputs = CapeEncoderOutput(*caller_outputs, leading_state=leading)
    leading = getattr(outputs, "leading_state", None)
    # not len(), which would fix the batch size of exported programs
    if leading is None or leading.shape[0] != outputs.last_hidden_state.shape[0]:
        rows = "none" if leading is None else f"one of {leading.shape[0]} rows"
        raise ValueError(
            "encoder_outputs need a leading_state, for the BOS hint (source_bos=True), with as "
            f"many rows as last_hidden_state; given: {rows}. Hand over the whole output of the "
            "encoder, as an object or a tuple; repeat rows of leading_state where you repeat rows."
        )
    states = torch.cat((leading, outputs.last_hidden_state), dim=1)
    return BaseModelOutput(states, outputs.hidden_states, outputs.attentions), outputs


class Generates:
    """Mixin over a stock model that generates, with an encoder that may have the hint."""

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Any:
        """A static cache with room for the BOS hint, which the encoder's output hides."""
        cache = super()._prepare_static_cache(*args, **kwargs)
        if self.get_encoder().has_hint:
            for layer in cache.cross_attention_cache.layers:
                layer.max_cache_len += 1
        return cache
