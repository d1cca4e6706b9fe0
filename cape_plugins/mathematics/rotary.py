"""Queries and keys turned by their positions (RoPE, Su et al., arXiv 2104.09864)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Angles(NamedTuple):
    """Cosines and sines of the angles by which pairs of channels are turned, float32.

    Attributes:
        cos: ``[B or 1, 1, T, d]``, the cosine of the pair of each channel.
        sin: ``[B or 1, 1, T, d]``, the sine of the pair; negative for the first channel of a pair.
    """

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Returns queries or keys ``[B, H, S, d]``, turned. Channels i and i + d/2 are a pair, as
        in Llama. The first S - T queries or keys, such as a class token, have no position and are
        not turned."""
        front = x.shape[2] - self.cos.shape[2]
        # Only cosines and sines are cast: angles in half precision would be wrong from position 257
        # on.
        cos, sin = (part.to(x.dtype) for part in self)
        if front:
            cos, sin = F.pad(cos, (0, 0, front, 0), value=1.0), F.pad(sin, (0, 0, front, 0))
        # four operations on whole tensors: on a GPU their number counts, not their size
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Rotation(nn.Module):
    """Coordinates to :class:`Angles`. Has no parameters and no buffers, see
    :mod:`~cape_plugins.mathematics.encodings`.

    Each coordinate has n = ``(d/2) // D`` pairs of channels, the slowest axis first, as in DINOv3;
    the remaining pairs are not turned. Pair k = 0 .. n - 1 of a coordinate is turned by ``speed /
    base^(k / n)`` radians for each unit.

    Args:
        head_dim: d, even, with at least one pair for each coordinate.
        num_coords: D.
        base: Ratio of the speed of the fastest pair to the speed that pair n would have; theta of
            RoPE.
        speed: Radians of the fastest pair for a coordinate of 1.

    Raises:
        ValueError: if the channels do not suffice.
    """

    def __init__(self, head_dim: int, num_coords: int, base: float, speed: float) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 2 * num_coords:
            raise ValueError(
                f"a head of {head_dim} channels cannot be turned by {num_coords} coordinates; "
                f"allowed: even numbers >= {2 * num_coords}. Change the width of the model or the "
                "number of heads, or choose alibi or fire."
            )
        self.head_dim, self.num_coords, self.base, self.speed = head_dim, num_coords, base, speed

    def forward(self, coords: Tensor) -> Angles:
        """Maps coordinates ``[B or 1, T, D]`` float32 to angles."""
        pairs = self.head_dim // 2
        pairs_of_axis = pairs // self.num_coords
        number = torch.arange(pairs_of_axis, dtype=torch.float32, device=coords.device)
        frequencies = self.speed / self.base ** (number / pairs_of_axis)
        # element by element: autocast would round a product of matrices
        angle = torch.cat(
            [
                coords[..., axis : axis + 1] * frequencies
                for axis in reversed(range(self.num_coords))
            ],
            dim=-1,
        )
        angle = F.pad(angle, (0, pairs - angle.shape[-1]))[:, None]
        cos, sin = angle.cos(), angle.sin()
        return Angles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
