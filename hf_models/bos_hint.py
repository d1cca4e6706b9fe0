"""The BOS hint: one token before the source, which the caller does not see.

The encoder puts it there and takes its state out of what it returns; the decoder attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput


@dataclass
class CapeEncoderOutput(BaseModelOutput):
    """Output of the encoder with the BOS hint: all of it fits the source of the caller, and one
    more state, for the decoder.

    Attributes:
        leading_state: ``[B, 1, C]``, the state before the first column of the source. The hint, or
            padding in a shorter sentence that is padded on the left: there, the hint stands in the
            last column of its padding.
    """

    leading_state: Tensor | None = None


def first_valid(mask: Tensor | None, content: Tensor) -> Tensor:
    """``[B, 1]``, column of the first token of each sentence."""
    if mask is None:
        return torch.zeros(content.shape[0], 1, dtype=torch.long, device=content.device)
    return mask.ne(0).int().argmax(dim=1, keepdim=True)


def prepend(content: Tensor, first: Tensor, token: Any, padding: float) -> Tensor:
    """``[B, S, ...]`` to ``[B, S + 1, ...]`` with `token` directly before column `first` ``[B, 1,
    ...]``, and `padding` before that."""
    longer = torch.cat((torch.full_like(content[:, :1], padding), content), dim=1)
    column = torch.arange(longer.shape[1], device=content.device)
    if content.dim() == 3:
        column = column[:, None]
    return torch.where(column == first, token, longer)


def extend_mask(mask: Tensor | None) -> Tensor | None:
    """``[B, S]`` to ``[B, S + 1]`` with BOS directly before the first token.

    Raises:
        ValueError: for a mask of another kind.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; with source_bos=True only "
            "[batch, source length] is allowed, because the source grows by the BOS hint. "
            "Give such a mask, or set source_bos to False."
        )
    slot = mask.ne(0).int().argmax(dim=1, keepdim=True)
    return torch.cat((torch.zeros_like(mask[:, :1]), mask), dim=1).scatter(1, slot, 1)


def without_bos(
    attentions: tuple[Tensor, ...] | None, mask: Tensor | None, queries: bool = False
) -> tuple[Tensor, ...] | None:
    """Attention ``[B, H, T, S + 1]`` over the caller's S tokens; with `queries` from them as well.

    In a shorter sentence that is padded on the left, BOS stands where the last pad was: it is set
    to zero, as on all padding.
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
    """Output of S + 1 positions, reduced to the caller's S."""
    hidden_states = output.hidden_states
    if hidden_states is not None:  # None where a caller has selected others
        hidden_states = tuple(None if state is None else state[:, 1:] for state in hidden_states)
    return CapeEncoderOutput(
        last_hidden_state=output.last_hidden_state[:, 1:],
        hidden_states=hidden_states,
        attentions=without_bos(output.attentions, mask, queries=True),
        leading_state=output.last_hidden_state[:, :1],
    )


def with_hint(outputs: Any) -> tuple[BaseModelOutput, CapeEncoderOutput]:
    """The S + 1 states that the decoder sees, and the `outputs` of the encoder that were given."""
    if not isinstance(outputs, BaseModelOutput):
        *shown, leading = outputs
        if shown and isinstance(leading, Tensor):
            outputs = CapeEncoderOutput(*shown, leading_state=leading)
    leading = getattr(outputs, "leading_state", None)
    # not len(), which would fix the batch size of exported programs
    if leading is None or leading.shape[0] != outputs.last_hidden_state.shape[0]:
        rows = "none" if leading is None else f"one of {leading.shape[0]} rows"
        raise ValueError(
            "encoder_outputs need a leading_state, for the BOS hint (source_bos=True), with as "
            f"many rows as last_hidden_state; given: {rows}. Hand over all that the encoder has "
            "returned, as it is or as a tuple; repeat rows of leading_state where you repeat rows."
        )
    states = torch.cat((leading, outputs.last_hidden_state), dim=1)
    return BaseModelOutput(states, outputs.hidden_states, outputs.attentions), outputs
