"""Tiny models of Whisper, stock and ours, and what they are asked."""

from __future__ import annotations

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

import hf_models

BINS, SEGMENT = 8, 80  # mel bins; frames of a segment of the stock model
LENGTHS = (50, 31, 20)
SPECIAL = {"pad_token_id": 59, "bos_token_id": 58, "eos_token_id": 58, "decoder_start_token_id": 57}
SIZES = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": BINS,
    "max_source_positions": SEGMENT // 2,
    "max_target_positions": 20,
    "begin_suppress_tokens": None,
    "init_std": 0.2,
    "classifier_proj_size": 16,
    "num_labels": 3,
    **SPECIAL,
}
# language, task and timestamps, from token 61 on
GENERATION = {
    "no_timestamps_token_id": 60,
    "lang_to_id": {"<|en|>": 52, "<|de|>": 53},
    "task_to_id": {"transcribe": 54, "translate": 55},
    "is_multilingual": True,
    "prev_sot_token_id": 56,
    "alignment_heads": [[0, 0], [1, 1]],
    "max_initial_timestamp_index": 10,
    "max_length": 20,
}


def make_stock(model=WhisperForConditionalGeneration, **changes):
    torch.manual_seed(0)
    built = model(WhisperConfig(**{**SIZES, **changes})).eval()
    for name, value in GENERATION.items() if model is WhisperForConditionalGeneration else ():
        setattr(built.generation_config, name, value)
    return built


def switched(settings="cape", decoder=None, model=WhisperForConditionalGeneration, **changes):
    fields = {"decoder_position_embedding": {"type": decoder}} if decoder else {}
    names = ("natural_length", "hop_seconds")
    fields |= {name: changes.pop(name) for name in names if name in changes}
    return hf_models.switch(make_stock(model, **changes), {"type": settings}, **fields)


def features(batch, frames, seed=0):
    return torch.randn(batch, BINS, frames, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


WHOLE = features(3, SEGMENT)
RAGGED, MASK = features(3, max(LENGTHS)), mask_of(LENGTHS)
LABELS = torch.arange(21).view(3, 7) % 50


def encoder_sizes(model, call):
    sizes = []
    hook = model.get_encoder().register_forward_hook(
        lambda module, inputs, output: sizes.append(output.last_hidden_state.shape[1])
    )
    call()
    hook.remove()
    return sizes


def save_with_processor(folder):
    """Writes a stock checkpoint with its processor, which writes letters."""
    alphabet = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"]
    special += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>"]
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    ids = {token: i for i, token in enumerate([*alphabet, *special, *stamps])}
    tokenizer = WhisperTokenizer(vocab=ids, merges=[], language="english", task="transcribe")
    tokenizer.pad_token = special[0]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(stamp) for stamp in stamps])
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    end = ids["<|endoftext|>"]
    model = make_stock(
        vocab_size=len(ids),
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    generation = model.generation_config
    generation._from_model_config = False
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|de|>")}
    generation.task_to_id = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    generation.max_length = 448
    model.save_pretrained(folder)
