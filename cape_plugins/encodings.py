"""Embeddings of coordinates: sinusoids of any domain, and the learned table.

A sinusoid is a frequency matrix W ``[D, K/2]`` and a layout of channels; text, audio and images
differ in W alone: ``phase = coords @ W``. Frequencies are recomputed in float32 in each forward:
a buffer would be rounded by ``.half()`` and lost by loaders that materialise models from "meta".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.domains import each_domain
from cape_plugins.positions import Positions
from cape_plugins.registry import ENCODINGS, Encoding

Frequencies = Callable[[int, torch.device], Tensor]


def text_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-2k/K) rad per token, k = 1 .. K/2 (CAPE Eq. 1)."""
    exponent = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device) * (2 / dim)
    return torch.pow(10000.0, -exponent)[None]


def audio_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 30 * 10000^(-2k/K) rad per second (CAPE section 3, sound)."""
    return 30.0 * text_frequencies(dim, device)


def image_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[2, K/2]``, pi 10^(2k/K) (cos k, sin k) for x and y, k = 1 .. K/2 (CAPE Eq. 3 and 4)."""
    k = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device)
    return math.pi * torch.pow(10.0, k * (2 / dim)) * torch.stack((k.cos(), k.sin()))


def fairseq_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-k/(K/2 - 1)), k = 0 .. K/2 - 1: tensor2tensor's formula, used by
    fairseq and Speech2Text, computed in their order of operations to agree bit for bit."""
    half = dim // 2
    rate = math.log(10000) / (half - 1)
    return torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -rate)[None]


def marian_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-2k/K), k = 0 .. K/2 - 1 (Vaswani et al.), in float64, in which Marian
    makes its table, to agree bit for bit; in float32 on devices without float64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    return torch.pow(10000.0, exponent).reciprocal()[None]


FREQUENCIES: dict[str, Frequencies] = {
    "text": text_frequencies,
    "audio": audio_frequencies,
    "image": image_frequencies,
    "fairseq": fairseq_frequencies,
    "marian": marian_frequencies,
}
LAYOUTS = ("cos_sin_interleaved", "sin_cos_blocks")
RESIZES = {1: "linear", 2: "bicubic", 3: "trilinear"}  # by the number of axes


class Sinusoid(nn.Module):
    """Sines and cosines of any coordinates (CAPE Eq. 1 and 3); owns no parameters or buffers.

    Args:
        dim: K, even and at least 4.
        frequencies: One of :data:`FREQUENCIES`, or such a function.
        layout: "cos_sin_interleaved" (the paper's equations: channel 2k cosine, 2k + 1 sine) or
            "sin_cos_blocks" (fairseq: all sines, then all cosines).

    Raises:
        ValueError: for an odd or too small `dim`, unknown frequencies or an unknown layout.
    """

    def __init__(
        self,
        dim: int,
        frequencies: str | Frequencies = "text",
        layout: str = "cos_sin_interleaved",
    ) -> None:
        super().__init__()
        if dim < 4 or dim % 2:
            raise ValueError(
                f"embedding dimension {dim} is not allowed for sinusoids; allowed: even, >= 4, "
                "because sines and cosines come in pairs. Change the model's embedding dimension."
            )
        for name, value, allowed in (
            ("frequencies", frequencies, FREQUENCIES),
            ("layout", layout, LAYOUTS),
        ):
            if not callable(value) and value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}.")
        self.dim = dim
        self.frequencies = frequencies
        self.interleaved = layout == "cos_sin_interleaved"

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.dim}, frequencies={self.frequencies!r}, interleaved={self.interleaved}"

    def weights(self, device: torch.device) -> Tensor:
        """Frequency matrix ``[D, K/2]``."""
        known = isinstance(self.frequencies, str)
        function = FREQUENCIES[self.frequencies] if known else self.frequencies
        return function(self.dim, device)

    def aliased(self, *sizes: int, gamma: float = 1.0) -> int:
        """How many of the K channels alias on a grid: along some axis their phase moves by more
        than pi from one cell to the next, so that they turn backwards, or round and round.

        Args:
            sizes: Cells along each axis, the slowest first, as of
                :func:`~cape_plugins.positions.patch_positions`.
            gamma: Factor on the grid.
        """
        # on the CPU also where a model is built on "meta"; an axis of one cell has no neighbours
        distance = [2.0 * gamma / (size - 1) if size > 1 else 0.0 for size in reversed(sizes)]
        step = torch.tensor(distance, dtype=torch.float32, device="cpu")[:, None]
        phase = self.weights(step.device).float().abs() * step
        return 2 * int((phase > math.pi).any(0).sum())

    def grid(self, grid: Tensor) -> Tensor:
        """Encodes few rows exactly, as tables are made: sin and cos of the same phases.

        Args:
            grid: ``[T, D]`` float32.

        Returns:
            ``[T, K]`` float32.
        """
        weights = self.weights(grid.device)
        phase = _phase(grid, weights)
        parts = phase.sin().float(), phase.cos().float()
        if self.interleaved:
            return torch.stack(parts[::-1], dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1)

    def forward(self, coords: Tensor) -> Tensor:
        """Encodes many positions in one pass over memory, using cos(p) = sin(p + pi / 2).

        Args:
            coords: ``[B, T, D]`` float32.

        Returns:
            ``[B, T, K]`` float32; differs from :meth:`grid` by float32 rounding of the phase.
        """
        weights = self.weights(coords.device).float()
        sine, cosine = torch.zeros_like(weights[0]), torch.full_like(weights[0], math.pi / 2)
        if self.interleaved:
            weights = weights.repeat_interleave(2, dim=1)
            offset = torch.stack((cosine, sine), dim=-1).flatten()
        else:
            weights = torch.cat((weights, weights), dim=1)
            offset = torch.cat((sine, cosine))
        return _phase(coords, weights, offset).sin_()


def warn_of_coarse_grid(
    sinusoid: Sinusoid, size: Sequence[int], usual: Sequence[int], gamma: float
) -> None:
    """Warns if more channels alias on a grid of this size than on the `usual` one of the papers.

    Args:
        sinusoid: The encoding of a model.
        size: Size of its inputs, the slowest axis first.
        usual: The same in the papers.
        gamma: Factor on the grid of the model.
    """
    if type(sinusoid.weights(torch.device("cpu"))) is not torch.Tensor:
        return  # a model of fake tensors, which have no values
    count, accepted = sinusoid.aliased(*size, gamma=gamma), sinusoid.aliased(*usual)
    if count <= accepted:
        return
    share, common_share = (100 * number / sinusoid.dim for number in (count, accepted))
    shape, common = (" x ".join(map(str, sides)) for sides in (size, usual))
    fits = min((n - 1) / (m - 1) for n, m in zip(size, usual, strict=True) if min(n, m) > 1)
    warnings.warn(
        f"{count} of {sinusoid.dim} channels ({share:.0f} %) of the position "
        f"embedding alias on a grid of {shape} patches (gamma={gamma:g}): their phase moves by "
        "more than pi from one patch to the next, so that they do not tell how far apart patches "
        f"are. Of the papers' {common} patches {common_share:.0f} % do. Use smaller "
        f"patches or larger images, or gamma={math.floor(100 * fits) / 100:g} or less.",
        stacklevel=2,
    )


def _phase(coords: Tensor, weights: Tensor, offset: Tensor | None = None) -> Tensor:
    """``coords @ weights + offset`` element by element: under autocast a matmul would be rounded
    to half precision, and positions are wrong there from 257 on."""
    columns = coords.unbind(-1)
    if len(columns) != len(weights):
        raise ValueError(
            f"positions have {len(columns)} coordinates, the frequencies are for {len(weights)}; "
            f"make positions and encoder for one domain ({each_domain('num_coords', named=True)})."
        )
    if offset is None:
        phase = columns[0][..., None] * weights[0]
    else:
        phase = torch.addcmul(offset, columns[0][..., None], weights[0])
    for dim in range(1, len(columns)):  # a slice of no rows would stay in exported programs
        phase.addcmul_(columns[dim][..., None], weights[dim])
    return phase


class PositionTable(nn.Module):
    """Learned absolute positions (*abspos*), usable beyond the trained size.

    Sequences longer than the table wrap around, E(t) = E(t mod N) (CAPE section 5.2); images of
    another size get a bicubic resize of the grid (CAPE section 5.1), other grids a linear one.

    Args:
        dim: K.
        size: N for sequences, (height, width) in patches for images.
        std: Standard deviation of the normal initialisation.

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
        """Normal, with the standard deviation given at construction."""
        nn.init.normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.weight.shape[1]}, size={self.size}"

    def lookup(self, positions: Positions) -> Tensor:
        """``[T, K]``, one row of the table for each row of `positions`.

        Raises:
            ValueError: for positions that are neither counted nor a grid.
        """
        if positions.patches is not None:
            return self.resize(*positions.patches)
        return counted_rows(self.weight, positions)

    def rows(self, length: int, first: int | Tensor = 0) -> Tensor:
        """``[length, K]``: the table from row `first` on, wrapping around."""
        return wrapped_rows(self.weight, length, first)

    def resize(self, *size: int) -> Tensor:
        """``[height * width, K]``: the image table at another size; itself at its own size.

        Raises:
            ValueError: if this is a table for sequences, or for grids of other axes.
        """
        if len(self.size) != len(size):
            raise ValueError(f"a position table of size {self.size} is no grid and has no resize.")
        return resize_grid(self.weight, self.size, size)


class InterpolatedTable(PositionTable):
    """Learned embeddings of whole numbers of steps, linear between neighbours: any encoding can
    take randomized positions (Ruoss et al., section 3), also those that are not whole. Wraps around
    beyond its last row, as all learned tables here.

    Args:
        dim: K.
        size: N rows, of steps 0 .. N - 1.
        std: Standard deviation of the normal initialisation.
    """

    def forward(self, steps: Tensor) -> Tensor:
        """``[..., 1]`` float32 numbers of steps, from 0 on, to ``[..., K]`` float32."""
        rows = self.weight.shape[0]
        place = steps[..., 0].clamp(min=0.0) % rows
        low = place.floor()
        below = F.embedding(low.long(), self.weight).float()
        above = F.embedding((low.long() + 1).clamp(max=rows - 1), self.weight).float()
        return below + (place - low)[..., None] * (above - below)

    grid = forward


def counted_rows(table: Tensor, positions: Positions) -> Tensor:
    """``[T, K]``: rows of `table` ``[N, K]`` by the numbers of positions, wrapping around.

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
    if isinstance(first, int) and first + length <= table.shape[0]:
        return table[first : first + length]
    row = torch.arange(length, device=table.device) + first
    return F.embedding(row % table.shape[0], table)


def resize_grid(
    rows: Tensor, size: Sequence[int], new_size: Sequence[int], antialias: bool = False
) -> Tensor:
    """Resize of one vector per patch, bicubic in the plane (CAPE section 5.1), linear elsewhere;
    itself at its own size.

    Args:
        rows: ``[height * width, K]``, row by row; other grids likewise, the slowest axis first.
        size: (height, width) in patches.
        new_size: Sizes of the axes afterwards.
        antialias: Smooths before a plane is made smaller; some stock models do.

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


def _sinusoid(dim: int, frequencies: str, layout: str, **_: Any) -> Sinusoid:
    return Sinusoid(dim, frequencies, layout)


def _table(dim: int, table_size: Any, table_std: float | None, **_: Any) -> PositionTable:
    return PositionTable(dim, table_size, table_std)


def _interpolated(
    dim: int, max_position: int, table_std: float | None, **_: Any
) -> InterpolatedTable:
    return InterpolatedTable(dim, max_position, table_std)


ENCODINGS["sinusoid"] = Encoding(_sinusoid)
ENCODINGS["interpolated"] = Encoding(_interpolated, learned=True, steps=True)
ENCODINGS["table"] = Encoding(_table, learned=True, counts=True)
