"""Recordings with their texts: hub data sets, tables, folders of audio files, synthetic speech."""

import argparse
import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio, resample
from cape_plugins.speech.features import WINDOW_SECONDS
from recipes.asr.synthesis import make_speech
from recipes.lab.data import check_columns, given_tables, open_dataset, read_text, train_and_test
from recipes.lab.steps import CommandError, progress

SAMPLING_RATE = 16000
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
TEXT_COLUMNS = ("text", "transcription", "transcript", "sentence")  # of a metadata file

# Built-in speech: training has up to TRAIN_WORDS digits, tests (how many of them) up to 16
# times as many.
TRAIN_WORDS = 6
TEST_WORDS = {(2, 4): 160, (4, 8): 120, (8, 16): 80, (16, 32): 40, (32, 64): 30, (64, 96): 20}


class Recording(NamedTuple):
    """Where a recording is, what is said in it, and its duration in seconds."""

    source: Any
    text: str
    seconds: float


class Recordings(Dataset):
    """Waveforms at 16 kHz.

    Args:
        items: What to read.
        rows: Rows of a data set that sources of type int point to.
        column: Its column of recordings.
    """

    def __init__(self, items: Sequence[Recording], rows: Any = None, column: str = "") -> None:
        self.items, self.rows, self.column = list(items), rows, column

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        """``[samples]``."""
        source = self.items[index].source
        if isinstance(source, int):
            source = _cell(self.rows[source][self.column])
        return _waveform(source)


def _cell(value: Any) -> Any:
    """What a row holds: a path, bytes of a file, or samples with their rate."""
    if isinstance(value, Mapping) and value.get("array") is None:
        return value.get("bytes") or value.get("path")
    return value


def _waveform(source: Any) -> torch.Tensor:
    if isinstance(source, np.ndarray):
        return torch.from_numpy(source)
    if isinstance(source, Mapping):
        samples = torch.as_tensor(np.asarray(source["array"], dtype=np.float32))
        return resample(samples, source["sampling_rate"], SAMPLING_RATE)
    return read_audio(source, SAMPLING_RATE)


def _seconds(source: Any) -> float:
    if isinstance(source, np.ndarray):
        return len(source) / SAMPLING_RATE
    if isinstance(source, Mapping):
        return len(source["array"]) / source["sampling_rate"]
    return audio_seconds(source)


def usable(rows: Iterator[tuple[Any, Any, str]], total: int, name: str) -> list[Recording]:
    """Recordings that can be read, are long enough and have a text; the others are counted and
    reported.

    Args:
        rows: Reference that is kept, source, text.
        total: Number of rows.
        name: Shown to the user.
    """
    items, skipped, first = [], Counter(), ""
    for kept, source, text in progress(rows, f"{name}: durations", total=total):
        if not isinstance(text, str) or not text.strip():
            skipped["without a text"] += 1
            continue
        try:
            if source is None:
                raise AudioError("a row without a recording")
            seconds = _seconds(source)
        except AudioError as error:
            skipped["unreadable"] += 1
            first = first or str(error)
            continue
        if seconds < WINDOW_SECONDS:
            skipped[f"shorter than {WINDOW_SECONDS} s"] += 1
            continue
        items.append(Recording(kept, text.strip(), seconds))
    report_skipped(name, skipped, total, first)
    if not items:
        raise CommandError(f"{name} data: none of {total} recordings can be used. {first}")
    return items


def report_skipped(name: str, skipped: Mapping[str, int], total: int, first: str = "") -> None:
    """Says how many recordings are left out, and why; the first process alone does."""
    if any(skipped.values()) and os.environ.get("RANK", "0") == "0":
        parts = ", ".join(f"{count} {reason}" for reason, count in skipped.items() if count)
        print(f"{name} data: {sum(skipped.values())} of {total} skipped ({parts})", flush=True)
        if first:
            print(f"  first: {first}", flush=True)


def synthetic() -> dict[str, Recordings]:
    """Strings of digits by many voices: short ones for training, short to long ones for tests."""
    train = make_speech(0, 6000, (1, TRAIN_WORDS))
    sets = enumerate(TEST_WORDS.items(), start=1)
    test = [s for seed, (words, count) in sets for s in make_speech(seed, count, words)]
    return {
        split: Recordings(
            Recording(one.waveform, one.text, len(one.waveform) / SAMPLING_RATE) for one in speech
        )
        for split, speech in (("train", train), ("test", test))
    }


def given(args: argparse.Namespace) -> dict[str, Recordings]:
    """The splits train and test of ``--dataset`` or ``--train-file``."""
    from datasets import Audio

    if args.dataset and _recordings(Path(args.dataset)):
        return _folder(Path(args.dataset))
    data = open_dataset(args.dataset, args.dataset_config) if args.dataset else given_tables(args)
    parts = train_and_test(data, args.train_split, args.test_split)
    check_columns(args, parts["train"], "audio_column", "text_column")
    # paths in a table are relative to it
    table = Path(args.train_file or args.dataset)
    base = table.parent if table.is_file() else Path()
    audio, text = args.audio_column, args.text_column
    splits = {}
    for name, part in parts.items():
        if isinstance(part.features[audio], Audio):
            part = part.cast_column(audio, Audio(decode=False))  # read by soundfile instead

        def rows(part: Any = part) -> Iterator[tuple[Any, Any, str]]:
            for index, row in enumerate(part):
                source = _cell(row[audio])
                if isinstance(source, str):
                    yield base / source, base / source, row[text]
                else:
                    yield index, source, row[text]

        splits[name] = Recordings(usable(rows(), len(part), name), part, audio)
    return splits


def _folder(folder: Path) -> dict[str, Recordings]:
    """Audio files with their texts, in subfolders train and test, or in one folder that is split.

    The texts stand in ``metadata.csv`` or ``metadata.jsonl`` with the columns file_name and text,
    or in a file beside each recording, ``one.txt`` beside ``one.wav``.
    """
    names = {"train": ("train",), "test": ("test", "validation", "valid", "dev")}
    found = {
        split: next((folder / n for n in allowed if (folder / n).is_dir()), None)
        for split, allowed in names.items()
    }
    if all(found.values()):
        pairs = {split: pairs_in(part) for split, part in found.items()}
    else:
        both = pairs_in(found["train"] or folder)
        order = np.random.default_rng(0).permutation(len(both))
        cut = min(1000, max(1, len(both) // 10))
        pairs = {
            "train": [both[i] for i in sorted(order[cut:])],
            "test": [both[i] for i in sorted(order[:cut])],
        }
    return {
        split: Recordings(usable(((p, p, t) for p, t in rows), len(rows), split))
        for split, rows in pairs.items()
    }


def _recordings(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES)


def pairs_in(folder: Path) -> list[tuple[Path, str]]:
    """Recordings of a folder with their texts."""
    table, lines = folder / "metadata.csv", folder / "metadata.jsonl"
    if table.is_file() or lines.is_file():
        table = table if table.is_file() else lines
        rows = _rows(table)
        column = next((name for name in TEXT_COLUMNS if rows and name in rows[0]), None)
        if column is None or "file_name" not in rows[0]:
            raise CommandError(
                f"{table}: needs the columns file_name and one of {', '.join(TEXT_COLUMNS)}"
            )
        return [(folder / row["file_name"], row[column]) for row in rows]
    recordings = _recordings(folder)
    pairs = [(p, p.with_suffix(".txt")) for p in recordings if p.with_suffix(".txt").is_file()]
    if len(pairs) < 2:
        raise CommandError(
            f"{folder} holds {len(recordings)} recordings ({', '.join(AUDIO_SUFFIXES)}), "
            f"{len(pairs)} of them with a text; at least 2 are needed. Give metadata.csv with the "
            "columns file_name and text, or a text file beside each, one.txt beside one.wav"
        )
    report_skipped("folder", {"without a text": len(recordings) - len(pairs)}, len(recordings))
    return [(path, read_text(text).strip()) for path, text in pairs]


def _rows(table: Path) -> list[dict[str, str]]:
    """Of metadata.csv or metadata.jsonl."""
    text = read_text(table)
    if table.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text, newline="")))
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise CommandError(f"{table}, line {number} is no JSON ({error}); repair it") from None
    return rows
