"""Small Whispers with all tokens of OpenAI's, which `cape-plugins export ggml` asks for: one that
has learned spoken digits, and one of random weights."""

import sys
from collections.abc import Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    TrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper.tokenization_whisper import LANGUAGES

import hf_models
from recipes.asr.data import Labelled, Recordings, SpeechTrainer
from recipes.asr.whisper import SIZES, Recogniser

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = [
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
SPOKEN = [f"<|{code}|>" for code in list(LANGUAGES)[:99]]
STAMPS = [f"<|{number * 0.02:.2f}|>" for number in range(1501)]
WORDS = 50257  # tokens before the special ones
PROMPT = ("<|en|>", "<|transcribe|>", "<|notimestamps|>")  # after the start of each text
POSITIONS = {"type": "sinpos"}
SMALL = {**SIZES, "num_mel_bins": 80, "max_source_positions": 1500}
SIDE = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}
TINY = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
TINY |= {"d_model": 384, "begin_suppress_tokens": None}  # whisper-tiny
BATCH = 8


def make_processor() -> WhisperProcessor:
    """The stock features, and a token for each byte; the other words are never written."""
    letters = list(bytes_to_unicode().values())
    pairs = map("".join, product(letters, letters))
    special = [END, START, *SPOKEN, *TASKS]
    tokens = [*letters, *islice(pairs, WORDS - len(letters)), *special, *STAMPS]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = WhisperTokenizer(vocab=numbers, merges=[], language="english", task="transcribe")
    tokenizer.pad_token = END
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(stamp) for stamp in STAMPS])
    return WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


def make_model(sizes: Mapping[str, Any], tokens: Mapping[str, int]) -> Any:
    """A model of recordings at natural length, with these tokens."""
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokens[END])
    fields = {**sizes, **ends, "decoder_start_token_id": tokens[START], "vocab_size": len(tokens)}
    stock = WhisperForConditionalGeneration(WhisperConfig(**fields))
    return hf_models.switch(stock, POSITIONS, natural_length=True)


def save(model: Any, processor: WhisperProcessor, folder: Path) -> None:
    """Writes a model with all tokens, and its processor."""
    numbers = processor.tokenizer.get_vocab()
    settings = {
        "is_multilingual": True,
        "no_timestamps_token_id": numbers["<|notimestamps|>"],
        "prev_sot_token_id": numbers["<|startofprev|>"],
        "lang_to_id": {name: numbers[name] for name in SPOKEN},
        "task_to_id": {task: numbers[f"<|{task}|>"] for task in ("translate", "transcribe")},
        "_from_model_config": False,
    }
    for name, value in settings.items():  # `update` leaves out names that are new
        setattr(model.generation_config, name, value)
    model.eval().save_pretrained(folder)
    Recogniser(processor, padded=False).processor.save_pretrained(folder)


def save_random(folder: Path, sizes: Mapping[str, Any]) -> None:
    """Writes a model that never ends a text: the logit of the end is always 0."""
    processor = make_processor()
    numbers = processor.tokenizer.get_vocab()
    model = make_model(sizes, numbers)
    with torch.no_grad():
        model.get_input_embeddings().weight[numbers[END]] = 0
    save(model, processor, folder)


def save_trained(folder: Path, recordings: Recordings, updates: int) -> None:
    """Writes a model that has learned the texts of recordings.

    It is trained with the tokens of the texts alone. All others get the row of the start, which no
    text has.
    """
    processor = make_processor()
    numbers = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    numbers |= {token: len(numbers) + number for number, token in enumerate((END, START, *PROMPT))}
    small, full = (make_model(SMALL, names) for names in (numbers, processor.tokenizer.get_vocab()))
    train(small, processor, numbers, recordings, updates, folder)
    rows = processor.tokenizer.convert_tokens_to_ids(list(numbers))
    weights = small.state_dict()
    for name, weight in full.state_dict().items():
        if len(weight) == len(processor.tokenizer) and weight.dim() == 2:
            table = weights[name][numbers[START]].repeat(len(weight), 1)
            table[rows] = weights[name]
            weights[name] = table
    full.load_state_dict(weights)
    save(full, processor, folder)


def train(
    model: Any,
    processor: WhisperProcessor,
    tokens: Mapping[str, int],
    recordings: Recordings,
    updates: int,
    folder: Path,
) -> None:
    """Trains a model of few tokens."""
    tokenizer = processor.tokenizer
    labels = [
        [tokens[token] for token in (*PROMPT, *tokenizer.tokenize(item.text), END)]
        for item in recordings.items
    ]
    arguments = TrainingArguments(
        str(folder),
        max_steps=updates,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        warmup_steps=100,
        lr_scheduler_type="cosine",
        weight_decay=0.01,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=not sys.stderr.isatty(),
    )
    collate = Recogniser(processor, padded=False).collate
    SpeechTrainer(model, arguments, collate, Labelled(recordings, labels)).train()
