"""Hugging Face models whose position embedding is chosen by their configuration.

Importing this package registers the model types ``cape_marian``, ``cape_vit``, ``cape_speech_ctc``
and ``cape_speech_to_text`` with the Auto classes of transformers.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    Wav2Vec2Processor,
)

from hf_models.callback import RankSeedCallback
from hf_models.configuration import (
    CapeMarianConfig,
    CapeSpeech2TextConfig,
    CapeSpeechConfig,
    CapeViTConfig,
)
from hf_models.families.marian import CapeMarianModel, CapeMarianMTModel
from hf_models.families.speech_ctc import CapeSpeechForCTC, CapeSpeechModel
from hf_models.families.speech_to_text import (
    CapeSpeech2TextForConditionalGeneration,
    CapeSpeech2TextModel,
)
from hf_models.families.vit import CapeViTForImageClassification, CapeViTModel
from hf_models.feature_extraction import CapeSpeechFeatureExtractor
from hf_models.settings import refuse_misplaced
from hf_models.tokenization import CapeSpeechTokenizer

__all__ = [
    "CapeMarianConfig",
    "CapeMarianMTModel",
    "CapeMarianModel",
    "CapeSpeech2TextConfig",
    "CapeSpeech2TextForConditionalGeneration",
    "CapeSpeech2TextModel",
    "CapeSpeechConfig",
    "CapeSpeechFeatureExtractor",
    "CapeSpeechForCTC",
    "CapeSpeechModel",
    "CapeSpeechTokenizer",
    "CapeViTConfig",
    "CapeViTForImageClassification",
    "CapeViTModel",
    "RankSeedCallback",
]

AUTO_CLASSES = {
    CapeMarianConfig: {AutoModel: CapeMarianModel, AutoModelForSeq2SeqLM: CapeMarianMTModel},
    CapeViTConfig: {
        AutoModel: CapeViTModel,
        AutoModelForImageClassification: CapeViTForImageClassification,
    },
    CapeSpeechConfig: {AutoModel: CapeSpeechModel, AutoModelForCTC: CapeSpeechForCTC},
    CapeSpeech2TextConfig: {
        AutoModel: CapeSpeech2TextModel,
        AutoModelForSpeechSeq2Seq: CapeSpeech2TextForConditionalGeneration,
    },
}


MODELS = tuple(model.__name__ for models in AUTO_CLASSES.values() for model in models.values())


def _register() -> None:
    for config, models in AUTO_CLASSES.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto, model in models.items():
            auto.register(config, model, exist_ok=True)
    # Subwords by a tokenizer of our own, letters by transformers' Wav2Vec2CTCTokenizer, which the
    # files of a checkpoint name; its processor takes any features.
    AutoFeatureExtractor.register(CapeSpeechConfig, CapeSpeechFeatureExtractor, exist_ok=True)
    AutoTokenizer.register(
        CapeSpeechConfig, slow_tokenizer_class=CapeSpeechTokenizer, exist_ok=True
    )
    AutoProcessor.register(CapeSpeechConfig, Wav2Vec2Processor, exist_ok=True)


def _accept_position_embedding(stock_from_pretrained: Any) -> Any:
    """Lets ``AutoConfig.from_pretrained``, and with it every Auto class, take a position embedding
    for a stock checkpoint: the configuration is then the one of this package.

    transformers drops arguments that a configuration does not know, without a word. Calls without
    such an argument are the stock ones.
    """
    fields = {field for config in AUTO_CLASSES for field in config.position_fields}

    @functools.wraps(stock_from_pretrained)
    def from_pretrained(source: Any, **kwargs: Any) -> Any:
        result = stock_from_pretrained(source, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        given = sorted(fields & kwargs.keys())
        for own in AUTO_CLASSES:
            if config.model_type in own.model_types():
                refuse_misplaced(kwargs, own.position_fields)
        if all(hasattr(config, field) for field in given):
            return result
        for own in AUTO_CLASSES:
            if config.model_type in own.model_types():
                for name in ("trust_remote_code", "code_revision"):
                    kwargs.pop(name, None)
                return own.from_pretrained(source, **kwargs)
        known = sorted({name for own in AUTO_CLASSES for name in own.model_types()})
        raise ValueError(
            f"{given[0]}={kwargs[given[0]]!r} has no effect on {source}, a model of type "
            f"{config.model_type!r}; model types with a position embedding to choose: "
            f"{', '.join(known)}. Leave it out, or give such a model."
        )

    return from_pretrained


_register()
AutoConfig.from_pretrained = _accept_position_embedding(AutoConfig.from_pretrained)
