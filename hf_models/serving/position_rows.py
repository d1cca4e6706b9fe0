"""The positions that a stack adds in evaluation, as rows of a table, for engines that know tables
only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cape_plugins import token_positions
from hf_models.seams.frames import Frames, add_positions
from hf_models.seams.natural_length import STRIDE


def rows_of_tokens(stack: Any, rows: int) -> Tensor:
    """``[rows, C]``, what a stack of tokens adds to a text of `rows` tokens; zeros if it adds
    nothing."""
    ids = torch.zeros(1, rows, dtype=torch.long)
    positions = token_positions(torch.ones(1, rows, dtype=torch.bool))
    addend = stack.embedding(positions, ids, rows, None)
    if addend is None:
        return torch.zeros(rows, stack.embed_tokens.embedding_dim)
    return addend[0].contiguous()


def rows_in_time(encoder: Any, rows: int) -> Tensor:
    """``[rows, C]``, what Whisper's encoder adds to a recording of `rows` positions; zeros if it
    adds nothing."""
    frames = Frames(torch.tensor([rows]), encoder.config.hop_seconds, None, None)
    empty = torch.zeros(1, rows, encoder.conv2.out_channels)
    return add_positions(encoder.positions, empty, frames, STRIDE)[0].contiguous()


def is_centred(model: Any) -> bool:
    """Whether a Whisper counts positions from the middle of a recording, so a table fits recordings
    of one length only."""
    config = model.config.position_config
    return bool(config.mean_normalize and config.encoding.adds)
