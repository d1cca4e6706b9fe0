"""Reading of recordings: formats, channels, rates, and every way a file can be bad."""

import io
import re

import numpy as np
import pytest
import torch

pytest.importorskip("soundfile")

import soundfile

from cape_plugins.speech.audio import AudioError, TolerantReader, audio_seconds, read_audio


def tone(rate, seconds=0.5, frequency=440.0):
    return (0.5 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)).astype("f")


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_every_format_is_read(tmp_path, suffix):
    path = tmp_path / f"one.{suffix}"
    soundfile.write(path, tone(16000), 16000)
    samples = read_audio(path)
    assert samples.dtype == torch.float32
    tolerance = 0.05 if suffix == "ogg" else 1e-4
    np.testing.assert_allclose(samples.numpy(), tone(16000), atol=tolerance)
    assert audio_seconds(path) == 0.5
    assert torch.equal(read_audio(path.read_bytes()), samples)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_rates_are_resampled(tmp_path, rate):
    """A tone stays the same tone, and frequencies above 8 kHz are filtered out."""
    path = tmp_path / "one.wav"
    soundfile.write(path, tone(rate), rate)
    samples = read_audio(path).numpy()
    assert len(samples) == 8000
    np.testing.assert_allclose(samples[500:-500], tone(16000)[500:-500], atol=0.01)
    if rate > 22050:
        soundfile.write(path, tone(rate, frequency=10000.0), rate)
        assert np.abs(read_audio(path).numpy()[500:-500]).max() < 0.01


def written(samples, **options):
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", **options)
    return file.getvalue()


BAD = {
    "no file": ("gone.wav", "gone.wav: no such file"),
    "a folder": (".", "no such file"),
    "no bytes": (b"", "0 bytes cannot be decoded"),
    "text": (b"no audio at all", "15 bytes cannot be decoded"),
    "half a header": (written(tone(16000))[:20], "cannot be decoded"),
    "no sample": (written(np.zeros(0, "f")), "no sample"),
    "NaN": (written(np.full(400, np.nan, "f"), subtype="FLOAT"), "NaN or infinite"),
}


@pytest.mark.parametrize(("source", "message"), BAD.values(), ids=BAD)
def test_bad_recordings_are_refused(source, message):
    with pytest.raises(AudioError, match=re.escape(message)):
        read_audio(source)


class Attempts(torch.utils.data.Dataset):
    """Reads two recordings in processes of a data loader."""

    def __init__(self, reader):
        self.reader = reader

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.reader.attempt(index) is not None


def test_a_broken_recording_is_reported_once_by_all_processes(caplog):
    def read(index):
        if index == 1:
            raise AudioError("1 is broken.")
        return torch.zeros(1)

    reader = TolerantReader(read, [1.0, 2.0])
    loader = torch.utils.data.DataLoader(Attempts(reader), batch_size=None, num_workers=1)
    assert list(loader) == [True, False]
    assert reader.unreadable.tolist() == [False, True]
    assert reader.attempt(1) is None
    assert not caplog.records, "the process of the loader has said so"


def test_a_broken_recording_is_replaced_by_one_of_like_duration(caplog):
    def read(index):
        if index in (1, 3):
            raise AudioError(f"{index} is broken.")
        return torch.full((1,), index)

    reader = TolerantReader(read, [1.0, 5.0, 4.0, 5.1])
    assert [reader(index)[0] for index in (0, 1, 2, 3, 1)] == [0, 2, 2, 2, 2]
    assert [record.message for record in caplog.records] == [
        "1 is broken. Another recording takes its place (1 of 4 so far).",
        "3 is broken. Another recording takes its place (2 of 4 so far).",
    ]
    with pytest.raises(AudioError, match="none of the recordings can be read"):
        TolerantReader(lambda index: read(1), [1.0, 2.0])(0)
