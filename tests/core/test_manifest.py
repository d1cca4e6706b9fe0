"""Manifests: which lines can be used, and why other lines cannot."""

import numpy as np
import pytest

pytest.importorskip("soundfile")
import soundfile

from cape_plugins.speech.manifest import (
    LeftOut,
    Unusable,
    Utterance,
    load,
    manifest_lines,
    measured,
    read_manifest,
)


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "wavs" / "1.wav"
    path.parent.mkdir()
    soundfile.write(path, np.full(8000, 0.1), 16000)
    return path


def test_a_duration_is_measured_where_it_is_not_known(recording):
    assert measured(Utterance("a", recording, "x")).seconds == 0.5
    assert measured(Utterance("a", recording.read_bytes(), "x")).seconds == 0.5
    assert measured(Utterance("a", "gone.wav", "x", 2.0)).seconds == 2.0


@pytest.mark.parametrize(
    ("audio", "text", "seconds", "reason"),
    [
        ("gone.wav", "x", None, "unreadable"),
        ("empty.npy", "x", None, "unreadable"),
        ("a.wav", " ", 1.0, "without a text"),
        (None, "x", 1.0, "without a recording"),
        ("a.wav", "x", 0.025, "of no more than 0.025 s"),
        ("a.wav", "x", float("nan"), "without a duration"),
        ("a.wav", "x", 5.8e14, "without a duration"),
        (b"\x93NUMPY\1\0\x0a\0{'descr':}\n", "x", None, "unreadable"),
    ],
)
def test_a_recording_is_left_out_for_each_of_the_reasons(
    tmp_path, monkeypatch, audio, text, seconds, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(Unusable) as error:
        measured(Utterance("a", audio, text, seconds))
    assert error.value.reason == reason


def test_what_is_left_out_is_counted_by_reason():
    left_out = LeftOut()
    for number, text in enumerate(("x", "", "")):
        with left_out.counting(f"line {number}: "):
            measured(Utterance("a", "gone.wav", text, 1.0))
    assert str(left_out) == "2 without a text"
    assert left_out.examples == {"without a text": "line 1: gone.wav"}


def test_written_lines_are_read_again(recording):
    folder = recording.parent.parent
    utterances = [Utterance("a-1", str(recording), "one two", 0.5)]
    lines = list(manifest_lines(utterances, folder))
    assert lines[1].split("\t")[1] == "wavs/1.wav", "relative to the folder"
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    assert read_manifest(folder / "train.tsv") == utterances
    assert len(load(utterances[0])) == 8000


def test_other_columns_are_ignored_and_missing_ones_have_defaults(recording):
    path = recording.parent.parent / "test.tsv"
    path.write_text("speaker\taudio\ttext\nann\twavs/1.wav\thello  you\n")
    assert read_manifest(path) == [Utterance("0", str(recording), "hello you", 0.5)]
    # recordings without texts need no column for them; the line has a tab too many
    path.write_text("id\taudio\na\twavs/1.wav\t\n")
    assert read_manifest(path, texts=False) == [Utterance("a", str(recording), "", 0.5)]
