"""Marian translation models with any position embedding."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import (
    MarianConfig,
    MarianModel,
    MarianMTModel,
)
from transformers.models.marian.modeling_marian import MarianDecoder, MarianEncoder

from hf_models.seams.bos_hint import Generates
from hf_models.seams.text import SourceStack, TargetStack, TranslationModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeMarianConfig(PositionEmbeddingMixin, MarianConfig):
    """Translation. Positions count tokens from 0. The BOS hint on the source is `bos_token_id`, or
    `eos_token_id` for models without `bos_token_id` (Marian)."""

    model_type = "cape_marian"
    position_embedding: dict | None = None


class CapeMarianEncoder(SourceStack, MarianEncoder):
    """Source side: alpha scales the positions, the BOS hint marks the first."""


class CapeMarianDecoder(TargetStack, MarianDecoder):
    """Target side; uses the draw of the source if the two are synchronised."""


class CapeMarianModel(TranslationModel, PositionModelMixin, MarianModel):
    """Encoder and decoder; ``forward(..., draw=, decoder_draw=)``."""


class CapeMarianMTModel(Generates, PositionModelMixin, MarianMTModel):
    """Translation model; ``forward(..., draw=)`` and ``generate()`` as in the stock class."""

    _keys_to_ignore_on_load_missing: ClassVar = ["final_logits_bias"]
    _keys_to_ignore_on_save = None


FAMILY = add_parts(
    FamilyClasses(
        CapeMarianConfig,
        (CapeMarianEncoder, CapeMarianDecoder, CapeMarianModel, CapeMarianMTModel),
    )
)
