"""Models that turn queries and keys by their positions (RoPE), for all families that do.

`position_ids` stay as the caller and transformers have them, which takes them for borders of packed
texts: positions are moved inside the module that turns them into angles.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cape_plugins import (
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
)
from cape_plugins.augmentation import sorted_sample
from cape_plugins.binding import Bound
from hf_models.host import find_cache
from hf_models.modeling import build_positions, draw_positions, given_content, rank_generator
from hf_models.packed import keep_borders, number_texts
from hf_models.settings import FIELD
from hf_models.switching import Seam


class Moves(NamedTuple):
    """Values bound to the module of angles in a training forward.

    Attributes:
        draw: Random numbers of this forward.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        coordinates: Moved positions, once they have been drawn: a stock model may ask for angles
            more than once, and all must be of the same positions.
    """

    draw: Draw
    valid: Tensor | None
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
        settings = getattr(config, FIELD), *config.position_fields[FIELD]
        self.settings = json.dumps(settings)  # as an operator of torch takes them

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        if not self.positions.config.encoding.turns:
            position_ids = torch.zeros_like(position_ids)  # no angle
        elif self.bound is not None:
            moved = self.bound.coordinates
            if "moved" not in moved:
                draw, valid, _ = self.bound
                moved["moved"] = move(self.positions, position_ids, draw, valid)
            position_ids = moved["moved"]
        return super().forward(x, position_ids, *args, **kwargs)


class RotaryModel:
    """Mixin over a stock model with :class:`RotaryAngles`; draws once per training forward.

    Attributes:
        causal: Whether the stock model is, and keeps packed texts apart itself.
    """

    causal = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            input_ids: ``[B, T]``.
            attention_mask: ``[B, T]``, 0 on padding.
            position_ids: ``[T]`` or ``[B or 1, T]``. Without mask and cache, each step other than 1
                begins another text, as in transformers, which is scaled, or gets positions, on its
                own.
            draw: Random numbers of this forward, to inject; default drawn in training. Without
                gradients none are drawn: each step of generation must see the same positions.
        """
        cache = find_cache(*args, *kwargs.values())
        content = given_content(input_ids, inputs_embeds)
        encoder, moved, valid = self.rotary_emb.positions, {}, None
        if position_ids is not None and position_ids.dim() == 1:
            position_ids = position_ids[None]
        if draw is None and torch.is_grad_enabled():
            packed = attention_mask is None and cache is None and position_ids is not None
            if not packed:
                draw = draw_positions(encoder, content)
            elif encoder.draws:
                texts = position_ids.expand(content.shape[:2])
                if encoder.config.sampling:
                    draw = Draw()
                    moved["moved"] = sample_positions(texts, self.rotary_emb.settings)
                else:
                    draw = draw_texts(encoder, texts)
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            valid = attention_mask[:, -content.shape[1] :].bool()
        if not self.causal:
            attention_mask = keep_borders(self, content, attention_mask, position_ids)
        with self.rotary_emb.using(None if draw is None else Moves(draw, valid, moved)):
            return super().forward(
                *(input_ids, attention_mask, position_ids, *args),
                inputs_embeds=inputs_embeds,
                **kwargs,
            )


def move(
    encoder: PositionEncoder, position_ids: Tensor, draw: Draw, valid: Tensor | None = None
) -> Tensor:
    """Augmented positions ``[B, T]`` float32 of `position_ids` ``[B or 1, T]``, which are counted
    from the first that is valid ``[B, T]`` on: only distances matter here."""
    raw = Positions(position_ids[..., None].float(), in_steps=True)
    if valid is not None and draw.order is not None:
        ids = position_ids.expand(valid.shape)
        first = ids.masked_fill(~valid, ids.shape[1]).amin(1, keepdim=True)
        number = (ids - first).clamp(min=0)
        raw = Positions(number[..., None].float(), in_steps=True, index=valid)
    return encoder.coordinates(raw, draw, generator=rank_generator, random=True)[..., 0]


def draw_texts(encoder: PositionEncoder, position_ids: Tensor) -> Draw:
    """A draw for each text of packed samples ``[B, T]``, at each of its tokens."""
    batch, length = position_ids.shape
    text = number_texts(position_ids)[..., None]
    draws = encoder.draw(batch * length, position_ids.device, rank_generator)
    parts = {
        name: part.view(batch, length, 1).gather(1, text)
        for name, part in (("scale", draws.scale), ("chance", draws.chance))
        if part is not None
    }
    return Draw(**parts, batch_size=batch)


def sample_texts(encoder: PositionEncoder, position_ids: Tensor) -> Tensor:
    """Positions ``[B, T]`` float32 of packed samples, drawn and sorted for each text.

    The numbers of texts and of positions are read from the device, once, in such training alone:
    an order for each token, as :func:`draw_texts` draws a number for each, would not fit into
    memory.
    """
    batch = position_ids.shape[0]
    text = number_texts(position_ids)
    texts, longest = (torch.stack((text.max(), position_ids.max())) + 1).tolist()
    encoder.check_length(longest)
    order = encoder.draw(batch * texts, position_ids.device, rank_generator).order
    size = order.shape[1]
    count = torch.zeros(batch, texts, dtype=torch.long, device=text.device)
    count = count.scatter_reduce(1, text, position_ids + 1, "amax")
    samples = sorted_sample(order.view(batch, texts, size), count)
    return samples.flatten(1).gather(1, text * size + position_ids)


# Random, and with a size that is read from the device, which no graph of CUDA can hold.
_TAGS = [torch.Tag.nondeterministic_seeded]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS.append(torch.Tag.cudagraph_unsafe)
_tagged: Any = {"tags": _TAGS}
if "tags" not in inspect.signature(torch.library.custom_op).parameters:  # torch before 2.7
    _tagged = {}


@torch.library.custom_op("cape_plugins::sample_positions", mutates_args=(), **_tagged)
def sample_positions(position_ids: Tensor, settings: str) -> Tensor:
    """:func:`sample_texts` as an operator, which torch.compile does not look into.

    Args:
        position_ids: ``[B, T]``.
        settings: Of :class:`RotaryAngles`.
    """
    return sample_texts(_encoder_of(settings), position_ids)


@sample_positions.register_fake
def _(position_ids: Tensor, settings: str) -> Tensor:
    return torch.empty(position_ids.shape, dtype=torch.float32, device=position_ids.device)


@functools.lru_cache
def _encoder_of(settings: str) -> PositionEncoder:
    return build_position_encoder(PositionConfig.from_dict(*json.loads(settings)), dim=2).train()
