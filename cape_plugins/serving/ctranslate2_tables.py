"""Converts positions to the form of ctranslate2, for both hosts: tables of positions, relative keys
and values of attention, turned queries and keys; refuses options that the engine does not have.
Does not import ctranslate2.

Facts about the engine come from trials with ctranslate2 4.8.5; see docs/decisions.md, Serving.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.options import OptionError
from cape_plugins.settings.registry import types_of

_IDENTITY_WIDTH = 8  # a multiple of the block size of kernels for int8


def relative_rows(table: Tensor, clip: bool) -> Tensor:
    """Rows ``[2 C + 1, d]`` of a table ``[1, 2 C + 1, d]`` that heads share. The engine clips
    distances. If distances beyond C have no embedding (`clip` is false), a row of zeros is added at
    either end, at which the engine then clips: ``[2 C + 3, d]``."""
    rows = table.detach()[0]
    return rows.contiguous() if clip else F.pad(rows, (0, 0, 1, 1))


def rotary_options(config: PositionConfig) -> dict[str, Any]:
    """Arguments of the engine's specification of attention that turns queries and keys: all
    channels (0), with channels i and i + d/2 as pairs (not interleaved)."""
    return {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": config.rotary_base}


def refuse_missing(config: PositionConfig, has_encoder: bool, remedy: str) -> None:
    """Refuses positions that the engine does not compute.

    Args:
        config: Settings of a stack.
        has_encoder: Whether the model has an encoder.
        remedy: A sentence that says what works instead.

    Raises:
        OptionError: names the option.
    """
    missing = missing_in_engine(config, has_encoder)
    if missing is not None:
        option, problem, allowed = missing
        value = config.type if option == "position_embedding" else getattr(config, option)
        raise OptionError(option, value, problem, allowed, remedy)


def missing_in_engine(config: PositionConfig, has_encoder: bool) -> tuple[str, str, str] | None:
    """Name of an option that the engine does not compute, the reason, and allowed values; None if
    there is none. For the arguments see :func:`refuse_missing`."""
    if config.random_evaluation:
        return (
            "random_evaluation",
            "is not allowed for ctranslate2, which has the same positions in each call",
            "False, with which the model can be loaded and saved",
        )
    missing = _type_missing(config, has_encoder)
    if missing:
        types = types_of(config.architecture, config.domain)
        configs = (PositionConfig(name, config.domain, config.architecture) for name in types)
        fitting = [row.type for row in configs if not _type_missing(row, has_encoder)]
        return "position_embedding", f"is not allowed for {missing}", ", ".join(fitting)
    if config.encoding.biases and config.layers != "all":
        return "layers", "is not allowed for ctranslate2, which biases all layers", "all"
    return None


def _type_missing(config: PositionConfig, has_encoder: bool) -> str:
    """Why the engine does not compute an encoding in attention; "" if it does."""
    encoding = config.encoding
    if encoding.turns and DOMAINS[config.domain].rotary_speed != 1:
        return (
            "ctranslate2, which turns queries and keys by numbers of positions, not by "
            f"{config.domain} units"
        )
    if encoding.biases and encoding.learned:
        return "ctranslate2, which has no learned bias of the distance"
    if encoding.biases and has_encoder:
        return "a model with an encoder, whose attention has no biases in ctranslate2"
    return ""


def has_table(config: PositionConfig) -> bool:
    """Whether positions are rows of a table, which limits the length; positions in attention have
    no limit. Models whose first layer has no positions get a table of zeros, because the engine
    adds sinusoids if there is no table."""
    return config.encoding.adds or not config.in_layer(0)


def needs_identity(config: PositionConfig) -> bool:
    """Whether positions are added to the content, and the first layer has relative keys as well.
    The engine adds no positions if its first layer has relative keys; :func:`put_identity_first`
    helps."""
    return config.encoding.adds and config.in_layer(0)


@torch.no_grad()
def put_identity_first(layers: nn.ModuleList) -> None:
    """Puts a layer with plain attention before the first layer; all weights of the new layer are
    zero, so the layer adds zero to the input. Works only in stacks with norms before the blocks,
    because a norm after a block would change the input."""
    layer = copy.deepcopy(layers[0])
    if hasattr(layer.self_attn, "relative"):
        del layer.self_attn.relative
    width = layer.fc1.in_features
    layer.fc1 = nn.Linear(width, _IDENTITY_WIDTH)
    layer.fc2 = nn.Linear(_IDENTITY_WIDTH, width)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).zero_()
    layers.insert(0, layer)
