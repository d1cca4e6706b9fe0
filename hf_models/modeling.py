"""What the models of all families share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from cape_plugins import Positions, PositionTable, RelativePositions, token_positions

TAG = "cape-plugins"


class PositionModelMixin:
    """Over a PreTrainedModel: initialises what position embeddings learn, tags and saves."""

    # The stock forwards of these families ignore the number of items in a batch; the Trainer
    # would multiply their loss by the number of processes and of accumulation steps.
    accepts_loss_kwargs = False

    def post_init(self) -> None:
        """See transformers."""
        super().post_init()
        self.add_model_tags([TAG])

    def save_pretrained(
        self, *args: Any, save_original_format: bool = False, **kwargs: Any
    ) -> None:
        """See transformers. Weights are saved under the names that the model has: with the older
        names that transformers writes by default, resuming with its Trainer would skip them."""
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PositionTable):
            init.normal_(module.weight, std=module.std)
        elif isinstance(module, RelativePositions):
            for table in module.parameters(recurse=False):
                init.uniform_(table, -0.1, 0.1)


class NoAddend(nn.Module):
    """In the place of a stock position embedding, where ours has been added before."""

    def forward(self, *args: Any, **kwargs: Any) -> float:
        """Zero."""
        return 0.0


def decoder_positions(
    length: int, past: int | Tensor, mask: Tensor | None, device: torch.device
) -> Positions:
    """Positions of the tokens that a decoder is given, counted from the beginning of the text.

    Args:
        length: T, tokens given now.
        past: Number of tokens in the cache, a tensor where the cache has a fixed size.
        mask: ``[B, past + T]``, 0 on padding; None if nothing is padded. Text is counted from its
            first token, also in batches padded on the left.
        device: Device of the tokens.

    Returns:
        Positions whose last T are those of the tokens given now.
    """
    if mask is not None and mask.dim() == 2:
        return token_positions(mask.bool())
    coords = (torch.arange(length, device=device) + past).float()[:, None]
    return Positions(coords[None], None, 1.0, coords, first=past)
