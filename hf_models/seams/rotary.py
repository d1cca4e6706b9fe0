"""Models that turn queries and keys by their positions (RoPE), for all such families.

Callers and transformers keep their `position_ids`, which also mark the borders of packed texts:
positions are moved inside the module that turns them into angles.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import (
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
)
from cape_plugins.checkpoints.families import find_family
from cape_plugins.mathematics.augmentation import sorted_sample
from cape_plugins.settings.options import OPTION_FIELDS
from hf_models.seams.attention import RunTimeMixin, mixed, refuse_unknown_layers
from hf_models.seams.base import Seam
from hf_models.seams.packed import keep_borders, number_texts
from hf_models.seams.scope import Scope
from hf_models.switching.modeling import build_positions, content_of_call, process_generator
from hf_models.switching.settings import FIELD

# Modules for images, sounds and proteins beside a text have separate angles.
_OTHER_INPUTS = re.compile("vision|visual|image|audio|speech|protein", re.IGNORECASE)
_ANGLES = re.compile(r"Rot\w*Emb")


class RotaryAngles(Seam):
    """Takes the place of the stock module that gives cosines and sines: moves the positions of the
    text. Frequencies that follow the longest length so far (dynamic NTK) follow the moved positions
    too."""

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules called like rotary embeddings whose
        forward takes positions."""
        for name, module in model.named_modules():
            stock = type(module)
            if not _ANGLES.search(stock.__name__) or isinstance(module, cls):
                continue
            is_text = not _OTHER_INPUTS.search(name) and "Vision" not in stock.__name__
            if is_text and arguments_of(stock)[1:3] == ("x", "position_ids"):
                yield name, module, {}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.in_decoder = "decoder" in path
        self.keeps_borders = find_family(config.model_type, vars(config)).keeps_borders
        self.positions = build_positions(config, self.side)
        settings = getattr(config, FIELD), *config.position_fields[FIELD]
        self.settings = json.dumps(settings)  # text, because an operator of torch takes no dict
        leave_layers_unturned(owner, self.settings_in(config))

    def adapt_call(self, model: nn.Module, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Positions of one sample apply to the whole
        batch; packed texts are kept apart if the stock model does not do this."""
        position_ids = call.get("position_ids")
        if isinstance(position_ids, Tensor) and position_ids.dim() == 1:
            call["position_ids"] = position_ids[None]
        takes_tokens = {"input_ids", "inputs_embeds"}.issubset(model.argument_names)
        if not takes_tokens or all(child is not self for child in model.children()):
            return
        content = content_of_call(call.get("input_ids"), call.get("inputs_embeds"))
        if self.keeps_borders:
            mask, position_ids = call.get("attention_mask"), call.get("position_ids")
            call["attention_mask"] = keep_borders(model, content, mask, position_ids)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers.

        Args:
            x: ``[B, ...]``, gives the precision and the size of the batch.
            position_ids: ``[B or 1, T]``; with several coordinates ``[coordinates, B, T]``, of
                which the first is moved, and the others by the same scale and shift, so the
                coordinates of a word stay equal.
        """
        if not self.positions.config.encoding.turns:
            position_ids = torch.zeros_like(position_ids)  # position 0: nothing turns
        elif self.bound is not None:
            position_ids = self._moved(self.bound, x, position_ids)
        return super().forward(x, position_ids, *args, **kwargs)

    def _moved(self, scope: Scope, x: Tensor, position_ids: Tensor) -> Tensor:
        """The moved positions; the same for all calls of one forward, because stock models may ask
        for the angles of each kind of layer."""
        if scope.injected is None and not (scope.draws and self.positions.draws):
            return position_ids
        prefix = self._prefix(scope)
        old_ids, moved = scope.moved.get(prefix, (None, None))
        if old_ids is None or old_ids.shape != position_ids.shape:
            move_ids = self._move_coordinates if position_ids.dim() == 3 else self._move_texts
            moved = move_ids(scope, x, position_ids, prefix)
            scope.moved[prefix] = position_ids, moved
        return moved

    def _prefix(self, scope: Scope) -> str:
        """Beginning of the names of the arguments of the side of this module."""
        has_two_sides = "decoder_attention_mask" in scope.names
        return "decoder_" if self.in_decoder and has_two_sides else ""

    def _move_texts(self, scope: Scope, x: Tensor, position_ids: Tensor, prefix: str) -> Tensor:
        encoder, (batch, length) = self.positions, (x.shape[0], position_ids.shape[1])
        if scope.injected is None and scope.packed:
            position_of_token = position_ids.expand(batch, length)
            if encoder.config.sampling:
                return sample_positions(position_of_token, self.settings)
            draw = draw_texts(encoder, position_of_token)
        else:
            draw = scope.draw(encoder, batch, x.device)
        return move(encoder, position_ids, draw, scope.mask(batch, length, prefix))

    def _move_coordinates(
        self, scope: Scope, x: Tensor, position_ids: Tensor, prefix: str
    ) -> Tensor:
        batch, length = position_ids.shape[1:]
        draw = scope.draw(self.positions, x.shape[0], x.device)
        first = move(self.positions, position_ids[0], draw, scope.mask(batch, length, prefix))
        scale = 1.0 if draw.scale is None else draw.scale[..., 0]
        shift = first - position_ids[0] * scale
        return torch.stack((first, *(ids * scale + shift for ids in position_ids[1:])))


@functools.cache
def arguments_of(stock: type[nn.Module]) -> tuple[str, ...]:
    """Names of the arguments of a stock forward, with self."""
    return tuple(inspect.signature(stock.forward).parameters)


class UnturnedAttention(RunTimeMixin):
    """Mixin over a stock attention class: neither queries nor keys are turned."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        """See transformers; the angles are zero.

        Args:
            hidden_states: ``[B, T, C]``.
            position_embeddings: Cosines and sines, complex numbers that turn, or None in layers
                that the stock model does not turn either.
        """
        angles = position_embeddings
        if isinstance(angles, tuple):
            cos, sin = angles
            angles = (torch.ones_like(cos), torch.zeros_like(sin))
        elif angles is not None:
            angles = torch.ones_like(angles)
        return super().forward(hidden_states, position_embeddings=angles, **kwargs)


def leave_layers_unturned(owner: nn.Module, settings: PositionConfig) -> None:
    """Takes the angles from layers that the settings do not name.

    Raises:
        ValueError: unless `owner` has one stack, and the attention of each layer takes the angles;
            if the settings name no layer of the stack.
    """
    all_layers = OPTION_FIELDS["layers"].metadata["off"]
    if not settings.encoding.turns or settings.layers == all_layers:
        return
    stacks = _stacks_with_angles(owner)
    if len(stacks) != 1:  # else one number would name layers of several stacks
        raise ValueError(
            f"layers={settings.layers!r} is not allowed for {type(owner).__name__}, which has "
            f"{len(stacks)} stacks whose layers all take the angles, not one; allowed: "
            f"{all_layers!r}. Leave the option out."
        )
    (attentions,) = stacks
    refuse_unknown_layers(settings, len(attentions), type(owner).__name__)
    for index, attention in enumerate(attentions):
        # an owner may hold several modules of angles
        if not (settings.names_layer(index) or isinstance(attention, UnturnedAttention)):
            attention.__class__ = mixed(UnturnedAttention, type(attention))


def _stacks_with_angles(owner: nn.Module) -> list[list[nn.Module]]:
    """The attentions of each stack in `owner` whose layers all take the angles. Stacks that `owner`
    holds itself come first, because encoders deeper in `owner` have separate angles; without such
    a stack, all deeper stacks are searched."""
    found: list[list[nn.Module]] = []
    for modules in (owner.children(), owner.modules()):
        for layers in (module for module in modules if isinstance(module, nn.ModuleList)):
            attentions = [next(filter(_takes_angles, layer.children()), None) for layer in layers]
            if attentions and None not in attentions:
                found.append(attentions)
        if found:
            break
    return found


def _takes_angles(module: nn.Module) -> bool:
    return "position_embeddings" in arguments_of(type(module))


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
        raw = Positions(number[..., None].float(), in_steps=True, valid=valid)
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

    Reads the numbers of texts and of positions from the device, once in a forward. The alternatives
    are worse: :func:`draw_texts` repeats a draw at each token, and an order for each token would
    not fit into memory; sorted gaps or one shared permutation would change the distribution of the
    draws, or could not raise the error for texts that are too long.

    Raises:
        ValueError: for a text with more positions than the settings allow.
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
