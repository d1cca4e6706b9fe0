"""Learned absolute positions: tables with one row per position, for texts and grids of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.mathematics.positions import Positions

RESIZES = {1: "linear", 2: "bicubic", 3: "trilinear"}  # by the number of axes


class PositionTable(nn.Module):
    """Learned absolute positions (*abspos*), which can be used beyond the trained size.

    For sequences longer than the table, the table begins again at its first row, E(t) = E(t mod N),
    as in CAPE section 5.2 for audio. Positions beyond the table were not trained, so outputs for
    long inputs are bad, but the program does not stop. For images of another size, the grid is
    resized: bicubic for images (CAPE section 5.1), linear for other grids.

    Args:
        dim: K.
        size: N for sequences, (height, width) in patches for images.
        std: Standard deviation of the normal initialisation; default ``dim ** -0.5``.

    Attributes:
        weight: ``[N, K]``; for grids ``[height * width, K]``, row by row.

    Raises:
        ValueError: if a size is not positive.
    """

    def __init__(self, dim: int, size: int | tuple[int, ...], std: float | None = None) -> None:
        super().__init__()
        shape = (size,) if isinstance(size, int) else tuple(size)
        if min(shape) < 1:
            raise ValueError(f"size={size} of a position table is not allowed; allowed: >= 1.")
        self.dim = dim
        self.size = shape
        self.std = dim**-0.5 if std is None else std
        self.weight = nn.Parameter(torch.empty(math.prod(shape), dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal values with the standard deviation given at construction."""
        nn.init.normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.weight.shape[1]}, size={self.size}"

    def lookup(self, positions: Positions) -> Tensor:
        """``[T, K]``, one row of the table for each row of `positions`.

        Raises:
            ValueError: for positions that are neither counted nor a grid, or a grid of other axes.
        """
        if positions.patches is not None or len(self.size) > 1:
            return self.resize(*(positions.patches or ()))
        return counted_rows(self.weight, positions)

    def rows(self, length: int, first: int | Tensor = 0) -> Tensor:
        """``[length, K]``: rows of the table from `first` on; begins again at row 0 after the last
        row."""
        return wrapped_rows(self.weight, length, first)

    def resize(self, *size: int) -> Tensor:
        """``[height * width, K]``: the image table at another size; at the same size unchanged.

        Raises:
            ValueError: if this is a table for sequences, or for grids of other axes.
        """
        if len(self.size) != len(size):
            raise ValueError(
                f"a position table of size {self.size} has no rows for positions of size {size}; "
                "allowed: as many axes as the table. Use patch_positions for a table of a grid, "
                "and token_positions or frame_positions for a table of a sequence."
            )
        return resize_grid(self.weight, self.size, size)


class InterpolatedTable(PositionTable):
    """Learned embeddings of whole numbers of steps, interpolated linearly between neighbours. Drawn
    positions may be combined with any encoding (Ruoss et al., section 3), and need interpolation if
    they are not whole. The table begins again at row 0 after the last row, like all learned tables
    of this package.

    Args:
        dim: K.
        size: N rows, of steps 0 .. N - 1.
        std: Standard deviation of the normal initialisation.
    """

    def forward(self, steps: Tensor) -> Tensor:
        """Maps numbers of steps ``[..., 1]`` float32, from 0 on, to ``[..., K]`` float32."""
        rows = self.weight.shape[0]
        row = steps[..., 0].clamp(min=0.0) % rows
        row_below = row.floor()
        below = F.embedding(row_below.long(), self.weight).float()
        above = F.embedding((row_below.long() + 1).clamp(max=rows - 1), self.weight).float()
        return below + (row - row_below)[..., None] * (above - below)

    grid = forward


def counted_rows(table: Tensor, positions: Positions) -> Tensor:
    """``[T, K]``: rows of `table` ``[N, K]`` by the numbers of positions modulo N.

    Raises:
        ValueError: for positions that are not counted.
    """
    if positions.first is None:
        raise ValueError(
            "a learned position table has rows for tokens, frames or patches counted from the "
            "first, not for arbitrary coordinates; use token_positions, frame_positions or "
            "patch_positions, or a sinusoid type."
        )
    return wrapped_rows(table, positions.rows.shape[1], positions.first)


def wrapped_rows(table: Tensor, length: int, first: int | Tensor = 0) -> Tensor:
    """``[length, K]``: rows of `table` ``[N, K]`` from `first` on, E(t) = E(t mod N)."""
    # A compiled or exported program would keep only the branch that was traced, so the general form
    # below serves all lengths there.
    may_branch = isinstance(first, int) and not torch.compiler.is_compiling()
    if may_branch and first + length <= table.shape[0]:
        return table[first : first + length]
    row = torch.arange(length, device=table.device) + first
    return F.embedding(row % table.shape[0], table)


def resize_grid(
    rows: Tensor, size: Sequence[int], new_size: Sequence[int], antialias: bool = False
) -> Tensor:
    """Resizes a grid of one vector per patch, bicubic in the plane (CAPE section 5.1), linear
    elsewhere; at the same size `rows` itself.

    Args:
        rows: ``[height * width, K]``, row by row; other grids likewise, the slowest axis first.
        size: (height, width) in patches.
        new_size: Sizes of the axes afterwards.
        antialias: Whether to smooth before a plane is made smaller, as some stock models do.

    Returns:
        ``[new height * new width, K]`` in the dtype of `rows`.

    Raises:
        ValueError: for a grid of more than three axes.
    """
    if tuple(new_size) == tuple(size):
        return rows
    if len(size) not in RESIZES:
        raise ValueError(f"size={tuple(size)} has {len(size)} axes; allowed: 1 to {len(RESIZES)}.")
    image = rows.float().T.reshape(1, -1, *size)
    image = F.interpolate(
        image,
        tuple(new_size),
        mode=RESIZES[len(size)],
        align_corners=False,
        antialias=antialias,
    )
    return image.flatten(2)[0].T.to(rows.dtype)
