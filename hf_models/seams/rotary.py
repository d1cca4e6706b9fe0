"""Models that turn queries and keys by their positions (RoPE), for all such families.

Callers and transformers keep their `position_ids`, which also mark the borders of packed texts:
positions are moved inside the module that turns them into angles.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

import torch
from torch import Tensor

from cape_plugins import (
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
)
from cape_plugins.mathematics.augmentation import sorted_sample
from cape_plugins.mathematics.binding import Bound
from hf_models.host import find_cache
from hf_models.seams.attention import RunTimeMixin, mixed
from hf_models.seams.packed import keep_borders, number_texts
from hf_models.switching.install import PositionHost
from hf_models.switching.modeling import (
    build_positions,
    content_of_call,
    draw_positions,
    process_generator,
)
from hf_models.switching.settings import FIELD


class MovedPositions:
    """Positions of a training forward, bound to the module of angles. Positions are moved once:
    stock models may ask for angles more than once (ModernBERT asks for each kind of layer), and all
    angles must belong to the same positions.

    Args:
        draw: Random numbers of this forward.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        positions: ``[B, T]`` float32, positions that are drawn already; None to draw.
    """

    def __init__(self, draw: Draw, valid: Tensor | None, positions: Tensor | None = None) -> None:
        self.draw, self.valid, self.positions = draw, valid, positions

    def of(self, encoder: PositionEncoder, position_ids: Tensor) -> Tensor:
        """``[B, T]`` float32, the moved positions of `position_ids` ``[B or 1, T]``."""
        if self.positions is None:
            self.positions = move(encoder, position_ids, self.draw, self.valid)
        return self.positions


class RotaryAngles(Bound, PositionHost):
    """Mixin over the stock module that gives cosines and sines; holds :class:`MovedPositions`, or
    nothing if nothing is augmented. Frequencies that follow the longest length so far (dynamic NTK)
    follow the moved positions too.

    Attributes:
        side: Side in the row of the family.
    """

    side = "decoder"

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        self.positions = build_positions(config, self.side)
        settings = getattr(config, FIELD), *config.position_fields[FIELD]
        self.settings = json.dumps(settings)  # text, because an operator of torch takes no dict

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        if not self.positions.config.encoding.turns:
            position_ids = torch.zeros_like(position_ids)  # no angle
        elif self.bound is not None:
            position_ids = self.bound.of(self.positions, position_ids)
        return super().forward(x, position_ids, *args, **kwargs)


class UnturnedAttention(RunTimeMixin):
    """Mixin over a stock attention class: neither queries nor keys are turned."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Any:
        """See transformers; the angles are zero."""
        cos, sin = position_embeddings
        angles = (torch.ones_like(cos), torch.zeros_like(sin))
        return super().forward(hidden_states, position_embeddings=angles, **kwargs)


class RotaryModel(PositionHost):
    """Mixin over a stock model with :class:`RotaryAngles`; draws once per training forward.

    Attributes:
        causal: Whether the stock model is causal, and therefore keeps packed texts apart.
    """

    causal = True

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        settings = config.position_settings(FIELD)
        for index, layer in enumerate(self.layers):
            if settings.encoding.turns and not settings.names_layer(index):
                attention = next(
                    module
                    for module in layer.children()
                    if "position_embeddings" in inspect.signature(module.forward).parameters
                )
                attention.__class__ = mixed(UnturnedAttention, type(attention))

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
            position_ids: ``[T]`` or ``[B or 1, T]``. Without a mask or cache, a jump starts a new
                packed text, as in transformers; each text is augmented separately.
            draw: Random numbers of this forward, to inject; default drawn in training. Without
                gradients nothing is drawn: each step of generation must see the same positions.
        """
        cache = find_cache(*args, *kwargs.values())
        content = content_of_call(input_ids, inputs_embeds)
        encoder, sampled_positions, valid = self.rotary_emb.positions, None, None
        if position_ids is not None and position_ids.dim() == 1:
            position_ids = position_ids[None]
        if draw is None and torch.is_grad_enabled():
            may_be_packed = attention_mask is None and cache is None and position_ids is not None
            if not may_be_packed:
                draw = draw_positions(encoder, content)
            elif encoder.draws:
                position_of_token = position_ids.expand(content.shape[:2])
                if encoder.config.sampling:
                    draw = Draw()
                    sampled_positions = sample_positions(
                        position_of_token, self.rotary_emb.settings
                    )
                else:
                    draw = draw_texts(encoder, position_of_token)
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            valid = attention_mask[:, -content.shape[1] :].bool()
        if not self.causal:
            attention_mask = keep_borders(self, content, attention_mask, position_ids)
        bound = None if draw is None else MovedPositions(draw, valid, sampled_positions)
        arguments = (input_ids, attention_mask, position_ids, *args)
        with self.rotary_emb.using(bound):
            return super().forward(*arguments, inputs_embeds=inputs_embeds, **kwargs)


def move(
    encoder: PositionEncoder, position_ids: Tensor, draw: Draw, valid: Tensor | None = None
) -> Tensor:
    """Augmented positions ``[B, T]`` float32 of `position_ids` ``[B or 1, T]``. Drawn orders count
    from the first token that is `valid` ``[B, T]``, because only distances matter."""
    raw = Positions(position_ids[..., None].float(), in_steps=True)
    if valid is not None and draw.order is not None:
        ids = position_ids.expand(valid.shape)
        first = ids.masked_fill(~valid, ids.shape[1]).amin(1, keepdim=True)
        number = (ids - first).clamp(min=0)
        raw = Positions(number[..., None].float(), in_steps=True, index=valid)
    return encoder.coordinates(raw, draw, generator=process_generator, random=True)[..., 0]


def draw_texts(encoder: PositionEncoder, position_ids: Tensor) -> Draw:
    """A draw for each text of packed samples ``[B, T]``, repeated at each token of the text."""
    batch, length = position_ids.shape
    text_number = number_texts(position_ids)[..., None]
    draws = encoder.draw(batch * length, position_ids.device, process_generator)
    parts = {
        name: part.view(batch, length, 1).gather(1, text_number)
        for name, part in (("scale", draws.scale), ("chance", draws.chance))
        if part is not None
    }
    return Draw(**parts, batch_size=batch)


def sample_texts(encoder: PositionEncoder, position_ids: Tensor) -> Tensor:
    """Positions ``[B, T]`` float32 of packed samples, drawn and sorted for each text.

    Reads the numbers of texts and of positions from the device, once, only in such training. An
    order for each token, like the number for each token of :func:`draw_texts`, would not fit into
    memory. Sorted gaps or one shared permutation would change the draws, or lose the error for long
    texts.
    """
    batch = position_ids.shape[0]
    text_number = number_texts(position_ids)
    num_texts, longest = (torch.stack((text_number.max(), position_ids.max())) + 1).tolist()
    encoder.check_length(longest)
    order = encoder.draw(batch * num_texts, position_ids.device, process_generator).order
    size = order.shape[1]
    count = torch.zeros(batch, num_texts, dtype=torch.long, device=text_number.device)
    count = count.scatter_reduce(1, text_number, position_ids + 1, "amax")
    samples = sorted_sample(order.view(batch, num_texts, size), count)
    return samples.flatten(1).gather(1, text_number * size + position_ids)


# The operator is random and reads a size from the device, so no graph of CUDA can hold it.
_TAGS = [torch.Tag.nondeterministic_seeded]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _TAGS.append(torch.Tag.cudagraph_unsafe)
_tagged: Any = {"tags": _TAGS}
if "tags" not in inspect.signature(torch.library.custom_op).parameters:  # torch before 2.7
    _tagged = {}


@torch.library.custom_op("cape_plugins::sample_positions", mutates_args=(), **_tagged)
def sample_positions(position_ids: Tensor, settings: str) -> Tensor:
    """:func:`sample_texts` as an operator. torch.compile does not trace operators, so graphs do not
    break.

    Args:
        position_ids: ``[B, T]``.
        settings: Settings of a :class:`RotaryAngles`, as JSON.
    """
    return sample_texts(_encoder_of(settings), position_ids)


@sample_positions.register_fake
def _(position_ids: Tensor, settings: str) -> Tensor:
    return torch.empty(position_ids.shape, dtype=torch.float32, device=position_ids.device)


@functools.lru_cache
def _encoder_of(settings: str) -> PositionEncoder:
    return build_position_encoder(PositionConfig.from_dict(*json.loads(settings)), dim=2).train()
