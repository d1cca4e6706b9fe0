"""Segments of recordings are those of what is read whole."""

import numpy as np
import pytest

pytest.importorskip("soundfile")

from cape_plugins.speech.audio import AudioError, read_audio, read_segment
from recipes.asr.corpora import _cut
from tests.core.test_streams import (
    LOUD_FIRST,
    NOISE,
    QUIET_FIRST,
    RATE,
    encoded,
    mp3,
    with_total,
    without_xing,
)

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


@pytest.mark.parametrize("times", [(9.5, 10.5), (11, 12), (3, 3), (3, 2), (-1, 2)])
@pytest.mark.parametrize("name", ["flac of unknown total", "mp3"])
def test_segments_that_are_not_there_are_refused(name, times):
    with pytest.raises(AudioError, match=r"no samples from .* to .* s \(it has 10"):
        read_segment(SOURCES[name], *times)


def test_an_end_that_was_rounded_up_is_the_end():
    assert len(read_segment(SOURCES["wav"], 9, 10.005)[0]) == RATE


def test_channels_stay_apart():
    both = np.stack((NOISE, -0.5 * NOISE), 1)
    for data in (encoded(both, "WAV"), encoded(both, "FLAC") * 2):
        samples, _ = read_segment(data, 1, 2)
        np.testing.assert_allclose(samples / 2**15, both[RATE : 2 * RATE].clip(-1, 1), atol=1e-4)


def test_streams_of_two_rates_have_no_segments():
    data = encoded(NOISE, "OGG") + encoded(NOISE, "OGG", 8000)
    with pytest.raises(AudioError, match="was joined of unlike recordings"):
        read_segment(data, 1, 2)


def test_a_segment_of_a_joined_talk_is_cut_out(tmp_path):
    (tmp_path / "talk").write_bytes(SOURCES["joined ogg"])
    _cut(tmp_path / "talk", 6, 7, tmp_path / "one.flac")
    assert len(read_audio(tmp_path / "one.flac")) == RATE
