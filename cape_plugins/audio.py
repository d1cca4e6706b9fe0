"""Recordings from files or bytes, at the sampling rate that a model needs."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Source = str | os.PathLike | bytes


class AudioError(ValueError):
    """A recording that cannot be used; the message says which, why and what to do."""


def read_audio(source: Source, sampling_rate: int = 16000) -> Tensor:
    """Reads a recording of any format that libsndfile knows (wav, flac, ogg, mp3 ...).

    Channels are averaged; another sampling rate is resampled with an anti-aliasing filter.

    Args:
        source: Path, or the bytes of a file.
        sampling_rate: Of the result, in Hz.

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
        raise AudioError(
            f"{_name(source)} is cut off: {len(samples)} of {expected} samples; repair it or leave "
            "it out."
        )
    if not len(samples):
        raise AudioError(f"{_name(source)} holds no sample; leave it out.")
    if not np.isfinite(samples).all():
        raise AudioError(f"{_name(source)} holds NaN or infinite samples; repair or leave it out.")
    return resample(torch.from_numpy(samples.mean(1)), rate, sampling_rate)


def audio_seconds(source: Source) -> float:
    """Duration of a recording, from its header; raises as :func:`read_audio`."""
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
        return soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (RuntimeError, OSError) as error:
        raise _unreadable(source, error) from None


def _unreadable(source: Source, error: Exception) -> AudioError:
    return AudioError(
        f"{_name(source)} cannot be decoded ({error}); convert it to wav or flac, or leave it out."
    )


def _name(source: Source) -> str:
    return f"a recording of {len(source)} bytes" if isinstance(source, bytes) else str(source)


class TolerantReader:
    """Reads recordings by index; one that cannot be read is reported once and replaced by the one
    of nearest duration that can, so that no training ends, and no batch shrinks, in mid-epoch.

    Args:
        read: From an index to ``[samples]``; raises :class:`AudioError`.
        seconds: Durations ``[N]``.
    """

    def __init__(self, read: Callable[[int], Tensor], seconds: Sequence[float]) -> None:
        self.read, self.seconds = read, np.asarray(seconds)
        self.unreadable: set[int] = set()

    def __call__(self, index: int) -> tuple[int, Tensor]:
        """Index and ``[samples]`` of what was read.

        Raises:
            AudioError: if none can be read.
        """
        for candidate in self._candidates(index):
            try:
                return candidate, self.read(candidate)
            except AudioError as error:
                self.unreadable.add(candidate)
                logger.warning(
                    "%s Another one takes its place (%d of %d so far).",
                    error,
                    len(self.unreadable),
                    len(self.seconds),
                )
        raise AudioError("none of the recordings can be read; check paths and formats.")

    def _candidates(self, index: int) -> Iterator[int]:
        """The wanted one, then the others by difference of duration, whatever was read before."""
        if index not in self.unreadable:
            yield index
        order = np.argsort(np.abs(self.seconds - self.seconds[index]), kind="stable")
        yield from (other for other in order.tolist() if other not in self.unreadable)
