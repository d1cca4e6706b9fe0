"""mBART with any position embedding, for texts of any length."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    MBartConfig,
    MBartForConditionalGeneration,
    MBartForSequenceClassification,
    MBartModel,
)
from transformers.models.mbart.modeling_mbart import (
    MBartDecoder,
    MBartEncoder,
    MBartLearnedPositionalEmbedding,
)

from hf_models.seams.bos_hint import Generates
from hf_models.seams.text import SourceStack, TargetStack, TranslationModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, LearnedTable, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeMBartConfig(PositionEmbeddingMixin, MBartConfig):
    """Translation between many languages. Positions count tokens from 0; a learned table keeps the
    stock layout, with two rows before the first position."""

    model_type = "cape_mbart"
    position_embedding: dict | None = None


class CapeMBartLearnedPositionalEmbedding(LearnedTable, MBartLearnedPositionalEmbedding):
    """The stock table, if the type has a table."""


class CapeMBartEncoder(SourceStack, MBartEncoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""


class CapeMBartDecoder(TargetStack, MBartDecoder):
    """Target side; uses the draw of the source if the two are synchronised."""


class CapeMBartModel(TranslationModel, PositionModelMixin, MBartModel):
    """Encoder and decoder; ``forward(..., draw=, decoder_draw=)``."""


class CapeMBartForConditionalGeneration(
    Generates, PositionModelMixin, MBartForConditionalGeneration
):
    """Translation and other generation; ``forward(..., draw=)`` and ``generate()`` as in stock."""


class CapeMBartForSequenceClassification(PositionModelMixin, MBartForSequenceClassification):
    """Classifier on the decoder's state at the last EOS."""


FAMILY = add_parts(
    FamilyClasses(
        CapeMBartConfig,
        (
            CapeMBartLearnedPositionalEmbedding,
            CapeMBartEncoder,
            CapeMBartDecoder,
            CapeMBartModel,
            CapeMBartForConditionalGeneration,
            CapeMBartForSequenceClassification,
        ),
    )
)
