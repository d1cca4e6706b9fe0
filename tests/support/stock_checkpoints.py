"""Tiny stock checkpoints in folders with names from the hub, so that examples of the
documents load them from the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    BertTokenizer,
    CLIPModel,
    RobertaForMaskedLM,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
)

from tests.support import served
from tests.support.hf import FAMILIES
from tests.support.whisper import save_with_processor

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", ",", ".")


def save_bert(folder: Path) -> None:
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    FAMILIES["bert"].build_stock(max_position_embeddings=512).save_pretrained(folder)


def save_with_bert_tokenizer(folder: Path, model_class: type, **fields: Any) -> None:
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if "max_position_embeddings" in fields:
        config = model_class.config_class(**sizes, **special, **fields)
    else:  # parts for texts and for images
        parts = {name: {**sizes, **special, **part} for name, part in fields.items()}
        config = model_class.config_class(**parts)
    model_class(config).save_pretrained(folder)


def save_translator(family: str, folder: Path, table: int) -> None:
    tokenizer = served.Corpus(folder.parent).tokenizer(family)
    tokenizer.save_pretrained(folder)
    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    special = {f"{name}_token_id": number for name, number in numbers.items()}
    start = numbers["eos" if family == "bart" else "pad"]
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": table}
    model = FAMILIES[family].build_stock(**special, **sizes, decoder_start_token_id=start)
    model.save_pretrained(folder)


def save_spectrogram_model(folder: Path) -> None:
    ASTFeatureExtractor().save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ASTForAudioClassification(ASTConfig(**sizes, intermediate_size=32)).save_pretrained(folder)


def save_video_model(folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = VideoMAEConfig(**sizes, intermediate_size=16)
    VideoMAEForVideoClassification(config).save_pretrained(folder)


SAVE = {
    "google-bert/bert-base-uncased": save_bert,
    "FacebookAI/roberta-base": lambda folder: save_with_bert_tokenizer(
        folder, RobertaForMaskedLM, max_position_embeddings=514
    ),
    "openai/clip-vit-base-patch32": lambda folder: save_with_bert_tokenizer(
        folder,
        CLIPModel,
        text_config={"max_position_embeddings": 77},
        vision_config={"image_size": 32, "patch_size": 16},
    ),
    "facebook/bart-large-cnn": lambda folder: save_translator("bart", folder, 1024),
    "Helsinki-NLP/opus-mt-en-de": lambda folder: save_translator("marian", folder, 512),
    "openai/whisper-tiny": save_with_processor,
    "MIT/ast-finetuned-audioset-10-10-0.4593": save_spectrogram_model,
    "MCG-NJU/videomae-base-finetuned-kinetics": save_video_model,
    "google/vit-base-patch16-224": lambda folder: (
        FAMILIES["vit"].build_stock(image_size=224, patch_size=16).save_pretrained(folder)
    ),
}


def save_named(code: str, folder: Path) -> None:
    """Writes the checkpoints that a program names into `folder`."""
    for name, save in SAVE.items():
        if f'"{name}"' in code:
            (folder / name).mkdir(parents=True)
            save(folder / name)
