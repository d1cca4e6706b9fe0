"""Manifests of speech: tables with one line for each recording, and the recordings they list.

A folder of data holds ``train.tsv``, ``valid.tsv`` and one table for each test set: UTF-8, columns
separated by tabs, no quotes, the first line names the columns. ``audio`` is relative to the folder
of the table for recordings under it, else an absolute path.
"""

import hashlib
import os
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio
from cape_plugins.speech.features import WINDOW_SECONDS
from recipes.asr.data import report_skipped
from recipes.lab.steps import (
    RECORD,
    CommandError,
    building,
    matches,
    progress,
    record,
    recorded,
    write_lines,
)

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
    for id, audio, text, make in progress(utterances, name, unit="recording"):
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


# ---- folders -------------------------------------------------------------------------------------

SOURCES = "sources"  # in the record of a folder: what its sources were
# What preparations read: recordings, texts, lists of them.
_SOURCE_SUFFIXES = {".wav", ".flac", ".ogg", ".mp3", ".sph", ".wv1"}
_SOURCE_SUFFIXES |= {".txt", ".csv", ".jsonl", ".stm", ".dot", ".lsn", ".ndx"}


def files_below(folder: Path) -> Iterator[Path]:
    """All files at any depth, also behind links to folders, of which none is visited twice."""
    visited = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # a link to a folder above
            folders.clear()
            continue
        visited.add(real)
        yield from (Path(place, name) for name in names)


def fingerprint(source: Path, output: Path) -> dict[str, Any]:
    """Number of recordings, texts and lists below `source`, and a digest of their names, sizes and
    times; without those in `output`, which may lie there."""
    sha, count = hashlib.sha256(), 0
    for path in sorted(files_below(source)):
        if path.suffix.lower() in _SOURCE_SUFFIXES and not path.is_relative_to(output):
            facts = path.stat() if path.exists() else path.lstat()  # a link to nothing
            name = path.relative_to(source).as_posix()
            sha.update(f"{name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode(errors="replace"))
            count += 1
    return {"files": count, "digest": sha.hexdigest()[:16]}


def make_folder(
    folder: Path,
    settings: Mapping[str, Any],
    make: Callable[[Path], None],
    source: Path | None = None,
) -> None:
    """A step of recipes/lab/steps.py that leaves nothing behind when it fails: speech fills disks.

    Says so if a finished folder is reused. One whose recordings or texts in `source` have changed
    is made again; what others have put into it since, such as dict.txt, stays.
    """
    old = recorded(folder).get(SOURCES)
    expected = {**settings, SOURCES: old} if old else settings
    finished = matches(folder, expected, "give another --output folder")
    now = fingerprint(source, folder) if source is not None and source.is_dir() else None
    if finished and (old is None or now is None or now.items() <= old.items()):
        print(f"reused: {folder} {_why_reused(source, old, now)}", flush=True)
        return
    if finished:
        counts = f"{now['files']} recordings, texts and lists, then {old['files']}"
        print(f"{source} has changed ({counts}): {folder} is made again", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    new = folder.with_name(f"{folder.name}.new") if finished else folder
    try:
        with building(new) as partial:
            make(partial)
            made = {**(now or {}), "made": sorted(path.name for path in partial.glob("*.tsv"))}
            record(partial, {**settings, SOURCES: made})
    except BaseException:  # also Ctrl-C
        shutil.rmtree(new.with_name(f"{new.name}.partial"), ignore_errors=True)
        raise
    if finished:
        _replace_content(folder, new, old["made"])


def _why_reused(source: Path | None, old: Any, now: Any) -> str:
    if source is None:
        return "was made with these settings"
    if now is None:
        return f"is finished, and {source} is not there any more"
    if old is None:
        return f"is finished; delete it if {source} has changed since, which it does not say"
    return f"is finished, and {source} has not changed"


def _replace_content(folder: Path, new: Path, tables: Sequence[str]) -> None:
    """Moves what was made into a finished folder, whose `tables` and their recordings go. The
    record is last: up to then the folder counts as made of what there was before."""
    for name in tables:
        (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "audio" / Path(name).stem, ignore_errors=True)
    for path in (*new.glob("audio/*"), *new.glob("*.tsv"), new / RECORD):
        place = folder / path.relative_to(new)
        place.parent.mkdir(exist_ok=True)
        os.replace(path, place)
    shutil.rmtree(new)


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
