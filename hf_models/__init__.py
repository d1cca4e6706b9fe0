"""Hugging Face models with a position embedding that the configuration chooses.

Importing this package registers the model types of its families, such as ``cape_marian`` and
``cape_vit``, with the Auto classes of transformers. Configurations and models have the names of the
stock classes with ``Cape`` in front: ``hf_models.CapeMarianMTModel``. Most families are made from
the stock classes when they are first asked for (:mod:`hf_models.generated.families`).
"""

from __future__ import annotations

from typing import Any

import hf_models.stand_ins  # noqa: F401, before transformers

# isort: split
import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoProcessor,
    AutoTokenizer,
    Wav2Vec2Processor,
    WhisperProcessor,
    WhisperTokenizer,
)

from hf_models.callback import RankSeedCallback
from hf_models.calls.loading import accept_position_embeddings
from hf_models.calls.switching import switch
from hf_models.checks.family import check_family
from hf_models.families import FAMILIES
from hf_models.families.speech_ctc import CapeSpeechConfig
from hf_models.families.whisper import CapeWhisperConfig
from hf_models.generated.families import class_of_name, let_transformers_make_families
from hf_models.processors.feature_extraction import (
    CapeSpeechFeatureExtractor,
    CapeWhisperFeatureExtractor,
)
from hf_models.processors.limits import let_pipelines_warn, let_tokenizers_follow
from hf_models.processors.tokenization import CapeSpeechTokenizer
from hf_models.releases import warn_if_untested
from hf_models.storage.longer_tables import extend_table
from hf_models.switching.install import FamilyClasses
from hf_models.switching.registry import AUTO_CLASSES, MODELS, register_family


def _register_processors() -> None:
    # Subwords need the tokenizer of this package; for letters the files of a checkpoint name
    # transformers' Wav2Vec2CTCTokenizer, and its processor takes any features.
    AutoFeatureExtractor.register(CapeSpeechConfig, CapeSpeechFeatureExtractor, exist_ok=True)
    AutoTokenizer.register(
        CapeSpeechConfig, slow_tokenizer_class=CapeSpeechTokenizer, exist_ok=True
    )
    AutoProcessor.register(CapeSpeechConfig, Wav2Vec2Processor, exist_ok=True)
    AutoFeatureExtractor.register(CapeWhisperConfig, CapeWhisperFeatureExtractor, exist_ok=True)
    AutoTokenizer.register(CapeWhisperConfig, fast_tokenizer_class=WhisperTokenizer, exist_ok=True)
    AutoProcessor.register(CapeWhisperConfig, WhisperProcessor, exist_ok=True)


warn_if_untested(transformers.__version__)
for _family in FAMILIES:
    register_family(_family)
_register_processors()
let_transformers_make_families()
accept_position_embeddings(AUTO_CLASSES.keys())
let_tokenizers_follow()
let_pipelines_warn()

_configs = {family.config.__name__: family.config for family in FAMILIES}
globals().update({**_configs, **MODELS})


def __getattr__(name: str) -> Any:
    if (found := class_of_name(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


__all__ = [
    *_configs,
    *MODELS,
    "CapeSpeechFeatureExtractor",
    "CapeSpeechTokenizer",
    "CapeWhisperFeatureExtractor",
    "FamilyClasses",
    "RankSeedCallback",
    "check_family",
    "extend_table",
    "register_family",
    "switch",
]
