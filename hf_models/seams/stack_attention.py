"""Positions in attention (relative keys, turned queries and keys, biases) for generated families
whose stock models add positions.

The stock code of such a model does not hand positions on to its layers. The seam that replaces the
stock table computes the positions of the stack once for each forward and leaves them in the scope;
each layer takes them from there as an argument, so that gradient checkpointing runs the layer
again with the same positions.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from cape_plugins import AttentionPositions, Draw, PositionConfig, Positions
from hf_models.host import cached_tokens, find_cache
from hf_models.seams.attention import (
    PositionAttention,
    RunTimeMixin,
    add_positions_to_attention,
    has_heads,
    keys_and_queries,
    mixed,
    positions_for_layers,
)
from hf_models.seams.base import Seam
from hf_models.seams.informed import InformedLayer
from hf_models.seams.scope import Scope
from hf_models.switching.modeling import process_generator

_CROSS = re.compile(r"cross|encoder_attn|encdec|inter_?attention")  # attention to other inputs
_INTERFACE = "_attn_implementation"  # field that stock code reads to look its function up


class ForLayers(NamedTuple):
    """What the layers of a stack need in a forward.

    Attributes:
        patches: Rows and columns of the patches, where tokens are patches.
        positions: Positions of the stack; None if relative keys need none.
    """

    patches: tuple[int, ...] | None
    positions: AttentionPositions | None


class PositionLayer(RunTimeMixin, InformedLayer):
    """Mixin over a stock layer: hands the positions of this forward on to the self-attention
    modules in it.

    Attributes:
        attention_paths: Paths of the self-attention modules in the layer; names, because replicas
            of a model hold other modules.
        stack: Key of the positions in the scope.
    """

    attention_paths: tuple[str, ...]
    stack: str

    @property
    def informed(self) -> list[Any]:
        """The self-attention modules."""
        return [self.get_submodule(path) for path in self.attention_paths]

    def information(self, scope: Scope) -> ForLayers | None:
        """What the seam of the stack has left in this forward."""
        return scope.for_layers.get(self.stack)


def add_to_layers(model: nn.Module, path: str, seam: Seam, only_adds: bool) -> None:
    """Gives the layers of the stack around a seam positions in attention, if the settings have
    such positions.

    Args:
        model: The outermost model.
        path: Path of the seam in the model.
        seam: The seam, with its encoder.
        only_adds: Whether the layers see other tokens than the seam, because the model hides or
            shuffles patches; positions then have to be added before the layers.

    Raises:
        ValueError: if the stock attention computes its scores itself, if there is none, or if the
            layers see other tokens than the seam.
    """
    settings = seam.positions.config
    if not settings.in_attention:
        return
    name = type(model).__name__
    if only_adds:
        refuse_in_attention(settings, f"{name} hides or reorders tokens before its layers")
    stack_path, attentions = _self_attentions(model, path)
    computing = [module for _, module in attentions if not _looks_up_function(module)]
    if computing:
        refuse_in_attention(
            settings,
            f"{type(computing[0]).__name__} does not look its attention function up as "
            "transformers' other models do",
        )
    if not attentions:
        refuse_in_attention(settings, f"{name} has no attention with heads that are known")
    modules = [module for _, module in attentions]
    causal = bool(getattr(modules[0], "is_causal", False))
    seam.layer_key = path
    seam.stack_positions = add_positions_to_attention(modules, settings, seam.positions, causal)
    # settings may leave layers without positions
    in_layers = [item for item in attentions if isinstance(item[1], PositionAttention)]
    for layer_path, paths in _by_layer(model, stack_path, in_layers).items():
        layer = model.get_submodule(layer_path)
        layer.attention_paths, layer.stack = tuple(paths), path
        layer.__class__ = mixed(PositionLayer, type(layer))


def refuse_in_attention(settings: PositionConfig, reason: str) -> None:
    """Refuses a type that acts in attention.

    Args:
        settings: Position embedding of a side.
        reason: Why the model cannot have such a type.

    Raises:
        ValueError: for a type that acts in attention.
    """
    if settings.in_attention:
        raise ValueError(
            f"position embedding {settings.type!r} acts in attention, and {reason}; allowed: types "
            "that add to the content, without relative_context. Choose one, such as 'cape'."
        )


def leave_for_layers(
    seam: Seam,
    scope: Scope | None,
    positions: Positions,
    draw: Draw | None,
    length: int | None = None,
    patches: tuple[int, ...] | None = None,
) -> None:
    """Computes the positions of a stack, and leaves them in the scope.

    Args:
        seam: The seam that knows the positions.
        scope: Scope of this forward; None outside of a model, where no layer follows.
        positions: Positions of the tokens, or of all tokens of the text so far.
        draw: Random numbers of this forward.
        length: Number of tokens given; None for patches, which no cache holds.
        patches: Rows and columns of the patches.
    """
    if scope is None or seam.layer_key is None:
        return
    queries = None
    if length is not None:
        cache = find_cache(*scope.call.values())
        positions, queries = keys_and_queries(positions, length, cached_tokens(cache), cache)
    computed = positions_for_layers(
        seam.stack_positions, seam.positions, positions, draw, process_generator, queries
    )
    scope.for_layers[seam.layer_key] = ForLayers(patches, computed.get("attention_positions"))


def _self_attentions(model: nn.Module, path: str) -> tuple[str, list[tuple[str, nn.Module]]]:
    """The stack around a module, and the self-attention modules in it, in the order of layers."""
    while path:
        path = path.rpartition(".")[0]
        stack = model.get_submodule(path) if path else model
        attentions = [
            (f"{path}.{name}" if path else name, module)
            for name, module in stack.named_modules()
            if has_heads(module) and not _CROSS.search(name)
        ]
        if attentions:
            return path, attentions
    return path, []


def _looks_up_function(module: nn.Module) -> bool:
    """Whether a stock attention module looks its function up by the name in its configuration."""
    forward = inspect.unwrap(type(module).forward)
    return hasattr(module, "config") and _INTERFACE in forward.__code__.co_names


def _by_layer(
    model: nn.Module, stack_path: str, attentions: list[tuple[str, nn.Module]]
) -> dict[str, list[str]]:
    """Paths of attention modules inside the layer of each, by the path of the layer: the module
    that gradient checkpointing runs again, or the attention module's owner."""
    layers: dict[str, list[str]] = {}
    for path, _ in attentions:
        layer_path = owner = path.rpartition(".")[0]
        while len(layer_path) > len(stack_path):
            if isinstance(model.get_submodule(layer_path), GradientCheckpointingLayer):
                break
            layer_path = layer_path.rpartition(".")[0]
        else:
            layer_path = owner
        layers.setdefault(layer_path, []).append(path[len(layer_path) + 1 :])
    return layers
