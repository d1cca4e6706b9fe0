"""Tables of relative attention: embeddings of the distances between key and query (Shaw et al.,
NAACL 2018), of sequences and of grids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS


class RelativePositions(nn.Module):
    """Learned embeddings of the distances -C .. C between key and query.

    Args:
        context: C, in positions. The CAPE paper has 150 tokens for text, the released code of CAPE
            919 frames for speech.
        head_dim: d.
        num_heads: H, to give each head a table; None for one table for all heads, as in the papers.
        values: Whether an embedding is added to the values (Shaw et al. Eq. 3).
        beyond: "clip" (distances beyond C use the outermost embedding, Shaw et al.) or "zero"
            (distances beyond C have no embedding, as in the code released with CAPE).

    Attributes:
        keys: ``[H or 1, 2 C + 1, d]``, a^K; the row C + j - i is for query i and key j.
        values: The same for values, a^V; None without `values`.

    Raises:
        ValueError: if a size is not positive or `beyond` is unknown.
    """

    def __init__(
        self,
        context: int,
        head_dim: int,
        num_heads: int | None = None,
        values: bool = False,
        beyond: str = "clip",
    ) -> None:
        super().__init__()
        sizes = {"context": context, "head dimension": head_dim, "number of heads": num_heads}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"relative {name} {size} is not allowed; allowed: >= 1.")
        if beyond not in ("clip", "zero"):
            raise ValueError(f"relative beyond={beyond!r} is unknown; allowed: clip, zero.")
        self.context = context
        self.clip = beyond == "clip"
        shape = (num_heads or 1, 2 * context + 1, head_dim)
        self.keys = nn.Parameter(torch.empty(shape))
        self.values = nn.Parameter(torch.empty(shape)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws uniform values from -0.1 to 0.1, as in the code released with CAPE."""
        for table in self.parameters():
            nn.init.uniform_(table, -0.1, 0.1)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"context={self.context}, clip={self.clip}"


class RelativeGridPositions(nn.Module):
    """Learned embeddings of the distances between patches of an image: an embedding for the
    distance in rows plus an embedding for the distance in columns, so images of every height and
    width have all distances. (Ramachandran et al., 2019, concatenate the two.) Grids of other axes
    have one embedding for each axis.

    Takes the arguments of :class:`RelativePositions`, which hold for each axis; C is a number of
    patches.

    Args:
        axes: Names of the axes, the slowest first; the tables have these names.
    """

    def __init__(
        self,
        context: int,
        head_dim: int,
        num_heads: int | None = None,
        values: bool = False,
        beyond: str = "clip",
        axes: Sequence[str] = ("rows", "columns"),
    ) -> None:
        super().__init__()
        self.axes = tuple(axes)
        for axis in axes:
            setattr(self, axis, RelativePositions(context, head_dim, num_heads, values, beyond))

    @property
    def values(self) -> Tensor | None:
        """Embeddings of the first axis that are added to the values, ``[H or 1, 2 C + 1, d]``; None
        if there are none."""
        return getattr(self, self.axes[0]).values


def build_relative_positions(
    config: PositionConfig, head_dim: int, num_heads: int
) -> RelativePositions | RelativeGridPositions | None:
    """Relative positions of one attention module; None without relative attention.
    :meth:`~cape_plugins.PositionConfig.in_layer` tells which layers have relative attention.

    Args:
        config: Complete settings.
        head_dim: d.
        num_heads: H, for settings with a table for each head.
    """
    if not config.relative_context:
        return None
    heads = {"shared": None, "separate": num_heads}[config.relative_heads]
    settings = {
        "context": config.relative_context,
        "head_dim": head_dim,
        "num_heads": heads,
        "values": config.relative_values,
        "beyond": config.relative_beyond,
    }
    axes = DOMAINS[config.domain].grid
    if axes:
        return RelativeGridPositions(**settings, axes=axes)
    return RelativePositions(**settings)
