"""Recordings from files or bytes, at the sampling rate that a model needs."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.streams import (
    HEAD_BYTES,
    CutOffError,
    Stream,
    is_absurd,
    streams,
    tells_length,
)

logger = logging.getLogger(__name__)

Source = str | os.PathLike | bytes

# What libsndfile says of a file that is shorter than its header, of which it reads what is there.
_SHORTER = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
_HEADER_BYTES = 44  # header of a wav file; some writers count it as samples
_UNKNOWN_BYTES = 0x7FFFF000  # least size that programs write into a pipe, where they do not know it
_RATES = (100, 1_000_000)  # Hz; others cannot be resampled in the memory of a computer
_BLOCK = 2**20  # samples of all channels that are decoded at a time
_CANCELLED = 1e-3  # share of the power that is left where channels are of opposite phase


class AudioError(ValueError):
    """A recording that cannot be used; the message says which, why and what to do."""


def read_audio(source: Source, sampling_rate: int = SAMPLING_RATE) -> Tensor:
    """Reads a recording of any format that libsndfile knows (wav, flac, ogg, mp3 ...) to its end,
    also behind the length that its header says, and all streams of joined files.

    Channels are averaged; another sampling rate is resampled with an anti-aliasing filter.

    Args:
        source: Path, or the bytes of a file.
        sampling_rate: Sampling rate of the result, in Hz.

    Returns:
        ``[samples]`` float32 in -1 to 1.

    Raises:
        AudioError: if there is no such file, it cannot be decoded, it holds fewer samples than its
            header says, none, or some that are not finite, or its channels cancel each other.
        ImportError: without the package soundfile.
    """
    parts = []
    for stream in _streams(source):
        with _opened(source, io.BytesIO(stream.data)) as file, _decoding(source):
            blocks = list(_blocks(file))
            rate, told = file.samplerate, file.frames if stream.frames is None else stream.frames
            samples = np.concatenate([*blocks, np.zeros((0, file.channels), np.float32)])
        if len(samples) < 0.99 * told and not is_absurd(told, len(stream.data)):
            raise _cut_off(source, f"{len(samples)} of {told} samples")
        parts.append(resample(torch.from_numpy(_mixed(source, samples)), rate, sampling_rate))
    waveform = torch.cat(parts)
    if not len(waveform):
        raise AudioError(f"{_name(source)} holds no sample; leave it out.")
    return waveform


def audio_seconds(source: Source) -> float:
    """Duration of a recording; raises as :func:`read_audio`.

    It is that of the header where this can be trusted. The whole file is looked into for another
    length and further streams in Ogg and mp3, and where the header says no length, or a nonsense
    one; samples are decoded only for FLAC of such a header. A wav, aiff or au file that holds fewer
    samples than its header says is cut off, too; in other formats only reading shows that."""
    if isinstance(source, bytes):
        head, size = source[:HEAD_BYTES], len(source)
    else:
        with _decoding(source), open(_existing(source), "rb") as file:
            head, size = file.read(HEAD_BYTES), os.path.getsize(source)
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    if tells_length(head, size) and (seconds := _header_seconds(source, file)):
        return seconds
    return sum(_header_seconds(source, io.BytesIO(part.data)) for part in _streams(source))


def read_segment(source: Source, start: float, end: float) -> tuple[np.ndarray, int]:
    """The samples between two times in seconds, as they are stored, and their rate in Hz.

    Returns:
        ``[samples]`` or ``[samples, channels]`` int16, and the sampling rate.

    Raises:
        AudioError: if it cannot be read, or there are no samples between `start` and `end`.
    """
    path = io.BytesIO(source) if isinstance(source, bytes) else _existing(source)
    with _opened(source, path) as file, _decoding(source):
        first, last = (round(time * file.samplerate) for time in (start, end))
        last = min(last, file.frames)
        if not 0 <= first < last:
            raise AudioError(
                f"{_name(source)}: no samples from {start} to {end} s; check the times."
            )
        file.seek(first)
        return file.read(last - first, dtype="int16"), file.samplerate


def audio_rate(source: Source) -> int:
    """Sampling rate of a recording as it is stored, in Hz; raises as :func:`read_audio`."""
    path = io.BytesIO(source) if isinstance(source, bytes) else _existing(source)
    with _opened(source, path) as file:
        return file.samplerate


def resample(waveform: Tensor, rate: int, new_rate: int) -> Tensor:
    """``[samples]`` at `rate` Hz to `new_rate` Hz by a polyphase filter."""
    if rate == new_rate:
        return waveform
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, new_rate)
    result = resample_poly(waveform.numpy(), new_rate // divisor, rate // divisor)
    return torch.from_numpy(result.astype(np.float32))


def _streams(source: Source) -> list[Stream]:
    with _decoding(source):
        data = source if isinstance(source, bytes) else Path(_existing(source)).read_bytes()
        try:
            return streams(data)
        except CutOffError as error:
            raise _cut_off(source, error) from None


def _header_seconds(source: Source, file: Any) -> float:
    size = file.getbuffer().nbytes if isinstance(file, io.BytesIO) else os.path.getsize(file)
    with _opened(source, file) as opened, _decoding(source):
        frames = opened.frames
        if is_absurd(frames, size):
            frames = sum(map(len, _blocks(opened)))
        return frames / opened.samplerate


def _blocks(file: Any) -> Iterator[np.ndarray]:
    """``[samples, channels]`` float32, up to the end of the stream."""
    # For a file in which it can seek, soundfile seeks behind what it has read, and that fails at
    # the end of a FLAC file whose header does not know where the end is.
    file.seekable = lambda: False
    while len(block := file.read(_BLOCK // file.channels + 1, dtype="float32", always_2d=True)):
        yield block


def _mixed(source: Source, samples: np.ndarray) -> np.ndarray:
    """``[samples]``, the mean of channels ``[samples, channels]``."""
    channels = samples.shape[1]
    mixed = samples.mean(1)
    if not np.isfinite(mixed).all():
        raise AudioError(f"{_name(source)} holds NaN or infinite samples; repair or leave it out.")
    if channels > 1 and len(samples):
        power = float(np.vdot(samples, samples)) / samples.size
        # channels that have nothing in common leave 1 / channels of their power
        if float(np.vdot(mixed, mixed)) / len(mixed) < _CANCELLED * power / channels:
            raise AudioError(
                f"{_name(source)}: its {channels} channels cancel each other (opposite phase), so "
                "that their mean is silence; write one of them to a file, or leave it out."
            )
    return mixed


def _existing(source: str | os.PathLike) -> str | os.PathLike:
    if not os.path.isfile(source):
        raise AudioError(f"{_name(source)}: no such file; check the path.")
    return source


def _opened(source: Source, file: Any) -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library libsndfile
        raise ImportError(
            f"reading recordings needs the package soundfile ({error}); pip install soundfile"
        ) from None
    with _decoding(source):
        opened = soundfile.SoundFile(file)
    for promised, held in (map(int, sizes) for sizes in _SHORTER.findall(opened.extra_info)):
        if held + _HEADER_BYTES < promised < _UNKNOWN_BYTES:
            opened.close()
            raise _cut_off(source, f"{held} of {promised} bytes")
    if not _RATES[0] <= opened.samplerate <= _RATES[1]:
        opened.close()
        raise AudioError(
            f"{_name(source)} has a sampling rate of {opened.samplerate} Hz; allowed: {_RATES[0]} "
            f"to {_RATES[1]}. Repair its header, or leave it out."
        )
    return opened


@contextlib.contextmanager
def _decoding(source: Source) -> Iterator[None]:
    """Turns all errors of its block into an :class:`AudioError` of `source`: a damaged file makes
    the libraries raise many, also of memory and of numbers out of range."""
    try:
        yield
    except AudioError:
        raise
    except Exception as error:
        # soundfile's own text of an error names the object that it has opened
        why = getattr(error, "error_string", None) or error
        remedy = "convert it to wav or flac, or leave it out."
        raise AudioError(f"{_name(source)} cannot be decoded ({why}); {remedy}") from None


def _cut_off(source: Source, held: object) -> AudioError:
    return AudioError(f"{_name(source)} is cut off: {held}; repair it or leave it out.")


def _name(source: Source) -> str:
    return f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)


class TolerantReader:
    """Reads recordings by index; one that cannot be read is reported once, whichever process of a
    data loader reads it, and in whichever epoch.

    Args:
        read: Turns an index into ``[samples]``; raises :class:`AudioError`.
        seconds: Durations ``[N]``.
        shared: Processes of a data loader may read, too; this takes a file descriptor.

    Attributes:
        unreadable: ``[N]``, True for recordings that could not be read.
    """

    def __init__(
        self, read: Callable[[int], Tensor], seconds: Sequence[float], shared: bool = True
    ) -> None:
        self.read, self.seconds = read, np.asarray(seconds)
        self.unreadable = torch.zeros(len(self.seconds), dtype=torch.bool)
        if shared:
            self.unreadable.share_memory_()

    def __call__(self, index: int) -> tuple[int, Tensor]:
        """Reads a recording, or, if that cannot be, the one of nearest duration that can, so that
        no training ends, and no batch shrinks, in mid-epoch.

        Returns:
            Index and ``[samples]`` of what was read.

        Raises:
            AudioError: if none can be read.
        """
        for candidate in self._candidates(index):
            samples = self.attempt(candidate, "Another one takes its place")
            if samples is not None:
                return candidate, samples
        raise AudioError("none of the recordings can be read; check paths and formats.")

    def attempt(self, index: int, consequence: str = "It is skipped") -> Tensor | None:
        """``[samples]``, or None for a recording that cannot be read; `consequence` is reported."""
        try:
            return self.read(index)
        except AudioError as error:
            if not self.unreadable[index]:
                self.unreadable[index] = True
                logger.warning(
                    "%s %s (%d of %d so far).",
                    error,
                    consequence,
                    int(self.unreadable.sum()),
                    len(self.seconds),
                )
            return None

    def _candidates(self, index: int) -> Iterator[int]:
        """The wanted one, then the others by difference of duration, whatever was read before."""
        if not self.unreadable[index]:
            yield index
        order = np.argsort(np.abs(self.seconds - self.seconds[index]), kind="stable")
        yield from (other for other in order.tolist() if not self.unreadable[other])
