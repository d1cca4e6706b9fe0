"""Vision transformers for images of any height and width, with any position embedding."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import (
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.vit.modeling_vit import ViTEmbeddings

from hf_models.seams.drop_path import add_drop_path
from hf_models.seams.images import ImageModel, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeViTConfig(PositionEmbeddingMixin, ViTConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square.

    Args:
        drop_path_rate: Stochastic depth in training: probability that a sample goes past a branch
            of the last layer. The probability grows linearly from 0 at the first layer.
    """

    model_type = "cape_vit"

    drop_path_rate: float | int = 0.0
    position_embedding: dict | None = None

    def validate_drop_path_rate(self) -> None:
        """Part of strict validation."""
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(
                f"drop_path_rate={self.drop_path_rate} is not allowed; allowed: 0 to less than 1, "
                "such as 0.1."
            )


class CapeViTEmbeddings(PatchEmbeddings, ViTEmbeddings):
    """Patches, class token and positions."""


class CapeViTModel(ImageModel, PositionModelMixin, ViTModel):
    """See transformers' ViTModel; images of any size, no flag needed."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        super().install_positions(config, trained)
        add_drop_path(self.layers, config.drop_path_rate)


class CapeViTForImageClassification(PositionModelMixin, ViTForImageClassification):
    """Linear classifier on the class token."""


FAMILY = add_parts(
    FamilyClasses(
        CapeViTConfig,
        (CapeViTEmbeddings, CapeViTModel, CapeViTForImageClassification),
    )
)
