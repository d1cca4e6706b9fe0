"""Positions of a raw batch, which all parts of this package exchange.

A caller passes raw positions: numbers of tokens, times of frames, cells of a grid. The position
encoder applies the settings to these positions. Shapes use this legend throughout the package: B
batch, T positions, D coordinates (1 for sequences, the number of axes for grids), K embedding
channels. Units: tokens for text, seconds for audio, the [-1, 1] square for images, the same square
and seconds for videos.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cape_plugins.settings.domains import DOMAINS


class Positions(NamedTuple):
    """Positions of a batch, in the unit of the domain. Many elements of a batch have the same
    position, so this class stores rows and the row of each element: each row is encoded only once.

    Attributes:
        rows: ``[B, T, D]`` float32, or ``[1, T, D]`` if the batch shares the rows.
        step: Distance between neighbouring positions, the unit of the local shift: a number or a
            tensor that broadcasts to `rows`.
        in_steps: Whether `rows` are multiples of `step`, such as the numbers of tokens or frames.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        row_of: ``[B, T]`` int64, the row of each element, -1 on padding; None if element t has
            row t in all samples.
        first: Number of row 0, counted from the beginning of the sequence. For caches of fixed size
            a tensor without dimensions, because reading the number would wait for the device. None
            if positions are not counted.
        patches: Sizes of the axes of a grid; for an image (height, width) in patches.
        timed: Whether the slowest axis of a grid is time in seconds, instead of spanning [-1, 1].
    """

    rows: Tensor
    step: Tensor | float = 1.0
    in_steps: bool = False
    valid: Tensor | None = None
    row_of: Tensor | None = None
    first: int | Tensor | None = None
    patches: tuple[int, ...] | None = None
    timed: bool = False

    @property
    def shared(self) -> bool:
        """Whether all samples have the same evenly spaced rows, so that one encoding of the rows
        serves the whole batch."""
        step = self.step
        same_step = not isinstance(step, Tensor) or step.dim() == 0 or step.shape[0] == 1
        evenly_spaced = same_step if self.in_steps else self.patches is not None
        return evenly_spaced and self.rows.shape[0] == 1

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Sizes of the axes, the slowest first, if the rows are the cells of one evenly spaced
        grid: an image, a clip, or a sequence that is counted without gaps. Positions of the caller
        may be in any order, so they have no axes."""
        if self.rows.shape[0] > 1:
            return None
        if self.in_steps:
            return None if self.first is None else (self.rows.shape[1],)
        return self.patches

    @property
    def coords(self) -> Tensor:
        """Coordinates of all elements, ``[B, T, D]`` float32, or ``[1, T, D]`` if the batch shares
        its positions."""
        return self.elements(self.rows * self.step if self.in_steps else self.rows)

    @property
    def counts(self) -> Tensor | None:
        """``[B or 1, T]`` float32, the number of each element from 0 on; on padding any number.
        None if positions are not counted."""
        if self.in_steps:
            return self.elements(self.rows)[..., 0]
        if self.first is None:
            return None
        # irregular frames: the frames that were not skipped are counted 0, 1, 2 ...
        return torch.arange(self.rows.shape[1], device=self.rows.device)[None].float()

    def elements(self, rows: Tensor) -> Tensor:
        """``[B or 1, T, D]``, the row of each element out of `rows` ``[B or 1, T, D]``; on padding
        any row."""
        if self.row_of is None or rows.shape[0] > 1:
            return rows
        return rows[0][self.row_of]

    def last(self, length: int) -> Positions:
        """Positions of the last `length` elements; only for positions with `row_of`."""
        valid = None if self.valid is None else self.valid[:, -length:]
        return self._replace(valid=valid, row_of=self.row_of[:, -length:])

    def at_centres(self) -> Positions:
        """The grid on which the cells span [-1, 1] from edge to edge; in :func:`patch_positions`
        the outermost centres do. A distance then covers the same part of an image at each
        resolution, as types need that depend on distances only (DINOv3). Time in seconds does not
        change.
        """
        shares = [(size - 1) / size for size in self.patches]
        if self.timed:
            shares[0] = 1.0
        factors = [
            torch.full((), share, dtype=torch.float32, device=self.rows.device)
            for share in reversed(shares)
        ]
        return self._replace(rows=self.rows * torch.stack(factors))

    def clear_padding(self, embedding: Tensor) -> Tensor:
        """``[B, T, K]``, with zeros on padding; `embedding` ``[B or 1, T, K]`` may change in
        place."""
        if self.valid is None:
            return embedding
        if embedding.shape[0] == self.valid.shape[0] and not embedding.requires_grad:
            # several times faster on a CPU than masked_fill_; padding may become -0.0
            return embedding.mul_(self.valid[..., None])
        return embedding * self.valid[..., None]

    def gather(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[B or 1, T, K]``, the embedding of each element in `dtype`, taken from the embeddings
        `rows` ``[T, K]`` of the shared rows; zero on padding."""
        rows = rows.to(dtype)
        if self.row_of is None:
            return rows[None] if self.valid is None else rows * self.valid[..., None]
        # padding has row -1, so a row of zeros is put in front
        rows = F.pad(rows, (0, 0, 1, 0))
        batch, length = self.row_of.shape
        return rows.index_select(0, self.row_of.reshape(-1) + 1).view(batch, length, -1)


def token_positions(valid: Tensor) -> Positions:
    """Positions of tokens, counted over valid tokens, so left and right padding give the same
    positions.

    Args:
        valid: ``[B, T]`` bool, False on padding.

    Returns:
        Positions with ``coords[b, t, 0] = i`` for the i-th valid token, from 0 on.

    Raises:
        ValueError: if `valid` is not a two-dimensional bool tensor.
    """
    _check_valid(valid)
    number = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device)
    row_of = valid.cumsum(1) * valid - 1
    return Positions(number.view(1, -1, 1), in_steps=True, valid=valid, row_of=row_of, first=0)


def token_position_at(
    index: int | Tensor, device: torch.device | str | None = None, length: int = 1
) -> Positions:
    """Positions of `length` tokens from this 0-based index on, rows ``[1, length, 1]`` that the
    whole batch shares, for one step of incremental decoding. These positions equal the columns
    `index` and following of :func:`token_positions` without padding. The index may be a tensor
    without dimensions."""
    if type(index) is int:
        number = torch.arange(index, index + length, dtype=torch.float32, device=device)
    else:
        number = torch.arange(length, dtype=torch.float32, device=device) + index
    return Positions(number.view(1, -1, 1), in_steps=True, first=index)


def frame_positions(
    num_frames: Tensor, seconds_per_frame: Tensor | float, max_frames: int | None = None
) -> Positions:
    """Positions of audio frames in seconds (CAPE section 3, positional encoding for sound); the
    time of the first frame is the `start` of the encoder.

    Args:
        num_frames: ``[B]`` integer, frames of each sample without padding (padding follows).
        seconds_per_frame: Distance between neighbouring frames in seconds: the product of hop and
            stride of the front end. A number, or ``[B]`` if the hop differs between samples.
        max_frames: T; default the largest of `num_frames`, which the program has to wait for if
            `num_frames` is on a GPU.

    Raises:
        ValueError: if a shape is wrong or a number is not positive. Numbers in a tensor are not
            checked, because reading them would wait for the device.
    """
    if (
        not isinstance(num_frames, Tensor)
        or num_frames.dim() != 1
        or num_frames.is_floating_point()
    ):
        description = f"={num_frames!r}"
        if isinstance(num_frames, Tensor):
            description = f" has shape {tuple(num_frames.shape)} and dtype {num_frames.dtype}"
        raise ValueError(
            f"num_frames{description}; allowed: a tensor [batch] of integers, the number of frames "
            "of each sample, such as torch.tensor([50])."
        )
    if isinstance(seconds_per_frame, int | float) and not 0 < seconds_per_frame < float("inf"):
        raise ValueError(
            f"seconds_per_frame={seconds_per_frame} is not allowed; allowed: > 0 seconds, "
            "such as 0.03 for a hop of 10 ms and stride 3."
        )
    length = int(num_frames.max()) if max_frames is None else max_frames
    if length < 0:
        raise ValueError(f"num_frames holds {length}; allowed: >= 0 for each sample.")
    step = _per_sample("seconds_per_frame", seconds_per_frame, num_frames)
    number = torch.arange(length, dtype=torch.float32, device=num_frames.device)
    valid = number < num_frames[:, None]
    return Positions(number.view(1, -1, 1), step, in_steps=True, valid=valid, first=0)


def timed_frame_positions(
    times: Tensor, num_frames: Tensor, seconds_per_frame: Tensor | float
) -> Positions:
    """Positions of audio frames at any increasing times, as after some frames were skipped.

    The step is the smallest distance between neighbours in a sample, so a local shift of at most
    half a step keeps the order. (CAPE's code may swap neighbours in the mode without padding.)

    Args:
        times: ``[B, T]``, the centre of each frame in seconds, less the `start` of the encoder.
        num_frames: ``[B]`` integer, frames of each sample without padding (padding follows).
        seconds_per_frame: Step of a sample with a single frame, a number or ``[B]``.

    Raises:
        ValueError: if a shape is wrong. The values of `times` are not checked, because reading
            them would wait for the device.
    """
    if times.dim() != 2 or num_frames.shape != times.shape[:1]:
        raise ValueError(
            f"times has shape {tuple(times.shape)} and num_frames {tuple(num_frames.shape)}; "
            "allowed: [batch, frames] times and [batch] numbers of frames."
        )
    batch, length = times.shape
    valid = torch.arange(length, device=times.device) < num_frames[:, None]
    gaps = times.diff(dim=1).masked_fill(~valid[:, 1:], float("inf"))
    gaps = torch.cat((gaps, gaps.new_full((batch, 1), float("inf"))), dim=1).amin(1)[:, None, None]
    step = _per_sample("seconds_per_frame", seconds_per_frame, num_frames)
    step = torch.where(gaps.isfinite(), gaps, step)
    rows = times.float().masked_fill(~valid, 0.0)[..., None]
    return Positions(rows, step, valid=valid, first=0)


def patch_positions(
    *sizes: int, device: torch.device | str | None = None, seconds: float | None = None
) -> Positions:
    """Centres of the patches of an image, row by row; on each axis the outermost centres are at -1
    and 1. Of a clip, frame by frame, with time in seconds from the middle of the clip.

    CAPE Appendix A has the same grid; an axis of a single patch is at 0. The step is 2 / N on an
    axis of N patches, slightly less than the distance 2 / (N - 1) between neighbours, so a local
    shift of 0.5 steps is the paper's 1 / N.

    Args:
        sizes: Number of patches along each axis, the slowest first: height and width of images.
        device: Device of the positions.
        seconds: Distance of neighbours along the slowest axis, if this axis is time. A longer clip
            then reaches further, instead of spanning [-1, 1].

    Returns:
        Positions with coords ``[1, height * width, 2]``, x (column) first, then y (row); of a clip
        ``[1, frames * height * width, 3]``, time last.

    Raises:
        ValueError: if a size or the distance is not positive.
    """
    names = ("height", "width") if len(sizes) == 2 else [f"size {i}" for i in range(len(sizes))]
    for name, value in zip(names, sizes, strict=True):
        if not 0 < value < float("inf"):
            raise ValueError(
                f"{name}={value} is not allowed; allowed: > 0 and finite. A patch grid needs at "
                "least one patch on each axis: is the image smaller than the patch?"
            )
    axes = [_axis(size, device) for size in sizes]
    steps = [2.0 / size for size in sizes]
    if seconds is not None:
        if not 0 < seconds < float("inf"):
            raise ValueError(
                f"seconds={seconds} is not allowed; allowed: > 0, such as 0.27 for two frames of "
                "7.5 a second."
            )
        axes[0], steps[0] = _centred(sizes[0], device) * seconds, seconds
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], dim=-1).flatten(0, -2)
    # filled on the device: copying from the CPU would synchronise
    step = [torch.full((), step, dtype=torch.float32, device=device) for step in reversed(steps)]
    return Positions(grid[None], torch.stack(step), patches=sizes, timed=seconds is not None)


def coordinate_positions(
    coords: Tensor, valid: Tensor | None = None, step: Tensor | float = 1.0
) -> Positions:
    """Positions that the caller already has as coordinates: patches of any arrangement, or times of
    frames after some frames were dropped.

    Args:
        coords: ``[B, T, D]``, D = 1 (tokens or seconds), 2 (the [-1, 1] square, x then y), 3 (x, y
            and seconds), or the number of coordinates of another domain.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        step: Distance to the neighbour, the unit of the local shift; a number or a tensor that
            broadcasts to `coords`.

    Raises:
        ValueError: if a shape is wrong.
    """
    allowed = sorted({row.num_coords for row in DOMAINS.values()})
    if coords.dim() != 3 or coords.shape[-1] not in allowed:
        raise ValueError(
            f"coords has shape {tuple(coords.shape)}; allowed: [batch, positions, "
            f"{' or '.join(map(str, allowed))}]."
        )
    if valid is not None:
        _check_valid(valid)
        if valid.shape[1] != coords.shape[1] or coords.shape[0] not in (1, valid.shape[0]):
            raise ValueError(
                f"valid has shape {tuple(valid.shape)}, coords {tuple(coords.shape)}; both need "
                "the same number of samples and positions (coords may have one sample for all)."
            )
        # values on padding, NaN included, must not reach the mean or the embedding
        coords = coords.masked_fill(~valid[..., None], 0.0)
    return Positions(coords.float(), step, valid=valid)


def _axis(size: int, device: torch.device | str | None) -> Tensor:
    # This form is symmetric, and exact at both ends. torch.linspace, or a branch for a size of 1,
    # would fix the size in exported programs.
    return _centred(size, device) / (torch.sym_max(size - 1, 1) / 2)


def _centred(size: int, device: torch.device | str | None) -> Tensor:
    """Numbers of the cells of an axis, from its middle."""
    return torch.arange(size, dtype=torch.float32, device=device) - (size - 1) / 2


def _per_sample(name: str, value: Tensor | float, num_frames: Tensor) -> Tensor | float:
    """`value`; a tensor as ``[B or 1, 1, 1]`` float32."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.shape not in ((), num_frames.shape):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; allowed: a number or [{len(num_frames)}] "
            "numbers."
        )
    return value.to(device=num_frames.device, dtype=torch.float32).reshape(-1, 1, 1)


def _check_valid(valid: Tensor) -> None:
    if valid.dim() != 2 or valid.dtype != torch.bool:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}; allowed: "
            "[batch, positions] bool, False on padding, such as tokens.ne(padding_idx)."
        )
