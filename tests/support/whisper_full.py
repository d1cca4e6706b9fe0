"""A tiny Whisper with as many tokens as OpenAI's, for engines that expect special tokens at their
places."""

from __future__ import annotations

import torch
from tokenizers import AddedToken
from transformers import (
    AutoProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES

import hf_models

TOKENS, WORDS = 51865, 50257
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def save_full(folder, **changes):
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
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
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
    model.save_pretrained(folder)


def learn(folder, recordings, texts, steps=150):
    """Trains a model of this package, saved with its processor, until it knows recordings by heart.

    The loss compares the tokens that the texts have; all other tokens get the row of the first
    token, which is never written, because a text never has it.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(folder).train()
    inputs = processor.feature_extractor(recordings, sampling_rate=16000, return_tensors="pt")
    labels = processor.tokenizer(texts, padding=True, return_tensors="pt").input_ids
    table = model.get_input_embeddings().weight
    used_ids, small = labels.unique(return_inverse=True)
    previous, targets = labels[:, :-1], small[:, 1:]
    # the last pad is the EOS of the shorter texts
    ends = labels[:, 1:].eq(processor.tokenizer.pad_token_id).cumsum(1).gt(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = model.model(**inputs, decoder_input_ids=previous).last_hidden_state
        logits = hidden @ table[used_ids].T
        torch.nn.functional.cross_entropy(logits[~ends], targets[~ends]).backward()
        optimizer.step()
    with torch.no_grad():
        rows = table[used_ids]
        table[:] = table[model.config.decoder_start_token_id]
        table[used_ids] = rows
    model.eval().save_pretrained(folder)
