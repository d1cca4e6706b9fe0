"""Models of images whose tokens of detections stand behind the patches, and that add positions
again behind their layers, as in YOLOS, for all such families: images of any height and width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_models.seams.base import Seam
from hf_models.seams.grids import ParameterOwner, as_pair
from hf_models.seams.rotary import arguments_of
from hf_models.seams.rows import is_position_table
from hf_models.seams.stack_attention import refuse_in_attention

_NUMBER = "num_detection_tokens"  # field of stock configurations
_DETECTIONS = "detection_tokens"  # parameter [1, detections, C]
_CLASS = "cls_token"  # parameter [1, 1, C], before the patches
_MOVED = "detection"  # key of the embeddings of a forward
_RESIZE = ("pos_embed", "img_size")  # arguments of the stock module that resizes the first table


class DetectionPositions(Seam):
    """Finds the modules with tables for patches and detections: :class:`InputTable` at the input,
    and :class:`LayerTables` behind the layers."""

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with a number of detections and a
        table of positions; the keyword `part` is the class for the module."""
        for path, module in model.named_modules():
            if isinstance(module, Seam) or not hasattr(getattr(module, "config", None), _NUMBER):
                continue
            part = InputTable if _DETECTIONS in module._parameters else LayerTables
            for name in module._parameters:
                if is_position_table(name):
                    yield path, module, {"part": part, "name": name}


class DetectionGrid(ParameterOwner):
    """Base of the modules with a table ``[..., class token + patches + detections, C]``."""

    resizes_table = True

    def patch_sizes(self, owner: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See :class:`~hf_models.seams.grids.PatchGrid`."""
        size = as_pair(owner.config.patch_size)
        return size, size

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Types that act in attention, which expect
        all special tokens before the patches, are refused."""
        refuse_in_attention(
            self.settings_in(config),
            f"{type(self).__name__} puts tokens of detections behind the patches",
        )
        self.tokens_behind = getattr(self.config, _NUMBER)
        super().prepare(owner, path, config, trained)

    def embedding(self, like: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """``[1 or B, class token + patches + detections, C]``, zero at special tokens. Input and
        layers of a forward get the same embeddings. For the arguments see
        :meth:`~hf_models.seams.grids.PatchGrid.embed_grid`."""
        if self.bound is None:
            return super().embedding(like, size)
        moved = self.bound.moved
        if _MOVED not in moved:
            moved[_MOVED] = super().embedding(like, size)
        return moved[_MOVED]


class InputTable(DetectionGrid):
    """Takes the place of the stock module that puts class token, patches and detections together
    and adds the first table."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`. A trained table leaves its rows of special
        tokens with the tokens."""
        table = self._parameters[self.table_name]
        super().prepare(owner, path, config, trained)
        if not self.drops_table:
            return
        if trained:
            with torch.no_grad():
                getattr(self, _CLASS).add_(table[:, :1])
                getattr(self, _DETECTIONS).add_(table[:, -self.tokens_behind :])
        for name, module in list(self.named_children()):
            if arguments_of(type(module))[1:] == _RESIZE:
                setattr(self, name, AsItIs())


class AsItIs(nn.Module):
    """Takes the place of a stock module that resizes a table: the embeddings of a forward have the
    size of its images already."""

    def forward(self, embedding: Tensor, size: Any) -> Tensor:
        """``[1 or B, class token + patches + detections, C]``, unchanged."""
        return embedding


class LayerTables(DetectionGrid):
    """Takes the place of the stock module with a table for each layer but the last ``[layers - 1,
    1, class token + patches + detections, C]``, which the stock encoder adds behind the layer.
    Other types than the stock type add the same positions there as at the input."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.layers = len(self._parameters[self.table_name])
        super().prepare(owner, path, config, trained)

    def forward(self, img_size: tuple[int, int]) -> Tensor:
        """``[layers - 1, 1 or B, class token + patches + detections, C]``.

        Args:
            img_size: Height and width of the images.
        """
        if not self.drops_table:
            return super().forward(img_size)
        embedding = self.embedding(self.like, tuple(img_size))
        return embedding.expand(self.layers, *embedding.shape)
