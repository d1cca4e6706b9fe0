"""Recordings with no length or a wrong length in the header, and files that were joined or cut."""

import contextlib
import io
import struct
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("soundfile")

import soundfile

from cape_plugins.speech import audio
from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio

RATE = 16000
TONE = 0.5 * np.sin(np.arange(80000, dtype="f") * 440 * 2 * np.pi / RATE)
NOISE = (0.3 * np.random.default_rng(0).standard_normal(80000)).astype("f")
SILENCE = np.zeros(80000, "f")


def encoded(samples, format, rate=RATE, **options):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


def with_total(flac, samples):
    """FLAC with this number of samples in the header; 0 is unknown."""
    word = int.from_bytes(flac[18:26], "big") >> 36 << 36 | samples
    return flac[:18] + word.to_bytes(8, "big") + flac[26:]


FLAC = encoded(NOISE, "FLAC")


@pytest.mark.parametrize(
    "data",
    [*(with_total(FLAC, total) for total in (0, 2**36 - 1, 9000)), FLAC + b"TAG" + bytes(125)],
    ids=["unknown", "largest", "small", "tagged"],
)
def test_flac_is_read_whole_whatever_its_header_says(tmp_path, data):
    path = tmp_path / "one.flac"
    path.write_bytes(data)
    for source in (path, data):
        assert np.array_equal(read_audio(source).numpy(), read_audio(FLAC).numpy())
        assert audio_seconds(source) == 5.0


def test_any_error_of_the_library_is_an_audio_error(monkeypatch):
    """A training goes on after an AudioError, and after no other."""
    error = MemoryError("of the library")
    monkeypatch.setattr(soundfile.SoundFile, "read", mock.Mock(side_effect=error))
    with pytest.raises(AudioError, match=r"bytes cannot be decoded \(of the library\)"):
        read_audio(FLAC)


def test_durations_of_trusted_headers_decode_nothing(monkeypatch):
    sources = [encoded(NOISE, name) for name in ("WAV", "FLAC", "OGG", "MP3", "AIFF")]
    monkeypatch.setattr(audio, "_blocks", mock.Mock(side_effect=AssertionError("decoded")))
    assert [audio_seconds(source) for source in sources] == [5.0] * 5


def mp3(samples, rate=RATE, **options):
    """With a bit rate that follows the sound."""
    return encoded(samples, "MP3", rate, bitrate_mode="VARIABLE", compression_level=0.5, **options)


def without_xing(data):
    """The mp3 without its first frame, which has no sound and states the number of frames."""
    return data[data.index(data[:2], 2) :]


QUIET_FIRST = np.concatenate([SILENCE, NOISE])
LOUD_FIRST = np.concatenate([NOISE, SILENCE])


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 1)])
@pytest.mark.parametrize("samples", [QUIET_FIRST, LOUD_FIRST], ids=["quiet first", "loud first"])
def test_mp3_without_a_number_of_frames_is_read_whole(samples, channels, rate):
    """libsndfile estimates the length from the first frame: it reads a quarter of a file that
    begins with loud noise, and several times the duration of a file that begins with silence."""
    data = without_xing(mp3(np.stack([samples] * channels, 1), rate))
    expected = len(samples) / rate
    assert audio_seconds(data) == pytest.approx(expected, abs=0.1)
    heard = read_audio(data, rate).numpy()
    assert len(heard) == round(rate * audio_seconds(data))
    middle = len(heard) // 2
    halves = heard[3000 : middle - 1200], heard[middle + 1200 : -3000]
    quiet, loud = halves if samples is QUIET_FIRST else reversed(halves)
    assert loud.std() > 0.1
    assert quiet.std() < 0.01


def test_pictures_in_a_tag_of_mp3_are_no_frames():
    picture = b"\xff\xfb\x90\x00" * 200
    tag = b"ID3\4\0\0\0\0" + bytes([len(picture) >> 7, len(picture) & 127]) + picture
    data = without_xing(mp3(QUIET_FIRST))
    assert audio_seconds(tag + data) == audio_seconds(data)
    assert audio_seconds(tag + bytes(100) + data) == audio_seconds(data)


def test_mp3_that_says_too_few_frames_is_read_whole():
    data = mp3(QUIET_FIRST)
    start = data.index(b"Xing") + 8
    (frames,) = struct.unpack_from(">I", data, start)
    wrong = data[:start] + struct.pack(">I", frames // 2) + data[start + 4 :]
    assert audio_seconds(wrong) == pytest.approx(10, abs=0.1)
    assert len(read_audio(wrong)) == pytest.approx(160000, abs=1600)


def test_cut_mp3_is_refused():
    data = mp3(QUIET_FIRST)
    with pytest.raises(AudioError, match=r"is cut off: \d+ of 280 frames"):
        read_audio(data[: len(data) * 3 // 4])


JOINED = {
    "ogg": (encoded(QUIET_FIRST, "OGG"), encoded(NOISE, "OGG")),
    "opus": (encoded(QUIET_FIRST, "OGG", subtype="OPUS"), encoded(NOISE, "OGG", subtype="OPUS")),
    "ogg of two rates": (encoded(QUIET_FIRST, "OGG"), encoded(NOISE[:40000], "OGG", 8000)),
    "mp3": (mp3(QUIET_FIRST), mp3(NOISE)),
    "mp3 of two rates": (mp3(QUIET_FIRST), mp3(NOISE[:40000], 8000)),
    "mp3 without frames": (without_xing(mp3(QUIET_FIRST)), without_xing(mp3(NOISE))),
}


@pytest.mark.parametrize("parts", JOINED.values(), ids=JOINED)
def test_joined_streams_are_read_to_the_end_of_the_last(tmp_path, parts):
    path = tmp_path / "one"
    path.write_bytes(b"".join(parts))
    for source in (path, path.read_bytes()):
        assert audio_seconds(source) == pytest.approx(15, abs=0.2)
        samples = read_audio(source).numpy()
        assert len(samples) == pytest.approx(240000, abs=3200)
        assert samples[163000:236000].std() > 0.1


@pytest.mark.parametrize("first", [SILENCE, NOISE[:9000], NOISE[:50]])
@pytest.mark.parametrize("second", [NOISE, SILENCE])
def test_joined_flac_is_read_to_the_end_of_the_last(first, second):
    """Also if both files have the same duration, and the header of the first file has the number of
    samples of the last."""
    data = encoded(first, "FLAC") + encoded(second, "FLAC")
    expected = len(first) + len(second)
    assert len(read_audio(data)) == expected
    assert audio_seconds(data) == expected / RATE


OGG, WAV = encoded(QUIET_FIRST, "OGG"), encoded(NOISE, "WAV")
LAST_PAGE = OGG.rindex(b"OggS")
# libsndfile reads the whole pages of a cut ogg and reports no error
BAD = {
    "fewer samples of flac": (with_total(FLAC, 90000), "is cut off: 80000 of 90000 samples"),
    "half a flac": (FLAC[: len(FLAC) // 2], "cannot be decoded"),
    "half a flac of unknown total": (with_total(FLAC, 0)[: len(FLAC) // 2], "cannot be decoded"),
    "ogg within a page": (OGG[:-1], r"is cut off: \d+ bytes of its last page"),
    "ogg between pages": (OGG[:LAST_PAGE], "is cut off: stream 1 has no last page"),
    "cut and joined ogg": (OGG[:LAST_PAGE] + OGG, "is cut off: stream 1 has no last page"),
    "absurd rate": (WAV[:24] + bytes([1, 0, 0, 0]) + WAV[28:], "1 Hz; allowed: 100 to 1000000"),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_damaged_streams_are_refused(data, message):
    for function in (read_audio, audio_seconds):
        with pytest.raises(AudioError, match=message):
            function(data)


@pytest.mark.parametrize("format", ["WAV", "MP3"])
@pytest.mark.parametrize(
    "channels", [(NOISE, -0.9 * NOISE), (TONE, -np.roll(TONE, 1))], ids=["weaker", "a sample late"]
)
def test_channels_of_opposite_phase_are_reported(format, channels):
    with pytest.raises(AudioError, match="its 2 channels cancel each other"):
        read_audio(encoded(np.stack(channels, 1), format))


@pytest.mark.parametrize("second", [-0.5 * NOISE, SILENCE])
def test_channels_that_leave_sound_are_averaged(second):
    samples = read_audio(encoded(np.stack((NOISE, second), 1), "WAV", subtype="FLOAT")).numpy()
    np.testing.assert_allclose(samples, (NOISE + second) / 2, atol=1e-6)


PLAIN = ["WAV", "RF64", "W64", "AU", "AIFF", "CAF", "NIST", "SVX", "VOC"]


@pytest.mark.parametrize("name", ["FLAC", "OGG", "MP3", *PLAIN])
def test_damaged_recordings_are_read_or_an_audio_error(name):
    rng = np.random.default_rng(0)
    whole = np.frombuffer(encoded(NOISE[:8000], name), np.uint8)
    for size in rng.integers(1, len(whole), 20):
        data = whole[:size].copy()
        places = rng.integers(0, min(size, 200), 3)
        data[places] = rng.integers(0, 256, 3)
        for function in (audio_seconds, read_audio):
            with contextlib.suppress(AudioError):
                function(data.tobytes())
