"""Reads values from calls of stock forwards: the only file that knows the differences between
releases.

Releases rename arguments: the cache is ``past_key_values`` up to transformers 5.23 and ``cache``
from 5.24 on, and code that looks for the old name gets None. A value of a distinct type is found by
this type, under any name; other names are read from the signature of the stock forward. If neither
is possible, building the model fails (:func:`check_forwards`), because an overlooked argument
silently gives wrong positions.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_models.releases import minor_release

# Arguments that forwards of this package take from a stock call by name.
ARGUMENTS = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "decoder_attention_mask",
        "decoder_position_ids",
        "encoder_outputs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "input_features",
        "pixel_values",
        "hidden_states",
        "labels",
        "use_cache",
    }
)
# Names as well as annotations: annotations are safer, but not all stock forwards have annotations.
_NAMES = {
    "the cache": ("cache", "past_key_values"),
    "the number of cached tokens": ("cache_length", "past_key_values_length"),
}


def is_cache(value: Any) -> bool:
    """Whether a value can tell its number of tokens. Not all caches of transformers have one base
    class (continuous batching)."""
    return hasattr(value, "get_seq_length")


def find_cache(*arguments: Any) -> Any | None:
    """The cache among the arguments of a call; None if there is none."""
    return next(filter(is_cache, arguments), None)


def is_generation_step(call: Mapping[str, Any]) -> bool:
    """Whether a call is a step of generation, which must see the positions of the steps before: a
    call without gradients that has a cache or asks for one. Other calls without gradients may be
    repeated with gradients, as in re-entrant checkpointing, and belong to training.

    Args:
        call: Arguments by name.
    """
    has_cache = call.get("use_cache") or find_cache(*call.values()) is not None
    return bool(has_cache) and not torch.is_grad_enabled()


def cached_tokens(cache: Any | None, layer: int | None = None) -> int | Tensor:
    """Number of tokens of the text that a cache holds.

    Args:
        cache: Cache of a stack; keys of the source in the cache of a decoder do not count.
        layer: Layer to ask; None if all layers hold the same number.
    """
    if cache is None:
        return 0
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return cache.get_seq_length() if layer is None else cache.get_seq_length(layer)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model, by name, for the encoder: a cache belongs to the decoder."""
    return {name: value for name, value in arguments.items() if not is_cache(value)}


def cache_name(forward: Any) -> str:
    """Name under which a stock forward takes the cache; see :func:`_name`."""
    return _name(forward, "the cache", r"\w*Cache")


def past_name(forward: Any) -> str:
    """Name under which a stock forward takes the number of cached tokens; see :func:`_name`."""
    return _name(forward, "the number of cached tokens", "int")


@functools.cache
def _name(forward: Any, meaning: str, annotation: str) -> str:
    """The argument that has the annotation, or one of the known names.

    Raises:
        ValueError: unless exactly one argument fits.
    """
    parameters = inspect.signature(forward).parameters
    annotated = [
        name
        for name, value in parameters.items()
        if re.search(rf"\b{annotation}\b", inspect.formatannotation(value.annotation))
    ]
    names = annotated or [name for name in _NAMES[meaning] if name in parameters]
    if len(names) != 1:
        raise ValueError(
            f"{forward.__qualname__} of transformers {transformers.__version__} takes {meaning} "
            f"under {'several names' if names else 'no name'} that this package knows; allowed: "
            f"one of {', '.join(_NAMES[meaning])}. {_REMEDY}"
        )
    return names[0]


_REMEDY = (
    "Positions would be silently wrong. Install a tested release of transformers; "
    "`cape-plugins doctor` names them."
)


@functools.cache
def check_forwards(part: type[nn.Module], stock: type[nn.Module]) -> None:
    """Refuses a part that takes arguments which the stock class does not have.

    Args:
        part: Class that takes the place of `stock`. A base with a forward that adds arguments in
            :data:`ARGUMENTS` to the stock arguments names them in the attribute `adds`.
        stock: Last base of `part`.

    Raises:
        ValueError: for an argument in :data:`ARGUMENTS` that a forward of `part` names, but
            `stock` does not; for positional arguments in another order; for positions under an
            unknown name; for a cache without a known name.
    """
    parameters = inspect.signature(stock.forward).parameters
    bases = [base for base in part.__mro__[: part.__mro__.index(stock)] if "forward" in vars(base)]
    added = {name for base in bases for name in getattr(base, "adds", ())}
    for base in bases:
        base_parameters = inspect.signature(base.forward).parameters
        if unknown_names := sorted(
            ARGUMENTS.intersection(base_parameters) - parameters.keys() - added
        ):
            _refuse(
                stock,
                f"no argument {unknown_names[0]!r}, which {base.__name__} takes from its calls",
            )
        positional = [name for name, value in base_parameters.items() if value.kind in _BY_PLACE]
        if positional and base_parameters[positional[-1]].kind is inspect.Parameter.VAR_POSITIONAL:
            positional.pop()  # *args: earlier arguments are handed on by place
            if positional != list(parameters)[: len(positional)]:
                _refuse(stock, f"the arguments of {base.__name__}.forward in another order")
    if bases and (unknown_names := [name for name in parameters if _names_positions(name)]):
        _refuse(stock, f"positions under a name that is not known, {unknown_names[0]!r}")
    if bases and "use_cache" in parameters:
        cache_name(stock.forward)


_BY_PLACE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def _names_positions(name: str) -> bool:
    return "position" in name and name not in ARGUMENTS


def _refuse(stock: type[nn.Module], difference: str) -> None:
    raise ValueError(
        f"{stock.__name__}.forward of transformers {transformers.__version__} has {difference}; "
        f"allowed: releases with the signature that this package knows. {_REMEDY}"
    )


# Stock encoders draw a number for each layer in training: up to 5.22 even if no layer is dropped.
ALWAYS_DRAWS = minor_release(transformers.__version__) < (5, 23)


def drops_layer(encoder: Any) -> bool:
    """Whether an encoder leaves out the next layer; draws the same random numbers as stock code."""
    if not encoder.training or not (encoder.layerdrop or ALWAYS_DRAWS):
        return False
    return bool(torch.rand([]) < encoder.layerdrop)


def record_outputs(module: nn.Module) -> None:
    """Tells transformers which outputs (hidden states, attentions) a module of a new class records.

    transformers notes these outputs when it builds a module: from 5.23 on under the class, before
    under the name of the class in a plain dict.
    """
    if hasattr(module, "_can_record_outputs"):
        name, recorded = str(type(module)), module._can_record_outputs
        dict.__setitem__(_CAN_RECORD_REGISTRY, name, recorded)
