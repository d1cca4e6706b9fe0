"""Tiny models of every family and type, with their stock counterparts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MarianConfig,
    MarianMTModel,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from cape_plugins import TYPES
from hf_models import (
    CapeMarianConfig,
    CapeMarianMTModel,
    CapeSpeech2TextConfig,
    CapeSpeech2TextForConditionalGeneration,
    CapeSpeechConfig,
    CapeSpeechForCTC,
    CapeViTConfig,
    CapeViTForImageClassification,
)

PAD, EOS = 59, 0
ALPHA = "11/10"


class Family(NamedTuple):
    """A model class, its configuration, their stock counterparts (None if there are none) and tiny
    sizes."""

    model: Any
    config: Any
    stock_model: Any
    stock_config: Any
    sizes: dict[str, Any]
    stock_type: str | None  # the type that is the stock model

    def build(self, settings: dict[str, Any], seed: int = 0, **sizes: Any) -> Any:
        torch.manual_seed(seed)
        return self.model(self.config(**self.sizes, **sizes, position_embedding=settings)).eval()

    def build_stock(self, seed: int = 0, **sizes: Any) -> Any:
        torch.manual_seed(seed)
        return self.stock_model(self.stock_config(**self.sizes, **sizes)).eval()


MARIAN = Family(
    CapeMarianMTModel,
    CapeMarianConfig,
    MarianMTModel,
    MarianConfig,
    {
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 40,
        "pad_token_id": PAD,
        "decoder_start_token_id": PAD,
        "eos_token_id": EOS,
        "dropout": 0.0,
        "scale_embedding": True,
        "init_std": 0.2,
    },
    "sinpos",
)
VIT = Family(
    CapeViTForImageClassification,
    CapeViTConfig,
    ViTForImageClassification,
    ViTConfig,
    {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
        "initializer_range": 0.2,
    },
    "abspos",
)
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "init_std": 0.2,
}
CTC = Family(
    CapeSpeechForCTC,
    CapeSpeechConfig,
    None,
    None,
    {
        **SPEECH,
        "initializer_range": 0.2,
        "feature_dropout": 0.0,
        "vocab_size": 12,
        "num_mel_bins": 8,
        "max_position_embeddings": 9,
        "ctc_zero_infinity": True,
    },
    None,
)
SPEECH_TO_TEXT = Family(
    CapeSpeech2TextForConditionalGeneration,
    CapeSpeech2TextConfig,
    Speech2TextForConditionalGeneration,
    Speech2TextConfig,
    {
        **SPEECH,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "conv_channels": 24,
        "input_feat_per_channel": 8,
        "vocab_size": 40,
        "max_source_positions": 40,
        "max_target_positions": 20,
    },
    "sinpos",
)
FAMILIES = {
    "marian": MARIAN,
    "vit": VIT,
    "speech_ctc": CTC,
    "speech_to_text": SPEECH_TO_TEXT,
}
WITH_STOCK = [name for name, family in FAMILIES.items() if family.stock_model]

# One of each type, and combinations; alpha must be given.
TEXT = {name: {"type": name} for name in TYPES}
TEXT["cape"]["source_scale"] = ALPHA
TEXT["cape+relative"] = {
    "type": "cape",
    "source_scale": ALPHA,
    "relative_context": 3,
    "relative_values": True,
}
TEXT["sinpos+bos"] = {"type": "sinpos", "source_bos": True, "source_scale": ALPHA}
TEXT["relpos+first"] = {"type": "relpos", "relative_context": 2, "relative_layers": "first"}
IMAGE = {name: {"type": name} for name in TYPES}
IMAGE["cape+relative"] = {"type": "cape", "relative_context": 3}
IMAGE["sinpos+gamma"] = {"type": "sinpos", "gamma": 0.5}
AUDIO = {name: {"type": name} for name in TYPES}
AUDIO["cape+relative"] = {"type": "cape", "relative_context": 3, "relative_beyond": "zero"}
AUDIO["sinpos+mean"] = {"type": "cape", "max_global_shift": 0, "max_local_shift": 0}
AUDIO["sinpos+mean"]["max_global_scale"] = 1
VARIANTS = {"marian": TEXT, "vit": IMAGE, "speech_ctc": AUDIO, "speech_to_text": AUDIO}
ALL = [(family, name) for family, variants in VARIANTS.items() for name in variants]


def make(family: str, name: str, **sizes: Any) -> Any:
    """A model in evaluation mode, attention weights returned on request."""
    return FAMILIES[family].build(VARIANTS[family][name], attn_implementation="eager", **sizes)


def sentences(left: bool = False, lengths: tuple[int, ...] = (9, 6, 4)) -> dict[str, Tensor]:
    """A batch of source sentences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randint(1, PAD, (length,), generator=generator)
        place = slice(width - length, width) if left else slice(0, length)
        ids[row, place], mask[row, place] = words, 1
    return {"input_ids": ids, "attention_mask": mask}


def targets(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randint(1, PAD, (rows, length), generator=torch.Generator().manual_seed(2))


def frames(lengths: tuple[int, ...] = (50, 41, 22)) -> dict[str, Tensor]:
    """A batch of log-mel frames."""
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(len(lengths), max(lengths), 8, generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_features": features * mask[..., None], "attention_mask": mask.long()}


def batch(family: str) -> dict[str, Tensor]:
    """Inputs with labels."""
    if family == "marian":
        return {**sentences(), "labels": targets()}
    if family == "vit":
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(3, 3, 24, 40, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 3, 1])}
    labels = targets(3, 4) % 9 + 3  # neither blank nor padding
    if family == "speech_ctc":
        labels[2, 2:] = -100
    return {**frames(), "labels": labels}


def seam(model: Any) -> Any:
    """The position encoder of the first stack; None if a learned table stands elsewhere."""
    if hasattr(model, "vit"):
        return model.vit.embeddings.positions
    encoder = model.get_encoder() if hasattr(model, "model") else model.encoder
    return encoder.conv.positions if hasattr(encoder, "conv") else encoder.positions
