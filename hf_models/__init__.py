"""Hugging Face models whose position embedding is chosen by their configuration.

Importing this package registers the model types ``cape_marian`` and ``cape_vit`` with the Auto
classes of transformers.
"""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
)

from hf_models.configuration import CapeMarianConfig, CapeViTConfig
from hf_models.marian import CapeMarianModel, CapeMarianMTModel
from hf_models.vit import CapeViTForImageClassification, CapeViTModel

__all__ = [
    "CapeMarianConfig",
    "CapeMarianMTModel",
    "CapeMarianModel",
    "CapeViTConfig",
    "CapeViTForImageClassification",
    "CapeViTModel",
]

AUTO_CLASSES = {
    CapeMarianConfig: {AutoModel: CapeMarianModel, AutoModelForSeq2SeqLM: CapeMarianMTModel},
    CapeViTConfig: {
        AutoModel: CapeViTModel,
        AutoModelForImageClassification: CapeViTForImageClassification,
    },
}


MODELS = tuple(model.__name__ for models in AUTO_CLASSES.values() for model in models.values())


def _register() -> None:
    for config, models in AUTO_CLASSES.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto, model in models.items():
            auto.register(config, model, exist_ok=True)


_register()
