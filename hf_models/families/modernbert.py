"""ModernBERT with augmented rotary positions."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForQuestionAnswering,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
)
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from hf_models.seams.rotary import RotaryAngles, RotaryModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeModernBertConfig(PositionEmbeddingMixin, ModernBertConfig):
    """Texts of any length. Queries and keys are turned; local shift and scale move positions in
    training."""

    model_type = "cape_modernbert"
    position_embedding: dict | None = None


class CapeModernBertRotaryEmbedding(RotaryAngles, ModernBertRotaryEmbedding):
    """Angles of augmented positions."""

    side = "encoder"


class CapeModernBertModel(RotaryModel, PositionModelMixin, ModernBertModel):
    """Tokens to hidden states; ``forward(..., draw=)``."""

    causal = False


class CapeModernBertForMaskedLM(PositionModelMixin, ModernBertForMaskedLM):
    """Predicts masked tokens."""

    accepts_loss_kwargs = True


class CapeModernBertForSequenceClassification(
    PositionModelMixin, ModernBertForSequenceClassification
):
    """Classifies texts."""


class CapeModernBertForTokenClassification(PositionModelMixin, ModernBertForTokenClassification):
    """Classifies tokens."""


class CapeModernBertForQuestionAnswering(PositionModelMixin, ModernBertForQuestionAnswering):
    """Finds the answer in a text."""


FAMILY = add_parts(
    FamilyClasses(
        CapeModernBertConfig,
        (
            CapeModernBertRotaryEmbedding,
            CapeModernBertModel,
            CapeModernBertForMaskedLM,
            CapeModernBertForSequenceClassification,
            CapeModernBertForTokenClassification,
            CapeModernBertForQuestionAnswering,
        ),
    )
)
