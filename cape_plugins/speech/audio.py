"""Recordings from files or bytes, at the sampling rate that a model needs."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.streams import CutOffError, Stream, is_absurd, streams, tells_length

logger = logging.getLogger(__name__)

Source = str | os.PathLike | bytes

_RATES = (100, 1_000_000)  # Hz; resampling from other rates would need too much memory
_ROUNDING = 0.01  # seconds by which transcripts round the end of a recording
# Formats in which a recording that was cut off or joined is noticed: by this package, HTK by
# libsndfile. For other formats a warning says that this check is missing.
_CHECKED = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "SVX", "VOC", "HTK")
_CHECKED += ("FLAC", "OGG", "MP3")
_BLOCK = 2**20  # samples of all channels that are decoded at a time
# Largest share of the power that remains when channels of opposite phase are averaged, even if one
# channel is weaker by a tenth or late by a sample. Channels with nothing in common keep all power.
_CANCELLED_SHARE = 2e-2


class AudioError(ValueError):
    """A recording that cannot be used; the message names recording, cause and remedy."""


def read_audio(source: Source, sampling_rate: int = SAMPLING_RATE) -> Tensor:
    """Reads a recording of any format that libsndfile knows (wav, flac, ogg, mp3 ...). Reads to the
    end of the file, even if the header gives a shorter length, and all streams of joined files.

    Channels are averaged; another sampling rate is resampled with an anti-aliasing filter.

    Args:
        source: Path, or the bytes of a file.
        sampling_rate: Sampling rate of the result, in Hz.

    Returns:
        ``[samples]`` float32 in -1 to 1.

    Raises:
        AudioError: if there is no such file; if the file cannot be decoded; if it holds no samples,
            fewer samples than its header states, or samples that are not finite; or if its channels
            cancel each other.
        ImportError: without the package soundfile.
    """
    parts = []
    for samples, rate in _decode(source):
        parts.append(resample(torch.from_numpy(_mix(source, samples)), rate, sampling_rate))
    waveform = torch.cat(parts)
    if not len(waveform):
        raise AudioError(f"{_name(source)} holds no sample; leave it out.")
    return waveform


def audio_seconds(source: Source) -> float:
    """Duration of a recording; raises as :func:`read_audio`.

    The header gives the duration if the size of an uncompressed file, or the number of the last
    FLAC frame, confirms the header. Otherwise the whole file is searched, and FLAC is decoded.
    Damage within the samples shows only when a recording is read, and a missing end of an mp3
    without a number of frames never shows."""
    if _is_trusted(source):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _open(source, file) as sound_file:
            if not is_absurd(sound_file.frames, _size(source)):
                return sound_file.frames / sound_file.samplerate
    return sum(_stream_seconds(source, stream) for stream in _streams(source))


def read_segment(source: Source, start: float, end: float) -> tuple[np.ndarray, int]:
    """The stored samples between two times in seconds, and their rate in Hz.

    Returns:
        ``[samples]`` or ``[samples, channels]`` int16, and the sampling rate.

    Raises:
        AudioError: if the recording cannot be read, ends before `end` (by more than a hundredth of
            a second), or has no samples between the times.
    """
    if _is_trusted(source):
        path = io.BytesIO(source) if isinstance(source, bytes) else source
        with _open(source, path) as file, _as_audio_errors(source):
            rate, count = file.samplerate, file.frames
            first, last = _sample_range(source, start, end, rate, count)
            file.seek(first)
            return _integers(file.read(last - first, dtype="float32")), rate
    # With an unconfirmed header, as in mp3 and joined files, libsndfile seeks to other places, so
    # the segment is cut out of all decoded samples.
    streams_read = list(_decode(source))
    if len({(rate, samples.shape[1]) for samples, rate in streams_read}) > 1:
        raise AudioError(
            f"{_name(source)} was joined from recordings with different rates or channels; "
            "convert it to wav."
        )
    samples = np.concatenate([samples for samples, _ in streams_read])
    rate = streams_read[0][1]
    first, last = _sample_range(source, start, end, rate, len(samples))
    return _integers(samples[first:last, 0] if samples.shape[1] == 1 else samples[first:last]), rate


def _integers(samples: np.ndarray) -> np.ndarray:
    """Samples in -1 to 1 as int16. Decoded Ogg and mp3 may have louder samples. libsndfile would
    let these samples wrap around to the other sign; this function clips them."""
    return (samples * 2**15).round().clip(-(2**15), 2**15 - 1).astype(np.int16)


def _sample_range(
    source: Source, start: float, end: float, rate: int, count: int
) -> tuple[int, int]:
    """Indices of the first sample of a segment and of the first sample after the segment."""
    first, last = round(start * rate), round(end * rate)
    if not 0 <= first < min(last, count) or last > count + _ROUNDING * rate:
        seconds = f"it has {count / rate:g} s"
        raise AudioError(
            f"{_name(source)}: no samples from {start} to {end} s ({seconds}); check the times."
        )
    return first, min(last, count)


def audio_rate(source: Source) -> int:
    """Sampling rate of a stored recording, in Hz; raises as :func:`read_audio`."""
    path = io.BytesIO(source) if isinstance(source, bytes) else _existing_path(source)
    with _open(source, path) as file:
        return file.samplerate


def resample(waveform: Tensor, rate: int, new_rate: int) -> Tensor:
    """Resamples ``[samples]`` from `rate` Hz to `new_rate` Hz with a polyphase filter."""
    if rate == new_rate:
        return waveform
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, new_rate)
    result = resample_poly(waveform.numpy(), new_rate // divisor, rate // divisor)
    return torch.from_numpy(result.astype(np.float32))


def _streams(source: Source) -> list[Stream]:
    with _as_audio_errors(source):
        data = source if isinstance(source, bytes) else Path(_existing_path(source)).read_bytes()
        try:
            return streams(data)
        except CutOffError as error:
            raise _cut_off(source, error) from None


def _is_trusted(source: Source) -> bool:
    """Whether the length in the header of a recording can be trusted."""
    with _as_audio_errors(source):
        if isinstance(source, bytes):
            return tells_length(io.BytesIO(source))
        with open(_existing_path(source), "rb") as file:
            return tells_length(file)


def _size(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else os.path.getsize(source)


def _stream_seconds(source: Source, stream: Stream) -> float:
    """Duration from the header; if the header has none, from the samples."""
    with _open(source, io.BytesIO(stream.data)) as file, _as_audio_errors(source):
        frames = file.frames
        if is_absurd(frames, len(stream.data)):
            frames = sum(map(len, _blocks(file)))
            _check_number(source, stream, frames, stream.frames or 0)
        return frames / file.samplerate


def _decode(source: Source) -> Iterator[tuple[np.ndarray, int]]:
    """The samples ``[samples, channels]`` of each stream, and the stream's rate in Hz."""
    for stream in _streams(source):
        with _open(source, io.BytesIO(stream.data)) as file, _as_audio_errors(source):
            blocks = list(_blocks(file))
            rate = file.samplerate
            stated_frames = file.frames if stream.frames is None else stream.frames
            samples = np.concatenate([*blocks, np.zeros((0, file.channels), np.float32)])
        _check_number(source, stream, len(samples), stated_frames)
        yield samples, rate


def _check_number(source: Source, stream: Stream, samples: int, stated_frames: int) -> None:
    if samples < 0.99 * stated_frames and not is_absurd(stated_frames, len(stream.data)):
        raise _cut_off(source, f"{samples} of {stated_frames} samples")


def _blocks(file: Any) -> Iterator[np.ndarray]:
    """``[samples, channels]``, up to the end of the stream."""
    # In a seekable file soundfile seeks to the end of what it has read. This fails at the end of a
    # FLAC file whose header states no length.
    file.seekable = lambda: False
    while len(block := file.read(_BLOCK // file.channels + 1, dtype="float32", always_2d=True)):
        yield block


def _mix(source: Source, samples: np.ndarray) -> np.ndarray:
    """``[samples]``, the mean of channels ``[samples, channels]``."""
    channels = samples.shape[1]
    mixed = samples.mean(1)
    if not np.isfinite(mixed).all():
        raise AudioError(f"{_name(source)} holds NaN or infinite samples; repair or leave it out.")
    if channels > 1 and len(samples):
        power = float(np.vdot(samples, samples)) / samples.size
        # The mean of channels with nothing in common has 1 / channels of their power. Cancelled
        # channels are an error: silence would be wrong, and nothing in the file says which single
        # channel is the right one.
        if float(np.vdot(mixed, mixed)) / len(mixed) < _CANCELLED_SHARE * power / channels:
            raise AudioError(
                f"{_name(source)}: its {channels} channels cancel each other (opposite phase), so "
                "their mean is silence; write one channel to a file, or leave the recording out."
            )
    return mixed


def _existing_path(source: str | os.PathLike) -> str | os.PathLike:
    if not os.path.isfile(source):
        raise AudioError(f"{_name(source)}: no such file; check the path.")
    return source


def _open(source: Source, file: Any) -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library libsndfile
        raise ImportError(
            f"reading recordings needs the package soundfile ({error}); pip install soundfile"
        ) from None
    with _as_audio_errors(source):
        opened = soundfile.SoundFile(file)
    if opened.format not in _CHECKED:
        _report_unchecked(opened.format)
    if not _RATES[0] <= opened.samplerate <= _RATES[1]:
        opened.close()
        raise AudioError(
            f"{_name(source)} has a sampling rate of {opened.samplerate} Hz; allowed: {_RATES[0]} "
            f"to {_RATES[1]}. Repair its header, or leave it out."
        )
    return opened


@functools.cache
def _report_unchecked(format: str) -> None:
    """Warns once for each format."""
    logger.warning(
        "Recordings of the format %s are read, but a recording that was cut off or joined cannot "
        "be recognised; better convert such recordings to wav or flac.",
        format,
    )


@contextlib.contextmanager
def _as_audio_errors(source: Source) -> Iterator[None]:
    """Turns all errors of the block into an :class:`AudioError` of `source`. A damaged file makes
    the libraries raise many errors, also of memory and of numbers out of range."""
    try:
        yield
    except AudioError:
        raise
    except Exception as error:
        # str() of soundfile's error also shows the opened object, which says nothing to a user
        reason = getattr(error, "error_string", None) or error
        remedy = "convert it to wav or flac, or leave it out."
        raise AudioError(f"{_name(source)} cannot be decoded ({reason}); {remedy}") from None


def _cut_off(source: Source, remainder: object) -> AudioError:
    return AudioError(f"{_name(source)} is cut off: {remainder}; repair it or leave it out.")


def _name(source: Source) -> str:
    return f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)


class TolerantReader:
    """Reads recordings by index. A recording that cannot be read is reported only once, over all
    processes of a data loader and all epochs.

    Args:
        read: Turns an index into ``[samples]``; raises :class:`AudioError`.
        seconds: Durations ``[N]``.
        shared: Whether worker processes of a data loader read, too; `unreadable` then lies in
            shared memory, which needs a file descriptor.

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
        """Reads a recording. An unreadable recording is replaced by the readable recording with the
        nearest duration, so a training does not end within an epoch, and no batch is empty; an
        empty batch would count as an update.

        Returns:
            Index and ``[samples]`` of the recording that was read.

        Raises:
            AudioError: if no recording can be read.
        """
        for candidate in self._candidates(index):
            samples = self.attempt(candidate, "Another recording takes its place")
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
        """This recording, then all others by difference of duration; independent of earlier
        reads."""
        if not self.unreadable[index]:
            yield index
        by_distance = np.argsort(np.abs(self.seconds - self.seconds[index]), kind="stable")
        yield from (nearest for nearest in by_distance.tolist() if not self.unreadable[nearest])
