"""Log-mel frames against a slow numpy loop after the description of the released code."""

import itertools
import math

import numpy as np
import pytest
import torch

from cape_plugins.speech.features import log_mel, spec_augment


def slow(wave, rate, bins, hop, window):
    size = round(window * rate)
    fft = 2 ** math.ceil(math.log2(size))
    mel = lambda f: 1127 * math.log(1 + f / 700)  # noqa: E731
    centres = np.linspace(0, mel(rate / 2), bins + 2)
    hamming = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(size) / (size - 1))
    rows = []
    while (start := round(len(rows) * hop * rate)) + size <= len(wave):
        frame = wave[start : start + size].astype(np.float64) * 32768
        emphasised = frame.copy()
        for n in range(1, size):
            emphasised[n] -= 0.97 * frame[n - 1]
        emphasised[0] *= 1 - 0.97
        spectrum = np.abs(np.fft.rfft(emphasised * hamming, fft))
        row = []
        for b in range(bins):
            total = 0.0
            for k, value in enumerate(spectrum):
                m = mel(k * rate / fft)
                left = (m - centres[b]) / (centres[b + 1] - centres[b])
                right = (centres[b + 2] - m) / (centres[b + 2] - centres[b + 1])
                total += value * max(0.0, min(left, right))
            row.append(math.log(max(1.0, total)))
        rows.append(row)
    return np.array(rows)


def wave(samples=1000, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


@pytest.mark.parametrize(("rate", "hop"), [(8000, 0.0125), (16000, 0.0077)])
def test_frames_equal_the_slow_loop(rate, hop):
    expected = slow(wave(), rate, 12, hop, 0.025)
    actual = log_mel(torch.from_numpy(wave()), rate, 12, hop, normalize=False)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.numpy(), expected, atol=2e-3)


def test_frames_are_normalised_over_the_whole_recording():
    raw = log_mel(torch.from_numpy(wave()), 8000, 12, normalize=False)
    features = log_mel(torch.from_numpy(wave()), 8000, 12)
    assert features.mean().abs() < 1e-5
    assert features.std(correction=0) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(features, (raw - raw.mean()) / raw.std(correction=0))
    assert log_mel(torch.zeros(1000), 8000, 12).abs().max() == 0.0  # silence is no 0 / 0


def masked_runs(flags):
    """Lengths of the runs of True."""
    return [len(list(run)) for masked, run in itertools.groupby(flags.tolist()) if masked]


def test_spec_augment_follows_appendix_c2():
    """CAPE: 2 bands of at most 30 bins, 10 stretches of at most 50 frames and at most a tenth of
    the frames."""

    def runs(frames, **numbers):
        numbers["generator"] = torch.Generator().manual_seed(1)
        masked = [spec_augment(torch.ones(frames, 70), **numbers) == 0 for _ in range(150)]
        return [[masked_runs(x.all(dim)) for x in masked] for dim in (0, 1)]

    bands, stretches = runs(1000)
    assert (max(map(len, bands)), max(map(len, stretches))) == (2, 10)
    for frames, longest in ((300, 30), (600, 50)):
        bands, stretches = runs(frames, frequency_masks=1, time_masks=1)
        assert (max(max(bands)), max(max(stretches))) == (30, longest)


def test_spec_augment_reaches_both_ends_and_may_be_switched_off():
    gone = [(spec_augment(torch.ones(20, 8), 0, 0, 1, 5, 1.0) == 0).all(1) for _ in range(300)]
    assert min(sum(frames[end].item() for frames in gone) for end in (0, -1)) > 5
    features = torch.rand(5, 4)
    assert torch.equal(spec_augment(features, frequency_masks=0, time_masks=0), features)
    assert torch.equal(spec_augment(features, frequency_masks=0), features)  # 10 % of 5 frames
    assert spec_augment(features, frequency_width=100).shape == features.shape
