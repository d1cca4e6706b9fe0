"""Files with a wrong size in the header, files that were joined or cut, and segments."""

import struct

import numpy as np
import pytest

pytest.importorskip("soundfile")

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio, read_segment
from recipes.asr.corpora import _cut
from tests.core.test_streams import (
    LOUD_FIRST,
    NOISE,
    PLAIN,
    QUIET_FIRST,
    RATE,
    encoded,
    mp3,
    with_total,
    without_xing,
)

FILES = {name: encoded(NOISE, name) for name in PLAIN}
FILES["WAVEX"] = encoded(np.stack((NOISE, NOISE), 1), "WAVEX", subtype="PCM_24")
FILES["RIFX"] = encoded(NOISE, "WAV", endian="BIG")
FILES["AIFC"] = encoded(NOISE, "AIFF", subtype="FLOAT")
PLACES = {  # of the size in the header, and how it is stored
    "WAV": (b"data", 4, "<I", 0),
    "RIFX": (b"data", 4, ">I", 0),
    "RF64": (b"ds64", 16, "<Q", 0),
    "W64": (b"data", 16, "<Q", 24),
    "AIFF": (b"SSND", 4, ">I", 8),
    "AIFC": (b"SSND", 4, ">I", 8),
    "SVX": (b"BODY", 4, ">I", 0),
    "CAF": (b"data", 4, ">Q", 4),
    "AU": (b".snd", 8, ">I", 0),
}


def with_size(name, size):
    data = FILES[name]
    mark, offset, form, _ = PLACES[name]
    start = data.index(mark) + offset
    return data[:start] + struct.pack(form, size) + data[start + struct.calcsize(form) :]


def expect_whole(data, name, times=1):
    """The samples, also of a file as a path, and their number as the duration."""
    expected = np.tile(read_audio(FILES[name]).numpy(), times)
    assert np.array_equal(read_audio(data).numpy(), expected)
    assert audio_seconds(data) == len(expected) / RATE == 5.0 * times


@pytest.mark.parametrize("name", PLACES)
def test_samples_behind_the_size_of_the_header_are_read(name):
    """A size of 0, a fifth of the samples, and the largest, which means unknown."""
    _, _, form, counted = PLACES[name]
    fifth = 32000 * (2 if name == "AIFC" else 1) + counted
    for size in (0, fifth, 256 ** struct.calcsize(form) - 1):
        expect_whole(with_size(name, size), name)


@pytest.mark.parametrize("name", FILES)
def test_files_shorter_than_their_header_says_are_cut_off(tmp_path, name):
    data = FILES[name][: int(0.97 * len(FILES[name]))]
    (tmp_path / "one").write_bytes(data)
    for source in (data, tmp_path / "one"):
        for function in (read_audio, audio_seconds, lambda source: read_segment(source, 0, 1)):
            with pytest.raises(AudioError, match=r"is cut off: \d+ of \d+ bytes; repair it"):
                function(source)


@pytest.mark.parametrize("name", FILES)
def test_joined_files_are_read_to_the_end_of_the_last(name):
    expect_whole(FILES[name] * 3, name, 3)


@pytest.mark.parametrize("name", ["WAV", "RIFX", "RF64", "AIFF"])
def test_chunks_behind_the_samples_are_no_samples(name):
    size = 5000
    form = ">I" if name in ("RIFX", "AIFF") else "<I"
    chunk = b"ID3 " + struct.pack(form, size) + b"\1" * size
    expect_whole(FILES[name] + chunk, name)
    expect_whole(FILES[name] + chunk + FILES[name], name, 2)
    expect_whole(FILES[name] + chunk[: 8 + size // 2], name)


def test_odd_numbers_of_bytes_need_no_padding_and_silence_is_no_end():
    data = encoded(NOISE[:8001], "WAV", subtype="PCM_U8")
    data = data[: 44 + 8001]
    for more in (b"", b"\0", b"LIST\4\0\0\0INFO", b"\0LIST\4\0\0\0INFO"):
        assert audio_seconds(data + more) == 8001 / RATE
        assert len(read_audio(data + more)) == 8001
    silence = encoded(np.zeros(80000, "f"), "WAV")  # behind a size of 0
    assert audio_seconds(silence[:40] + bytes(4) + silence[44:]) == 5.0


@pytest.mark.parametrize("format", ["PAF", "PVF"])
def test_formats_whose_length_cannot_be_checked_are_reported_once(format, caplog):
    data = encoded(NOISE, format)
    for source in (data, data[:20000]):
        audio_seconds(source)
        read_audio(source)
    read_audio(FILES["WAV"])
    (record,) = caplog.records
    assert f"of the format {format} are read, but a recording that was cut off" in record.message


WAV = encoded(QUIET_FIRST, "WAV")
FLAC = encoded(QUIET_FIRST, "FLAC")
SOURCES = {
    "wav": WAV,
    "wav of size 0": WAV[:40] + bytes(4) + WAV[44:],
    "flac": FLAC,
    "flac of unknown total": with_total(FLAC, 0),
    "flac of a small total": with_total(FLAC, 9000),
    "joined flac": encoded(QUIET_FIRST[:80000], "FLAC") + encoded(NOISE, "FLAC"),
    "ogg": encoded(QUIET_FIRST, "OGG"),
    "joined ogg": encoded(QUIET_FIRST[:80000], "OGG") + encoded(NOISE, "OGG"),
    "mp3": mp3(QUIET_FIRST),
    "mp3 without frames": without_xing(mp3(QUIET_FIRST)),
    "mp3 without frames, loud first": without_xing(mp3(LOUD_FIRST)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_segments_are_parts_of_the_whole(name):
    whole = read_audio(SOURCES[name]).numpy().clip(-1, 1)
    for times in ((4.5, 5.5), (8, 9.99)):
        samples, rate = read_segment(SOURCES[name], *times)
        first, last = (round(time * RATE) for time in times)
        assert rate == RATE
        assert samples.dtype == np.int16
        np.testing.assert_allclose(samples / 2**15, whole[first:last], atol=1e-4)
    assert len(read_segment(SOURCES["wav"], 9, 10.005)[0]) == RATE  # an end that was rounded up


@pytest.mark.parametrize("times", [(9.5, 10.5), (11, 12), (3, 3), (3, 2), (-1, 2)])
@pytest.mark.parametrize("name", ["flac of unknown total", "mp3"])
def test_segments_that_are_not_there_are_refused(name, times):
    with pytest.raises(AudioError, match=r"no samples from .* to .* s \(it has 10"):
        read_segment(SOURCES[name], *times)
    with pytest.raises(AudioError, match="was joined from recordings with different"):
        read_segment(encoded(NOISE, "OGG") + encoded(NOISE, "OGG", 8000), 1, 2)


def test_channels_stay_apart():
    both = np.stack((NOISE, -0.5 * NOISE), 1)
    for data in (encoded(both, "WAV"), encoded(both, "FLAC") * 2):
        samples, _ = read_segment(data, 1, 2)
        np.testing.assert_allclose(samples / 2**15, both[RATE : 2 * RATE].clip(-1, 1), atol=1e-4)


def test_a_segment_of_a_joined_talk_is_cut_out(tmp_path):
    (tmp_path / "talk").write_bytes(SOURCES["joined ogg"])
    _cut(tmp_path / "talk", 6, 7, tmp_path / "one.flac")
    assert len(read_audio(tmp_path / "one.flac")) == RATE
