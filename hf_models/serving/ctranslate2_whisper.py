"""Whisper as a folder for ctranslate2, which faster-whisper loads."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoFeatureExtractor, AutoTokenizer, PreTrainedModel

from cape_plugins.serving.ctranslate2_notes import (
    largest_of,
    precision_notes,
    readme,
    refuse_difference,
)
from cape_plugins.serving.output import Exported
from cape_plugins.speech.audio import read_audio
from hf_models.natural_length import STRIDE
from hf_models.serving.ctranslate2_loaders import (
    RecognitionLoader,
    refuse_large_tables,
    refuse_unfit,
    write_tokenizer,
)
from hf_models.serving.source import saved_beside

_CHECKED_TOKENS = 64  # at most, of a recording in a check
_PROMPT = ("<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>")


class Recognition(NamedTuple):
    """A model of recognition and what belongs to it.

    Attributes:
        model: In evaluation mode.
        tokenizer: Its tokenizer.
    """

    model: PreTrainedModel
    tokenizer: Any


def export_recognition(
    model: PreTrainedModel, source: Path, folder: Path, args: argparse.Namespace
) -> Exported:
    """Writes the folder of a model, with tables at least as long as those of the stock model.

    Raises:
        ValueError: for positions that do not fit, and if a check finds a difference.
    """
    with saved_beside(source, "processor", "the names of the tokens and the kind of features"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        extractor = AutoFeatureExtractor.from_pretrained(source)
    recognition = Recognition(model, tokenizer)
    rows = {
        "source": max(args.max_source_tokens, model.config.max_source_positions),
        "target": max(args.max_target_tokens, model.config.max_target_positions),
    }
    write_recognition(recognition, folder, rows, args.quantization)
    write_tokenizer(source, folder, tokenizer)
    extractor.save_pretrained(folder)  # preprocessor_config.json, newer processors have another
    size = (folder / "model.bin").stat().st_size / 2**20
    title = f"{type(model).__name__}, position embedding {model.config.position_config.type}"
    report = [f"ctranslate2: {title}, {size:.1f} MiB"]
    report += precision_notes(args.quantization, ctranslate2.get_supported_compute_types("cpu"))
    if args.check is not None:
        waveform = read_audio(args.check, extractor.sampling_rate)
        given = extractor(
            waveform.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt"
        )
        features = _fitted(given["input_features"], model, rows["source"])
        report.append(check(recognition, folder, features, args.quantization))
    text = _readme(recognition, f"{source.resolve().name}: {title}", rows, args.quantization)
    return Exported(text, "\n".join(report))


def write_recognition(
    recognition: Recognition, folder: Path, rows: dict[str, int], quantization: str | None = None
) -> None:
    """Writes the model, and leaves it as it is: conversion to int8 writes into its tensors, so that
    a copy is converted.

    Args:
        recognition: The model and its tokenizer.
        folder: Empty.
        rows: Side ("source", "target") to positions of its table; of the source, 20 ms each.
        quantization: Precision of the weights; None for float32.
    """
    model, tokenizer = recognition
    refuse_large_tables(model, rows)
    refuse_unfit(model.get_encoder(), beside=True)  # the engine has both there
    refuse_unfit(model.get_decoder(), beside=False)
    loader = RecognitionLoader(rows["source"], rows["target"])
    loader.write(copy.deepcopy(model).requires_grad_(False), tokenizer, folder, quantization)


def is_centred(model: PreTrainedModel) -> bool:
    """Whether positions are counted from the middle of a recording, so that the table fits
    recordings of one length only."""
    config = model.config.position_config
    return bool(config.mean_normalize and config.encoding.adds)


def _fitted(features: Tensor, model: PreTrainedModel, rows: int) -> Tensor:
    """Features ``[1, bins, T]`` at a length that the table is for: even, and full where positions
    are centred."""
    frames = STRIDE * rows
    features = features[..., :frames]
    short = frames - features.shape[-1] if is_centred(model) else features.shape[-1] % STRIDE
    return F.pad(features, (0, short))


@torch.no_grad()
def check(
    recognition: Recognition, folder: Path, features: Tensor, quantization: str | None = None
) -> str:
    """Encodes a recording and writes its text, token by token, by the model and by the folder. Each
    token of the folder's text is compared with what the model says behind the tokens before it: how
    likely the token is, and how likely the one that the model would choose.

    Args:
        recognition: The model and its tokenizer.
        folder: Written by :func:`write_recognition`.
        features: ``[1, bins, T]``, T even.
        quantization: Precision of the weights.

    Raises:
        ValueError: if states or log-probabilities differ by more than rounding, and the weights are
            as they were.
    """
    model = recognition.model
    engine = ctranslate2.models.Whisper(str(folder), device="cpu")
    given = ctranslate2.StorageView.from_array(np.ascontiguousarray(features.numpy()))
    encoded, encoded_too = model.get_encoder()(features), engine.encode(given)
    states = encoded.last_hidden_state - torch.from_numpy(np.array(encoded_too))
    prompt = prompt_of(recognition)
    longest = min(_CHECKED_TOKENS, _room(model, prompt))
    by_engine, theirs = _text_by_engine(
        engine, encoded_too, prompt, longest, recognition.tokenizer.eos_token_id
    )
    ids = torch.tensor([[*prompt, *by_engine[:-1]]])
    logits = model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, len(prompt) - 1 :]
    ours = logits.log_softmax(-1)
    by_host = ours.argmax(-1)
    same = int(by_host.eq(torch.tensor(by_engine)).sum())
    chosen = torch.stack((torch.tensor(by_engine), by_host), dim=1)
    seconds = features.shape[-1] * model.config.hop_seconds
    of_states = states.abs().max().item()
    of_tokens = (ours - theirs).gather(1, chosen).abs().max().item()
    report = (
        f"check: {same} of {len(by_engine)} tokens of {seconds:.1f} s of the recording are the "
        f"same, log-probabilities differ by at most {of_tokens:.1e}, states of the encoder by "
        f"{of_states:.1e}"
    )
    refuse_difference(largest_of((of_states, of_tokens)), report, quantization)
    return report


def _text_by_engine(
    engine: Any, encoded: Any, prompt: list[int], longest: int, eos: int
) -> tuple[list[int], Tensor]:
    """N tokens of the most likely text, EOS included if it ends by itself, with every token
    allowed; and ``[N, V]`` log-probabilities of all tokens at each of them."""
    (result,) = engine.generate(
        encoded,
        [prompt],
        beam_size=1,
        max_length=2 * longest,  # the engine writes half as many
        suppress_blank=False,
        suppress_tokens=[],
        return_logits_vocab=True,
    )
    (tokens,), (steps,) = result.sequences_ids, result.logits
    logits = torch.stack([torch.from_numpy(np.array(step)) for step in steps])
    return [*tokens, eos][: len(steps)], logits.log_softmax(-1)


def _room(model: PreTrainedModel, prompt: list[int]) -> int:
    """Tokens of the longest text that the model writes, EOS included."""
    return model.config.max_target_positions - len(prompt)


def prompt_of(recognition: Recognition) -> list[int]:
    """Numbers of the tokens before a text without timestamps, of those that the model has."""
    model, tokenizer = recognition
    start, *rest = tokenizer.convert_tokens_to_ids(list(_PROMPT))
    languages = sorted((getattr(model.generation_config, "lang_to_id", None) or {}).values())
    numbers = [start, *languages[:1], *rest]
    return [number for number in numbers if number not in (None, tokenizer.unk_token_id)]


# ---- README --------------------------------------------------------------------------------------

_SEGMENTS = """
import sys

from faster_whisper import WhisperModel

folder, recording = sys.argv[1:]  # this folder; a recording of any format
model = WhisperModel(folder, device="cpu")
segments, _ = model.transcribe(recording, beam_size=5, without_timestamps=True)
for segment in segments:
    print(segment.text.strip())
"""
_NATURAL = """
import sys

import ctranslate2
from faster_whisper import WhisperModel, decode_audio

folder, recording = sys.argv[1:]  # this folder; a recording of any format
model = WhisperModel(folder, device="cpu")
audio = decode_audio(recording)
frames = min(len(audio) // 320 * 2, {frames})  # of 10 ms, an even number
features = model.feature_extractor(audio, padding=400)[None, :, :frames].copy()
given = ctranslate2.StorageView.from_array(features)
length = 2 * {room}  # a text ends at half of max_length, so that it may have {room} tokens
result = model.model.generate(given, [{prompt}], beam_size=5, max_length=length)[0]
print(model.hf_tokenizer.decode(result.sequences_ids[0]).strip())
"""


def _readme(
    recognition: Recognition, title: str, rows: dict[str, int], quantization: str | None
) -> str:
    model, _ = recognition
    frames = STRIDE * rows["source"]
    seconds = frames * model.config.hop_seconds
    prompt = prompt_of(recognition)
    natural = model.config.at_natural_length and not is_centred(model)
    if natural:
        program = _NATURAL.format(frames=frames, prompt=prompt, room=_room(model, prompt))
    else:
        program = _SEGMENTS
    lengths = (
        f"Positions are centred (`mean_normalize`): the table is for {frames} frames, {seconds:g} "
        "seconds, and shorter inputs get positions that the model does not give them. Pad them "
        "with silence, as faster-whisper does with 30 s."
        if is_centred(model)
        else f"Inputs have up to {frames} frames, {seconds:g} seconds, and shorter ones are taken "
        "as they are."
    )
    return readme(
        title,
        program=program,
        conventions=[
            "The caller gives the tokens before a text, such as "
            f"`{prompt}` ({' '.join(_PROMPT)}, the language behind the first); faster-whisper "
            "does so by itself. EOS ends the text and is not in the result.",
            "`tokenizer.json` and `preprocessor_config.json` stand here; faster-whisper reads "
            "both.",
        ],
        rows={"target": rows["target"]},
        options=[
            lengths,
            "An even number of frames gives the states of the host.",
            "There is no mask: padding changes states. Put recordings of equal length into a "
            "batch, or give them one by one.",
            "faster-whisper pads and cuts to segments of 30 s, as stock Whisper does; a model "
            "trained at natural length has not seen that silence. "
            "`model.model.generate(features, ...)` takes the frames as they are.",
            "`max_length` of `generate` is 448 by default, and a text ends at half of it, 224 "
            "tokens, without a word; so does each segment of faster-whisper, as of Whisper itself, "
            "and with its `max_new_tokens=N` at (N + tokens before the text) / 2.",
            "Greedy and beam search are those of the host; `suppress_tokens=[-1]`, the default, "
            "are those of its generation_config.",
        ],
        quantization=quantization,
    )
