"""Hugging Face models whose position embedding is chosen by their configuration.

Importing this package registers the model types ``cape_marian``, ``cape_vit``, ``cape_speech_ctc``
and ``cape_speech_to_text`` with the Auto classes of transformers.
"""

from __future__ import annotations

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
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from hf_models.callback import RankSeedCallback
from hf_models.configuration import (
    CapeMarianConfig,
    CapeSpeech2TextConfig,
    CapeSpeechConfig,
    CapeViTConfig,
)
from hf_models.feature_extraction import CapeSpeechFeatureExtractor
from hf_models.marian import CapeMarianModel, CapeMarianMTModel
from hf_models.speech_ctc import CapeSpeechForCTC, CapeSpeechModel
from hf_models.speech_to_text import (
    CapeSpeech2TextForConditionalGeneration,
    CapeSpeech2TextModel,
)
from hf_models.tokenization import CapeSpeechTokenizer
from hf_models.vit import CapeViTForImageClassification, CapeViTModel

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
    # the speech recognition pipeline tells models with a decoder by this table
    seq2seq = CapeSpeech2TextForConditionalGeneration
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[CapeSpeech2TextConfig.model_type] = seq2seq.__name__


_register()
