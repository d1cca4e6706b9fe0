"""Pegasus summarization models with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusModel,
)
from transformers.models.pegasus.modeling_pegasus import PegasusDecoder, PegasusEncoder

from hf_models.seams.bos_hint import Generates
from hf_models.seams.text import SourceStack, TargetStack, TranslationModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapePegasusConfig(PositionEmbeddingMixin, PegasusConfig):
    """Summarization. Positions count tokens from 0."""

    model_type = "cape_pegasus"
    position_embedding: dict | None = None


class CapePegasusEncoder(SourceStack, PegasusEncoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""


class CapePegasusDecoder(TargetStack, PegasusDecoder):
    """Target side; uses the draw of the source if the two are synchronised."""


class CapePegasusModel(TranslationModel, PositionModelMixin, PegasusModel):
    """Encoder and decoder; ``forward(..., draw=, decoder_draw=)``."""


class CapePegasusForConditionalGeneration(
    Generates, PositionModelMixin, PegasusForConditionalGeneration
):
    """Translation and other generation; ``forward(..., draw=)`` and ``generate()`` as in stock."""


FAMILY = add_parts(
    FamilyClasses(
        CapePegasusConfig,
        (
            CapePegasusEncoder,
            CapePegasusDecoder,
            CapePegasusModel,
            CapePegasusForConditionalGeneration,
        ),
    )
)
