"""Recordings from files or bytes, at the sampling rate that a model needs."""

from __future__ import annotations

import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cape_plugins.speech.features import SAMPLING_RATE

logger = logging.getLogger(__name__)

Source = str | os.PathLike | bytes

# What libsndfile says of a file that is shorter than its header, of which it reads what is there.
_SHORTER = re.compile(r"^ *(?:data|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
_HEADER_BYTES = 44  # header of a wav file; some writers count it as samples
_UNKNOWN_BYTES = 0x7FFFF000  # least size that programs write into a pipe, where they do not know it


class AudioError(ValueError):
    """A recording that cannot be used; the message says which, why and what to do."""


def read_audio(source: Source, sampling_rate: int = SAMPLING_RATE) -> Tensor:
    """Reads a recording of any format that libsndfile knows (wav, flac, ogg, mp3 ...).

    Channels are averaged; another sampling rate is resampled with an anti-aliasing filter.

    Args:
        source: Path, or the bytes of a file.
        sampling_rate: Sampling rate of the result, in Hz.

    Returns:
        ``[samples]`` float32 in -1 to 1.

    Raises:
        AudioError: if there is no such file, it cannot be decoded, or it holds no sample or samples
            that are not finite.
        ImportError: without the package soundfile.
    """
    file = _opened(source)
    with file:
        try:
            samples = file.read(dtype="float32", always_2d=True)
        except RuntimeError as error:
            raise _unreadable(source, error) from None
        rate, expected = file.samplerate, file.frames
    if len(samples) < 0.99 * expected:
        raise _cut_off(source, f"{len(samples)} of {expected} samples")
    if not len(samples):
        raise AudioError(f"{_name(source)} holds no sample; leave it out.")
    if not np.isfinite(samples).all():
        raise AudioError(f"{_name(source)} holds NaN or infinite samples; repair or leave it out.")
    return resample(torch.from_numpy(samples.mean(1)), rate, sampling_rate)


def audio_seconds(source: Source) -> float:
    """Duration of a recording, from its header; raises as :func:`read_audio`.

    A wav, aiff or au file that holds fewer samples than its header says is cut off, too; in
    compressed formats only reading shows that."""
    with _opened(source) as file:
        return file.frames / file.samplerate


def resample(waveform: Tensor, rate: int, new_rate: int) -> Tensor:
    """``[samples]`` at `rate` Hz to `new_rate` Hz by a polyphase filter."""
    if rate == new_rate:
        return waveform
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, new_rate)
    result = resample_poly(waveform.numpy(), new_rate // divisor, rate // divisor)
    return torch.from_numpy(result.astype(np.float32))


def _opened(source: Source) -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without the library libsndfile
        raise ImportError(
            f"reading recordings needs the package soundfile ({error}); pip install soundfile"
        ) from None
    if not isinstance(source, bytes) and not os.path.isfile(source):
        raise AudioError(f"{_name(source)}: no such file; check the path.")
    try:
        file = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (RuntimeError, OSError) as error:
        raise _unreadable(source, error) from None
    for promised, held in (map(int, sizes) for sizes in _SHORTER.findall(file.extra_info)):
        if held + _HEADER_BYTES < promised < _UNKNOWN_BYTES:
            file.close()
            raise _cut_off(source, f"{held} of {promised} bytes")
    return file


def _unreadable(source: Source, error: Exception) -> AudioError:
    return AudioError(
        f"{_name(source)} cannot be decoded ({error}); convert it to wav or flac, or leave it out."
    )


def _cut_off(source: Source, held: str) -> AudioError:
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
