"""DINOv2 with registers for images of any height and width, with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    Dinov2WithRegistersBackbone,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
)
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
)

from hf_models.seams.images import ImageModel, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeDinov2WithRegistersConfig(PositionEmbeddingMixin, Dinov2WithRegistersConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square.
    Registers are special tokens that get no position."""

    model_type = "cape_dinov2_with_registers"
    position_embedding: dict | None = None


class CapeDinov2WithRegistersEmbeddings(PatchEmbeddings, Dinov2WithRegistersEmbeddings):
    """Patches, special tokens and positions."""

    has_flag, antialias = False, True


class CapeDinov2WithRegistersModel(ImageModel, PositionModelMixin, Dinov2WithRegistersModel):
    """Patches to hidden states; images of any size, no flag needed."""


class CapeDinov2WithRegistersForImageClassification(
    PositionModelMixin, Dinov2WithRegistersForImageClassification
):
    """Linear classifier."""


class CapeDinov2WithRegistersBackbone(ImageModel, PositionModelMixin, Dinov2WithRegistersBackbone):
    """Feature maps for detection and segmentation."""


FAMILY = add_parts(
    FamilyClasses(
        CapeDinov2WithRegistersConfig,
        (
            CapeDinov2WithRegistersEmbeddings,
            CapeDinov2WithRegistersModel,
            CapeDinov2WithRegistersForImageClassification,
            CapeDinov2WithRegistersBackbone,
        ),
    )
)
