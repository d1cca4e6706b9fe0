"""SigLIP's vision model, and classifiers on it, for images of any height and width, with any
position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    SiglipConfig,
    SiglipForImageClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from hf_models.seams.images import ImageModel, NoTable, PatchEmbeddings
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeSiglipVisionConfig(PositionEmbeddingMixin, SiglipVisionConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square."""

    model_type = "cape_siglip_vision_model"
    position_embedding: dict | None = None


@strict
class CapeSiglipConfig(PositionEmbeddingMixin, SiglipConfig):
    """A classifier of images; holds the position embedding, and `vision_config` holds sizes."""

    model_type = "cape_siglip"
    position_embedding: dict | None = None


class CapeSiglipVisionEmbeddings(PatchEmbeddings, SiglipVisionEmbeddings):
    """Patches and positions; there is no special token."""

    special_tokens = ()
    square = True

    @property
    def table(self) -> Tensor | None:
        """See :class:`~hf_models.seams.images.PatchEmbeddings`."""
        return None if self.positions is not None else self.position_embedding.weight[None]

    def set_table(self, table: nn.Parameter | None) -> None:
        """See :class:`~hf_models.seams.images.PatchEmbeddings`."""
        self.position_embedding = NoTable()
        if table is not None:
            self.position_embedding = nn.Embedding.from_pretrained(
                table.data[0], freeze=not table.requires_grad
            )


class CapeSiglipVisionModel(ImageModel, PositionModelMixin, SiglipVisionModel):
    """Patches to hidden states; images of any size, no flag needed."""


class CapeSiglipForImageClassification(PositionModelMixin, SiglipForImageClassification):
    """Linear classifier on the mean of the patches."""


VISION = add_parts(
    FamilyClasses(CapeSiglipVisionConfig, (CapeSiglipVisionEmbeddings, CapeSiglipVisionModel))
)
CLASSIFIER = add_parts(FamilyClasses(CapeSiglipConfig, (CapeSiglipForImageClassification,)))
