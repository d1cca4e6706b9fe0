"""Recordings with their texts: hub data sets, tables, folders of audio files, synthetic speech."""

import argparse
import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from cape_plugins.speech.audio import read_audio, resample
from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.manifest import LeftOut, Utterance, measured
from recipes.asr.manifest import report_left_out, usable
from recipes.lab.data import check_columns, given_tables, open_dataset, read_text, train_and_test
from recipes.lab.steps import CommandError
from recipes.lab.synthesis import make_speech

FOLDERS = {"train": ("train",), "test": ("test", "validation", "valid", "dev")}
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
TEXT_COLUMNS = ("text", "transcription", "transcript", "sentence")  # of a metadata file

# Built-in speech: training has up to TRAIN_WORDS digits, tests (how many of them) up to 16
# times as many.
TRAIN_STRINGS, TRAIN_WORDS = 6000, 6
TEST_WORDS = {(2, 4): 160, (4, 8): 120, (8, 16): 80, (16, 32): 40, (32, 64): 30, (64, 96): 20}


class Recordings(Dataset):
    """Waveforms ``[samples]`` at 16 kHz, of paths, bytes, waveforms, or of numbers of `rows`, which
    have the recordings in `column`."""

    def __init__(self, items: Iterable[Utterance], rows: Any = None, column: str = "") -> None:
        self.items, self.rows, self.column = list(items), rows, column

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        source = self.items[index].audio
        if isinstance(source, int):
            source = _cell(self.rows[source][self.column])
        if isinstance(source, np.ndarray):
            return torch.from_numpy(source)
        if isinstance(source, Mapping):
            samples = torch.as_tensor(np.asarray(source["array"], dtype=np.float32))
            return resample(samples, source["sampling_rate"], SAMPLING_RATE)
        return read_audio(source, SAMPLING_RATE)


def _cell(value: Any) -> Any:
    """What a row holds: a path, bytes of a file, or samples with their rate."""
    if isinstance(value, Mapping) and value.get("array") is None:
        return value.get("bytes") or value.get("path")
    return value


def synthetic() -> dict[str, Recordings]:
    """Strings of digits by many voices: short ones for training, short to long ones for tests."""
    train = make_speech(0, TRAIN_STRINGS, (1, TRAIN_WORDS))
    sets = enumerate(TEST_WORDS.items(), start=1)
    test = [s for seed, (words, count) in sets for s in make_speech(seed, count, words)]
    return {
        split: Recordings(
            Utterance(str(n), spoken.waveform, spoken.text, len(spoken.waveform) / SAMPLING_RATE)
            for n, spoken in enumerate(speech)
        )
        for split, speech in (("train", train), ("test", test))
    }


def given(args: argparse.Namespace) -> dict[str, Recordings]:
    """The splits train and test of ``--dataset`` or ``--train-file``."""
    from datasets import Audio

    if args.dataset and _recordings(Path(args.dataset)):
        sets = split_folder(Path(args.dataset), FOLDERS)
        return {name: Recordings(usable(rows, len(rows), name)) for name, rows in sets.items()}
    data = open_dataset(args.dataset, args.dataset_config) if args.dataset else given_tables(args)
    parts = train_and_test(data, args.train_split, args.test_split)
    check_columns(args, parts["train"], "audio_column", "text_column")
    # paths in a table are relative to it
    table = Path(args.train_file or args.dataset)
    base = table.parent if table.is_file() else Path()
    audio, text = args.audio_column, args.text_column

    def measure(numbered: tuple[int, Mapping[str, Any]]) -> Utterance:
        index, row = numbered
        source, said, seconds = _cell(row[audio]), row[text], None
        if isinstance(source, str):
            source = base / source
        if isinstance(source, Mapping):
            seconds = len(source["array"]) / source["sampling_rate"]
        said = said.strip() if isinstance(said, str) else ""
        utterance = measured(Utterance(str(index), source, said, seconds))
        # a path, or the number of the row, is enough to read it again
        return utterance._replace(audio=source if isinstance(source, Path) else index)

    splits = {}
    for name, part in parts.items():
        if isinstance(part.features[audio], Audio):
            part = part.cast_column(audio, Audio(decode=False))  # read by soundfile instead

        splits[name] = Recordings(usable(enumerate(part), len(part), name, measure), part, audio)
    return splits


def split_folder(folder: Path, names: Mapping[str, Sequence[str]]) -> dict[str, list[Utterance]]:
    """Audio files with their texts, in subfolders or in one folder.

    The texts stand in ``metadata.csv`` or ``metadata.jsonl`` with the columns file_name and text,
    or in a file beside each recording, ``one.txt`` beside ``one.wav``. A tenth of the training
    data, at most 1000 recordings, is split off for each set that is not there. `names` are the
    allowed names of the subfolder for each set.
    """
    parts = {
        split: next((folder / name for name in allowed if (folder / name).is_dir()), None)
        for split, allowed in names.items()
    }
    if any(parts.values()) and not parts["train"]:
        others = ", ".join(part.name for part in parts.values() if part)
        raise CommandError(f"{folder}: no folder train beside {others}")
    parts["train"] = parts["train"] or folder
    sets = {
        split: [Utterance(_id(path, part), path, text) for path, text in pairs_in(part)]
        for split, part in parts.items()
        if part
    }
    missing = [split for split in names if split not in sets]
    recordings = sets["train"]
    size = min(1000, max(1, len(recordings) // 10))
    if len(recordings) <= size * len(missing):
        raise CommandError(
            f"{folder}: {len(recordings)} recordings are too few to split off {', '.join(missing)}"
        )
    order = np.random.default_rng(0).permutation(len(recordings))
    drawn = np.split(order, [size * (n + 1) for n in range(len(missing))])
    for split, rows in zip((*missing, "train"), drawn, strict=True):
        sets[split] = [recordings[n] for n in sorted(rows)]
    return sets


def _id(path: Path, folder: Path) -> str:
    relative = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
    return re.sub(r"\s", "_", "-".join(relative.with_suffix("").parts))


def _recordings(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES)


def pairs_in(folder: Path) -> list[tuple[Path, str]]:
    """Recordings of a folder with their texts."""
    table, lines = folder / "metadata.csv", folder / "metadata.jsonl"
    if table.is_file() or lines.is_file():
        table = table if table.is_file() else lines
        rows = _metadata(table)
        column = next((name for name in TEXT_COLUMNS if rows and name in rows[0]), None)
        if column is None or "file_name" not in rows[0]:
            raise CommandError(
                f"{table}: needs the columns file_name and one of {', '.join(TEXT_COLUMNS)}"
            )
        return [(folder / row["file_name"], (row[column] or "").strip()) for row in rows]
    recordings = _recordings(folder)
    pairs = [(p, p.with_suffix(".txt")) for p in recordings if p.with_suffix(".txt").is_file()]
    if len(pairs) < 2:
        raise CommandError(
            f"{folder} holds {len(recordings)} recordings ({', '.join(AUDIO_SUFFIXES)}), "
            f"{len(pairs)} of them with a text; at least 2 are needed. Give metadata.csv with the "
            "columns file_name and text, or a text file beside each, one.txt beside one.wav"
        )
    left_out = LeftOut()
    left_out.reasons["without a text"] = len(recordings) - len(pairs)
    report_left_out("folder", left_out, len(recordings))
    return [(path, read_text(text).strip()) for path, text in pairs]


def _metadata(table: Path) -> list[dict[str, str]]:
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
