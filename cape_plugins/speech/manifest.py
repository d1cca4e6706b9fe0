"""Manifests: tables of recordings with their texts, one recording a line, in the form of this
package and of fairseq's speech_to_text.

UTF-8, columns separated by tabs, no quotes. The first line names the columns: `audio`; `tgt_text`
(or `text`), unless recordings are only transcribed; and, if known, `id` and `seconds`. `audio` is a
file, relative to the folder of the manifest, or ``ARCHIVE.zip:OFFSET:SIZE`` in an uncompressed zip.
A file or part of a zip holds audio, or frames of features as a numpy array.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio
from cape_plugins.speech.features import HOP_SECONDS, SAMPLING_RATE, WINDOW_SECONDS, normalized
from cape_plugins.utils.texts import text_lines

logger = logging.getLogger(__name__)

COLUMNS = ("id", "audio", "seconds", "tgt_text")  # columns that are written
AUDIO_COLUMN, TEXT_COLUMNS = "audio", ("tgt_text", "text")
_MOST_SECONDS = 1e6  # 11 days: larger numbers come from a broken header or table
_NUMPY = b"\x93NUMPY"


class Utterance(NamedTuple):
    """A recording and its text.

    Attributes:
        id: Unique in the set; the part before the last ``-`` or ``_`` names the talk, chapter or
            speaker, if there are several.
        audio: The recording: a path or part of a zip file as in a manifest, or anything else that
            the reader of the recording understands.
        text: Spoken text; empty if the text is unknown.
        seconds: Duration; None until the duration is measured.
    """

    id: str
    audio: Any
    text: str
    seconds: float | None = None


# ---- what can be used ----------------------------------------------------------------------------


class Unusable(AudioError):
    """A recording that is left out for a reason such as "unreadable"; reasons are counted."""

    def __init__(self, reason: str, detail: object) -> None:
        super().__init__(str(detail))
        self.reason = reason


class LeftOut:
    """Counts recordings that are left out, by reason.

    Attributes:
        reasons: Number of recordings for each reason.
        examples: The first recording for each reason, with details.
        entries: All recordings that are left out, each with its reason.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.entries: list[str] = []

    @contextlib.contextmanager
    def counting(self, beginning: str = "") -> Iterator[None]:
        """Counts an Unusable that the ``with`` block raises, with `beginning` in front of its text;
        the program continues after the block."""
        try:
            yield
        except Unusable as error:
            self.reasons[error.reason] += 1
            self.examples.setdefault(error.reason, f"{beginning}{error}")
            self.entries.append(f"{error.reason}: {beginning}{error}")

    def __str__(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())

    @property
    def example(self) -> str:
        """The first recording that was left out."""
        return next(iter(self.examples.values()), "")


def measured(utterance: Utterance, texts: bool = True) -> Utterance:
    """The utterance with its duration; an unknown duration is read from the header.

    Args:
        utterance: An utterance; the text may be empty unless `texts`.
        texts: Refuse an utterance without a text.

    Raises:
        Unusable: if the utterance has no text, cannot be read, or is no longer than a window.
    """
    is_path = isinstance(utterance.audio, str | os.PathLike)
    name = utterance.audio if is_path else utterance.id
    if utterance.audio is None or name == "":
        raise Unusable("without a recording", "its path is empty")
    if texts and not (utterance.text or "").strip():
        raise Unusable("without a text", name)
    seconds = utterance.seconds
    if seconds is None:
        try:
            seconds = _seconds(_source(utterance.audio))
        except (ValueError, OSError) as error:
            raise Unusable("unreadable", error) from None
    if not seconds < _MOST_SECONDS:
        raise Unusable("without a duration", f"{name} has {seconds} seconds")
    if not seconds > WINDOW_SECONDS:
        raise Unusable(f"of no more than {WINDOW_SECONDS} s", name)
    return utterance._replace(seconds=seconds)


# ---- tables --------------------------------------------------------------------------------------


def read_manifest(
    path: str | os.PathLike,
    audio_root: str | None = None,
    texts: bool = True,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> list[Utterance]:
    """Reads the usable lines of a manifest; damaged lines are counted and reported, in recipes and
    in fairseq.

    Args:
        path: TSV file; columns of other names are ignored.
        audio_root: Folder of recordings with relative paths; default the folder of the manifest.
        texts: Whether to leave out lines without a text; otherwise such a line has an empty text.
        progress: Shows the progress, because headers of recordings without `seconds` are read.

    Returns:
        Utterances, named by their number if there is no `id`.

    Raises:
        ValueError: if there is no such file, the file is not UTF-8, a column is missing, or no line
            is usable.
    """
    path = os.fspath(path)
    root = audio_root or os.path.dirname(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such manifest.")
    # not by a csv reader, which would end a line at a carriage return in a text
    columns, *cells = (line.split("\t") for line in text_lines(path) if line)
    rows = [dict(zip(columns, row, strict=False)) for row in cells]
    column = next((name for name in TEXT_COLUMNS if name in columns), None)
    needed_columns = "audio and tgt_text" if texts else "audio"
    if AUDIO_COLUMN not in columns or not rows or (texts and column is None):
        names = ", ".join(map(str, columns)) or "none"
        raise ValueError(
            f"{path} has the columns {names} and {len(rows)} lines below; needed: "
            f"{needed_columns}, tab-separated, named in the first line, and at least one line "
            "below."
        )
    utterances, left_out = [], LeftOut()
    for number, row in enumerate(progress(rows)):
        text = " ".join(row.get(column, "").split())
        with left_out.counting(f"line {number + 2}: "):
            utterances.append(measured(_utterance(row, number, root, text), texts))
    if not utterances:
        raise ValueError(
            f"{path}: none of its {len(rows)} recordings can be used ({left_out}). "
            f"{left_out.example}"
        )
    if left_out.reasons:
        count = len(rows) - len(utterances)
        examples = "; ".join(left_out.examples.values())
        logger.warning("%s: %d of %d skipped (%s); %s", path, count, len(rows), left_out, examples)
    return utterances


def _utterance(row: Mapping[str, str], number: int, root: str, text: str) -> Utterance:
    audio = row.get(AUDIO_COLUMN, "").strip()
    seconds = row.get("seconds") or None
    try:
        seconds = seconds and float(seconds)
    except ValueError:
        raise Unusable("unreadable", f"seconds {seconds!r} is not a number") from None
    return Utterance(
        row.get("id") or str(number), audio and os.path.join(root, audio), text, seconds
    )


def manifest_lines(utterances: Iterable[Utterance], folder: str | os.PathLike) -> Iterator[str]:
    """Lines of a manifest in `folder`; paths below `folder` become relative.

    Raises:
        ValueError: for a tab or line break in a name or text.
    """
    folder = os.path.abspath(folder)
    yield "\t".join(COLUMNS)
    for utterance in utterances:
        audio = os.path.abspath(utterance.audio)
        if audio.startswith(os.path.join(folder, "")):
            audio = os.path.relpath(audio, folder)
        cells = (utterance.id, audio, f"{utterance.seconds:.4f}", utterance.text)
        if any(re.search(r"[\t\r\n]", cell) for cell in cells):
            raise ValueError(f"{audio}: a tab or line break in its name or text; rename it")
        yield "\t".join(cells)


# ---- recordings ----------------------------------------------------------------------------------


def load(utterance: Utterance) -> Tensor:
    """``[samples]`` at 16 kHz, or features ``[T, bins]`` that were computed before.

    Raises:
        AudioError: if the utterance cannot be read.
    """
    try:
        source = _source(utterance.audio)
        frames = _features(source)
    except (OSError, ValueError) as error:
        raise AudioError(f"{utterance.audio}: {error}; repair or leave it out.") from None
    return read_audio(source, SAMPLING_RATE) if frames is None else frames


def _seconds(source: str | bytes) -> float:
    frames = _features(source)
    if frames is not None:
        return (len(frames) - 1) * HOP_SECONDS + WINDOW_SECONDS
    return audio_seconds(source)


def _source(audio: str | os.PathLike | bytes) -> str | bytes:
    """A path, or the bytes of a file or of a part of a zip file."""
    if isinstance(audio, bytes):
        return audio
    audio = os.fspath(audio)
    path, *offset_and_size = audio.rsplit(":", 2)
    if len(offset_and_size) != 2 or not all(part.isdecimal() for part in offset_and_size):
        return audio
    offset, size = map(int, offset_and_size)
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _features(source: str | bytes) -> Tensor | None:
    """``[T, bins]`` of a numpy array, mean and variance normalised as in log_mel; None if the
    source is a recording."""
    if not (source.startswith(_NUMPY) if isinstance(source, bytes) else source.endswith(".npy")):
        return None
    try:
        array = np.load(io.BytesIO(source) if isinstance(source, bytes) else source)
        frames = torch.from_numpy(array.astype(np.float32))
    except OSError:  # the text of this error names the file already
        raise
    except Exception as error:  # a damaged file makes numpy raise many types of errors
        raise ValueError(f"features cannot be read ({error})") from None
    if frames.dim() != 2 or not len(frames):
        raise ValueError(f"features have shape {tuple(frames.shape)}, not [frames, bins]")
    return normalized(frames)
