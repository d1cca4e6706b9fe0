"""Recordings, manifests and texts that are broken: reported, replaced, left out or refused."""

import numpy as np
import pytest

pytest.importorskip("soundfile")
import soundfile
import torch
from fairseq import utils

from cape_plugins.speech.manifest import load
from fairseq_user_dir.asr.manifest import read_manifest
from tests.support.fairseq_speech import RATE, make_task, training_set, write_manifest


def break_body(path):
    """A flac file whose header is right and whose body is damaged."""
    samples, rate = soundfile.read(path)
    flac = path.with_suffix(".flac")
    soundfile.write(flac, samples, rate)
    data = flac.read_bytes()
    half = len(data) // 2
    flac.write_bytes(data[:half] + bytes(20) + data[half + 20 :])
    path.unlink()
    return flac


def broken_set(tmp_path, split):
    manifest = write_manifest(tmp_path, split, [1.0, 0.5, 0.9])
    break_body(tmp_path / split / "000.wav")
    manifest.write_text(manifest.read_text().replace("000.wav", "000.flac"))
    if split != "train":
        write_manifest(tmp_path, "train", [1.0])
    task = make_task(tmp_path)
    task.load_dataset(split)
    return task.dataset(split)


def test_in_training_it_is_replaced(tmp_path, caplog):
    dataset = broken_set(tmp_path, "train")
    sample = dataset.collater([dataset[0], dataset[1]])
    assert sample["nsentences"] == 2
    assert sample["net_input"]["src_lengths"].tolist() == [88, 48]
    assert torch.equal(sample["target"][0, :2], dataset.targets[2][:2]), "text of the substitute"
    dataset[0]
    assert sum("000.flac" in record.message for record in caplog.records) == 1, "reported once"


def test_in_evaluation_it_is_left_out(tmp_path, caplog):
    dataset = broken_set(tmp_path, "test")
    for _ in range(2):
        assert dataset.collater([dataset[0], dataset[1]])["id"].tolist() == [1]
    assert sum("000.flac" in record.message for record in caplog.records) == 1, "reported once"
    assert "skipped" in caplog.text
    empty = dataset.collater([dataset[0]])
    assert (empty["id"].tolist(), empty["texts"], empty["nsentences"]) == ([], [], 0)
    assert dataset.collater([]) == {}, "what fairseq fills shards with"


def _file(write):
    def make(folder):
        path = folder / "bad.wav"
        write(path)
        return "bad.wav\ta"

    return make


SKIPPED = {
    "no such file": lambda folder: "gone.wav\ta",
    "not audio": _file(lambda path: path.write_bytes(b"hello, this is a text" * 50)),
    "too short": _file(lambda path: soundfile.write(path, np.zeros(300), RATE)),
    "blank text": lambda folder: "train/000.wav\t   ",
    "column missing": lambda folder: "train/000.wav",
    "a folder": lambda folder: "train\ta",
    "zip that is gone": lambda folder: "gone.zip:3:9\ta",
    "cut samples": _file(
        lambda path: (
            soundfile.write(path, np.zeros(RATE), RATE),
            path.write_bytes(path.read_bytes()[:RATE]),
        )
    ),
}


@pytest.mark.parametrize("make", SKIPPED.values(), ids=SKIPPED)
def test_bad_lines_are_counted_and_reported(tmp_path, make, caplog):
    manifest = write_manifest(tmp_path, "train", [1.0, 0.5])
    lines = ["audio\ttgt_text", "train/000.wav\tb", make(tmp_path), "train/001.wav\tc"]
    manifest.write_text("\n".join(lines) + "\n")
    utterances = read_manifest(str(manifest))
    assert [utterance.text for utterance in utterances] == ["b", "c"]
    (message,) = [record.message for record in caplog.records]
    assert "1 of 3 skipped (1 " in message
    assert "line 3" in message


def test_other_formats_are_converted(tmp_path):
    """Two channels at 44.1 kHz."""
    manifest = write_manifest(tmp_path, "train", [1.0])
    noise = np.random.default_rng(0).normal(0, 0.1, (44100, 2))
    soundfile.write(tmp_path / "other.wav", noise, 44100)
    manifest.write_text("audio\ttext\nother.wav\ta\n")
    (utterance,) = read_manifest(str(manifest))
    assert utterance.seconds == pytest.approx(1.0)
    assert load(utterance).shape == (RATE,)


REFUSED = {
    "no manifest": (None, "no such manifest"),
    "empty manifest": ("", "train.tsv is empty"),
    "no text column": ("audio\twords\na.wav\thello\n", "needed: audio and tgt_text"),
    "commas": ("audio,tgt_text\na.wav,hello\n", "tab-separated"),
    "nothing usable": ("audio\ttext\ngone.wav\ta\n", "none of its 1 recordings"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_manifests_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_task(tmp_path)


def test_recording_of_an_untrue_duration_is_reported_and_replaced(tmp_path, caplog):
    """The hop of its batch would be wrong, and the batch cut to pieces."""
    manifest = write_manifest(tmp_path, "train", [1.0, 1.1])
    lines = ["audio\ttext\tseconds", "train/000.wav\ta\t5.0", "train/001.wav\tb\t1.1"]
    manifest.write_text("\n".join(lines) + "\n")
    dataset = training_set(tmp_path, "--padding-free")
    assert dataset[0].text == "b"
    assert "has 1.00 s, its manifest says 5.00" in caplog.text


def fitting(folder, limit):
    """What a training keeps with --max-tokens, as fairseq filters it."""
    task = make_task(folder)
    task.load_dataset("train")
    dataset = task.dataset("train")
    limits = utils.resolve_max_positions(task.max_positions(), None, limit)
    return task.filter_indices_by_size(dataset.ordered_indices(), dataset, limits, True)


@pytest.fixture
def long_ones(tmp_path):
    """Thirty recordings, of 18, 28 ... 308 frames."""
    write_manifest(tmp_path, "train", [0.2 + 0.1 * n for n in range(30)])
    return tmp_path


def test_recordings_that_do_not_fit_a_batch_are_counted_with_the_limit_that_fits(long_ones, caplog):
    assert len(fitting(long_ones, 100)) == 9
    (said,) = (r.getMessage() for r in caplog.records if "--max-tokens" in r.getMessage())
    assert said.startswith("21 of 30 recordings have more than 100 frames or 100 units")
    assert "--max-tokens 308 fits all" in said


def test_a_training_that_leaves_out_almost_all_is_refused(long_ones):
    message = "28 of 30 recordings have more than 30 frames or 30 units.*--max-tokens 308 fits all"
    with pytest.raises(ValueError, match=message):
        fitting(long_ones, 30)
    with pytest.raises(ValueError, match="30 of 30 recordings"):
        fitting(long_ones, 5)


def test_units_that_the_dictionary_lacks_are_reported(tmp_path, caplog):
    write_manifest(tmp_path, "train", [1.0])
    (tmp_path / "train.tsv").write_text("audio\ttext\ntrain/000.wav\tabc abc abc abc\n")
    (tmp_path / "test.tsv").write_text("audio\ttext\ntrain/000.wav\tabé\n")
    task = make_task(tmp_path)
    task.load_dataset("test")
    assert "1 of 3 units of the texts are not in the dictionary, such as in 'abé'" in caplog.text
    reference = task.target_dictionary.string(task.dataset("test").targets[0], escape_unk=True)
    assert len(reference) == 3, "one letter"
    assert reference != task.target_dictionary.string(task.dataset("test").targets[0])
    (tmp_path / "train.tsv").write_text("audio\ttext\ntrain/000.wav\tABC\n")
    with pytest.raises(ValueError, match="3 of 3 units .* Do case, subword model and dict.txt"):
        task.load_dataset("train")
