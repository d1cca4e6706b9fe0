"""Positions as ctranslate2 holds them, the same for both hosts: which models have a table of them,
and relative keys and values in its attention. Does not import ctranslate2.

Facts about the engine: ctranslate2 4.8.5, tried; see the decisions on serving.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.settings.config import PositionConfig

_IDENTITY_WIDTH = 8  # a multiple of what kernels for int8 take at once


def relative_rows(table: Tensor, clip: bool) -> Tensor:
    """``[2 C + 1, d]`` of a table ``[1, 2 C + 1, d]`` that heads share. The engine clips distances;
    where those beyond C count nothing, a row of zeros at either end does that: ``[2 C + 3, d]``."""
    rows = table.detach()[0]
    return rows.contiguous() if clip else F.pad(rows, (0, 0, 1, 1))


def has_table(config: PositionConfig) -> bool:
    """Whether positions are rows of a table, which ends; relative keys do not. Without either the
    engine would add sinusoids of its own: such models have a table of zeros."""
    return config.encoding.adds or not config.relative_context


def needs_identity(config: PositionConfig) -> bool:
    """Whether positions are added to the content beside relative keys in the first layer, where the
    engine leaves them out."""
    return bool(config.encoding.adds and config.relative_context)


@torch.no_grad()
def put_identity_first(layers: nn.ModuleList) -> None:
    """Puts a layer before the first that adds zero to what passes it, and has plain attention; for
    stacks with norms before their blocks, whose layers only add."""
    layer = copy.deepcopy(layers[0])
    if hasattr(layer.self_attn, "relative"):
        del layer.self_attn.relative
    width = layer.fc1.in_features
    layer.fc1 = nn.Linear(width, _IDENTITY_WIDTH)
    layer.fc2 = nn.Linear(_IDENTITY_WIDTH, width)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).zero_()
    layers.insert(0, layer)
