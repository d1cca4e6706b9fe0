"""The task's data: manifests, dictionaries, batches without padding, recordings that are broken."""

import io
import logging
import zipfile

import numpy as np
import pytest

pytest.importorskip("soundfile")
import soundfile
import torch

from cape_plugins.features import log_mel
from fairseq_user_dir.asr.manifest import load, read_manifest
from tests.fairseq.speech import RATE, durations, make_task, write_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    write_manifest(path, "train", durations(40))
    write_manifest(path, "valid", durations(5, seed=1), seed=1)
    return path


def training_set(folder, *words, epoch=1):
    task = make_task(folder, *words)
    task.load_dataset("train")
    task.dataset("train").set_epoch(epoch)
    return task.dataset("train")


def make_batches(dataset, max_tokens=600):
    return dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max_tokens)


# ---- batches -------------------------------------------------------------------------------------


def test_epoch_without_padding(folder):
    """Every recording once; frames are those at its own hop, in order, at their true times."""
    dataset = training_set(folder, "--padding-free")
    batches = make_batches(dataset)
    assert sorted(np.concatenate(batches)) == list(range(40))
    assert all(dataset.seconds[batch].sum() <= 6 for batch in batches)
    lost = 0
    for indices in batches:
        sample = dataset.collater([dataset[index] for index in indices])
        inputs = sample["net_input"]
        times, features = inputs["frame_nanoseconds"], inputs["src_tokens"]
        assert (inputs["src_lengths"] == features.shape[1]).all()
        assert (times.diff() > 0).all()
        for row, index in enumerate(indices):
            hop = 0.01 * dataset.seconds[index] / dataset.seconds[indices].mean()
            alone = log_mel(load(dataset.utterances[index]), RATE, 8, hop)
            kept = ((times[row] * 1e-9 - 0.0125) / hop).round().long()
            torch.testing.assert_close(features[row], alone[kept])
            lost += len(alone) - len(kept)
    assert lost <= 2 * len(dataset), "few frames are skipped"


def test_epochs_differ_and_are_reproducible(folder):
    first, again, other = (
        [batch.tolist() for batch in make_batches(training_set(folder, "--padding-free", epoch=e))]
        for e in (1, 1, 2)
    )
    assert first == again
    assert first != other
    dataset = training_set(folder, "--padding-free", epoch=1)
    samples = [dataset[index] for index in first[0]]
    one, two = (dataset.collater(samples)["net_input"] for _ in range(2))
    assert torch.equal(one["frame_nanoseconds"], two["frame_nanoseconds"])
    dataset.set_epoch(2)
    assert not torch.equal(
        one["frame_nanoseconds"], dataset.collater(samples)["net_input"]["frame_nanoseconds"]
    )
    assert not dataset.can_reuse_epoch_itr_across_epochs


def epoch_iterator(folder, **given):
    task = make_task(folder, "--padding-free")
    task.load_dataset("train")
    return task.get_batch_iterator(task.dataset("train"), max_tokens=600, seed=7, **given)


def contents(batches):
    return [sorted(batch["id"].tolist()) for batch in batches if batch]


def test_ranks_share_an_epoch(folder):
    whole = contents(epoch_iterator(folder).next_epoch_itr())
    parts = [
        contents(epoch_iterator(folder, num_shards=2, shard_id=rank).next_epoch_itr())
        for rank in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_in_mid_epoch(folder, workers):
    """The batches after the interruption are the same, to the last bit, with any workers."""
    iterator = epoch_iterator(folder)
    epoch = iterator.next_epoch_itr()
    expected = list(epoch)
    interrupted = epoch_iterator(folder, num_workers=workers)
    epoch = interrupted.next_epoch_itr()
    for _ in range(3):
        next(epoch)
    state = interrupted.state_dict()
    assert state["iterations_in_epoch"] == 3
    resumed = epoch_iterator(folder, num_workers=workers)
    resumed.load_state_dict(state)
    rest = list(resumed.next_epoch_itr())
    assert len(rest) == len(expected) - 3
    for one, two in zip(rest, expected[3:], strict=True):
        for key, value in one["net_input"].items():
            assert torch.equal(value, two["net_input"][key]), key


def test_says_how_much_padding_is_saved(folder, caplog):
    dataset = training_set(folder, "--padding-free")
    with caplog.at_level(logging.INFO):
        batches = make_batches(dataset)
    (message,) = [r.message for r in caplog.records if "without padding" in r.message]
    assert message.startswith(f"{len(batches)} batches without padding; sorted batches")
    assert 0 < float(message.split()[-2]) < 30


def test_padded_batches_keep_every_recording(folder):
    dataset = training_set(folder)
    batches = make_batches(dataset)
    assert sorted(np.concatenate(batches)) == list(range(40)), "also those beyond a multiple of 8"
    sample = dataset.collater([dataset[index] for index in batches[0]])
    inputs = sample["net_input"]
    assert "frame_nanoseconds" not in inputs
    assert inputs["src_lengths"].max() == inputs["src_tokens"].shape[1]
    assert (inputs["hop_nanoseconds"] == 10_000_000).all()


def test_evaluation_has_one_hop(folder):
    """Also with --padding-free, which is about training; --hop-seconds changes it."""
    task = make_task(folder, "--padding-free", "--hop-seconds", "0.02")
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    inputs = dataset.collater([dataset[index] for index in range(5)])["net_input"]
    assert (inputs["hop_nanoseconds"] == 20_000_000).all()
    frames = [(int(s * RATE) - 400) // 320 + 1 for s in durations(5, seed=1)]
    assert inputs["src_lengths"].tolist() == frames


# ---- texts ---------------------------------------------------------------------------------------


def test_letters(folder):
    task = make_task(folder)
    assert (folder / "dict.txt").read_text().split()[::2] == ["a", "b", "c", "|"]
    dictionary = task.target_dictionary
    ids = task.targets.encode("ba cab", dictionary)
    assert [dictionary[i] for i in ids] == list("ba|cab")
    ended = torch.cat((ids, torch.tensor([dictionary.eos(), dictionary.pad()])))
    assert dictionary.string(ended) == "ba cab"
    assert dictionary.string(torch.stack((ended, ended))) == "ba cab\nba cab"
    assert dictionary[int(task.targets.encode("x", dictionary))] == "<unk>"


def test_subwords(tmp_path):
    from sentencepiece import SentencePieceTrainer

    write_manifest(tmp_path, "train", durations(10))
    (tmp_path / "text").write_text("\n".join(["ba cab abba", "c a b"] * 20))
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "spm"), vocab_size=12
    )
    task = make_task(tmp_path)
    ids = task.targets.encode("ba cab", task.target_dictionary)
    assert len(ids) < 6
    assert task.target_dictionary.unk() not in ids
    assert task.target_dictionary.string(ids) == "ba cab"
    assert len(make_task(tmp_path).target_dictionary) == len(task.target_dictionary), "read again"


def test_manifest_of_fairseq(tmp_path):
    """Parts of an uncompressed zip, audio or features, and the names of files in config.yaml."""
    tone = np.random.default_rng(0).normal(0, 0.1, RATE).astype("f")
    flac, frames = io.BytesIO(), io.BytesIO()
    soundfile.write(flac, tone, RATE, format="FLAC")
    np.save(frames, 3 + 2 * np.random.default_rng(1).normal(size=(50, 8)).astype("f"))
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("one.flac", flac.getvalue())
        archive.writestr("two.npy", frames.getvalue())
        places = [(i.header_offset + 30 + len(i.filename), i.file_size) for i in archive.infolist()]
    lines = [f"data.zip:{a}:{b}\t98\ta b" for a, b in places]
    header = "audio\tn_frames\ttgt_text"
    (tmp_path / "train.tsv").write_text("\n".join([header, *lines]) + "\n")
    (tmp_path / "vocab.txt").write_text("a 1\nb 1\n| 1\n")
    (tmp_path / "config.yaml").write_text("vocab_filename: vocab.txt\n")
    task = make_task(tmp_path)
    assert not (tmp_path / "dict.txt").exists()
    task.load_dataset("train")
    dataset = task.dataset("train")
    assert dataset.sizes[:, 0].tolist() == [98, 51]
    inputs = dataset.collater([dataset[0], dataset[1]])["net_input"]
    assert inputs["src_lengths"].tolist() == [98, 50]
    expected = log_mel(torch.from_numpy(tone), RATE, 8)
    torch.testing.assert_close(inputs["src_tokens"][0], expected, atol=0.02, rtol=0)
    assert float(inputs["src_tokens"][1, :50].std()) == pytest.approx(1, abs=0.01)
    free = training_set(tmp_path, "--padding-free")
    with pytest.raises(ValueError, match="which need recordings"):
        free.collater([free[0], free[1]])


# ---- what is broken ------------------------------------------------------------------------------


def break_body(path):
    """A flac file whose header is right and whose body ends early."""
    samples, rate = soundfile.read(path)
    flac = path.with_suffix(".flac")
    soundfile.write(flac, samples, rate)
    flac.write_bytes(flac.read_bytes()[: flac.stat().st_size // 2])
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
    assert dataset.collater([dataset[0], dataset[1]])["id"].tolist() == [1]
    assert dataset.collater([dataset[0]]) == {}
    assert "skipped" in caplog.text
    assert "000.flac" in caplog.text


def _file(write):
    def make(folder):
        path = folder / "bad.wav"
        write(path)
        return "bad.wav\ta"

    return make


def _wav(samples, rate=RATE, **more):
    return _file(lambda path: soundfile.write(path, samples, rate, **more))


SKIPPED = {
    "no such file": lambda folder: "gone.wav\ta",
    "empty file": _file(lambda path: path.write_bytes(b"")),
    "not audio": _file(lambda path: path.write_bytes(b"hello, this is a text" * 50)),
    "no samples": _wav(np.zeros(0)),
    "too short": _wav(np.zeros(300)),
    "no text": lambda folder: "train/000.wav\t",
    "blank text": lambda folder: "train/000.wav\t   ",
    "column missing": lambda folder: "train/000.wav",
    "no audio": lambda folder: "\ta",
    "a folder": lambda folder: "train\ta",
    "zip that is gone": lambda folder: "gone.zip:3:9\ta",
    "cut header": _file(lambda path: path.write_bytes(b"RIFF\x10\x00\x00\x00WAVE")),
}


@pytest.mark.parametrize("make", SKIPPED.values(), ids=SKIPPED)
def test_bad_lines_are_counted_and_reported(tmp_path, make, caplog):
    manifest = write_manifest(tmp_path, "train", [1.0, 0.5])
    lines = ["audio\ttgt_text", "train/000.wav\tb", make(tmp_path), "train/001.wav\tc"]
    manifest.write_text("\n".join(lines) + "\n")
    found = read_manifest(str(manifest))
    assert [one.text for one in found] == ["b", "c"]
    (message,) = [record.message for record in caplog.records]
    assert "1 of 3 skipped (1 " in message
    assert "line 3" in message


GOOD = {
    "stereo": (np.random.default_rng(0).normal(0, 0.1, (RATE, 2)), RATE),
    "8 kHz": (np.random.default_rng(0).normal(0, 0.1, RATE // 2), RATE // 2),
    "44.1 kHz": (np.random.default_rng(0).normal(0, 0.1, 44100), 44100),
}


@pytest.mark.parametrize(("samples", "rate"), GOOD.values(), ids=GOOD)
def test_other_formats_are_converted(tmp_path, samples, rate):
    manifest = write_manifest(tmp_path, "train", [1.0])
    soundfile.write(tmp_path / "other.wav", samples, rate)
    manifest.write_text("audio\ttext\nother.wav\ta\n")
    (one,) = read_manifest(str(manifest))
    assert one.seconds == pytest.approx(1.0)
    assert load(one).shape == (RATE,)


REFUSED = {
    "no manifest": (None, "no such manifest"),
    "empty manifest": ("", "has the columns none"),
    "header only": ("audio\ttgt_text\n", "has the columns none"),
    "no text column": ("audio\twords\na.wav\thello\n", "needed: audio and tgt_text"),
    "commas": ("audio,tgt_text\na.wav,hello\n", "tab-separated"),
    "nothing usable": ("audio\ttext\ngone.wav\ta\n", "none of its 1 recordings"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_manifests(tmp_path, text, message):
    if text is not None:
        (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_task(tmp_path)


def test_missing_subword_model(folder):
    with pytest.raises(ValueError, match="--subword-model gone.model: no such file"):
        make_task(folder, "--subword-model", "gone.model")
