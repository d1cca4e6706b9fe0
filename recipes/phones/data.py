"""Utterances with a phone for each frame: synthetic speech, or a folder of recordings with labels
of TIMIT (``.PHN``) or Praat (``.TextGrid``)."""

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cape_plugins.settings.domains import HOP_SECONDS, WINDOW_SECONDS
from cape_plugins.speech.audio import AudioError, audio_rate, read_audio
from cape_plugins.speech.features import SAMPLING_RATE, log_mel, normalized
from recipes.lab.data import read_text
from recipes.lab.steps import CommandError, progress
from recipes.lab.synthesis import PITCHES, SPEEDS, VOICES, Phone, Synthesizer
from recipes.phones.analysis import SILENCE

BANDS = 40
SPLITS = ("train", "dev", "test")
AUDIO = (".wav", ".flac", ".ogg", ".mp3", ".sph", ".aiff")
LABELS = (".phn", ".textgrid")
# Labels may end at most BEYOND seconds after the recording, and not before the share COVERED of it;
# labels beyond these limits belong to another recording, or have another unit of time.
BEYOND, COVERED = 0.1, 0.5

# names of silence in TIMIT, in Praat, of the Montreal Forced Aligner, of MAUS and of espeak-ng
SILENT_NAMES = {"", "#", "_", "_:", "<p:>", "epi", "h#", "pau", "sil", "silence", "sp"}
PHONE_TIERS = ("phones", "phone", "phonemes", "phoneme", "segments", "segment", "mau")

# Praat reads texts in quotes, free-standing numbers and flags; all else is a comment
_TEXT_GRID_TOKEN = re.compile(
    r'(?<!\S)(?:"((?:[^"]|"")*)"|([-+]?[\d.]+(?:[eE][-+]?\d+)?)|(<\w+>))(?!\S)'
)
_INTERVALS = "IntervalTier"
_ROW_SIZES = {"TextTier": 2, _INTERVALS: 3}  # time, mark; start, end, text

# Words that have all 39 phones of the thesis, and none of the diphthongs with r of espeak-ng. A
# comma makes a pause.
_WORDS = """the quick brown fox jumps lazy dog measure pleasure vision treasure beige rouge church
    judge teeth breathe this that sheep shoe azure boy noise voice cow house out bird nurse girl
    father calm spa thought law saw go home day make time light think thing singing zoo zip yes you
    use we wind hello behind help pen ten bed cat hat sit fish book good foot blue cup love among
    sofa vague gift king pig tub dad kick pop babe mother nothing see, pay, knife, dawn, mouth,
    join, seven, buzz, peace, cheese, bulb, mug,"""
WORDS = _WORDS.split()
WORDS_PER_UTTERANCE = (1, 3)
STEADY_VOICES = [voice for voice in VOICES if voice != "en-us+f2"]  # f2's breath differs by run
# speech relative to noise; without noise, single frames are enough to tell phones apart
NOISE_DB = (0.0, 20.0)
# names of the thesis, each followed by the names of espeak-ng in the voices of synthesis.py
_NAMES = """ah @ @2 V a#, ih I I# I2, iy i: i, aa A: 0, er 3 3:, r r r-, t t t2, y j ;, sil _ _:,
    ae a, ay aI, aw aU, dh D, jh dZ, eh E, ey eI, hh h, ng N, ao O:, oy OI, ow oU, sh S, th T,
    ch tS, uw u:, uh U, zh Z"""
ESPEAK = {name: phone for phone, *names in map(str.split, _NAMES.split(",")) for name in names}


class Example(NamedTuple):
    name: str
    features: Tensor  # [T, 40] float32, each band of mean 0 and standard deviation 1
    labels: Tensor | list[str]  # [T] indices of classes; names, before all classes are known


@dataclass
class Corpus:
    """Data for training and tests of models."""

    classes: list[str]  # sorted
    splits: dict[str, list[Example]]
    description: str  # for reports
    skipped: Sequence[str] = ()  # reasons for which recordings were left out
    # the test again, joined and cut into pieces of these lengths in seconds
    lengths: dict[float, list[Example]] = field(default_factory=dict)

    def fingerprint(self) -> str:
        sha = hashlib.sha256(" ".join(self.classes).encode())
        for split in SPLITS:
            for example in self.splits[split]:
                sha.update(example.features.numpy().tobytes())
                sha.update(example.labels.numpy().tobytes())
            sha.update(split.encode())
        return sha.hexdigest()[:16]

    def sizes(self) -> str:
        return "; ".join(
            f"{split} {len(items)} utterances, {sum(len(item.labels) for item in items)} frames"
            for split, items in self.splits.items()
        )


def label(name: str, waveform: Tensor, phones: Sequence[Phone]) -> Example:
    """An example from ``[samples]`` at 16 kHz; each band is normalised over the utterance."""
    mel = log_mel(waveform, SAMPLING_RATE, BANDS, HOP_SECONDS, normalize=False)
    features = normalized(mel, 0)
    return Example(name, features, frame_labels(phones, len(features)))


class LabelError(ValueError):
    """Labels that cannot be used; the message gives the reason."""


class Tier(NamedTuple):
    name: str
    phones: list[Phone]


def read_labels(path: Path, sampling_rate: int, tier: str | None = None) -> list[Phone]:
    """Reads the phones of a ``.phn`` or ``.TextGrid`` file, in order. `sampling_rate` is the unit
    of time in ``.phn``, `tier` a name in ``.TextGrid``. Names of silence become "sil", ``AH0``
    becomes ``AH``."""
    try:
        text = read_text(path)
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}") from None
    except CommandError as error:
        raise LabelError(str(error)) from None
    if path.suffix.lower() == ".phn":
        phones = parse_phn(text, sampling_rate)
    else:
        phones = choose_tier(parse_text_grid(text), tier).phones
    phones = sorted(Phone(start, end, _clean(name)) for start, end, name in phones)
    for before, phone in zip([-inf, *(phone.end for phone in phones)], phones, strict=False):
        if phone.end < phone.start or phone.start < before - 1e-3:
            raise LabelError(f"the phone {phone} ends before it starts or overlaps the one before")
    if not phones:
        raise LabelError("no phone in it")
    if phones[0].start < 0:
        raise LabelError(f"the phone {phones[0]} starts before the recording")
    return phones


def _clean(name: str) -> str:
    name = name.strip()
    return SILENCE if name.lower() in SILENT_NAMES else re.sub("^([A-Z]{2})[012]$", r"\1", name)


def parse_phn(text: str, sampling_rate: int) -> list[Phone]:
    """TIMIT's format: first sample, last sample and label in each line."""
    phones = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                start, end, name = line.split()
                phones.append(Phone(int(start) / sampling_rate, int(end) / sampling_rate, name))
        except ValueError:
            why = f"line {number}, {line.strip()!r}, is not: first sample, last sample, label"
            raise LabelError(why) from None
    return phones


def parse_text_grid(text: str) -> list[Tier]:
    """The interval tiers of Praat's long and short text formats."""
    tokens = (
        float(match[2]) if match[2] else match[3] or match[1].replace('""', '"')
        for match in _TEXT_GRID_TOKEN.finditer(text)
    )
    try:
        if (next(tokens), next(tokens)) != ("ooTextFile", "TextGrid"):
            raise LabelError("not a TextGrid in Praat's text format")
        next(tokens), next(tokens)  # times of the whole file
        if next(tokens) != "<exists>":
            raise LabelError("a TextGrid without tiers")
        tiers = [_parse_tier(tokens) for _ in range(int(next(tokens)))]
    except LabelError:
        raise
    except StopIteration:
        raise LabelError("the TextGrid ends too early") from None
    except (TypeError, ValueError) as error:
        raise LabelError(f"a text or number is out of place in the TextGrid ({error})") from None
    return [tier for tier in tiers if tier is not None]


def _parse_tier(tokens: Iterator[str | float]) -> Tier | None:
    """The next tier; None for a tier of points."""
    tier_class, name, _, _, count = [next(tokens) for _ in range(5)]
    if tier_class not in _ROW_SIZES:
        raise LabelError(f"a tier of the unknown class {tier_class!r}")
    rows = []
    for _ in range(int(count)):
        row = [next(tokens) for _ in range(_ROW_SIZES[tier_class])]
        if tier_class == _INTERVALS and list(map(type, row)) != [float, float, str]:
            raise LabelError(f"tier {name!r}: {', '.join(map(repr, row))} is no interval")
        rows.append(row)
    return Tier(name, [Phone(*row) for row in rows]) if tier_class == _INTERVALS else None


def choose_tier(tiers: Sequence[Tier], name: str | None = None) -> Tier:
    """The tier `name`. Without a name, the tier with a usual name or ``SPEAKER - phones``, or else
    the only tier."""
    wanted = PHONE_TIERS if name is None else [name.lower()]
    chosen = [tier for tier in tiers if tier.name.lower() in wanted]
    if name is None:
        chosen = chosen or [tier for tier in tiers if tier.name.lower().endswith(" - phones")]
        chosen = chosen or list(tiers)
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(repr(tier.name) for tier in tiers) or "none"
    raise LabelError(
        f"{len(chosen) or 'no'} tiers are {name or 'for phones'!r}; the TextGrid has {names}: name "
        "one by --tier"
    )


def frame_labels(
    phones: Sequence[Phone], count: int, hop: float = HOP_SECONDS, window: float = WINDOW_SECONDS
) -> list[str]:
    """The phone at the centre of each frame, ``i * hop + window / 2`` seconds; "sil" where there is
    no phone. `phones` are in order."""
    centres = np.arange(count) * hop + window / 2
    indices = np.searchsorted([phone.start for phone in phones], centres, side="right") - 1
    return [
        phones[index].name if index >= 0 and centre < phones[index].end else SILENCE
        for index, centre in zip(indices, centres, strict=True)
    ]


def add_noise(waveform: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Speech ``[samples]`` float32 with white noise, at a random ratio in :data:`NOISE_DB`."""
    level = np.sqrt((waveform**2).mean()) * 10 ** (-rng.uniform(*NOISE_DB) / 20)
    return (waveform + level * rng.standard_normal(len(waveform))).astype(np.float32)


def synthetic(sizes: Sequence[int], seed: int = 0) -> Corpus:
    """Random words spoken by espeak-ng; `sizes` are the numbers of utterances for training, dev and
    test. The utterances are short and noisy: with sentences of 1.5 s, SGD did not find local
    attention within 16 epochs, and in formant synthesis without noise, single frames are enough to
    tell phones apart."""
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


def read_folder(folder: Path, tier: str | None = None, seed: int = 0) -> Corpus:
    """Recordings below `folder` with labels of the same name beside them.

    Subfolders train, dev (or valid) and test, in any letter case, are the splits. A tenth of the
    recordings becomes the test if train and test are missing; a tenth of training becomes dev if
    dev is missing.
    """
    if not folder.is_dir():
        raise CommandError(
            f"--data {folder}: no such folder; give a folder with recordings and labels"
        )
    pairs, skipped = _pairs(folder)
    items = []
    for audio, labels in progress(pairs, "read"):
        name = audio.relative_to(folder)
        try:
            items.append((name, _read(name, audio, labels, tier)))
        except ValueError as error:  # AudioError, LabelError, or shorter than a frame
            skipped.append(f"{name}: {error}")
    if len(items) < 3:
        why = f"; {skipped[0]}" if skipped else ""
        raise CommandError(
            f"--data {folder}: {len(items)} recordings ({', '.join(AUDIO)}) with labels "
            f"({', '.join(LABELS)}) of the same name can be used, at least 3 are needed{why}"
        )
    splits = _split(items, seed)
    if not splits["train"]:
        remedy = "add recordings to train"
        raise CommandError(f"--data {folder}: nothing is left for training; {remedy}")
    return _corpus(splits, folder.name, skipped)


def _pairs(folder: Path) -> tuple[list[list[Path]], list[str]]:
    """Recordings with their labels, and messages about files without a partner."""
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


def _read(name: Path, audio: Path, labels: Path, tier: str | None) -> Example:
    waveform = read_audio(audio, SAMPLING_RATE)
    if not waveform.any():
        raise AudioError("silence from beginning to end")
    phones = read_labels(labels, audio_rate(audio), tier)
    seconds = len(waveform) / SAMPLING_RATE
    end = phones[-1].end
    if not COVERED * seconds < end < seconds + BEYOND:
        raise LabelError(f"labels end at {end:.2f} s, the recording at {seconds:.2f} s")
    return label(name.as_posix(), waveform, phones)


def _split(items: Sequence[tuple[Path, Example]], seed: int) -> dict[str, list[Example]]:
    splits = {split: [] for split in SPLITS}
    names = {"train": "train", "dev": "dev", "valid": "dev", "test": "test"}
    for path, item in items:
        folders = (names.get(part.lower()) for part in path.parts[:-1])
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
    """Makes a corpus, in which labels are numbers of classes."""
    labels = (name for items in splits.values() for item in items for name in item.labels)
    classes = sorted({SILENCE, *labels})
    index = {name: number for number, name in enumerate(classes)}
    for items in splits.values():
        for row, item in enumerate(items):
            items[row] = item._replace(labels=torch.tensor([index[n] for n in item.labels]))
    return Corpus(classes, splits, description, skipped)


def join_and_cut(corpus: Corpus, train: float | None, tests: Sequence[float]) -> Corpus:
    """The corpus in pieces of other lengths, in seconds: the utterances of each split are joined
    and cut. A piece may begin inside a phone.

    Args:
        corpus: Corpus with whole utterances.
        train: Length of the pieces of all splits; None does not cut them.
        tests: Lengths of further tests. All tests, including the test of length `train`, have the
            same frames: the frames in whole pieces of the longest length.

    Raises:
        CommandError: if a split has too little speech for a piece.
    """
    lengths = sorted({*tests} | ({train} - {None}))
    if not lengths:
        return corpus
    frames = {seconds: max(1, round(seconds / HOP_SECONDS)) for seconds in lengths}
    splits, needed = dict(corpus.splits), dict.fromkeys(SPLITS, frames.get(train, 1))
    needed["test"] = frames[lengths[-1]]
    for split, least in needed.items():
        present = sum(len(item.labels) for item in splits[split])
        if present < least:
            option = "--test-lengths" if split == "test" and tests else "--train-length"
            raise CommandError(
                f"{option} {least * HOP_SECONDS:g}: {split} has {present * HOP_SECONDS:.2f} s of "
                "speech; give a shorter length or more data"
            )
    whole = _pieces(splits["test"], needed["test"])
    pieces = {seconds: _pieces(whole, count) for seconds, count in frames.items()}
    if train is not None:
        splits = {split: _pieces(items, frames[train]) for split, items in splits.items()}
        splits["test"] = pieces[train]
    return replace(corpus, splits=splits, lengths=pieces)


def _pieces(items: Sequence[Example], frames: int) -> list[Example]:
    """Joins items and cuts them into pieces of `frames` frames; a shorter last piece is dropped."""
    names = [name for name, _, labels in items for _ in labels][::frames]
    features = torch.cat([item.features for item in items]).split(frames)
    labels = torch.cat([item.labels for item in items]).split(frames)
    pieces = map(Example, names, features, labels)
    return [piece for piece in pieces if len(piece.labels) == frames]
