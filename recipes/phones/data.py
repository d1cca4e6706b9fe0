"""Utterances with a phone for each frame: synthetic, or of a folder with labels."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from torch import Tensor
from tqdm import tqdm

from cape_plugins.speech.audio import AudioError, read_audio
from cape_plugins.speech.features import (
    HOP_SECONDS,
    SAMPLING_RATE,
    log_mel,
    normalized,
)
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
# espeak-ng's names in the voices of synthesis.py, in those of the thesis
ESPEAK = {
    **dict.fromkeys(("@", "@2", "V", "a#"), "ah"),
    **dict.fromkeys(("I", "I#", "I2"), "ih"),
    **dict.fromkeys(("i:", "i"), "iy"),
    **dict.fromkeys(("A:", "0"), "aa"),
    **dict.fromkeys(("3", "3:"), "er"),
    **dict.fromkeys(("r", "r-"), "r"),
    **dict.fromkeys(("t", "t2"), "t"),
    **dict.fromkeys(("j", ";"), "y"),
    **dict.fromkeys(("_", "_:"), SILENCE),
    "a": "ae",
    "aI": "ay",
    "aU": "aw",
    "D": "dh",
    "dZ": "jh",
    "E": "eh",
    "eI": "ey",
    "h": "hh",
    "N": "ng",
    "O:": "ao",
    "OI": "oy",
    "oU": "ow",
    "S": "sh",
    "T": "th",
    "tS": "ch",
    "u:": "uw",
    "U": "uh",
    "Z": "zh",
}


class Example(NamedTuple):
    """Features and labels of one recording.

    Attributes:
        name: Name of the recording.
        features: ``[T, 40]`` float32, each band of mean 0 and standard deviation 1.
        labels: ``[T]`` int64, indices of the classes; names, before all classes are known.
    """

    name: str
    features: Tensor
    labels: Tensor | list[str]


@dataclass
class Corpus:
    """What models are trained and tested on.

    Attributes:
        classes: Names, sorted.
        splits: Examples of train, dev and test.
        description: What the data are, for reports.
        skipped: Why recordings were left out, one line for each.
    """

    classes: list[str]
    splits: dict[str, list[Example]]
    description: str
    skipped: list[str] = field(default_factory=list)

    def fingerprint(self) -> str:
        """A digest of all features and labels."""
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
    """Features of a recording and the phone of each frame."""
    features = extract(waveform)
    return Example(name, features, frame_labels(phones, len(features)))


# ---- synthetic speech ----------------------------------------------------------------------------


def add_noise(waveform: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """White noise at a random distance of :data:`NOISE_DB` to the speech, ``[samples]`` float32."""
    level = np.sqrt((waveform**2).mean()) * 10 ** (-rng.uniform(*NOISE_DB) / 20)
    return (waveform + level * rng.standard_normal(len(waveform))).astype(np.float32)


def synthetic(sizes: Sequence[int], seed: int = 0) -> Corpus:
    """Random words read by espeak-ng.

    Args:
        sizes: Utterances for training, dev and test.
        seed: Seed of the words and voices.
    """
    splits = {}
    for number, (split, count) in enumerate(zip(SPLITS, sizes, strict=True)):
        rng = np.random.default_rng((seed, number))
        synthesizer = Synthesizer()
        splits[split] = []
        for index in range(count):
            speech = synthesizer.speak(
                " ".join(rng.choice(WORDS, rng.integers(*WORDS_PER_UTTERANCE, endpoint=True))),
                str(rng.choice(STEADY_VOICES)),
                speed=int(rng.integers(*SPEEDS, endpoint=True)),
                pitch=int(rng.integers(*PITCHES, endpoint=True)),
            )
            waveform = torch.from_numpy(add_noise(speech.waveform, rng))
            phones = [
                phone._replace(name=ESPEAK.get(phone.name, phone.name)) for phone in speech.phones
            ]
            splits[split].append(label(f"{split}{index} ({speech.text})", waveform, phones))
    return _corpus(splits, f"random words by espeak-ng, seed {seed}")


# ---- a folder ------------------------------------------------------------------------------------


def read_folder(folder: Path, tier: str | None = None, seed: int = 0) -> Corpus:
    """Recordings below `folder` with labels of the same name beside them.

    Subfolders train, dev (or valid) and test, in any letter case, are the splits. Without train and
    test a tenth of the recordings becomes the test; without dev a tenth of training becomes dev.

    Args:
        folder: Has recordings and ``.phn`` or ``.TextGrid`` files.
        tier: Name of the tier of the TextGrids.
        seed: Seed of the splits.

    Raises:
        CommandError: if nothing, or too little, can be used.
    """
    if not folder.is_dir():
        raise CommandError(f"--data {folder}: no such folder; give one with recordings and labels")
    pairs, skipped = _pairs(folder)
    items: list[tuple[Path, Example]] = []
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
    corpus = _corpus(splits, folder.name)
    corpus.skipped = skipped
    return corpus


def _pairs(folder: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Recordings with their labels, and what has no partner."""
    by_name: dict[tuple[Path, str], dict[str, list[Path]]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        role = "audio" if path.suffix.lower() in AUDIO else "labels"
        stem = path
        while stem.suffix.lower() in AUDIO + LABELS:  # SA1.WAV.wav belongs to SA1.PHN
            stem = stem.with_suffix("")
        if stem != path:
            by_name.setdefault((path.parent, stem.name.lower()), {}).setdefault(role, []).append(
                path
            )
    pairs, skipped = [], []
    for files in by_name.values():
        if len(files) == 2:
            pairs.append((files["audio"][0], files["labels"][0]))
        else:
            lacking = "no labels" if "audio" in files else "no recording"
            paths = next(iter(files.values()))
            skipped.append(f"{paths[0].relative_to(folder)}: {lacking} of this name")
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
    splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
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


def _corpus(splits: dict[str, list[Example]], description: str) -> Corpus:
    names: set[str] = {SILENCE}.union(*(item.labels for items in splits.values() for item in items))
    classes = sorted(names)
    index = {name: number for number, name in enumerate(classes)}
    numbered = {
        split: [
            item._replace(labels=torch.tensor([index[name] for name in item.labels]))
            for item in items
        ]
        for split, items in splits.items()
    }
    return Corpus(classes, numbered, description)
