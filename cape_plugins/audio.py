"""Recordings from files or bytes, at the sampling rate that a model needs."""

from __future__ import annotations

import io
import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        rate = file.samplerate
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
