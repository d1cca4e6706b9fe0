"""Positions in self-attention of fairseq layers: relative keys, turned queries and keys, biases.

Checkpoints of stock attention can be loaded: tables and learned biases are additional parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import (
    AttentionPositions,
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    RelativePositions,
    StackPositions,
    build_layer_bias,
    build_relative_positions,
    build_stack_positions,
    relative_attention,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.binding import Bound
from fairseq_user_dir.embedding import process_generator
from fairseq_user_dir.host.errors import SettingsError, named_by_flags


class PositionSelfAttention(MultiheadAttention):
    """fairseq's self-attention with positions. This class replaces the whole forward, because
    positions act on queries, keys, scores or values of each head, which the stock forward does not
    hand out."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention in fairseq's signature.

        Args:
            query: ``[T, B, C]``; key and value are the same tensor.
            key_padding_mask: ``[B, S]``, True on padding.
            incremental_state: Cache of incremental decoding.
            attn_mask: ``[T, S]`` added to the scores.

        Returns:
            ``[T, B, C]`` and weights: ``[H, B, T, S]`` if `need_head_weights`, the mean over heads
            ``[B, T, S]`` if `need_weights`, else None.
        """
        if static_kv or before_softmax:
            raise ValueError(
                "attention with positions has no static_kv or before_softmax mode; allowed: False. "
                "Leave these arguments out."
            )
        queries, keys, values = (
            self._heads(projection(query)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if incremental_state is not None:
            keys, values, key_padding_mask = self._append_to_cache(
                incremental_state, keys, values, key_padding_mask
            )
        output, weights = self._attend(
            queries,
            keys,
            values,
            attn_mask,
            None if key_padding_mask is None else key_padding_mask.bool(),
            need_weights or need_head_weights,
        )
        # B x H x T x d -> T x B x C
        output = self.out_proj(output.permute(2, 0, 1, 3).flatten(2))
        if weights is not None:
            weights = weights.transpose(0, 1)
            if not need_head_weights:
                weights = weights.mean(0)
        return output, weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Maps queries ``[B, H, T, d]``, keys and values ``[B, H, S, d]`` to outputs ``[B, H, T,
        d]`` and, with `need_weights`, weights ``[B, H, T, S]``."""
        raise NotImplementedError

    @property
    def _dropout(self) -> float:
        """Probability of dropping a weight now."""
        drop = self.dropout_module
        return drop.p if drop.training or drop.apply_during_inference else 0.0

    def _heads(self, projected: Tensor) -> Tensor:
        """T x B x C -> B x H x T x d"""
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _append_to_cache(
        self,
        incremental_state: dict[str, Any],
        keys: Tensor,
        values: Tensor,
        key_padding_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the whole prefix. The cache holds only content, no positions, so
        fairseq's reordering of beams stays right."""
        saved = self._get_input_buffer(incremental_state)
        if "prev_key" in saved:
            keys = torch.cat((saved["prev_key"], keys), dim=2)
            values = torch.cat((saved["prev_value"], values), dim=2)
        key_padding_mask = self._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=saved.get("prev_key_padding_mask"),
            batch_size=keys.shape[0],
            src_len=keys.shape[2],
            static_kv=False,
        )
        saved = {
            "prev_key": keys,
            "prev_value": values,
            "prev_key_padding_mask": key_padding_mask,
        }
        self._set_input_buffer(incremental_state, saved)
        return keys, values, key_padding_mask


class RelativeSelfAttention(PositionSelfAttention):
    """Self-attention with learned relative positions (Shaw et al.)."""

    relative: RelativePositions

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return relative_attention(
            query,
            key,
            value,
            self.relative,
            query_offset=key.shape[2] - query.shape[2],
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            dropout=self._dropout,
            need_weights=need_weights,
        )


class CoordinateSelfAttention(Bound, PositionSelfAttention):
    """Self-attention with turned queries and keys, or with a bias that depends on the distance;
    holds the :class:`AttentionPositions` of a forward.

    Attributes:
        layer_bias: A learned bias; None if the layers share one bias or have no learned bias.
    """

    layer_bias: nn.Module | None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        positions = self.bound
        if positions is None:
            raise ValueError(
                "this layer got no positions; allowed: a call through the whole encoder or "
                "decoder, which computes positions. Call the encoder or decoder."
            )
        query, key = positions.turn(query, key)
        combine = functools.partial(_combined_mask, query.dtype)
        mask = positions.mask_of(self.layer_bias, query, key, combine, attn_mask, key_padding_mask)
        if not need_weights:
            output = F.scaled_dot_product_attention(query, key, value, mask, self._dropout)
            return output, None
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores if mask is None else scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return F.dropout(weights, self._dropout) @ value, weights


def _combined_mask(
    dtype: torch.dtype,
    bias: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Bias and masks of fairseq in one tensor of `dtype` that is added to the scores; None if none
    of them is there."""
    mask = bias
    if attn_mask is not None:
        attn_mask = attn_mask.to(dtype)
        mask = attn_mask if mask is None else mask + attn_mask
    if key_padding_mask is not None:
        is_padding = key_padding_mask[:, None, None]
        mask = torch.zeros_like(is_padding, dtype=dtype) if mask is None else mask
        mask = mask.masked_fill(is_padding, float("-inf"))
    # The lowest finite number, not -inf: a query on padding may see no key at all, and its softmax
    # would be NaN.
    return None if mask is None else mask.clamp(min=torch.finfo(dtype).min)


class CoordinateLayer:
    """Mixin over a layer: hands positions to its self-attention. The stock stack gives its layers
    no positions, and the positions that a stack holds are gone when activation checkpointing runs a
    layer again. So ``__call__`` reads the positions from the stack, and passes them to ``forward``
    as an argument.

    Attributes:
        stack_attention: The module of the stack that holds the positions.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See fairseq."""
        positions = vars(self)["stack_attention"].bound
        return super().__call__(*args, attention_positions=positions, **kwargs)

    def forward(
        self, *args: Any, attention_positions: AttentionPositions | None = None, **kwargs: Any
    ) -> Any:
        """See fairseq."""
        with self.self_attn.using(attention_positions):
            return super().forward(*args, **kwargs)


@functools.cache
def _layer_class(stock: type[nn.Module]) -> type[nn.Module]:
    return type(f"Coordinate{stock.__name__}", (CoordinateLayer, stock), {})


class StackAttention(Bound, nn.Module):
    """Computes the positions of a forward for the layers of a stack, and holds them.

    Args:
        encoder: Position encoder of the stack, which adds nothing to the content.
        stack_positions: Module that computes the positions that all layers share.
        padding_idx: Index of padding, of a stack of tokens.
    """

    def __init__(
        self, encoder: PositionEncoder, stack_positions: StackPositions, padding_idx: int = 0
    ) -> None:
        super().__init__()
        self.encoder, self.stack_positions = encoder, stack_positions
        self.padding_idx = padding_idx

    def draw(
        self, batch_size: int, device: torch.device, partner: Draw | None = None
    ) -> Draw | None:
        """See :meth:`~fairseq_user_dir.embedding.TokenPositionEmbedding.draw`."""
        return self.encoder.draw(batch_size, device, process_generator, partner)

    def of_tokens(
        self, tokens: Tensor, draw: Draw | None, incremental_state: Any | None = None
    ) -> AttentionPositions:
        """Positions of tokens ``[B, T]``; in incremental decoding the tokens are the whole prefix,
        without padding, and the last token is the query."""
        if incremental_state is None:
            return self.of(token_positions(tokens.ne(self.padding_idx)), draw)
        length, device = tokens.shape[1], tokens.device
        query = token_position_at(length - 1, device)
        return self.stack_positions(self.encoder, token_position_at(0, device, length), None, query)

    def of(
        self, positions: Positions, draw: Draw | None, generator: Any = process_generator
    ) -> AttentionPositions:
        """Positions of a forward in which queries and keys are the same elements."""
        return self.stack_positions(
            self.encoder, positions, draw, generator=generator, random=self.encoder.draws
        )


def add_positions_to_attention(
    layers: nn.ModuleList,
    config: PositionConfig,
    encoder: PositionEncoder | None,
    padding_idx: int = 0,
    causal: bool = False,
) -> StackAttention | None:
    """Adds positions to the self-attention of the layers that the settings name. Does nothing if no
    position acts in attention.

    Exchanges the classes of built layers and of their attention, instead of overriding methods that
    build layers. Layers may already be wrapped for activation checkpointing, but their attention
    may not. Stock initialisation, names of parameters and dropout settings stay.

    Args:
        layers: Layers of a stack.
        config: Settings.
        encoder: Position encoder of the stack; None if the stack has a learned table.
        padding_idx: Index of padding, of a stack of tokens.
        causal: Whether queries see earlier keys only.

    Returns:
        The module that computes and holds positions; None for relative keys, which need no such
        module.

    Raises:
        ValueError: for kinds of attention in which such positions are not defined.
    """
    stack_attention = None
    if config.in_attention and not any(map(config.in_layer, range(len(layers)))):
        raise SettingsError(
            f"--position-layers {config.layers} names no layer of a stack of {len(layers)} layers, "
            f"so {config.type} would have no positions in attention; allowed: all, first, or "
            f"every:N and not:N with layers among 1 to {len(layers)}. Choose other layers."
        )
    # by index: iterating over a stack with layer drop skips layers at random
    for index in range(len(layers)):
        if not config.in_layer(index):
            continue
        layer = layers[index]
        attention = _checked_attention(layer, config)
        heads, head_dim = attention.num_heads, attention.head_dim
        if config.relative_context:
            attention.relative = build_relative_positions(config, head_dim, heads)
            attention.__class__ = RelativeSelfAttention
            continue
        if stack_attention is None:
            with named_by_flags():
                stack_positions = build_stack_positions(
                    config, head_dim, heads, encoder.unit, causal
                )
            stack_attention = StackAttention(encoder, stack_positions, padding_idx)
        attention.layer_bias = build_layer_bias(config, heads, encoder.unit, causal)
        attention.__class__ = CoordinateSelfAttention
        layer.__class__ = _layer_class(type(layer))
        vars(layer)["stack_attention"] = stack_attention  # no submodule: it belongs to the stack
        # fairseq's wrapper for activation checkpointing holds the forward of the stock class; the
        # wrapper now gets the forward of the new class
        if "precheckpoint_forward" in vars(layer):
            wrapper, forward = layer.forward, functools.partial(type(layer).forward, layer)
            layer.precheckpoint_forward = forward
            layer.forward = functools.partial(wrapper.func, forward, *wrapper.args[1:])
    return stack_attention


def _checked_attention(layer: nn.Module, config: PositionConfig) -> MultiheadAttention:
    """The self-attention of a layer. Refuses every class other than fairseq's standard
    attention."""
    option = f"--position-embedding {config.type}"
    if config.relative_context:
        option = f"--position-relative-context={config.relative_context}"
    attention = getattr(layer, "self_attn", None)
    if type(attention) is not MultiheadAttention:
        raise SettingsError(
            f"{option} needs fairseq's MultiheadAttention in each layer, but "
            f"{type(layer).__name__} has {type(attention).__name__}; leave out the option that "
            "replaces the attention (such as --base-layers)."
        )
    unsupported = {
        "--cross-self-attention": not attention.self_attention,
        "xformers attention": attention.use_xformers,
        "add_bias_kv": attention.bias_k is not None,
        "add_zero_attn": attention.add_zero_attn,
    }
    for name, present in unsupported.items():
        if present:
            raise SettingsError(f"{option} cannot be combined with {name}; switch one of them off.")
    return attention
