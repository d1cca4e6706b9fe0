"""DeiT for images of any height and width, with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
)
from transformers.models.deit.modeling_deit import DeiTEmbeddings

from hf_models.seams.images import ImageModel, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeDeiTConfig(PositionEmbeddingMixin, DeiTConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square."""

    model_type = "cape_deit"
    position_embedding: dict | None = None


class CapeDeiTEmbeddings(PatchEmbeddings, DeiTEmbeddings):
    """Patches, special tokens and positions."""

    special_tokens = ("cls_token", "distillation_token")


class CapeDeiTModel(ImageModel, PositionModelMixin, DeiTModel):
    """Patches to hidden states; images of any size, no flag needed."""


class CapeDeiTForImageClassification(PositionModelMixin, DeiTForImageClassification):
    """Linear classifier."""


class CapeDeiTForImageClassificationWithTeacher(
    PositionModelMixin, DeiTForImageClassificationWithTeacher
):
    """Two linear classifiers, on the class token and on the distillation token."""


FAMILY = add_parts(
    FamilyClasses(
        CapeDeiTConfig,
        (
            CapeDeiTEmbeddings,
            CapeDeiTModel,
            CapeDeiTForImageClassification,
            CapeDeiTForImageClassificationWithTeacher,
        ),
    )
)
