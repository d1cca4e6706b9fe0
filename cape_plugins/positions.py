"""From a raw batch to positions: the one currency of this package.

Shapes use this legend throughout the package: B batch, T positions, D coordinates (1 for text and
audio, 2 for images), K embedding channels. Units: tokens for text, seconds for audio, the [-1, 1]
square for images.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Positions(NamedTuple):
    """Where the elements of a batch are.

    Attributes:
        coords: ``[B, T, D]`` float32, or ``[1, T, D]`` if the batch shares its positions.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        step: Distance between neighbouring positions in the unit of `coords`, the unit of the
            local shift: a number or a tensor that broadcasts to `coords`.
        grid: ``[T, D]`` float32, set if every coordinate is a row of one grid: row i of the grid
            is the i-th valid position. Encoding the grid once is then enough for the batch.
        index: ``[B, T]`` int64, 1 + the number of valid positions before, 0 on padding; None if
            all samples have all rows of the grid in order.
        first: Position of row 0 of the grid, counted from the beginning of the sequence; a tensor
            without dimensions where the host may not read it (caches of fixed size).
        patches: (height, width) of an image in patches.
    """

    coords: Tensor
    valid: Tensor | None
    step: Tensor | float
    grid: Tensor | None = None
    index: Tensor | None = None
    first: int | Tensor = 0
    patches: tuple[int, int] | None = None


def token_positions(valid: Tensor, source_scale: float = 1.0, start: float = 0.0) -> Positions:
    """Positions of tokens, counted over valid tokens: left and right padding give the same.

    Args:
        valid: ``[B, T]`` bool, False on padding.
        source_scale: Alpha, target tokens per source token (CAPE section 5.3). It scales the
            index only, so source and target begin at the same coordinate.
        start: Coordinate of the first valid token, in tokens.

    Returns:
        Positions with ``coords[b, t, 0] = start + source_scale * i`` for the i-th valid token.

    Raises:
        ValueError: if `valid` is not a two-dimensional bool tensor.
    """
    _check_valid(valid)
    index = valid.cumsum(1) * valid
    grid = start + source_scale * torch.arange(
        valid.shape[1], dtype=torch.float32, device=valid.device
    )
    coords = start + source_scale * (index - 1).float()
    return Positions(coords[..., None], valid, 1.0, grid[:, None], index)


def token_position_at(
    index: int, device: torch.device, source_scale: float = 1.0, start: float = 0.0
) -> Positions:
    """The position of the token with this 0-based index alone, shared by the batch: what one step
    of incremental decoding needs. Equal to column `index` of :func:`token_positions`."""
    coord = torch.full((1, 1), float(index), dtype=torch.float32, device=device)
    coord = start + source_scale * coord
    return Positions(coord[None], None, 1.0, coord, first=index)


def frame_positions(
    num_frames: Tensor,
    seconds_per_frame: Tensor | float,
    first_frame_center: Tensor | float = 0.0,
    max_frames: int | None = None,
) -> Positions:
    """Positions of audio frames in seconds (CAPE section 3, positional encoding for sound).

    Args:
        num_frames: ``[B]`` integer, frames of each sample without padding (padding follows).
        seconds_per_frame: Distance of neighbouring frames in seconds, a number or ``[B]`` where
            the hop differs between samples. The product of hop and stride of the front end.
        first_frame_center: Time of the centre of frame 0 in seconds, a number or ``[B]``.
        max_frames: T; default the largest of `num_frames` (which costs a device synchronisation).

    Raises:
        ValueError: if a shape is wrong or a number is not positive.
    """
    if (
        not isinstance(num_frames, Tensor)
        or num_frames.dim() != 1
        or num_frames.is_floating_point()
    ):
        given = f"={num_frames!r}"
        if isinstance(num_frames, Tensor):
            given = f" has shape {tuple(num_frames.shape)} and dtype {num_frames.dtype}"
        raise ValueError(
            f"num_frames{given}; allowed: a tensor [batch] of integers, the number of frames of "
            "each sample, such as torch.tensor([50])."
        )
    if isinstance(seconds_per_frame, int | float) and not 0 < seconds_per_frame < float("inf"):
        raise ValueError(
            f"seconds_per_frame={seconds_per_frame} is not allowed; allowed: > 0 seconds, "
            "such as 0.03 for a hop of 10 ms and stride 3."
        )
    batch = num_frames.shape[0]
    length = int(num_frames.max()) if max_frames is None else max_frames
    if length < 0:
        raise ValueError(f"num_frames holds {length}; allowed: >= 0 for each sample.")
    frame = torch.arange(length, dtype=torch.float32, device=num_frames.device)
    step = _per_sample("seconds_per_frame", seconds_per_frame, batch, num_frames.device)
    first = _per_sample("first_frame_center", first_frame_center, batch, num_frames.device)
    coords = first + step * frame[None, :, None]
    index = torch.arange(1, length + 1, device=num_frames.device)
    valid = index <= num_frames[:, None]
    grid = coords[0] if coords.shape[0] == 1 else None  # all samples have the same frame times
    return Positions(coords, valid, step, grid, index * valid)


def timed_frame_positions(
    times: Tensor, num_frames: Tensor, seconds_per_frame: Tensor | float
) -> Positions:
    """Positions of audio frames that stand at any increasing times, such as those that are left
    after some were skipped.

    The step is the smallest distance of neighbours in a sample, so that a local shift of at most
    half a step keeps their order.

    Args:
        times: ``[B, T]``, the centre of each frame.
        num_frames: ``[B]`` integer, frames of each sample without padding (padding follows).
        seconds_per_frame: Step of a sample that has one frame only, a number or ``[B]``.
    """
    batch, length = times.shape
    index = torch.arange(1, length + 1, device=times.device)
    valid = index <= num_frames[:, None]
    gaps = times.diff(dim=1).masked_fill(~valid[:, 1:], float("inf"))
    gaps = torch.cat((gaps, gaps.new_full((batch, 1), float("inf"))), dim=1).amin(1)
    step = _per_sample("seconds_per_frame", seconds_per_frame, batch, times.device)
    step = torch.where(gaps.isfinite()[:, None, None], gaps[:, None, None], step)
    coords = times.float().masked_fill(~valid, 0.0)[..., None]
    return Positions(coords, valid, step, None, index * valid)


def patch_positions(
    height: int, width: int, gamma: float = 1.0, device: torch.device | str | None = None
) -> Positions:
    """Centres of the patches of an image, row by row, each axis spanning [-1, 1] end to end.

    The grid is that of CAPE Appendix A; an axis with one patch only is at 0. The step is 2 / N on
    an axis of N patches, slightly less than the distance 2 / (N - 1) of neighbours, so that a
    local shift of 0.5 steps is the paper's 1 / N.

    Args:
        height: Number of patch rows.
        width: Number of patch columns.
        gamma: Factor on the grid (CAPE Appendix B, Table 6).
        device: Where the positions are made.

    Returns:
        Positions with coords ``[1, height * width, 2]``, x (column) first, then y (row).

    Raises:
        ValueError: if `height`, `width` or `gamma` is not positive.
    """
    for name, value in (("height", height), ("width", width), ("gamma", gamma)):
        if not 0 < value < float("inf"):
            raise ValueError(
                f"{name}={value} is not allowed; allowed: > 0 and finite. A patch grid needs at "
                "least one patch on each axis: is the image smaller than the patch?"
            )
    x, y = (_axis(size, device) for size in (width, height))
    grid = gamma * torch.stack((x.repeat(height), y.repeat_interleave(width)), dim=1)
    # filled on the device: copying from the host would synchronise
    step = [
        torch.full((), 2.0 * gamma / size, dtype=torch.float32, device=device)
        for size in (width, height)
    ]
    step = torch.stack(step)
    return Positions(grid[None], None, step, grid, patches=(height, width))


def coordinate_positions(
    coords: Tensor, valid: Tensor | None = None, step: Tensor | float = 1.0
) -> Positions:
    """Positions that are known already: patches of any arrangement, frame times after dropping.

    Args:
        coords: ``[B, T, D]``, D = 1 (tokens or seconds) or 2 (the [-1, 1] square, x then y).
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        step: Distance to the neighbour that a local shift is measured in; a number or a tensor
            that broadcasts to `coords`.

    Raises:
        ValueError: if a shape is wrong.
    """
    if coords.dim() != 3 or coords.shape[-1] not in (1, 2):
        raise ValueError(
            f"coords has shape {tuple(coords.shape)}; allowed: [batch, positions, 1 or 2]."
        )
    if valid is not None:
        _check_valid(valid)
        if valid.shape[1] != coords.shape[1] or coords.shape[0] not in (1, valid.shape[0]):
            raise ValueError(
                f"valid has shape {tuple(valid.shape)}, coords {tuple(coords.shape)}; both need "
                "the same number of samples and positions (coords may have one sample for all)."
            )
        # whatever stands on padding, NaN included, must not reach the mean or the embedding
        coords = coords.masked_fill(~valid[..., None], 0.0)
    return Positions(coords.float(), valid, step)


def _axis(size: int, device: torch.device | str | None) -> Tensor:
    if size == 1:
        return torch.zeros(1, dtype=torch.float32, device=device)
    # symmetric and exact at both ends; torch.linspace would fix the size in torch.export
    return (2 * torch.arange(size, dtype=torch.float32, device=device) - (size - 1)) / (size - 1)


def _per_sample(name: str, value: Tensor | float, batch: int, device: torch.device) -> Tensor:
    """`value` as ``[B or 1, 1, 1]`` float32."""
    if not isinstance(value, Tensor):
        return torch.full((1, 1, 1), float(value), dtype=torch.float32, device=device)
    if value.shape not in ((), (batch,)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; allowed: a number or [{batch}] numbers."
        )
    return value.to(device=device, dtype=torch.float32).reshape(-1, 1, 1)


def _check_valid(valid: Tensor) -> None:
    if valid.dim() != 2 or valid.dtype != torch.bool:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)} and dtype {valid.dtype}; allowed: "
            "[batch, positions] bool, False on padding, such as tokens.ne(padding_idx)."
        )
