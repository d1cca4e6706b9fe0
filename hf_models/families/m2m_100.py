"""M2M100 and NLLB translation models with any position embedding."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Model,
)
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Decoder, M2M100Encoder

from hf_models.seams.bos_hint import Generates
from hf_models.seams.text import SourceStack, TargetStack, TranslationModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeM2M100Config(PositionEmbeddingMixin, M2M100Config):
    """Translation between many languages. Positions count tokens from `pad_token_id` + 1; language
    codes are tokens like others, behind the BOS hint."""

    model_type = "cape_m2m_100"
    position_embedding: dict | None = None


class CapeM2M100Encoder(SourceStack, M2M100Encoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""

    padding_by_id = True


class CapeM2M100Decoder(TargetStack, M2M100Decoder):
    """Target side; uses the draw of the source if the two are synchronised."""

    padding_by_id = True


class CapeM2M100Model(TranslationModel, PositionModelMixin, M2M100Model):
    """Encoder and decoder; ``forward(..., draw=, decoder_draw=)``."""


class CapeM2M100ForConditionalGeneration(
    Generates, PositionModelMixin, M2M100ForConditionalGeneration
):
    """Translation and other generation; ``forward(..., draw=)`` and ``generate()`` as in stock."""


FAMILY = add_parts(
    FamilyClasses(
        CapeM2M100Config,
        (
            CapeM2M100Encoder,
            CapeM2M100Decoder,
            CapeM2M100Model,
            CapeM2M100ForConditionalGeneration,
        ),
    )
)
