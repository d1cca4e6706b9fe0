"""BEiT for images of any height and width, with any position embedding."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import (
    BeitBackbone,
    BeitConfig,
    BeitForImageClassification,
    BeitModel,
)
from transformers.models.beit.modeling_beit import BeitEmbeddings, BeitRelativePositionBias

from hf_models.seams.images import ImageModel, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeBeitConfig(PositionEmbeddingMixin, BeitConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square. The
    relative biases of stock checkpoints stay. The stock type is `nopos` unless the configuration
    has absolute positions; a table that `abspos` adds to a stock checkpoint begins at zero."""

    model_type = "cape_beit"
    position_embedding: dict | None = None


class CapeBeitEmbeddings(PatchEmbeddings, BeitEmbeddings):
    """Patches, special tokens and positions."""

    has_flag = False


class CapeBeitModel(ImageModel, PositionModelMixin, BeitModel):
    """Patches to hidden states; images of any size, no flag needed."""

    def resize_images(self, height: int, width: int) -> None:
        """See :meth:`ImageModel.resize_images`. Tables of relative biases are resized as well,
        bilinearly, as in each stock forward; the biases of the class token stay.

        Raises:
            ValueError: if the model has relative biases and the size is no square: then the stock
                forward mixes up rows and columns of the tables.
        """
        tables = [
            module for module in self.modules() if isinstance(module, BeitRelativePositionBias)
        ]
        if tables and height != width:
            raise ValueError(
                f"an image size of {height} x {width} pixels is not allowed for "
                f"{type(self).__name__} with relative position biases; allowed: height = width. "
                "Give a square; forward still takes images of any height and width."
            )
        super().resize_images(height, width)
        for table in tables:
            _resize_biases(table, self.embeddings.table_size)


def _resize_biases(table: BeitRelativePositionBias, size: tuple[int, int]) -> None:
    """Resizes `table` for images of `size` patches."""
    old, new = ([2 * side - 1 for side in sides] for sides in (table.window_size, size))
    biases = table.relative_position_bias_table
    between_patches = biases[:-3].detach().T.unflatten(1, old)  # [H, rows, columns]
    between_patches = F.interpolate(between_patches[None], new, mode="bilinear")[0].flatten(1).T
    resized = torch.cat((between_patches, biases[-3:].detach()))
    table.relative_position_bias_table = nn.Parameter(resized, biases.requires_grad)
    table.window_size, table.num_relative_distance = size, len(resized)


class CapeBeitForImageClassification(PositionModelMixin, BeitForImageClassification):
    """Linear classifier."""


class CapeBeitBackbone(PositionModelMixin, BeitBackbone):
    """Feature maps for detection and segmentation."""


FAMILY = add_parts(
    FamilyClasses(
        CapeBeitConfig,
        (
            CapeBeitEmbeddings,
            CapeBeitModel,
            CapeBeitForImageClassification,
            CapeBeitBackbone,
        ),
    )
)
