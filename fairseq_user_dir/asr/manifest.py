"""Manifests of recordings with their texts, one line each: ours, and those of fairseq's S2T task.

Tab-separated columns with a header: `audio` and, unless recordings are only to be transcribed,
`tgt_text` (or `text`), and if known `id` and `seconds`. `audio` is a file, relative to the folder
of the manifest, or ``ARCHIVE.zip:OFFSET:SIZE`` in an uncompressed zip; either holds audio, or
frames of features as a numpy array.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio
from cape_plugins.speech.features import WINDOW_SECONDS

logger = logging.getLogger(__name__)

SAMPLING_RATE = 16000
FEATURE_HOP = 0.010  # of features that were computed before
_NUMPY = b"\x93NUMPY"
TEXT_COLUMNS = ("tgt_text", "text")
_WITHOUT_TEXT = (
    " Training and validation need texts; recordings without are transcribed by fairseq-generate "
    "and fairseq-interactive."
)
_USED = ("vocab_filename", "audio_root", "input_feat_per_channel")


class Utterance(NamedTuple):
    """A line of a manifest."""

    name: str
    audio: str
    text: str  # empty where it is not known
    seconds: float


def read_manifest(path: str, audio_root: str | None = None, texts: bool = True) -> list[Utterance]:
    """The usable lines of a manifest; the others are counted and reported.

    Args:
        path: TSV file.
        audio_root: What relative recordings are relative to; default the folder of the manifest.
        texts: Lines without a text cannot be used; else their text is empty.

    Raises:
        ValueError: if there is no such file, a column is missing, or no line is usable.
    """
    root = audio_root or os.path.dirname(path)
    if not os.path.isfile(path):
        raise ValueError(
            f"{path}: no such manifest; give the data folder with train.tsv, valid.tsv ... "
            "(columns audio and tgt_text), and name the others by --gen-subset or --valid-subset."
        )
    with open(path, encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        rows, columns = list(table), table.fieldnames or ()
    column = next((name for name in TEXT_COLUMNS if name in columns), None)
    needed = "audio and tgt_text" if texts else "audio"
    if "audio" not in columns or not rows or (texts and column is None):
        names = ", ".join(map(str, columns)) or "none"
        raise ValueError(
            f"{path} has the columns {names} and {len(rows)} lines below; needed: {needed}, "
            f"tab-separated, named in the first line, and at least one line below.{_WITHOUT_TEXT}"
        )
    found: list[Utterance] = []
    skipped: Counter[str] = Counter()
    first = ""
    for number, row in enumerate(
        tqdm(rows, os.path.basename(path), leave=False, delay=2, disable=None)
    ):
        text = " ".join((row.get(column) or "").split())
        try:
            if texts and not text:
                raise AudioError(f"without a text: {row['audio']}")
            found.append(_utterance(row, number, root, text))
        except AudioError as error:
            reason, _, detail = str(error).partition(": ")
            skipped[reason] += 1
            first = first or f"line {number + 2}: {detail}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    if not found:
        raise ValueError(
            f"{path}: none of its {len(rows)} recordings can be used ({reasons}). {first}"
            f"{_WITHOUT_TEXT if 'without a text' in skipped else ''}"
        )
    if skipped:
        count = sum(skipped.values())
        logger.warning("%s: %d of %d skipped (%s); %s", path, count, len(rows), reasons, first)
    return found


def named_recordings(paths: Sequence[str]) -> list[Utterance]:
    """Recordings without texts, relative to the current folder; those that cannot be used are
    reported and have a duration of 0."""
    recordings = []
    for number, path in enumerate(paths):
        try:
            recordings.append(_utterance({"audio": path}, number, "", ""))
        except AudioError as error:
            logger.warning("skipped, %s", error)
            recordings.append(Utterance(str(number), path, "", 0.0))
    return recordings


def _utterance(row: Mapping[str, str | None], number: int, root: str, text: str) -> Utterance:
    audio = (row["audio"] or "").strip()
    if not audio:
        raise AudioError("without a recording: its path is empty")
    audio = os.path.join(root, audio)
    try:
        seconds = float(row["seconds"]) if row.get("seconds") else _seconds(audio)
    except (ValueError, OSError) as error:
        raise AudioError(f"unreadable: {error}") from None
    if not math.isfinite(seconds):
        raise AudioError(f"without a duration: {audio} has {seconds} seconds")
    if not seconds > WINDOW_SECONDS:
        raise AudioError(f"of no more than {WINDOW_SECONDS} s: {audio}")
    return Utterance(row.get("id") or str(number), audio, text, seconds)


def _seconds(audio: str) -> float:
    source = _source(audio)
    frames = _features(source)
    if frames is not None:
        return (len(frames) - 1) * FEATURE_HOP + WINDOW_SECONDS
    return audio_seconds(source)


def read_config(folder: str, name: str = "config.yaml") -> dict[str, Any]:
    """What is used of the configuration of fairseq's S2T data, if there is one: `vocab_filename`,
    `audio_root`, `input_feat_per_channel` and the sentencepiece model; a warning names the rest."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file) or {}
    used = {key: config.pop(key) for key in _USED if key in config}
    bpe = config.get("bpe_tokenizer") or {}
    if bpe.get("bpe") == "sentencepiece":
        model = config.pop("bpe_tokenizer")["sentencepiece_model"]
        used["subword_model"] = os.path.join(folder, model)
    if config:
        logger.warning(
            "%s: %s not used; recordings become log-mel features, normalised by recording, "
            "and are masked by the flags of the task",
            path,
            ", ".join(sorted(config)),
        )
    return used


def load(utterance: Utterance) -> Tensor:
    """``[samples]`` at 16 kHz, or features ``[T, bins]`` that were computed before.

    Raises:
        AudioError: if it cannot be read.
    """
    try:
        source = _source(utterance.audio)
        frames = _features(source)
    except (OSError, ValueError) as error:
        raise AudioError(f"{utterance.audio}: {error}; repair or leave it out.") from None
    return read_audio(source, SAMPLING_RATE) if frames is None else frames


def _source(audio: str) -> str | bytes:
    """A path, or the bytes of a part of a zip file."""
    path, *place = audio.rsplit(":", 2)
    if len(place) != 2 or not all(part.isdecimal() for part in place):
        return audio
    offset, size = map(int, place)
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _features(source: str | bytes) -> Tensor | None:
    """``[T, bins]`` of a numpy array, mean and variance normalised as log_mel does."""
    if isinstance(source, bytes):
        if not source.startswith(_NUMPY):
            return None
        array = np.load(io.BytesIO(source))
    elif source.endswith(".npy"):
        array = np.load(source)
    else:
        return None
    frames = torch.from_numpy(array.astype(np.float32))
    if frames.dim() != 2 or not len(frames):
        raise ValueError(f"features have shape {tuple(frames.shape)}, not [frames, bins]")
    return (frames - frames.mean()) / frames.std(correction=0).clamp(min=1e-5)
