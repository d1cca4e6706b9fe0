"""A tiny Whisper with as many tokens as OpenAI's, for engines that expect special tokens at their
places."""

from __future__ import annotations

import torch
from tokenizers import AddedToken
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES

TOKENS, WORDS = 51865, 50257
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def save_full(place, **changes):
    """Writes a stock checkpoint with its processor; words of several letters are never written."""
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
    letters = list(bytes_to_unicode().values())
    fillers = (f"{a}{b}" for a in letters for b in letters)
    words = [*letters, *(word for word, _ in zip(fillers, range(WORDS - 256), strict=False))]
    special = ["<|endoftext|>", "<|startoftranscript|>", *languages]
    special += [f"<|{task}|>" for task in TASKS]
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    ids = {token: i for i, token in enumerate([*words, *special, *stamps])}
    assert len(ids) == TOKENS
    tokenizer = WhisperTokenizer(vocab=ids, merges=[], language="english", task="transcribe")
    tokenizer.pad_token = special[0]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(stamp) for stamp in stamps])
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(place)
    end = ids[special[0]]
    sizes = {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256,
        "pad_token_id": end,
        "bos_token_id": end,
        "eos_token_id": end,
        "decoder_start_token_id": end + 1,
        "begin_suppress_tokens": None,
    }
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**sizes, **changes})).eval()
    settings = {
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "lang_to_id": {name: ids[name] for name in languages},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in TASKS[:2]},
        "is_multilingual": True,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "alignment_heads": [[1, 0]],
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False
    model.save_pretrained(place)
