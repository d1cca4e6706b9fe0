"""Models that turn queries and keys by their positions (RoPE), for all families that do.

`position_ids` stay as the caller and transformers have them, which takes them for borders of packed
texts: positions are moved inside the module that turns them into angles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cape_plugins import Draw, PositionEncoder, Positions
from cape_plugins.binding import Bound
from hf_models.modeling import build_positions, draw_positions, rank_generator
from hf_models.switching import Seam


class Moves(NamedTuple):
    """Values bound to the module of angles in a training forward.

    Attributes:
        draw: Random numbers of this forward.
        coordinates: Moved positions, once they have been drawn: a stock model may ask for angles
            more than once, and all must be of the same positions.
    """

    draw: Draw
    coordinates: dict[str, Tensor]


class RotaryAngles(Bound, Seam):
    """Mixin over the stock module that gives cosines and sines; :class:`Moves` are bound
    to it, or nothing where nothing is augmented.

    Attributes:
        side: Side in the row of the family.
    """

    side = "decoder"

    def take_place(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.Seam`."""
        self.positions = build_positions(config, self.side)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        if not self.positions.config.encoding.turns:
            position_ids = torch.zeros_like(position_ids)  # no angle
        elif self.bound is not None:
            moved = self.bound.coordinates
            if "moved" not in moved:
                moved["moved"] = move(self.positions, position_ids, self.bound.draw)
            position_ids = moved["moved"]
        return super().forward(x, position_ids, *args, **kwargs)


class RotaryModel:
    """Mixin over a stock model with :class:`RotaryAngles`; draws once per training forward."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]``, 0 on padding.
            position_ids: ``[B or 1, T]``. Without mask and cache, each 0 begins another text, which
                is scaled on its own.
            draw: Random numbers of this forward, to inject; default drawn in training. A model in
                training mode that generates draws none: each step must see the same positions.
        """
        inputs_embeds, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
        content = input_ids if inputs_embeds is None else inputs_embeds
        angles = self.rotary_emb
        if draw is None and content is not None and (cache is None or torch.is_grad_enabled()):
            packed = attention_mask is None and cache is None
            draw = draw_positions(angles.positions, content)
            if draw is not None and packed and position_ids is not None:
                draw = draw_texts(angles.positions, position_ids.expand(content.shape[:2]))
        with angles.using(None if draw is None else Moves(draw, {})):
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)


def move(encoder: PositionEncoder, position_ids: Tensor, draw: Draw) -> Tensor:
    """Augmented positions ``[B, T]`` float32 of `position_ids` ``[B or 1, T]``."""
    raw = Positions(position_ids[..., None].float(), in_steps=True)
    return encoder.coordinates(raw, draw, generator=rank_generator, random=True)[..., 0]


def draw_texts(encoder: PositionEncoder, position_ids: Tensor) -> Draw:
    """A draw for each text of packed samples ``[B, T]``, at each of its tokens."""
    batch, length = position_ids.shape
    text = position_ids.eq(0).cumsum(1).clamp(max=length - 1)[..., None]
    draws = encoder.draw(batch * length, position_ids.device, rank_generator)
    if draws.scale is None:
        return Draw(batch_size=batch)
    return Draw(scale=draws.scale.view(batch, length, 1).gather(1, text), batch_size=batch)
