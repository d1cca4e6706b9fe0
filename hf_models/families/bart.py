"""BART with any position embedding, for texts of any length."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    BartModel,
)
from transformers.models.bart.modeling_bart import (
    BartDecoder,
    BartEncoder,
    BartLearnedPositionalEmbedding,
)

from hf_models.seams.bos_hint import Generates
from hf_models.seams.text import SourceStack, TargetStack, TranslationModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, LearnedTable, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeBartConfig(PositionEmbeddingMixin, BartConfig):
    """Generation and classification. Positions count tokens from 0; a learned table keeps the stock
    layout, with two rows before the first position."""

    model_type = "cape_bart"
    position_embedding: dict | None = None


class CapeBartLearnedPositionalEmbedding(LearnedTable, BartLearnedPositionalEmbedding):
    """The stock table, if the type has a table."""


class CapeBartEncoder(SourceStack, BartEncoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""


class CapeBartDecoder(TargetStack, BartDecoder):
    """Target side; uses the draw of the source if the two are synchronised."""


class CapeBartModel(TranslationModel, PositionModelMixin, BartModel):
    """Encoder and decoder; ``forward(..., draw=, decoder_draw=)``."""


class CapeBartForConditionalGeneration(Generates, PositionModelMixin, BartForConditionalGeneration):
    """Translation and other generation; ``forward(..., draw=)`` and ``generate()`` as in stock."""


class CapeBartForSequenceClassification(PositionModelMixin, BartForSequenceClassification):
    """Classifier on the decoder's state at the last EOS."""


FAMILY = add_parts(
    FamilyClasses(
        CapeBartConfig,
        (
            CapeBartLearnedPositionalEmbedding,
            CapeBartEncoder,
            CapeBartDecoder,
            CapeBartModel,
            CapeBartForConditionalGeneration,
            CapeBartForSequenceClassification,
        ),
    )
)
