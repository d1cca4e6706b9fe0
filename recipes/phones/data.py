"""Utterances with a phone for each frame: synthetic, or of a folder with labels."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from tqdm import tqdm

from cape_plugins.speech.audio import AudioError, read_audio
from cape_plugins.speech.features import HOP_SECONDS, SAMPLING_RATE, log_mel, normalized
from recipes.lab.steps import CommandError
from recipes.lab.synthesis import PITCHES, SPEEDS, VOICES, Phone, Synthesizer
from recipes.phones.labels import SILENCE, LabelError, frame_labels, read_labels

BANDS = 40
SPLITS = ("train", "dev", "test")
AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".sph", ".aiff")
LABELS = (".phn", ".textgrid")
# Labels of another recording, or in another unit of time: they may end this much after the
# recording, in seconds, and not before this share of it.
BEYOND, COVERED = 0.1, 0.5

# Words that have all 39 phones of the thesis and none of espeak-ng's diphthongs with r. A comma
# makes a pause.
_WORDS = """the quick brown fox jumps lazy dog measure pleasure vision treasure beige rouge church
    judge teeth breathe this that sheep shoe azure boy noise voice cow house out bird nurse girl
    father calm spa thought law saw go home day make time light think thing singing zoo zip yes you
    use we wind hello behind help pen ten bed cat hat sit fish book good foot blue cup love among
    sofa vague gift king pig tub dad kick pop babe mother nothing see, pay, knife, dawn, mouth,
    join, seven, buzz, peace, cheese, bulb, mug,"""
WORDS = _WORDS.split()
WORDS_PER_UTTERANCE = (1, 3)
STEADY_VOICES = [voice for voice in VOICES if voice != "en-us+f2"]  # its breath differs in each run
NOISE_DB = (0.0, 20.0)  # speech above noise; without noise single frames tell nearly all
# names of the thesis, each with those of espeak-ng in the voices of synthesis.py
_NAMES = """ah @ @2 V a#, ih I I# I2, iy i: i, aa A: 0, er 3 3:, r r r-, t t t2, y j ;, sil _ _:,
    ae a, ay aI, aw aU, dh D, jh dZ, eh E, ey eI, hh h, ng N, ao O:, oy OI, ow oU, sh S, th T,
    ch tS, uw u:, uh U, zh Z"""
ESPEAK = {name: phone for phone, *names in map(str.split, _NAMES.split(",")) for name in names}


class Example(NamedTuple):
    """Features and labels of one recording."""

    name: str
    features: Tensor  # [T, 40] float32, each band of mean 0 and standard deviation 1
    labels: Tensor | list[str]  # [T] indices of classes; names, before all classes are known


@dataclass
class Corpus:
    """What models are trained and tested on."""

    classes: list[str]  # sorted
    splits: dict[str, list[Example]]
    description: str  # for reports
    skipped: Sequence[str] = ()  # why recordings were left out

    def fingerprint(self) -> str:
        sha = hashlib.sha256(" ".join(self.classes).encode())
        for split in SPLITS:
            for example in self.splits[split]:
                sha.update(example.features.numpy().tobytes())
                sha.update(example.labels.numpy().tobytes())
            sha.update(split.encode())
        return sha.hexdigest()[:16]

    def sizes(self) -> str:
        """Utterances and frames of the splits."""
        parts = (
            f"{split} {len(items)} utterances, {sum(len(item.labels) for item in items)} frames"
            for split, items in self.splits.items()
        )
        return "; ".join(parts)


def extract(waveform: Tensor) -> Tensor:
    """``[samples]`` at 16 kHz to ``[T, 40]``, each band normalised over the utterance."""
    return normalized(log_mel(waveform, SAMPLING_RATE, BANDS, HOP_SECONDS, normalize=False), 0)


def label(name: str, waveform: Tensor, phones: Sequence[Phone]) -> Example:
    features = extract(waveform)
    return Example(name, features, frame_labels(phones, len(features)))


# ---- synthetic speech ----------------------------------------------------------------------------


def add_noise(waveform: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """White noise at a random distance of :data:`NOISE_DB` to the speech, ``[samples]`` float32."""
    level = np.sqrt((waveform**2).mean()) * 10 ** (-rng.uniform(*NOISE_DB) / 20)
    return (waveform + level * rng.standard_normal(len(waveform))).astype(np.float32)


def synthetic(sizes: Sequence[int], seed: int = 0) -> Corpus:
    """Random words read by espeak-ng, so many utterances for training, dev and test."""
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
    for number, (split, count) in enumerate(zip(SPLITS, sizes, strict=True)):
        rng = np.random.default_rng((seed, number))
        synthesizer = Synthesizer()
        for index in range(count):
            speech = synthesizer.speak(
                " ".join(rng.choice(WORDS, rng.integers(*WORDS_PER_UTTERANCE, endpoint=True))),
                str(rng.choice(STEADY_VOICES)),
                speed=int(rng.integers(*SPEEDS, endpoint=True)),
                pitch=int(rng.integers(*PITCHES, endpoint=True)),
            )
            waveform = torch.from_numpy(add_noise(speech.waveform, rng))
            phones = [Phone(*times, ESPEAK.get(name, name)) for *times, name in speech.phones]
            splits[split].append(label(f"{split}{index} ({speech.text})", waveform, phones))
    return _corpus(splits, f"random words by espeak-ng, seed {seed}", [])


# ---- a folder ------------------------------------------------------------------------------------


def read_folder(folder: Path, tier: str | None = None, seed: int = 0) -> Corpus:
    """Recordings below `folder` with labels of the same name beside them.

    Subfolders train, dev (or valid) and test, in any letter case, are the splits. Without train and
    test a tenth of the recordings becomes the test; without dev a tenth of training becomes dev.
    """
    if not folder.is_dir():
        raise CommandError(f"--data {folder}: no such folder; give one with recordings and labels")
    pairs, skipped = _pairs(folder)
    items = []
    for audio, labels in tqdm(pairs, desc="read", disable=None, leave=False):
        place = audio.relative_to(folder)
        try:
            items.append((place, _read(place, audio, labels, tier)))
        except ValueError as error:  # AudioError, LabelError, or shorter than a frame
            skipped.append(f"{place}: {error}")
    if len(items) < 3:
        why = f"; {skipped[0]}" if skipped else ""
        raise CommandError(
            f"--data {folder}: {len(items)} recordings ({', '.join(AUDIO)}) with labels "
            f"({', '.join(LABELS)}) of the same name can be used, at least 3 are needed{why}"
        )
    splits = _split(items, seed)
    if not splits["train"]:
        raise CommandError(
            f"--data {folder}: nothing is left for training; add recordings to train"
        )
    return _corpus(splits, folder.name, skipped)


def _pairs(folder: Path) -> tuple[list[list[Path]], list[str]]:
    """Recordings with their labels, and what has no partner."""
    by_name: Any = defaultdict(lambda: {"recording": [], "labels": []})
    for path in sorted(folder.rglob("*")):
        stem = path
        while stem.suffix.lower() in AUDIO + LABELS:  # SA1.WAV.wav belongs to SA1.PHN
            stem = stem.with_suffix("")
        if stem != path and path.is_file():
            sort = "recording" if path.suffix.lower() in AUDIO else "labels"
            by_name[path.parent, stem.name.lower()][sort].append(path)
    pairs, skipped = [], []
    for files in by_name.values():
        pair = [paths[0] for paths in files.values() if paths]
        if len(pair) == 2:
            pairs.append(pair)
        else:
            lacking = next(sort for sort, paths in files.items() if not paths)
            skipped.append(f"{pair[0].relative_to(folder)}: no {lacking} of this name")
    return pairs, skipped


def _read(place: Path, audio: Path, labels: Path, tier: str | None) -> Example:
    waveform = read_audio(audio, SAMPLING_RATE)
    if not waveform.any():
        raise AudioError("silence from beginning to end")
    phones = read_labels(labels, soundfile.info(audio).samplerate, tier)
    seconds = len(waveform) / SAMPLING_RATE
    end = phones[-1].end
    if not COVERED * seconds < end < seconds + BEYOND:
        raise LabelError(f"labels end at {end:.2f} s, the recording at {seconds:.2f} s")
    return label(place.as_posix(), waveform, phones)


def _split(items: Sequence[tuple[Path, Example]], seed: int) -> dict[str, list[Example]]:
    splits = {split: [] for split in SPLITS}
    names = {"train": "train", "dev": "dev", "valid": "dev", "test": "test"}
    for place, item in items:
        folders = (names.get(part.lower()) for part in place.parts[:-1])
        splits[next(filter(None, folders), "train")].append(item)
    shuffle = random.Random(seed).shuffle
    if not splits["train"]:  # a folder that is a part of a corpus
        splits = {"train": [item for _, item in items], "dev": [], "test": []}
    for split in ("test", "dev"):
        if not splits[split]:
            shuffle(splits["train"])
            size = max(1, len(splits["train"]) // 10)
            splits[split], splits["train"] = splits["train"][:size], splits["train"][size:]
    return splits


def _corpus(splits: dict[str, list[Example]], description: str, skipped: Sequence[str]) -> Corpus:
    """Numbers the classes of the labels."""
    labels = (name for items in splits.values() for item in items for name in item.labels)
    classes = sorted({SILENCE, *labels})
    index = {name: number for number, name in enumerate(classes)}
    for items in splits.values():
        items[:] = [
            item._replace(labels=torch.tensor([index[name] for name in item.labels]))
            for item in items
        ]
    return Corpus(classes, splits, description, skipped)
