"""Llama with augmented rotary positions."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_models.seams.rotary import RotaryAngles, RotaryModel
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin


@strict
class CapeLlamaConfig(PositionEmbeddingMixin, LlamaConfig):
    """Texts of any length. Queries and keys are turned; local shift and scale move positions in
    training."""

    model_type = "cape_llama"
    position_embedding: dict | None = None


class CapeLlamaRotaryEmbedding(RotaryAngles, LlamaRotaryEmbedding):
    """Angles of augmented positions."""


class CapeLlamaModel(RotaryModel, PositionModelMixin, LlamaModel):
    """Tokens to hidden states; ``forward(..., draw=)``."""


class CapeLlamaForCausalLM(PositionModelMixin, LlamaForCausalLM):
    """Predicts the next token; ``generate()`` as in the stock class."""

    accepts_loss_kwargs = True


class CapeLlamaForSequenceClassification(PositionModelMixin, LlamaForSequenceClassification):
    """Classifies texts."""


FAMILY = add_parts(
    FamilyClasses(
        CapeLlamaConfig,
        (
            CapeLlamaRotaryEmbedding,
            CapeLlamaModel,
            CapeLlamaForCausalLM,
            CapeLlamaForSequenceClassification,
        ),
    )
)
