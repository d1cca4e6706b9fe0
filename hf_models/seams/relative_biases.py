"""Models of images whose layers have learned biases of relative positions (BEiT)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_models.seams.images import ImageModel


class RelativeBiasModel(ImageModel):
    """Mixin over a stock model of images that may have tables of relative biases. The tables stay
    under all types of position embedding."""

    def resize_images(self, height: int, width: int) -> None:
        """See :meth:`ImageModel.resize_images`. Tables of relative biases are resized as well,
        bilinearly, as in each stock forward; the biases of the class token stay.

        Raises:
            ValueError: if the model has relative biases and the size is no square: then the stock
                forward mixes up rows and columns of the tables.
        """
        modules = self.modules()
        tables = [module for module in modules if hasattr(module, "relative_position_bias_table")]
        if tables and height != width:
            raise ValueError(
                f"an image size of {height} x {width} pixels is not allowed for "
                f"{type(self).__name__} with relative position biases; allowed: height = width. "
                "Give a square; forward still takes images of any height and width."
            )
        super().resize_images(height, width)
        for table in tables:
            _resize_biases(table, self.embeddings.table_size)


def _resize_biases(table: Any, size: tuple[int, int]) -> None:
    """Resizes `table` for images of `size` patches."""
    old, new = ([2 * side - 1 for side in sides] for sides in (table.window_size, size))
    biases = table.relative_position_bias_table  # the last three are biases of the class token
    between_patches = biases[:-3].detach().T.unflatten(1, old)  # [H, rows, columns]
    between_patches = F.interpolate(between_patches[None], new, mode="bilinear")[0].flatten(1).T
    resized = torch.cat((between_patches, biases[-3:].detach()))
    table.relative_position_bias_table = nn.Parameter(resized, biases.requires_grad)
    table.window_size, table.num_relative_distance = size, len(resized)
