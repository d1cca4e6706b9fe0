"""Relative attention in the attention modules of transformers.

The modules keep their forward, parameters and caches. A module looks its attention function up by
name. A module with relative positions gets another name, and the number of cached positions,
because queries are counted among the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cape_plugins import (
    PositionConfig,
    build_relative_positions,
    relative_attention,
)
from cape_plugins.mathematics.binding import Bound
from hf_models.host import cached_tokens, find_cache

NAME = "cape_relative"
# Functions of transformers with masks ``[B, 1, T, S]`` that relative attention can use. The masks
# of other functions are not causal, or are no tensors.
ALLOWED = ("eager", "sdpa")


class _AttentionConfig:
    """The configuration of a model, with another name for the attention function."""

    _attn_implementation = NAME

    def __init__(self, model_config: Any) -> None:
        self.model_config = model_config

    def __getattr__(self, name: str) -> Any:
        if name == "model_config":  # during unpickling
            raise AttributeError(name)
        return getattr(self.model_config, name)


class _RelativeAttention(Bound):
    """Mixin over an attention class: binds the number of cached positions and the sizes of an image
    to the module, for the attention function. Not all stock modules hand their arguments on to the
    attention function; SigLIP hands on none."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        patches: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        cache, offset = find_cache(*args, *kwargs.values()), None
        if cache is not None:  # + 0 copies the number, because a static cache counts in place
            offset = cached_tokens(cache, self.layer_idx) + 0
        with self.using((offset, patches)):
            return super().forward(hidden_states, *args, **kwargs)

    def __reduce__(self) -> Any:  # pickle cannot find a class by name that is made at run time
        return _unpickle, (type(self).__bases__[1],), self.__dict__


@functools.cache
def _relative_class(stock: type[nn.Module]) -> type[nn.Module]:
    return type(f"Relative{stock.__name__}", (_RelativeAttention, stock), {})


def _unpickle(stock: type[nn.Module]) -> nn.Module:
    relative = _relative_class(stock)
    return relative.__new__(relative)


def _first_attribute(module: nn.Module, *names: str) -> Any:
    """The first attribute of a module with one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def add_relative_positions(attentions: Iterable[nn.Module], config: PositionConfig) -> None:
    """Gives self-attention modules relative positions, all of them or the first.

    Args:
        attentions: Self-attention modules, in the order of the layers.
        config: Settings; nothing is done without a relative context.
    """
    attentions = list(attentions)
    for attention in attentions[: config.relative_depth(len(attentions))]:
        heads = _first_attribute(attention, "num_heads", "num_attention_heads")
        head_dim = _first_attribute(attention, "head_dim", "attention_head_size")
        attention.relative = build_relative_positions(config, head_dim, heads)
        attention.config = _AttentionConfig(attention.config)
        attention.__class__ = _relative_class(type(attention))


def _check_attention(module: nn.Module, query: Tensor) -> str:
    """The attention function of the model; refuses functions that would compute nonsense."""
    implementation = module.config.model_config._attn_implementation
    if implementation not in ALLOWED:
        raise ValueError(
            f"attn_implementation={implementation!r} is not allowed with relative positions; "
            f"allowed: {', '.join(ALLOWED)}. Load the model with attn_implementation='sdpa', or "
            "call model.set_attn_implementation('sdpa')."
        )
    if not query.is_meta and any(table.is_meta for table in module.relative.parameters()):
        raise ValueError(  # torch would silently multiply with missing values
            "the relative embeddings are on device 'meta', as accelerate offloads them "
            f"(device_map, cpu_offload); allowed: {query.device}, as the queries. Load the model "
            "without offloading, or choose a type without relative_context."
        )
    return implementation


def _relative_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in the signature of transformers: ``[B, H, T, d]`` to ``[B, T, H, d]``
    and, with eager attention, the weights ``[B, H, T, S]``.

    Raises:
        ValueError: if the model has another attention function than :data:`ALLOWED`, or relative
            embeddings are offloaded.
    """
    implementation = _check_attention(module, query)
    if scaling == 1.0:  # Whisper has scaled its queries already; relative_attention scales, too
        query = query * query.shape[-1] ** 0.5
    query_offset, patches = module.bound
    length, num_keys = query.shape[2], key.shape[2]
    if query_offset is None:
        if num_keys != length:
            raise ValueError(
                f"{type(module).__name__} has {num_keys} keys for {length} queries, but no cache "
                "among its arguments; allowed: releases of transformers that hand it on. Install "
                "a tested one; `cape-plugins doctor` names them."
            )
        query_offset = 0
    if attention_mask is None and getattr(module, "is_causal", False) and length > 1:
        # counted from the cache, which may have room for more keys
        index = torch.arange(max(length, num_keys), device=query.device)
        attention_mask = index[:num_keys] <= index[:length, None] + query_offset
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # the least number rather than -inf: a query on padding may have no key at all
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


ALL_ATTENTION_FUNCTIONS.register(NAME, _relative_forward)
