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

from cape_plugins.serving.ctranslate2_check import largest_of, refuse_difference
from cape_plugins.serving.ctranslate2_readme import RECOGNITION, precision_notes, readme
from cape_plugins.serving.output import Exported
from cape_plugins.settings.arguments import HUGGING_FACE
from cape_plugins.speech.audio import read_audio
from hf_models.seams.natural_length import STRIDE
from hf_models.serving.ctranslate2_loaders import (
    RecognitionLoader,
    refuse_large_tables,
    refuse_unfit,
    write_tokenizer,
)
from hf_models.serving.position_rows import is_centred
from hf_models.serving.source_folder import saved_beside

_CHECKED_TOKENS = 64  # largest number of tokens in the check of a recording
_PROMPT = ("<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>")


class Recognition(NamedTuple):
    """A recognition model with its tokenizer.

    Attributes:
        model: Model in evaluation mode.
        tokenizer: Tokenizer of the model.
    """

    model: PreTrainedModel
    tokenizer: Any


def export_recognition(
    model: PreTrainedModel, source: Path, folder: Path, args: argparse.Namespace
) -> Exported:
    """Writes the folder of a model, with tables at least as long as in the stock model.

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
    # faster-whisper reads preprocessor_config.json, which newer processors do not save
    extractor.save_pretrained(folder)
    size = (folder / "model.bin").stat().st_size / 2**20
    title = f"{type(model).__name__}, position embedding {model.config.position_config.type}"
    report = [f"ctranslate2: {title}, {size:.1f} MiB"]
    report += precision_notes(args.quantization, ctranslate2.get_supported_compute_types("cpu"))
    if args.check is not None:
        waveform = read_audio(args.check, extractor.sampling_rate)
        inputs = extractor(
            waveform.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt"
        )
        features = _fitted(inputs["input_features"], model, rows["source"])
        report.append(check(recognition, folder, features, args.quantization))
    text = _readme(recognition, f"{source.resolve().name}: {title}", rows, args.quantization)
    return Exported(text, "\n".join(report))


def write_recognition(
    recognition: Recognition, folder: Path, rows: dict[str, int], quantization: str | None = None
) -> None:
    """Writes the folder from a copy of the model, because conversion to int8 writes into the
    tensors of the converted model.

    Args:
        recognition: The model and its tokenizer.
        folder: Empty folder.
        rows: Positions in the table of each side, "source" and "target"; a source position takes 20
            ms.
        quantization: Precision of the weights; None for float32.

    Raises:
        ValueError: for positions that the engine cannot hold, and for too many rows.
    """
    model, tokenizer = recognition
    refuse_large_tables(model, rows)
    refuse_unfit(model.get_encoder(), beside=True)  # the engine has both in encoders
    refuse_unfit(model.get_decoder(), beside=False)
    loader = RecognitionLoader(rows["source"], rows["target"])
    loader.write(copy.deepcopy(model).requires_grad_(False), tokenizer, folder, quantization)


def _fitted(features: Tensor, model: PreTrainedModel, rows: int) -> Tensor:
    """Features ``[1, bins, T]`` at a length that fits the table: even, and full if positions are
    centred."""
    frames = STRIDE * rows
    features = features[..., :frames]
    short = frames - features.shape[-1] if is_centred(model) else features.shape[-1] % STRIDE
    return F.pad(features, (0, short))


@torch.no_grad()
def check(
    recognition: Recognition, folder: Path, features: Tensor, quantization: str | None = None
) -> str:
    """Encodes a recording and writes its text, token by token, with the model and with the folder.
    At each token of the folder's text, given the earlier tokens, compares the probabilities of this
    token and of the token that the model would choose.

    Args:
        recognition: The model and its tokenizer.
        folder: Folder that :func:`write_recognition` wrote.
        features: ``[1, bins, T]``, T even.
        quantization: Precision of the weights.

    Raises:
        ValueError: if states or log-probabilities differ by more than rounding although the weights
            were not rounded.
    """
    model = recognition.model
    engine = ctranslate2.models.Whisper(str(folder), device="cpu")
    view = ctranslate2.StorageView.from_array(np.ascontiguousarray(features.numpy()))
    our_states, their_states = model.get_encoder()(features), engine.encode(view)
    states = our_states.last_hidden_state - torch.from_numpy(np.array(their_states))
    prompt = prompt_of(recognition)
    longest = min(_CHECKED_TOKENS, _room(model, prompt))
    by_engine, theirs = _text_by_engine(
        engine, their_states, prompt, longest, recognition.tokenizer.eos_token_id
    )
    ids = torch.tensor([[*prompt, *by_engine[:-1]]])
    logits = model(encoder_outputs=our_states, decoder_input_ids=ids).logits[0, len(prompt) - 1 :]
    ours = logits.log_softmax(-1)
    by_host = ours.argmax(-1)
    same = int(by_host.eq(torch.tensor(by_engine)).sum())
    token_pairs = torch.stack((torch.tensor(by_engine), by_host), dim=1)
    seconds = features.shape[-1] * model.config.hop_seconds
    of_states = states.abs().max().item()
    of_tokens = (ours - theirs).gather(1, token_pairs).abs().max().item()
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
    """N tokens of the most likely text, with every token allowed, and EOS if the text ends by
    itself; and log-probabilities ``[N, V]`` of all tokens at each of the N tokens."""
    (result,) = engine.generate(
        encoded,
        [prompt],
        beam_size=1,
        max_length=2 * longest,  # the engine writes half as many tokens
        suppress_blank=False,
        suppress_tokens=[],
        return_logits_vocab=True,
    )
    (tokens,), (steps,) = result.sequences_ids, result.logits
    logits = torch.stack([torch.from_numpy(np.array(step)) for step in steps])
    return [*tokens, eos][: len(steps)], logits.log_softmax(-1)


def _room(model: PreTrainedModel, prompt: list[int]) -> int:
    """Largest number of tokens that the model writes, EOS included."""
    return model.config.max_target_positions - len(prompt)


def prompt_of(recognition: Recognition) -> list[int]:
    """Ids of the prompt of a text without timestamps; leaves out tokens that the model lacks."""
    model, tokenizer = recognition
    start, *task = tokenizer.convert_tokens_to_ids(list(_PROMPT))
    languages = sorted((getattr(model.generation_config, "lang_to_id", None) or {}).values())
    numbers = [start, *languages[:1], *task]
    return [number for number in numbers if number not in (None, tokenizer.unk_token_id)]


def _readme(
    recognition: Recognition, title: str, rows: dict[str, int], quantization: str | None
) -> str:
    model, prompt = recognition.model, prompt_of(recognition)
    frames, centred = STRIDE * rows["source"], is_centred(model)
    return readme(
        HUGGING_FACE,
        RECOGNITION,
        {"target": rows["target"]},
        quantization,
        title=title,
        packages="faster-whisper",
        centred=centred,
        natural_length=model.config.at_natural_length and not centred,
        frames=frames,
        seconds=f"{frames * model.config.hop_seconds:g}",
        room=_room(model, prompt),
        prompt=prompt,
        prompt_names=" ".join(_PROMPT),
    )
