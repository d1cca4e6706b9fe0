"""Recordings, manifests and texts that are broken: reported, replaced, left out or refused."""

import pytest

pytest.importorskip("soundfile")
import soundfile
import torch
from fairseq import utils

from tests.support.fairseq_speech import make_task, training_set, write_manifest


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


REFUSED = {
    "no manifest": (None, "no such manifest"),
    "no text column": ("audio\twords\na.wav\thello\n", "needed: audio and tgt_text"),
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


def test_recordings_that_do_not_fit_a_batch_are_counted_with_the_limit_that_fits(tmp_path, caplog):
    """Thirty, of 18, 28 ... 308 frames; a training that would leave out almost all is refused."""
    write_manifest(tmp_path, "train", [0.2 + 0.1 * n for n in range(30)])
    task = make_task(tmp_path)
    task.load_dataset("train")
    dataset = task.dataset("train")

    def fitting(limit):
        limits = utils.resolve_max_positions(task.max_positions(), None, limit)
        return task.filter_indices_by_size(dataset.ordered_indices(), dataset, limits, True)

    assert len(fitting(100)) == 9
    (said,) = (r.getMessage() for r in caplog.records if "--max-tokens" in r.getMessage())
    assert said.startswith("21 of 30 recordings have more than 100 frames or 100 units")
    assert "--max-tokens 308 fits all" in said
    with pytest.raises(ValueError, match="28 of 30 recordings have more.*--max-tokens 308 fits"):
        fitting(30)


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
