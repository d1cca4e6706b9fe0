"""Positions in attention modules of transformers: relative keys, turned queries and keys, biases.

The modules keep their forward, parameters and caches. A module looks up its attention function by
name. This package gives a module with positions the name of another function, and the values that
this function needs: the positions of the stack, and the number of cached positions, because
relative attention counts queries among the keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cape_plugins import (
    AttentionPositions,
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    StackPositions,
    build_layer_bias,
    build_relative_positions,
    build_stack_positions,
    relative_attention,
    token_position_at,
)
from cape_plugins.mathematics.binding import Bound
from cape_plugins.settings.options import OptionError
from hf_models.host import cached_tokens, find_cache

NAME = "cape_positions"
# Functions of transformers with masks ``[B, 1, T, S]`` that relative attention and biases can use.
# The masks of other functions are not causal, or are no tensors.
ALLOWED = ("eager", "sdpa")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size")


class _AttentionConfig:
    """The configuration of a model, with another name for the attention function."""

    _attn_implementation = NAME

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    def __getattr__(self, name: str) -> Any:
        if name == "model_config":  # during unpickling
            raise AttributeError(name)
        return getattr(self.model_config, name)


class RunTimeMixin:
    """Base of mixins that :func:`mixed` puts over stock classes."""

    def __reduce__(self) -> Any:  # pickle cannot find a class that is made at run time
        return _unpickle, type(self).__bases__, self.__dict__


@functools.cache
def mixed(mixin: type[RunTimeMixin], stock: type[nn.Module]) -> type[nn.Module]:
    """The class of `mixin` over a stock class, made once; instances can be pickled."""
    return type(f"{mixin.__name__}Over{stock.__name__}", (mixin, stock), {})


def _unpickle(mixin: type[RunTimeMixin], stock: type[nn.Module]) -> nn.Module:
    cls = mixed(mixin, stock)
    return cls.__new__(cls)


class PositionAttention(RunTimeMixin, Bound):
    """Mixin over an attention class: binds the number of cached positions, the sizes of an image
    and the positions of the stack to the module, for the attention function. Not all stock modules
    hand their arguments on to the attention function; SigLIP hands on none."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        patches: tuple[int, ...] | None = None,
        attention_positions: AttentionPositions | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes the stock attention on positions of the stack.

        Args:
            hidden_states: ``[B, T, C]``.
            patches: Rows and columns of patches, if the tokens are patches of an image.
            attention_positions: Positions that the stack computed for this forward; None if the
                stack computes none, as for relative embeddings.
            *args: Arguments of the stock module. A cache gives the number of earlier positions.
            **kwargs: Keyword arguments of the stock module.

        Returns:
            The output of the stock module.
        """
        if self.bound is not None:  # by a layer whose stock code hands on no positions
            patches, attention_positions = self.bound
        cache, offset = find_cache(*args, *kwargs.values()), None
        if cache is not None:  # + 0 copies the number, because a static cache counts in place
            offset = cached_tokens(cache, self.layer_idx) + 0
        with self.using((offset, patches, attention_positions)):
            return super().forward(hidden_states, *args, **kwargs)


def has_heads(module: nn.Module) -> bool:
    """Whether a module has the sizes of attention heads under one of the known names."""
    return all(any(hasattr(module, n) for n in names) for names in (_HEADS, _HEAD_WIDTHS))


def _first_attribute(module: nn.Module, *names: str) -> Any:
    """The first attribute of a module with one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def add_positions_to_attention(
    attentions: Iterable[nn.Module],
    config: PositionConfig,
    encoder: PositionEncoder | None = None,
    causal: bool = False,
) -> StackPositions | None:
    """Gives the self-attention modules of a stack positions, in the layers that the settings name.

    Args:
        attentions: Self-attention modules, in the order of the layers.
        config: Settings; nothing is done if positions do not act in attention.
        encoder: Position encoder of the stack; None if positions count in the unit of the domain.
        causal: Whether queries see earlier keys only.

    Returns:
        Module for :func:`positions_for_layers`, which the stack calls in each forward; None if the
        layers need nothing.

    Raises:
        OptionError: if the settings name no layer of the stack.
    """
    unit = 1.0 if encoder is None else encoder.unit
    attentions, stack_positions = list(attentions), None
    if config.in_attention and attentions:
        refuse_unknown_layers(config, len(attentions), "a stack")
    for index, attention in enumerate(attentions):
        heads = _first_attribute(attention, *_HEADS)
        head_dim = _first_attribute(attention, *_HEAD_WIDTHS)
        if stack_positions is None:
            stack_positions = build_stack_positions(config, head_dim, heads, unit, causal)
        if not config.in_layer(index):
            continue
        attention.relative = build_relative_positions(config, head_dim, heads)
        attention.layer_bias = build_layer_bias(config, heads, unit, causal)
        attention.config = _AttentionConfig(attention.config)
        attention.__class__ = mixed(PositionAttention, type(attention))
    return stack_positions


def refuse_unknown_layers(config: PositionConfig, num_layers: int, owner: str) -> None:
    """Raises an OptionError if the settings name none of the layers of `owner`."""
    if not any(map(config.names_layer, range(num_layers))):
        raise OptionError(
            "layers",
            config.layers,
            f"names no layer of {owner}, which has {num_layers}",
            allowed=f"'all', 'first', 'every:N' up to every:{num_layers}, 'not:N'",
            remedy="Name layers that each stack of the model has, or choose the type 'nopos'.",
        )


def positions_for_layers(
    stack_positions: StackPositions | None,
    encoder: PositionEncoder | None,
    positions: Positions,
    draw: Draw | None,
    generator: Any,
    query_positions: Positions | None = None,
) -> dict[str, AttentionPositions]:
    """The keyword argument that a stack passes to its layers; no argument if the layers need none.

    Args:
        stack_positions: From :func:`add_positions_to_attention`.
        encoder: Position encoder of the stack.
        positions: Positions of the keys.
        draw: Random numbers of this forward.
        generator: Source of local shifts.
        query_positions: Positions of the queries, if these are not all keys.
    """
    if stack_positions is None:
        return {}
    random = draw is not None and encoder.draws
    computed = stack_positions(encoder, positions, draw, query_positions, generator, random)
    return {"attention_positions": computed}


def keys_and_queries(
    positions: Positions, length: int, past: int | Tensor, cache: Any | None
) -> tuple[Positions, Positions | None]:
    """Positions of all keys of a decoder, and of its queries if these are not all keys.

    Args:
        positions: Positions of the tokens that the decoder is given, or of all tokens.
        length: Number of tokens given.
        past: Number of tokens in the cache; a tensor if the cache has a fixed size.
        cache: Cache of the decoder.
    """
    if cache is None:
        return positions, None
    if positions.row_of is not None and positions.row_of.shape[1] != length:
        return positions, positions.last(length)
    # a decoder with a source has two caches in one; the other one holds the source
    cache = getattr(cache, "self_attention_cache", cache)
    size, device = past + length, positions.rows.device
    if isinstance(past, Tensor) or getattr(cache, "is_compileable", False):
        size = cache.layers[0].max_cache_len  # room for more keys, which the mask hides
    keys = token_position_at(0, device, size)
    # keys and queries are both counted from the first token after padding on the left
    index = torch.arange(length, device=device) + past
    lead = index[-1] - positions.elements(positions.rows)[:, -1:]
    return Positions(keys.rows - lead, in_steps=True), positions


def _check_attention(module: nn.Module, query: Tensor) -> str:
    """Name of the model's attention function.

    Raises:
        ValueError: for a function that :data:`ALLOWED` lacks, and for offloaded parameters.
    """
    implementation = module.config.model_config._attn_implementation
    if implementation not in ALLOWED:
        raise ValueError(
            f"attn_implementation={implementation!r} is not allowed with relative positions or "
            f"biases in attention; allowed: {', '.join(ALLOWED)}. Load the model with "
            "attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')."
        )
    learned = module.layer_bias if module.relative is None else module.relative
    parameters = () if learned is None else learned.parameters()
    if not query.is_meta and any(parameter.is_meta for parameter in parameters):
        raise ValueError(  # torch would silently multiply with missing values
            "the relative embeddings or learned biases are on device 'meta', as accelerate "
            "offloads them (device_map, cpu_offload); allowed: the device of the queries, "
            f"{query.device}. Load the model without offloading, or "
            "choose a type without learned parameters in attention."
        )
    return implementation


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in the signature of transformers: ``[B, H, T, d]`` to ``[B, T, H, d]``
    and, with eager attention, the weights ``[B, H, T, S]``.

    Raises:
        ValueError: if the model has another attention function than :data:`ALLOWED`, or learned
            positions are offloaded.
    """
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if module.relative is not None:
        return _relative_forward(
            module, query, key, value, attention_mask, dropout, scaling, causal
        )
    offset, _, positions = module.bound
    if positions is None:
        raise ValueError(
            f"{type(module).__name__} got no positions; allowed: a call through the whole stack, "
            "which computes them. Call the model, or hand attention_positions to the layer."
        )
    if positions.query.shape[1] > query.shape[2]:
        raise ValueError(
            f"{type(module).__name__} got {query.shape[2]} tokens for "
            f"{positions.query.shape[1]} positions, because the model hides tokens from its "
            "layers; allowed here: types that add to the content, such as 'cape'."
        )
    implementation = module.config.model_config._attn_implementation
    if module.layer_bias is not None or positions.bias is not None:
        _check_attention(module, query)
    query, key = positions.turn(query, key)

    def combine(bias: Tensor | None, mask: Tensor | None, causal: bool, offset: Any) -> Any:
        if bias is None:
            return mask
        return _biased_mask(bias, _visible_keys(causal, mask, query, key, offset))

    attention_mask = positions.mask_of(
        module.layer_bias, query, key, combine, attention_mask, causal, offset
    )
    if is_causal is not None:  # CLIP's text model passes the argument in each call
        kwargs["is_causal"] = is_causal
    return _stock_function(module, implementation)(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _stock_function(module: nn.Module, implementation: str) -> Any:
    """The attention function of the stock model; eager attention is in the file of each model."""
    if implementation == "eager":
        # the bases are the mixin of this file and the stock class
        return sys.modules[type(module).__bases__[1].__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[implementation]


def _visible_keys(
    causal: bool,
    attention_mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    offset: int | Tensor | None,
) -> Tensor | None:
    """The mask of a call, or the causal mask, bool ``[T, S]``, that stock functions would make."""
    length, num_keys = query.shape[2], key.shape[2]
    # a single query is the last token and sees all keys, in sdpa of transformers too
    if attention_mask is not None or not causal or length == 1:
        return attention_mask
    # queries are counted from the cached tokens: a static cache has room for more keys
    index = torch.arange(max(length, num_keys), device=query.device)
    return index[:num_keys] <= index[:length, None] + (0 if offset is None else offset)


def _biased_mask(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Bias and mask in one tensor that is added to the scores."""
    # the least number, because softmax over -inf alone is NaN: a query on padding may see no key
    least = torch.finfo(bias.dtype).min
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least)
    return (bias + mask).clamp(min=least)


def _relative_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """:func:`_attention_forward` with relative keys."""
    implementation = _check_attention(module, query)
    width = query.shape[-1]
    if scaling not in (None, width**-0.5):  # Whisper has scaled its queries already: 1
        query = query * (scaling * width**0.5)  # relative_attention scales, too
    if (groups := query.shape[1] // key.shape[1]) > 1:  # heads share keys and values
        key, value = (shared.repeat_interleave(groups, dim=1) for shared in (key, value))
    query_offset, patches, _ = module.bound
    length, num_keys = query.shape[2], key.shape[2]
    if query_offset is None:
        if num_keys != length:
            raise ValueError(
                f"{type(module).__name__} has {num_keys} keys for {length} queries, but no cache "
                "among its arguments; allowed: releases of transformers that pass the cache. "
                "Install a tested release; `cape-plugins doctor` names the tested releases."
            )
        query_offset = 0
    attention_mask = _visible_keys(causal, attention_mask, query, key, query_offset)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # the least number, not -inf: see _biased_mask
        least = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(
            ~attention_mask, least
        )
    output, weights = relative_attention(
        query,
        key,
        value,
        module.relative,
        query_offset=query_offset,
        patches=patches,
        attn_mask=attention_mask,
        dropout=dropout,
        need_weights=implementation == "eager",
    )
    return output.transpose(1, 2), weights


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention_forward)
