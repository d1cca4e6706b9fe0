"""Log-mel frames of audio with any hop (CAPE Appendix C; features of the released code)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cape_plugins.settings.domains import HOP_SECONDS, WINDOW_SECONDS

SAMPLING_RATE = 16000  # Hz; the default of models
PREEMPHASIS = 0.97
# Samples are scaled to the range of 16-bit integers, for which the floor of 1 was chosen.
FULL_SCALE = 32768.0


def log_mel(
    waveform: Tensor,
    sampling_rate: int = SAMPLING_RATE,
    num_mel_bins: int = 80,
    hop_seconds: float = HOP_SECONDS,
    window_seconds: float = WINDOW_SECONDS,
    normalize: bool = True,
) -> Tensor:
    """Log-mel frames of one recording.

    Hamming window, magnitude spectrum, triangular HTK-mel filters from 0 Hz to half the sampling
    rate, natural logarithm with floor 1. Frame i begins at the sample nearest to
    ``i * hop_seconds``, so the hop need not be a whole number of samples; the centre of frame i is
    at ``i * hop_seconds + window_seconds / 2``.

    Args:
        waveform: ``[samples]`` in -1 to 1.
        sampling_rate: Samples per second, in Hz.
        num_mel_bins: Number of filters.
        hop_seconds: Distance between frames.
        window_seconds: Length of a frame.
        normalize: Subtract the mean and divide by the standard deviation of all values of the
            recording.

    Returns:
        ``[T, num_mel_bins]`` float32; samples after the last whole frame are dropped.

    Raises:
        ValueError: if the recording is shorter than a frame, not one-dimensional or not finite, or
            a setting is out of range.
    """
    for name, value in (("hop_seconds", hop_seconds), ("window_seconds", window_seconds)):
        if not 1 / sampling_rate <= value < 10:
            raise ValueError(
                f"{name}={value} is not allowed; allowed: {1 / sampling_rate} (one sample) to less "
                "than 10 seconds, such as 0.01."
            )
    if waveform.dim() != 1:
        raise ValueError(
            f"waveform has shape {tuple(waveform.shape)}; allowed: [samples], one channel. "
            "Average or choose a channel first."
        )
    window = round(window_seconds * sampling_rate)
    if len(waveform) < window:
        raise ValueError(
            f"waveform has {len(waveform)} samples; allowed: at least {window} (one window of "
            f"{window_seconds} s at {sampling_rate} Hz). Leave out empty and too short recordings."
        )
    if not waveform.isfinite().all():
        raise ValueError(
            "waveform holds NaN or infinite samples; allowed: finite samples. Repair the recording."
        )
    hop = hop_seconds * sampling_rate
    # 1e-6: a quotient that rounding puts just below a whole number is meant to be whole
    count = int((len(waveform) - window) / hop + 1e-6) + 1
    starts = (torch.arange(count, dtype=torch.float64, device=waveform.device) * hop).round().long()
    samples = torch.arange(window, device=waveform.device)
    frames = waveform.float()[starts[:, None] + samples] * FULL_SCALE
    # pre-emphasis within each frame; the first sample is its own predecessor, as in HTK
    before = torch.cat((frames[:, :1], frames[:, :-1]), dim=1)
    frames = (frames - PREEMPHASIS * before) * torch.hamming_window(
        window, periodic=False, device=waveform.device
    )
    size = 2 ** math.ceil(math.log2(window))
    spectrum = torch.fft.rfft(frames, size).abs()
    filters = mel_filters(num_mel_bins, size // 2 + 1, sampling_rate).to(waveform.device)
    features = (spectrum @ filters).clamp(min=1.0).log()
    return normalized(features) if normalize else features


def normalized(features: Tensor, dim: int | None = None) -> Tensor:
    """``[T, bins]`` with mean 0 and standard deviation 1, of all values or along `dim`."""
    per_bin = dim is not None
    deviation = features.std(dim, correction=0, keepdim=per_bin).clamp(min=1e-5)
    return (features - features.mean(dim, keepdim=per_bin)) / deviation


def spec_augment(
    features: Tensor,
    frequency_masks: int = 2,
    frequency_width: int = 30,
    time_masks: int = 10,
    time_width: int = 50,
    time_share: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """SpecAugment without time warping: sets bands and stretches of one recording to 0, which is
    the mean of normalised features.

    The defaults come from CAPE Appendix C.2 (the released code uses the same masks for a whole
    batch). Widths are drawn uniformly from 1 to the widest.

    Args:
        features: ``[T, bins]`` of one recording, so that recordings of a batch get different masks.
        frequency_masks: Number of bands.
        frequency_width: Bins of the widest band.
        time_masks: Number of stretches.
        time_width: Frames of the longest stretch.
        time_share: Largest share of the recording in a stretch.
        generator: Source of randomness; default the global one.

    Returns:
        A masked copy, ``[T, bins]``.

    Raises:
        ValueError: for a negative number or a share above 1.
    """
    settings = {
        "frequency_masks": frequency_masks,
        "frequency_width": frequency_width,
        "time_masks": time_masks,
        "time_width": time_width,
        "time_share": time_share,
    }
    for name, value in settings.items():
        if value < 0 or (name == "time_share" and value > 1):
            allowed = "0 to 1" if name == "time_share" else ">= 0"
            raise ValueError(f"{name}={value} is not allowed; allowed: {allowed}.")
    length, bins = features.shape
    widest = min(time_width, int(time_share * length))
    device = features.device
    masked = _stretches(length, time_masks, widest, device, generator)[:, None]
    masked = masked | _stretches(bins, frequency_masks, frequency_width, device, generator)
    return features.masked_fill(masked, 0.0)


def _stretches(
    length: int,
    count: int,
    widest: int,
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """``[length]`` bool, true on `count` stretches of 1 to `widest` elements at random places."""
    widest = min(widest, length)
    if not count or not widest:
        return torch.zeros(length, dtype=torch.bool, device=device)
    width = torch.randint(1, widest + 1, (count, 1), device=device, generator=generator)
    fraction = torch.rand(count, 1, device=device, generator=generator)
    start = (fraction * (length + 1 - width)).long()
    index = torch.arange(length, device=device)
    return ((index >= start) & (index < start + width)).any(0)


def mel_filters(num_mel_bins: int, num_bins: int, sampling_rate: int) -> Tensor:
    """``[num_bins, num_mel_bins]`` triangular filters, equally spaced on HTK's mel scale
    ``1127 ln(1 + f / 700)``, linear in mel between the centres."""
    highest = 1127.0 * math.log(1.0 + sampling_rate / 2 / 700.0)
    centres = torch.linspace(0.0, highest, num_mel_bins + 2, dtype=torch.float64)
    frequency = torch.linspace(0.0, sampling_rate / 2, num_bins, dtype=torch.float64)
    mel = 1127.0 * torch.log1p(frequency / 700.0)[:, None]
    rising = (mel - centres[:-2]) / (centres[1:-1] - centres[:-2])
    falling = (centres[2:] - mel) / (centres[2:] - centres[1:-1])
    return torch.minimum(rising, falling).clamp(min=0.0).float()
