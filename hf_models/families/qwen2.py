"""Qwen2 with augmented rotary positions."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from hf_models.seams.rotary import RotaryAngles, RotaryModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeQwen2Config(PositionEmbeddingMixin, Qwen2Config):
    """Texts of any length. Queries and keys are turned; local shift and scale move positions in
    training."""

    model_type = "cape_qwen2"
    position_embedding: dict | None = None


class CapeQwen2RotaryEmbedding(RotaryAngles, Qwen2RotaryEmbedding):
    """Angles of augmented positions."""


class CapeQwen2Model(RotaryModel, PositionModelMixin, Qwen2Model):
    """Tokens to hidden states; ``forward(..., draw=)``."""


class CapeQwen2ForCausalLM(PositionModelMixin, Qwen2ForCausalLM):
    """Predicts the next token; ``generate()`` as in the stock class."""

    accepts_loss_kwargs = True


class CapeQwen2ForSequenceClassification(PositionModelMixin, Qwen2ForSequenceClassification):
    """Classifies texts."""


FAMILY = add_parts(
    FamilyClasses(
        CapeQwen2Config,
        (
            CapeQwen2RotaryEmbedding,
            CapeQwen2Model,
            CapeQwen2ForCausalLM,
            CapeQwen2ForSequenceClassification,
        ),
    )
)
