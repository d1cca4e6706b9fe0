"""An encoding that this package has never seen: triangle waves, a row and a class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cape_plugins import BUILDERS, ENCODINGS, TYPES, Encoding, PositionType

PERIOD = 8.0


class Triangle(nn.Module):
    """Triangle waves of doubling periods."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, coords: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, K]``."""
        periods = PERIOD * 2.0 ** torch.arange(self.dim, device=coords.device)
        phase = (coords.sum(-1, keepdim=True) / periods) % 1.0
        return 4 * (phase - 0.5).abs() - 1

    def grid(self, rows: Tensor) -> Tensor:
        """``[T, D]`` to ``[T, K]``."""
        return self(rows[None])[0]


def add_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type "triangle" and its encoding, for one test."""
    monkeypatch.setitem(ENCODINGS, "triangle", Encoding())
    monkeypatch.setitem(BUILDERS, "triangle", lambda dim, **_: Triangle(dim))
    row = PositionType("triangle", {"max_offset": 7, "source_scale": "1"}, "triangle waves")
    monkeypatch.setitem(TYPES, "triangle", row)
