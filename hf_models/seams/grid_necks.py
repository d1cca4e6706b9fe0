"""Necks of heads that put patches back into a grid (DPT), for images of any height and width."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from hf_models.seams.base import Seam
from hf_models.seams.patch_counts import count_patches

_GRID = ("patch_height", "patch_width")  # arguments of necks: rows and columns of patches
_PIXELS = "pixel_values"


def is_neck(model: nn.Module, path: str) -> bool:
    """Whether the module at a path takes the rows and columns of patches, and the module that
    holds it does not hand them on."""
    holder = model.get_submodule(path.rpartition(".")[0])
    return _takes_grid(type(model.get_submodule(path))) and not _takes_grid(type(holder))


@functools.cache
def _takes_grid(stock: type[nn.Module]) -> bool:
    arguments = inspect.signature(stock.forward).parameters
    return all(name in arguments and arguments[name].default is None for name in _GRID)


class GridNeck(Seam):
    """Mixin over a stock neck: gives it the rows and columns of patches where the head around it
    does not. The stock neck would put the patches into a square."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        embeddings = next(part for part in owner.modules() if isinstance(part, Seam) and part.adds)
        self.kernel, self.stride = embeddings.patch_grid.kernel, embeddings.patch_grid.stride

    def forward(
        self, hidden_states: Any, patch_height: int | None = None, patch_width: int | None = None
    ) -> Any:
        """See transformers."""
        size = None if self.bound is None else self.bound.size(_PIXELS)
        if patch_height is None and size is not None:
            patch_height, patch_width = count_patches(*size[-2:], self.kernel, self.stride)
        return super().forward(hidden_states, patch_height, patch_width)
