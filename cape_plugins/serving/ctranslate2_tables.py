"""Positions in the form of ctranslate2, for both hosts: which models have a table of positions, and
relative keys and values of attention. Does not import ctranslate2.

Facts about the engine come from trials with ctranslate2 4.8.5; see docs/decisions.md, Serving.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.settings.config import PositionConfig

_IDENTITY_WIDTH = 8  # a multiple of the block size of kernels for int8


def relative_rows(table: Tensor, clip: bool) -> Tensor:
    """``[2 C + 1, d]`` of a table ``[1, 2 C + 1, d]`` that heads share. The engine clips distances.
    If distances beyond C have no embedding (`clip` is false), a row of zeros is added at either
    end: ``[2 C + 3, d]``."""
    rows = table.detach()[0]
    return rows.contiguous() if clip else F.pad(rows, (0, 0, 1, 1))


def has_table(config: PositionConfig) -> bool:
    """Whether positions are rows of a table, which limits the length; relative keys have no limit.
    Models without positions have a table of zeros: without a table the engine adds sinusoids."""
    return config.encoding.adds or not config.relative_context


def needs_identity(config: PositionConfig) -> bool:
    """Whether positions are added to the content beside relative keys in the first layer. The
    engine leaves such positions out."""
    return bool(config.encoding.adds and config.relative_context)


@torch.no_grad()
def put_identity_first(layers: nn.ModuleList) -> None:
    """Puts a layer with plain attention, which adds zero to its input, before the first layer. Only
    for stacks with norms before the blocks, because these layers only add to their input."""
    layer = copy.deepcopy(layers[0])
    if hasattr(layer.self_attn, "relative"):
        del layer.self_attn.relative
    width = layer.fc1.in_features
    layer.fc1 = nn.Linear(width, _IDENTITY_WIDTH)
    layer.fc2 = nn.Linear(_IDENTITY_WIDTH, width)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).zero_()
    layers.insert(0, layer)
