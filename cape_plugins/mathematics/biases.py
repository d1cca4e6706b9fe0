"""Biases that depend on the distance between two positions and are added to attention scores: a
fixed penalty (ALiBi, Press et al., ICLR 2022) and a learned function (FIRE, Li et al., ICLR
2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN = 32  # hidden channels of FIRE (section 4.1)
THRESHOLD = 512.0  # L of FIRE at the beginning of a training, in steps
SHARPNESS = 0.1  # c of FIRE at the beginning of a training
# Ratio of the slopes of a head before and after a token, if slopes are directed; not tuned
STEEPER = 8.0


def alibi_slopes(num_heads: int, device: torch.device | None = None) -> Tensor:
    """Slopes of the heads ``[H]``, ``2^(-8 h / H)``. If H is no power of two: the slopes of the
    next smaller power of two, then every other slope of the next larger power of two, as in the
    code of ALiBi. The slopes are computed on the device, because a copy from the CPU would make the
    program wait for the GPU."""
    power = 2 ** int(math.log2(num_heads))
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    share = torch.where(head < power, (head + 1) / power, (head - power + 0.5) / power)
    return torch.exp2(-8.0 * share)


class LinearBias(nn.Module):
    """ALiBi: minus the distance times the slope of the head. On grids the distance is Euclidean.

    Args:
        num_heads: H.
        unit: Distance that counts as 1.
        directed: Whether every other head multiplies the penalty of keys before its query by
            :data:`STEEPER`, and the other heads multiply the penalty of keys after the query.
    """

    def __init__(self, num_heads: int, unit: float, directed: bool = False) -> None:
        super().__init__()
        self.num_heads, self.unit, self.directed = num_heads, unit, directed

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Coordinates ``[B or 1, T, D]`` and ``[B or 1, S, D]`` to ``[B or 1, H, T, S]``."""
        difference = (key[:, None] - query[:, :, None]) / self.unit
        if difference.shape[-1] == 1:
            distance = difference[..., 0].abs()
        else:
            distance = difference.square().sum(-1).sqrt()
        slopes = alibi_slopes(self.num_heads, query.device)[:, None, None]
        if self.directed:
            is_before = difference[..., 0][:, None] < 0
            is_even = torch.arange(self.num_heads, device=query.device)[:, None, None] % 2 == 0
            slopes = torch.where(is_before == is_even, STEEPER * slopes, slopes)
        return -slopes * distance[:, None]


class FireBias(nn.Module):
    """FIRE: the bias of key j for query i is ``f(psi(x_j - x_i) / psi(max(L, x_i)))``, with
    ``psi(x) = sign(x) log(1 + c |x|)`` and a network f with one hidden layer (section 3.2). c and L
    are learned.

    The paper has causal models: positions count from 0, so the longest distance of query i is x_i.
    Without a causal mask the denominator is ``psi(L)``, and the sign of a distance shows whether
    the key is before or after the query. On grids, f has one input for each coordinate.

    The denominator of a causal model is ``psi(L)`` for all queries up to position L. There, as
    without a causal mask, the bias depends on the distance alone: moving all positions changes
    nothing. Beyond L the bias of a distance also depends on the position of the query.

    Args:
        num_heads: H.
        num_coords: D.
        unit: Distance that counts as 1.
        causal: Whether queries see earlier keys only.
    """

    def __init__(self, num_heads: int, num_coords: int, unit: float, causal: bool = False) -> None:
        super().__init__()
        self.unit, self.causal = unit, causal
        self.hidden = nn.Linear(num_coords, HIDDEN)
        self.output = nn.Linear(HIDDEN, num_heads)
        # vectors of one number, because FSDP2 cannot shard scalars
        self.sharpness = nn.Parameter(torch.tensor([SHARPNESS]))
        self.threshold = nn.Parameter(torch.ones(1))  # times THRESHOLD, as in the paper's code

    def forward(self, query: Tensor, key: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
        """The bias ``[B or 1, H, T, S]`` float32, whatever the precision of the parameters.

        Args:
            query: Coordinates ``[B or 1, T, D]``.
            key: Coordinates ``[B or 1, S, D]``.
            axes: Sizes of the axes, the slowest first, if queries and keys are the cells of one
                evenly spaced grid. f is then computed once for each distance: for 27 x 27 distances
                instead of 196 x 196 pairs on a grid of 14 x 14.
        """
        if axes is None or self.causal:  # the denominators of causal queries differ
            difference = key[:, None] - query[:, :, None]
            limit = (query / self.unit)[:, :, None]
            return self._function(difference, limit if self.causal else None).movedim(-1, 1)
        bias = self._function(grid_differences(key, axes)).movedim(-1, 1)
        return pairs_of_cells(bias, axes)

    def bounds(self) -> Iterator[tuple[nn.Parameter, float]]:
        """Parameters of f, with the bound of their uniform initial values, which is torch's bound
        for a linear layer. A host that initialises linear layers with a small standard deviation
        would give biases near zero, which are learned slowly."""
        for layer in (self.hidden, self.output):
            for parameter in layer.parameters():
                yield parameter, layer.in_features**-0.5

    def _function(self, difference: Tensor, limit: Tensor | None = None) -> Tensor:
        """f of differences ``[..., D]``: ``[..., H]``.

        Args:
            difference: Key minus query.
            limit: Lower bound of L, in steps; broadcasts to `difference`.
        """
        threshold = (self.threshold.float() * THRESHOLD).abs()
        limit = threshold if limit is None else torch.maximum(threshold, limit)
        ratio = self._squash(difference / self.unit) / (self._squash(limit) + 1e-6)
        # the products need float32
        with torch.autocast(ratio.device.type, enabled=False):
            if ratio.shape[-1] == 1:
                return self._by_pieces(ratio[..., 0])
            hidden = F.linear(ratio, self.hidden.weight.float(), self.hidden.bias.float()).relu()
            return F.linear(hidden, self.output.weight.float(), self.output.bias.float())

    def _squash(self, x: Tensor) -> Tensor:
        return x.sign() * torch.log1p(self.sharpness.float().abs() * x.abs())

    def _by_pieces(self, ratio: Tensor) -> Tensor:
        """f of one number for each pair. f is piecewise linear, with at most :data:`HIDDEN` knots.
        Looking up the linear piece of each pair needs no tensor ``[..., HIDDEN]`` of hidden
        channels."""
        weight, bias = self.hidden.weight.float()[:, 0], self.hidden.bias.float()
        with torch.no_grad():
            far = torch.finfo(torch.float32).max / 8  # a flat unit has no knot
            knots = (-bias / weight).nan_to_num(far, far, -far).clamp(-far, far).sort().values
            # one number inside each piece; all numbers of the piece give the hidden units the same
            # signs
            first, last = knots[:1], knots[-1:]
            between = knots[1:] / 2 + knots[:-1] / 2
            within = torch.cat((first - first.abs() - 1, between, last + last.abs() + 1))
            is_on = (within[:, None] * weight + bias > 0).float()  # [pieces, hidden]
        output = self.output.weight.float().t()
        slopes = (is_on * weight) @ output  # [pieces, H]
        offsets = (is_on * bias) @ output + self.output.bias.float()
        piece = torch.bucketize(ratio.detach(), knots)
        return F.embedding(piece, slopes) * ratio[..., None] + F.embedding(piece, offsets)


def grid_differences(coords: Tensor, axes: Sequence[int]) -> Tensor:
    """Differences between cells of an evenly spaced grid, each of them once.

    Args:
        coords: ``[B, T, D]``, the coordinate of the fastest axis first.
        axes: Sizes of the D axes, the slowest first; their product is T.

    Returns:
        ``[B, 2 n - 1, ..., D]`` with an axis for each n of `axes`; entry ``n - 1 + i`` is the
        difference to the cell i steps further.
    """
    lines = []
    for axis, size in enumerate(axes):
        stride = math.prod(axes[axis + 1 :])
        line = coords[:, : size * stride : stride, -1 - axis]
        steps = line - line[:, :1]
        line = torch.cat((-steps[:, 1:].flip(1), steps), dim=1)
        lines.append(
            line.view(-1, *(2 * size - 1 if other == axis else 1 for other in range(len(axes))))
        )
    return torch.stack(torch.broadcast_tensors(*reversed(lines)), dim=-1)


def pairs_of_cells(values: Tensor, axes: Sequence[int]) -> Tensor:
    """Values of all pairs of cells, from the values of their differences.

    Args:
        values: ``[B, H, 2 n - 1, ...]``, with the axes of :func:`grid_differences`.
        axes: Sizes of the axes.

    Returns:
        ``[B, H, T, T]``: queries, keys.
    """
    for axis, size in enumerate(axes):
        values = values.unfold(2 + axis, size, 1)  # windows, which begin at their first key
    # the first query has the last window
    return values.flip(*range(2, 2 + len(axes))).flatten(2, 1 + len(axes)).flatten(3)
