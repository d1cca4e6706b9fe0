"""Positions that act in self-attention. A stack computes these positions once for each forward, and
the layers of the stack apply them. Turned queries and keys, fixed biases and learned biases use the
same hook in the attention of a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.mathematics.augmentation import Draw
from cape_plugins.mathematics.biases import FireBias, LinearBias
from cape_plugins.mathematics.encoder import Generators, PositionEncoder
from cape_plugins.mathematics.positions import Positions
from cape_plugins.mathematics.rotary import Angles, Rotation
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS


class AttentionPositions:
    """Positions of a forward for the self-attention of all layers of a stack.

    A stack passes the object to its layers as an argument, because a value that is bound to a
    module is gone when gradient checkpointing runs a layer again. The class is neither a tuple nor
    a dataclass, because FSDP would cast floating-point tensors in such arguments to half precision,
    in which positions are wrong from 257 on.

    Args:
        query: Coordinates of queries, ``[B or 1, T, D]`` float32.
        key: Coordinates of keys, ``[B or 1, S, D]``.
        query_angles: Angles of the queries, if queries and keys are turned.
        key_angles: Angles of the keys.
        bias: ``[B or 1, H, T, S]``, if all layers share a bias.
        axes: Sizes of the axes, the slowest first, if queries and keys are the cells of one evenly
            spaced grid.
        pairs: ``[B, T, T]`` int64, if `query` and `key` are the same R rows and the elements of the
            batch have some of these rows: ``R * row of the query + row of the key``.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        query_angles: Angles | None = None,
        key_angles: Angles | None = None,
        bias: Tensor | None = None,
        axes: tuple[int, ...] | None = None,
        pairs: Tensor | None = None,
    ) -> None:
        self.query, self.key = query, key
        self.query_angles, self.key_angles = query_angles, key_angles
        self.bias = bias
        self.axes, self.pairs = axes, pairs
        self._mask: tuple[tuple[Any, ...], Tensor | None] | None = None  # of the last layer

    def turn(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries ``[B, H, T, d]`` and keys ``[B, H, S, d]``, turned if the type turns
        them."""
        if self.query_angles is None:
            return query, key
        return self.query_angles.turn(query), self.key_angles.turn(key)

    def bias_of(self, layer_bias: nn.Module | None, query: Tensor, key: Tensor) -> Tensor | None:
        """The bias ``[B or 1, H, T, S]`` of a layer in the precision of its queries; 0 where query
        or key has no position, such as a class token. None if positions have no bias.

        Args:
            layer_bias: Module of a learned bias; None if the layers share a bias.
            query: ``[B, H, T, d]``.
            key: ``[B, H, S, d]``.
        """
        bias = self.bias if layer_bias is None else self._learned(layer_bias)
        if bias is None:
            return None
        front_query, front_key = query.shape[2] - bias.shape[2], key.shape[2] - bias.shape[3]
        if front_query or front_key:
            bias = F.pad(bias, (front_key, 0, front_query, 0))
        return bias.to(query.dtype)

    def _learned(self, layer_bias: nn.Module) -> Tensor:
        """The learned bias ``[B or 1, H, T, S]`` of a layer."""
        bias = layer_bias(self.query, self.key, self.axes)
        if self.pairs is None:
            return bias
        elements = bias[0].flatten(1).index_select(1, self.pairs.flatten())
        return elements.view(-1, *self.pairs.shape).transpose(0, 1)

    def mask_of(
        self,
        layer_bias: nn.Module | None,
        query: Tensor,
        key: Tensor,
        combine: Callable[..., Tensor | None],
        *parts: Any,
    ) -> Tensor | None:
        """``combine(bias, *parts)``: the bias of a layer, see :meth:`bias_of`, together with the
        masks of the host. Layers without a learned bias that get the same masks share the result:
        a stack then holds one tensor ``[B, H, T, S]``, and not one for each layer.

        Args:
            layer_bias: See :meth:`bias_of`.
            query: ``[B, H, T, d]``.
            key: ``[B, H, S, d]``.
            combine: Function of the bias, or None, and of `parts`.
            parts: Masks, and what else the result depends on.
        """
        # A compiler shares equal tensors itself, and may not see the attribute change.
        if layer_bias is not None or torch.compiler.is_compiling():
            return combine(self.bias_of(layer_bias, query, key), *parts)
        made_of = (query.dtype, query.device, query.shape[2], key.shape[2], *parts)
        if self._mask is None or not _are_same(self._mask[0], made_of):
            self._mask = made_of, combine(self.bias_of(None, query, key), *parts)
        return self._mask[1]

    def to(self, device: torch.device, **options: Any) -> AttentionPositions:
        """The same positions on another device. accelerate calls this method, because it moves the
        arguments of layers that are distributed over devices."""
        parts = (self.query, self.key, self.query_angles, self.key_angles, self.bias)
        moved = (_moved(part, device, **options) for part in parts)
        pairs = _moved(self.pairs, device, **options)
        return AttentionPositions(*moved, axes=self.axes, pairs=pairs)


def _are_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether tensors are the same, or the same view, and other parts are equal."""
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and a == b)
    # fairseq cuts the causal mask out of one tensor, for each layer anew
    is_same_view = a._base is not None and a._base is b._base
    return a is b or (is_same_view and _layout(a) == _layout(b))


def _layout(view: Tensor) -> tuple[Any, ...]:
    return view.shape, view.stride(), view.storage_offset()


def _moved(part: Any, device: torch.device, **options: Any) -> Any:
    if isinstance(part, Angles):
        return Angles(*(tensor.to(device, **options) for tensor in part))
    return None if part is None else part.to(device, **options)


class StackPositions(nn.Module):
    """Computes :class:`AttentionPositions` of a stack; has no parameters.

    Args:
        config: Complete settings of a type that acts in attention.
        head_dim: d.
        num_heads: H.
        unit: Unit of the stack's :class:`PositionEncoder`.
        causal: Whether queries see earlier keys only; then no slope is directed.
    """

    def __init__(
        self,
        config: PositionConfig,
        head_dim: int,
        num_heads: int,
        unit: float = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        domain = DOMAINS[config.domain]
        self.rotation = self.bias = None
        self.in_layers = config.encoding.biases and config.encoding.learned
        if config.encoding.turns:
            speed = domain.rotary_speed * unit
            self.rotation = Rotation(head_dim, domain.num_coords, config.rotary_base, speed)
        elif not self.in_layers:
            directed = config.directed and not causal
            self.bias = LinearBias(num_heads, domain.bias_unit / unit, directed)

    def forward(
        self,
        encoder: PositionEncoder,
        positions: Positions,
        draw: Draw | None = None,
        query_positions: Positions | None = None,
        generator: Generators = None,
        random: bool = False,
    ) -> AttentionPositions:
        """Positions for the layers.

        Args:
            encoder: Position encoder, which augments positions as the settings say.
            positions: Positions of the keys.
            draw: Random numbers of this forward; None for no augmentation.
            query_positions: Positions of the queries in incremental decoding, where the queries are
                only some of the keys; then nothing may be drawn. Default `positions`.
            generator: See :meth:`PositionEncoder.forward`.
            random: Whether a draw is required and local shifts are drawn.

        Raises:
            ValueError: for a missing draw.
        """
        if random and draw is None:
            encoder.refuse_missing_draw()
        axes = pairs = None
        if self.in_layers and query_positions is None and not _is_uneven(encoder, draw, random):
            axes = _known_axes(positions)
            if axes is not None and positions.row_of is not None:
                if draw is None and positions.shared:
                    # each layer computes its bias for the rows, once for the batch
                    pairs = _pairs_of_rows(positions.row_of, positions.rows.shape[1])
                    positions = positions._replace(row_of=None)
                else:
                    axes = None
        key = encoder.coordinates(positions, draw, generator=generator, random=random)
        query = key if query_positions is None else encoder.coordinates(query_positions)
        if self.rotation is not None:
            key_angles = self.rotation(key)
            query_angles = key_angles if query is key else self.rotation(query)
            return AttentionPositions(query, key, query_angles, key_angles)
        bias = None if self.bias is None else self.bias(query, key)
        return AttentionPositions(query, key, bias=bias, axes=axes, pairs=pairs)


def _is_uneven(encoder: PositionEncoder, draw: Draw | None, random: bool) -> bool:
    """Whether augmented positions are not evenly spaced: local shifts and drawn positions are not,
    a global shift or scale is."""
    return bool(random and encoder.max_local_shift) or (draw is not None and draw.order is not None)


def _known_axes(positions: Positions) -> tuple[int, ...] | None:
    """:attr:`Positions.axes`, but None in programs for inputs of any size, such as ONNX graphs,
    which would become programs for the sizes of the example."""
    axes = positions.axes
    if axes is None or torch.jit.is_tracing() or any(type(size) is not int for size in axes):
        return None
    return axes


def _pairs_of_rows(row_of: Tensor, num_rows: int) -> Tensor:
    """Numbers of the pairs ``[B, T, T]``, for :class:`AttentionPositions`."""
    row_of = row_of % num_rows  # padding, -1, has the last row, as in `Positions.elements`
    return num_rows * row_of[:, :, None] + row_of[:, None]


def build_stack_positions(
    config: PositionConfig,
    head_dim: int,
    num_heads: int,
    unit: float = 1.0,
    causal: bool = False,
) -> StackPositions | None:
    """The module with which a stack computes positions once for each forward. None if no positions
    act in attention, or only relative keys do. For the arguments see :class:`StackPositions`."""
    if not config.encoding.in_attention:
        return None
    return StackPositions(config, head_dim, num_heads, unit, causal)


def build_layer_bias(
    config: PositionConfig, num_heads: int, unit: float = 1.0, causal: bool = False
) -> FireBias | None:
    """The learned bias of one layer; None if the type has no learned bias. Each layer has a
    separate bias: with one bias for a stack, reentrant gradient checkpointing would go backward
    through this bias twice.

    Args:
        config: Complete settings.
        num_heads: H.
        unit: Unit of the stack's :class:`PositionEncoder`.
        causal: Whether queries see earlier keys only.
    """
    if not (config.encoding.biases and config.encoding.learned):
        return None
    domain = DOMAINS[config.domain]
    return FireBias(num_heads, domain.num_coords, domain.bias_unit / unit, causal)
