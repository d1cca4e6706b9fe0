"""Manifests of speech: tables with one line for each recording, and the recordings they list.

A folder of data holds ``train.tsv``, ``valid.tsv`` and one table for each test set: UTF-8, columns
separated by tabs, no quotes, the first line names the columns. ``audio`` is relative to the folder
of the table for recordings under it, else an absolute path.
"""

import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from tqdm import tqdm

from cape_plugins.audio import AudioError, audio_seconds, read_audio
from cape_plugins.features import WINDOW_SECONDS
from recipes.asr.data import report_skipped
from recipes.steps import CommandError, matches, step, write_lines

COLUMNS = ("id", "audio", "seconds", "tgt_text")


class Entry(NamedTuple):
    """A line of a manifest; `seconds` is the duration of the recording."""

    id: str
    audio: Path
    seconds: float
    text: str


class Utterance(NamedTuple):
    """A recording to be listed.

    Attributes:
        id: Unique in its set; what stands before its last ``-`` or ``_`` names the talk, chapter
            or speaker.
        audio: The recording; with `make` the name of the file that it writes.
        text: Words, see :func:`ascii_words`; without any, the recording is left out.
        make: Writes the recording to a path, or raises AudioError.
    """

    id: str
    audio: Path
    text: str
    make: Callable[[Path], None] | None = None


# ---- texts ---------------------------------------------------------------------------------------


def ascii_words(text: str) -> str:
    """Lower-case words of the letters a to z and the apostrophe, separated by single spaces.

    Accents are removed; everything else, digits too, separates words.

    >>> ascii_words("It’s twenty-one, CAFÉ!")
    "it's twenty one cafe"
    """
    text = unicodedata.normalize("NFKD", text.replace("’", "'").lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    return _spaced(re.sub("[^a-z']", " ", text))


def unicode_words(text: str) -> str:
    """As :func:`ascii_words`, but letters with their accents, and digits, of any script stay.

    >>> unicode_words("Größe: 21 – l’eau!")
    "größe 21 l'eau"
    """
    text = unicodedata.normalize("NFC", text.replace("’", "'").lower())
    # L: letters, M: marks, which many scripts write vowels with, N: digits
    kept = (c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    return _spaced("".join(kept))


def _spaced(text: str) -> str:
    return " ".join(word for word in text.split() if word.strip("'"))


# ---- recordings ----------------------------------------------------------------------------------


def write_audio(path: Path, samples: np.ndarray, sampling_rate: int) -> None:
    """Writes 16-bit samples, int16 or floats in -1 to 1; the suffix says whether wav or flac."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        soundfile.write(path, samples, sampling_rate, subtype="PCM_16")
    except (RuntimeError, OSError) as error:  # a full disk
        raise CommandError(f"{path} cannot be written ({error})") from None


def collect(
    name: str, utterances: Sequence[Utterance], folder: Path, decode: bool = False
) -> list[Entry]:
    """Entries of the usable utterances; the others are counted and reported.

    Args:
        name: Of the set; recordings that are made lie in ``folder/audio/name``.
        utterances: With different ids.
        folder: That the manifest will lie in.
        decode: Read every recording to its end, not only its header.
    """
    entries, skipped, first = [], Counter(), ""
    seen = set()
    for id, audio, text, make in tqdm(utterances, name, unit="recording", leave=False):
        if not text:
            skipped["without a text"] += 1
            continue
        if id in seen:
            raise CommandError(f"{name} data: two recordings are named {id}; rename one of them")
        seen.add(id)
        try:
            if make is not None:
                audio = folder / "audio" / name / audio
                make(audio)
            seconds = audio_seconds(audio)
            if decode:
                read_audio(audio)
        except AudioError as error:
            skipped["unreadable"] += 1
            first = first or str(error)
            continue
        if seconds < WINDOW_SECONDS:
            skipped[f"shorter than {WINDOW_SECONDS} s"] += 1
            continue
        entries.append(Entry(id, audio, seconds, text))
    report_skipped(name, skipped, len(utterances), first)
    if not entries:
        raise CommandError(
            f"{name} data: none of {len(utterances)} recordings can be used. {first}".strip()
        )
    return entries


def make_folder(folder: Path, settings: Mapping[str, Any], make: Callable[[Path], None]) -> None:
    """A step of recipes/steps.py that leaves nothing behind when it fails: speech fills disks."""
    matches(folder, settings, "give another --output folder")
    try:
        step(folder, settings, make)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
        raise


# ---- tables --------------------------------------------------------------------------------------


def write_manifest(path: Path, entries: Iterable[Entry]) -> None:
    """Writes a manifest atomically."""
    folder = Path(os.path.abspath(path.parent))
    lines = ["\t".join(COLUMNS)]
    for entry in entries:
        audio = Path(os.path.abspath(entry.audio))
        if audio.is_relative_to(folder):
            audio = audio.relative_to(folder)
        cells = (entry.id, audio.as_posix(), f"{entry.seconds:.4f}", entry.text)
        if any(re.search(r"[\t\r\n]", cell) for cell in cells):
            raise CommandError(f"{audio}: a tab or line break in its name or text; rename it")
        lines.append("\t".join(cells))
    write_lines(path, lines)


def read_manifest(path: Path) -> list[Entry]:
    """Reads a manifest; columns of other names are ignored."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except FileNotFoundError:
        raise CommandError(
            f"{path}: no such file; give a manifest of recipes.asr.prepare"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    header = lines[0].split("\t")
    if missing := [name for name in COLUMNS if name not in header]:
        raise CommandError(
            f"{path}: the first line lacks the column {', '.join(missing)}; a manifest has "
            f"{', '.join(COLUMNS)}, separated by tabs"
        )
    entries = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) != len(header):
            raise CommandError(
                f"{path}: line {number} has {len(cells)} columns, the first has {len(header)}"
            )
        id, audio, seconds, text = (cells[header.index(name)] for name in COLUMNS)
        try:
            entries.append(Entry(id, path.parent / audio, float(seconds), text))
        except ValueError:
            raise CommandError(
                f"{path}: line {number}: seconds {seconds!r} is not a number"
            ) from None
    if not entries:
        raise CommandError(f"{path}: lists no recording")
    return entries


def describe(sets: Mapping[str, Sequence[Entry]]) -> str:
    """A table of the number and the durations of recordings."""
    width = max(map(len, (*sets, "set")))
    head = ("recordings", "words", "hours", "mean s", "longest s")
    lines = [f"{'set':{width}}  " + "  ".join(f"{title:>10}" for title in head)]
    for name, entries in sets.items():
        seconds = [entry.seconds for entry in entries]
        words = sum(len(entry.text.split()) for entry in entries)
        total = sum(seconds)
        cells = (
            *(f"{count:10}" for count in (len(entries), words)),
            *(f"{x:10.2f}" for x in (total / 3600, total / len(entries), max(seconds))),
        )
        lines.append(f"{name:{width}}  " + "  ".join(cells))
    return "\n".join(lines)
