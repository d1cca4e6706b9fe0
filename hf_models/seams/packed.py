"""Several texts in one sample of a model that attends to both sides: no text sees the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    packed_sequence_mask_function,
)

_MASKS = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}


def number_texts(position_ids: Tensor) -> Tensor:
    """``[B, T]``, the number of the packed text of each token, from 0 on."""
    first = torch.zeros_like(position_ids[:, :1])
    return torch.cat((first, position_ids.diff(dim=1).ne(1).cumsum(1)), dim=1)


def refuse_packed_sources(arguments: Mapping[str, Any]) -> None:
    """Refuses `position_ids` in a call of an encoder beside a decoder. No stock forward of these
    models takes `position_ids`, so packed texts would silently see each other. Keeping the texts
    apart would need borders in the attention of both sides."""
    if arguments.get("position_ids") is not None:
        raise ValueError(
            "position_ids are not allowed with a source: positions of a source count from its "
            "first token, and packed texts of a source would see each other; allowed: one text in "
            "each sample, padded (attention_mask), without position_ids. For positions of the "
            "target, run the encoder first and give encoder_outputs instead of the source."
        )


def keep_borders(
    model: Any, content: Tensor, attention_mask: Any, position_ids: Tensor | None
) -> Any:
    """A mask that keeps packed texts apart in a stock forward. Without this mask the texts see each
    other, because the stock forward ignores their borders.

    Args:
        model: The stack. If kinds of layers differ, a mask for each kind is returned.
        content: Ids ``[B, T]`` or embeddings ``[B, T, C]``.
        attention_mask: The caller's mask, which is returned if there is one.
        position_ids: ``[T]`` or ``[B or 1, T]``. Without a mask, each step other than 1 begins
            another text, as in the causal models of transformers.

    Raises:
        ValueError: for packed texts, if the attention function takes no mask of this kind.
    """
    config, (batch, length) = model.config, content.shape[:2]
    if attention_mask is not None or position_ids is None or getattr(config, "is_decoder", False):
        return attention_mask
    text_number = number_texts(position_ids.view(-1, length).expand(batch, length))
    # in evaluation one text is computed bit for bit as without a mask; training always makes the
    # mask, because looking at the positions would halt a GPU
    if not model.training and not torch.compiler.is_compiling() and not text_number.any():
        return None
    content_like = torch.empty(batch, length, 0, dtype=model.dtype, device=content.device)
    layer_types = set(getattr(config, "layer_types", None) or ())
    borders = packed_sequence_mask_function(text_number)
    masks = {
        layer_type: _MASKS[layer_type](config, content_like, None, and_mask_function=borders)
        for layer_type in layer_types or {"full_attention"}
    }
    if None in masks.values():
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} takes no mask that would keep "
            "the packed texts in position_ids apart; allowed: eager, sdpa. Load the model with "
            "attn_implementation='sdpa', or give one text in each sample."
        )
    return masks if layer_types else masks["full_attention"]
