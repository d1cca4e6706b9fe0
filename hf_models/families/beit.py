"""BEiT for images of any height and width, with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    BeitBackbone,
    BeitConfig,
    BeitForImageClassification,
    BeitModel,
)
from transformers.models.beit.modeling_beit import BeitEmbeddings

from hf_models.configuration import PositionEmbeddingMixin
from hf_models.images import ImageModel, PatchEmbeddings
from hf_models.modeling import PositionModelMixin
from hf_models.switching import FamilyClasses, add_parts


@strict
class CapeBeitConfig(PositionEmbeddingMixin, BeitConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square.
    The relative biases of stock checkpoints stay beside it."""

    model_type = "cape_beit"
    position_embedding: dict | None = None


class CapeBeitEmbeddings(PatchEmbeddings, BeitEmbeddings):
    """Patches, special tokens and positions."""

    has_flag = False


class CapeBeitModel(ImageModel, PositionModelMixin, BeitModel):
    """Patches to hidden states; images of any size, no flag needed."""


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
