"""Manifests of speech: tables with one line for each recording, and the recordings they list.

A folder of data holds ``train.tsv``, ``valid.tsv`` and one table for each test set: UTF-8, columns
separated by tabs, no quotes, the first line names the columns. ``audio`` is relative to the folder
of the table for recordings below this folder, else an absolute path.
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

from cape_plugins.speech import manifest
from cape_plugins.speech.audio import AudioError, read_audio
from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.manifest import LeftOut, Unusable, Utterance, manifest_lines, measured
from recipes.lab import steps
from recipes.lab.steps import CommandError, progress, write_lines


class ToWrite(NamedTuple):
    """A recording that is not a file yet, with the name that its file will have."""

    name: str
    write: Callable[[Path], None]  # may raise AudioError


LEFT_OUT = "left_out.txt"  # in a folder of data: recordings that are not used, and why
SHOWN = 20  # recordings of a set that are printed; LEFT_OUT lists all
DAMAGED = "\ufffd"  # replaces a byte that is no text; collect leaves out recordings with this sign


def ascii_words(text: str) -> str:
    """Lower-case words of the letters a to z and apostrophes. Accents are removed; all other signs,
    including digits, separate words.

    >>> ascii_words("It’s twenty-one, CAFÉ!")
    "it's twenty one cafe"
    """
    text = unicodedata.normalize("NFKD", text.replace("’", "'").lower())
    text = "".join(c for c in text if not unicodedata.combining(c))
    return _spaced(re.sub(f"[^a-z'{DAMAGED}]", " ", text))


def unicode_words(text: str) -> str:
    """Lower-case words of letters of any script, with their accents, digits and apostrophes.

    >>> unicode_words("Größe: 21 – l’eau!")
    "größe 21 l'eau"
    """
    text = unicodedata.normalize("NFC", text.replace("’", "'").lower())
    # L: letters, M: marks (the vowels of many scripts), N: digits
    characters = (
        c if c in ("'", DAMAGED) or unicodedata.category(c)[0] in "LMN" else " " for c in text
    )
    return _spaced("".join(characters))


def _spaced(text: str) -> str:
    return " ".join(word for word in text.split() if word.strip("'"))


def write_audio(path: Path, samples: np.ndarray, sampling_rate: int) -> None:
    """Writes 16-bit samples, int16 or floats in -1 to 1; the suffix chooses wav or flac."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        soundfile.write(path, samples, sampling_rate, subtype="PCM_16")
    except (RuntimeError, OSError) as error:  # a full disk
        raise CommandError(f"{path} cannot be written ({error})") from None


def usable(
    items: Iterable[Any],
    total: int,
    name: str,
    measure: Callable[[Any], Utterance] = measured,
    listing: Path | None = None,
) -> list[Utterance]:
    """The utterances of the set `name` that can be used. Items for which `measure` raises Unusable
    are counted, reported and added to the file `listing`."""
    utterances, left_out = [], LeftOut()
    for item in progress(items, name, total=total, unit="recording"):
        with left_out.counting():
            utterances.append(measure(item))
    report_left_out(name, left_out, total, listing)
    if not utterances:
        why = f"none of {total} recordings can be used. {left_out.example}".strip()
        raise CommandError(f"{name} data: {why}")
    return utterances


def report_left_out(name: str, left_out: LeftOut, total: int, listing: Path | None = None) -> None:
    """Prints how many recordings are left out, and why, and adds all of these recordings to the
    file `listing`; only in the first process."""
    entries = left_out.entries
    if not entries or os.environ.get("RANK", "0") != "0":
        return
    # at least one example of each reason
    lines = list(dict.fromkeys([*(f"{r}: {e}" for r, e in left_out.examples.items()), *entries]))
    lines = [f"  {entry}" for entry in lines[: max(SHOWN, len(left_out.examples))]]
    if listing:
        with open(listing, "a", encoding="utf-8") as file:
            file.writelines(f"{name}: {' '.join(entry.split())}\n" for entry in entries)
        lines.append(f"  {listing.name} in the folder of the data lists all of them with reasons")
    print(
        f"{name} data: {len(entries)} of {total} skipped ({left_out})", *lines, sep="\n", flush=True
    )


def collect(
    name: str, utterances: Sequence[Utterance], folder: Path, decode: bool = False
) -> list[Utterance]:
    """Returns the :func:`usable` utterances; with `decode`, only recordings that can be read to
    their end. Writes recordings without a file to ``folder/audio/name``."""
    ids = Counter(utterance.id for utterance in utterances if utterance.text)
    for id, count in ids.most_common(1):
        if count > 1:
            raise CommandError(f"{name} data: two recordings are named {id}; rename one of them")

    def measure(utterance: Utterance) -> Utterance:
        audio = utterance.audio
        source = utterance.id if isinstance(audio, ToWrite) else str(audio)
        if DAMAGED in utterance.text:
            raise Unusable("with a damaged text", source)
        # a line of a manifest cannot hold these signs
        if re.search(r"[\t\r\n]", f"{utterance.id} {source}"):
            raise Unusable("with a tab or line break in its name", repr(source))
        try:
            if isinstance(audio, ToWrite) and utterance.text:
                utterance = utterance._replace(audio=folder / "audio" / name / audio.name)
                audio.write(utterance.audio)
            if decode and utterance.text:  # the duration in a header may be wrong
                seconds = len(read_audio(utterance.audio)) / SAMPLING_RATE
                utterance = utterance._replace(seconds=seconds)
        except AudioError as error:
            raise Unusable("unreadable", error) from None
        return measured(utterance)

    return usable(utterances, len(utterances), name, measure, folder / LEFT_OUT)


SOURCES = "sources"  # key in the record of a folder: facts about its sources
# Files that a preparation reads: recordings, texts, lists of files.
_SOURCE_SUFFIXES = {".wav", ".flac", ".ogg", ".mp3", ".sph", ".wv1"}
_SOURCE_SUFFIXES |= {".txt", ".csv", ".jsonl", ".stm", ".dot", ".lsn", ".ndx"}


def files_below(folder: Path) -> Iterator[Path]:
    """All files at any depth, also behind links to folders; no folder is visited twice."""
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:  # a link to a folder above
            folders.clear()
        else:
            visited.add(real)
            yield from (Path(parent, name) for name in names)


def fingerprint(source: Path, output: Path) -> dict[str, Any]:
    """Number of recordings, texts and lists below `source`, and a digest of their names, sizes and
    modification times; without the files in `output`."""
    sha, count = hashlib.sha256(), 0
    for path in sorted(files_below(source)):
        if path.suffix.lower() in _SOURCE_SUFFIXES and not path.is_relative_to(output):
            # lstat: a link whose target is missing
            facts = path.stat() if path.exists() else path.lstat()
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
    """Makes a step, and deletes its files if it fails, because recordings fill the disk. A finished
    folder whose `source` has changed is made again; other files in the folder, such as dict.txt,
    stay."""
    old = steps.recorded(folder).get(SOURCES)
    finished = steps.matches(folder, {**settings, SOURCES: old}, steps.OTHER_OUTPUT)
    now = fingerprint(source, folder) if source is not None and source.is_dir() else None
    if finished and (now is None or now.items() <= old.items()):
        why = f"is finished, and {source} has not changed"
        if source is None:
            why = "was made with these settings"
        elif now is None:
            why = f"is finished, and {source} does not exist any more"
        print(f"reused: {folder} {why}", flush=True)
        return
    new = folder.with_name(f"{folder.name}.new") if finished else folder
    if finished:
        counts = f"{now['files']} recordings, texts and lists, before {old['files']}"
        print(f"{source} has changed ({counts}): {folder} is made again", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    with steps.building(new) as partial:
        make(partial)
        tables = sorted(path.name for path in partial.glob("*.tsv"))
        steps.record(partial, {**settings, SOURCES: {**(now or {}), "made": tables}})
    if finished:
        _replace_content(folder, new, old["made"])


def _replace_content(folder: Path, new: Path, tables: Sequence[str]) -> None:
    """Replaces the old `tables` and their recordings in a finished folder by the content of `new`.
    The record is written last: until then the folder counts as made from the old sources."""
    (folder / LEFT_OUT).unlink(missing_ok=True)
    for name in tables:
        (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "audio" / Path(name).stem, ignore_errors=True)
    new_paths = (
        path for pattern in ("audio/*", "*.tsv", "*.model", LEFT_OUT) for path in new.glob(pattern)
    )
    for path in (*new_paths, new / steps.RECORD):
        target = folder / path.relative_to(new)
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    shutil.rmtree(new)


def write_manifest(path: Path, utterances: Iterable[Utterance]) -> None:
    try:
        write_lines(path, manifest_lines(utterances, path.parent))
    except ValueError as error:
        raise CommandError(str(error)) from None


def read_manifest(path: Path) -> list[Utterance]:
    try:
        return manifest.read_manifest(path, progress=progress)
    except ValueError as error:
        raise CommandError(f"{error} Give a manifest of recipes.asr.prepare.") from None


def describe(sets: Mapping[str, Sequence[Utterance]]) -> str:
    """A table of the number and the durations of recordings."""
    rows = [("set", "recordings", "words", "hours", "mean s", "longest s")]
    for name, utterances in sets.items():
        seconds = [utterance.seconds for utterance in utterances]
        words = sum(len(utterance.text.split()) for utterance in utterances)
        times = (sum(seconds) / 3600, sum(seconds) / len(seconds), max(seconds))
        rows.append((name, len(seconds), words, *(f"{time:.2f}" for time in times)))
    width = max(len(name) for name, *_ in rows)
    lines = (f"{name:{width}}" + "".join(f"{x:>12}" for x in cells) for name, *cells in rows)
    return "\n".join(lines)
