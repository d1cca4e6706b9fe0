"""BERT for texts of any length, with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)
from transformers.models.bert.modeling_bert import BertEmbeddings

from hf_models.seams.tokens import TokenEmbeddings, TokenModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeBertConfig(PositionEmbeddingMixin, BertConfig):
    """Texts of any length. Positions count tokens from 0, without padding on either side."""

    model_type = "cape_bert"
    position_embedding: dict | None = None


class CapeBertEmbeddings(TokenEmbeddings, BertEmbeddings):
    """Tokens, their types and positions."""


class CapeBertModel(TokenModel, PositionModelMixin, BertModel):
    """Tokens to hidden states; ``forward(..., draw=)``."""


class CapeBertForMaskedLM(PositionModelMixin, BertForMaskedLM):
    """Predicts masked tokens."""


class CapeBertForSequenceClassification(PositionModelMixin, BertForSequenceClassification):
    """Classifies texts."""


class CapeBertForTokenClassification(PositionModelMixin, BertForTokenClassification):
    """Classifies tokens."""


class CapeBertForQuestionAnswering(PositionModelMixin, BertForQuestionAnswering):
    """Finds the answer in a text."""


FAMILY = add_parts(
    FamilyClasses(
        CapeBertConfig,
        (
            CapeBertEmbeddings,
            CapeBertModel,
            CapeBertForMaskedLM,
            CapeBertForSequenceClassification,
            CapeBertForTokenClassification,
            CapeBertForQuestionAnswering,
        ),
    )
)
