"""DINOv2 for images of any height and width, with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    Dinov2Backbone,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
)
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings

from hf_models.seams.images import ImageModel, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeDinov2Config(PositionEmbeddingMixin, Dinov2Config):
    """Images of any height and width; positions are patch centres in the [-1, 1] square."""

    model_type = "cape_dinov2"
    position_embedding: dict | None = None


class CapeDinov2Embeddings(PatchEmbeddings, Dinov2Embeddings):
    """Patches, special tokens and positions."""

    has_flag = False


class CapeDinov2Model(ImageModel, PositionModelMixin, Dinov2Model):
    """Patches to hidden states; images of any size, no flag needed."""


class CapeDinov2ForImageClassification(PositionModelMixin, Dinov2ForImageClassification):
    """Linear classifier."""


class CapeDinov2Backbone(ImageModel, PositionModelMixin, Dinov2Backbone):
    """Feature maps for detection and segmentation."""


FAMILY = add_parts(
    FamilyClasses(
        CapeDinov2Config,
        (
            CapeDinov2Embeddings,
            CapeDinov2Model,
            CapeDinov2ForImageClassification,
            CapeDinov2Backbone,
        ),
    )
)
