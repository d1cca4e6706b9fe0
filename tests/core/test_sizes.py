"""Files without compression whose header says a wrong size, and files that were joined or cut."""

import struct

import numpy as np
import pytest

pytest.importorskip("soundfile")

from cape_plugins.speech.audio import AudioError, audio_seconds, read_audio, read_segment
from tests.core.test_streams import NOISE, PLAIN, RATE, encoded

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
    place = data.index(mark) + offset
    return data[:place] + struct.pack(form, size) + data[place + struct.calcsize(form) :]


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


def test_an_odd_number_of_bytes_need_not_be_padded():
    data = encoded(NOISE[:8001], "WAV", subtype="PCM_U8")
    data = data[: 44 + 8001]
    for more in (b"", b"\0", b"LIST\4\0\0\0INFO", b"\0LIST\4\0\0\0INFO"):
        assert audio_seconds(data + more) == 8001 / RATE
        assert len(read_audio(data + more)) == 8001


def test_silence_behind_a_size_of_0_is_read_in_no_time():
    wav = encoded(np.zeros(80000, "f"), "WAV")
    assert audio_seconds(wav[:40] + bytes(4) + wav[44:]) == 5.0


@pytest.mark.parametrize("format", ["PAF", "PVF"])
def test_formats_whose_length_cannot_be_checked_are_reported_once(format, caplog):
    data = encoded(NOISE, format)
    for source in (data, data[:20000]):
        audio_seconds(source)
        read_audio(source)
    read_audio(FILES["WAV"])
    (record,) = caplog.records
    assert f"of the format {format} are read, but one that was cut off" in record.message
