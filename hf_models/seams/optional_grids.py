"""Patch embeddings whose configuration tells whether there is a table of patches, as in
data2vec-vision, beside biases of distances in attention, for all such families."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_models.seams.base import Seam
from hf_models.seams.grids import ParameterOwner
from hf_models.seams.rows import is_position_table

_FIELD = "use_absolute_position_embeddings"  # of stock configurations
_CLASS = "cls_token"  # parameter [1, 1, C]; its row is the first one


class OptionalTable(ParameterOwner):
    """Takes the place of a stock module that adds a table unless its attribute is None.

    A learned type has a table in any case; a new table begins with zeros, as stock tables do. A
    type that adds nothing leaves the stock module without a table.
    """

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with a class token, a convolution
        over images and an attribute for a table, in a model whose configuration tells whether
        there is a table."""
        if not hasattr(getattr(model, "config", None), _FIELD):
            return
        for path, module in model.named_modules():
            has_patches = any(isinstance(part, cls.convolution) for part in module.modules())
            if isinstance(module, Seam) or _CLASS not in module._parameters or not has_patches:
                continue
            for name in (*module._parameters, *vars(module)):
                if is_position_table(name):
                    yield path, module, {"name": name}
                    break

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`."""
        name = keywords["name"]
        return (cls, stock), {"table_name": name, name: _table_or_embedding(name)}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        name = self.table_name
        vars(self).pop(name, None)
        if self._parameters.get(name) is None:
            self._parameters[name] = nn.Parameter(self._new_table(config))
        super().prepare(owner, path, config, trained)

    def _new_table(self, config: Any) -> Tensor:
        """Zeros ``[1, class token + patches, C]``."""
        self.kernel, self.stride = self.patch_sizes(self)
        patches = math.prod(self.patches(*self.trained_size(self, config)))
        token = getattr(self, _CLASS)
        return torch.zeros_like(token).repeat(1, 1 + patches, 1)


def _table_or_embedding(name: str) -> property:
    """An attribute of a class that gives the stock table, or the embeddings of this forward; None
    if nothing is added."""

    def get(self: OptionalTable) -> Tensor | None:
        if (table := self._parameters.get(name)) is not None:
            return table
        return self.embedding(self.like) if self.positions.config.encoding.adds else None

    return property(get)
