"""Data of the task: manifests, dictionaries, batches without padding, damaged recordings."""

import gc
import io
import multiprocessing
import sys
import zipfile

import numpy as np
import pytest

pytest.importorskip("soundfile")
import soundfile
import torch
from fairseq import utils
from torch.utils.data import get_worker_info

from cape_plugins.speech.features import log_mel
from cape_plugins.speech.manifest import load
from fairseq_user_dir.asr.data import SpeechDataset
from tests.support.fairseq_speech import RATE, durations, make_task, training_set, write_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    write_manifest(path, "train", durations(40))
    write_manifest(path, "valid", durations(5, seed=1), seed=1)
    return path


def make_batches(dataset, max_tokens=600):
    return dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max_tokens)


def test_epoch_without_padding_has_every_recording_once(folder):
    """Its frames are computed at its hop, in order, at their true times."""
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
            frame_numbers = ((times[row] * 1e-9 - 0.0125) / hop).round().long()
            torch.testing.assert_close(features[row], alone[frame_numbers])
            lost += len(alone) - len(frame_numbers)
    assert lost <= 2 * len(dataset), "few frames are skipped"


@pytest.mark.usefixtures("ended_loaders")
def test_epochs_of_a_training_equal_new_trainings(folder, monkeypatch, capfd):
    """Epochs equal the epochs of trainings that begin with them. Processes of a data loader stay
    alive, because processes of the next epoch would find garbage that refers to them and fail to
    end them."""
    load = SpeechDataset.__getitem__

    def collecting(dataset, index):
        if get_worker_info() is not None and index == 0:
            sys.unraisablehook = sys.__unraisablehook__  # not pytest's
            gc.collect()
        return load(dataset, index)

    monkeypatch.setattr(SpeechDataset, "__getitem__", collecting)
    tasks = [make_task(folder, "--padding-free") for _ in range(4)]
    for task in tasks:
        task.load_dataset("train")

    def batches_of(task, epoch, **options):
        options |= {"max_tokens": 600, "seed": 7, "epoch": epoch}
        return list(task.get_batch_iterator(task.dataset("train"), **options).next_epoch_itr())

    gc.collect()  # what other tests left
    processes, others = set(), {process.pid for process in multiprocessing.active_children()}
    members = []
    gc.disable()
    try:
        for epoch in (1, 2, 3):  # as fairseq's trainer does
            batches = batches_of(tasks[0], epoch, num_workers=1)
            members.append({frozenset(batch["id"].tolist()) for batch in batches})
            processes |= {process.pid for process in multiprocessing.active_children()} - others
            for batch, reference in zip(batches, batches_of(tasks[epoch], epoch), strict=True):
                for key, value in batch["net_input"].items():
                    assert torch.equal(value, reference["net_input"][key]), (epoch, key)
    finally:
        gc.enable()
    assert "can only test a child process" not in capfd.readouterr().err
    assert len(processes) == 1
    assert members[0] != members[1] != members[2]


def test_subwords_are_encoded_and_decoded(tmp_path):
    from sentencepiece import SentencePieceTrainer

    write_manifest(tmp_path, "train", durations(10))
    (tmp_path / "text").write_text("\n".join(["ba cab abba", "c a b"] * 20))
    text, prefix = str(tmp_path / "text"), str(tmp_path / "spm")
    SentencePieceTrainer.train(input=text, model_prefix=prefix, vocab_size=12)
    task = make_task(tmp_path)
    ids = task.targets.encode("ba cab", task.target_dictionary)
    assert len(ids) < 6
    assert task.target_dictionary.unk() not in ids
    assert task.target_dictionary.string(ids) == "ba cab"
    assert len(make_task(tmp_path).target_dictionary) == len(task.target_dictionary), "read again"


def test_manifest_of_fairseq_is_read(tmp_path, caplog):
    """Parts of an uncompressed zip, audio or features; and config.yaml, of which the names of files
    and the number of features are used."""
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
    settings = "vocab_filename: vocab.txt\ninput_feat_per_channel: 8\nspecaugment: {a: 1}\n"
    (tmp_path / "config.yaml").write_text(settings)
    task = make_task(tmp_path, input_feat_per_channel=None)
    assert "specaugment not used" in caplog.text
    assert not (tmp_path / "dict.txt").exists()
    task.load_dataset("train")
    dataset = task.dataset("train")
    assert dataset.sizes[:, 0].tolist() == [98, 50]
    inputs = dataset.collater([dataset[0], dataset[1]])["net_input"]
    assert inputs["src_lengths"].tolist() == [98, 50]
    expected = log_mel(torch.from_numpy(tone), RATE, 8)
    torch.testing.assert_close(inputs["src_tokens"][0], expected, atol=0.02, rtol=0)
    assert float(inputs["src_tokens"][1, :50].std()) == pytest.approx(1, abs=0.01)
    free = training_set(tmp_path, "--padding-free")
    with pytest.raises(ValueError, match="which need recordings"):
        free.collater([free[0], free[1]])


def drop_texts(manifest, keep=()):
    """Lines in which only the texts of some rows are left."""
    header, *lines = manifest.read_text().splitlines()
    for n in set(range(len(lines))).difference(keep):
        lines[n] = lines[n].rpartition("\t")[0] + "\t"
    manifest.write_text("\n".join([header, *lines]) + "\n")


def test_recordings_without_text_are_transcribed(folder, caplog):
    """They have separate batches, before all others: fairseq scores batches, and shows a score at
    the end if the last batch has targets."""
    drop_texts(write_manifest(folder, "mixed", durations(7, seed=3)), keep=(1, 4))
    task = make_task(folder)
    task.load_dataset("mixed")
    assert "mixed: 5 of 7 recordings have no text; they are transcribed, not scored" in caplog.text
    dataset = task.dataset("mixed")
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_sentences=4)
    samples = [dataset.collater([dataset[index] for index in batch]) for batch in batches]
    assert [sample["target"] is None for sample in samples] == [True, True, False]
    assert sorted(samples[-1]["id"].tolist()) == [1, 4]
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    (folder / "bare.tsv").write_text("audio\nmixed/000.wav\n")
    task.load_dataset("bare")
    assert task.dataset("bare").collater([task.dataset("bare")[0]])["target"] is None


def test_paths_of_recordings_are_read_one_by_one(folder, monkeypatch):
    """No file stays open, and no dataset stays in memory."""
    monkeypatch.chdir(folder)
    task = make_task(folder)
    task.mel_bins = 8
    for line in ["train/000.wav", "gone.wav", "", "train/001.wav"] * 8:
        paths, seconds = task.get_interactive_tokens_and_lengths([line], None)
        dataset = task.build_dataset_for_inference(paths, seconds)
        iterator = task.get_batch_iterator(dataset, max_sentences=1)
        batches = list(iterator.next_epoch_itr(shuffle=False))
        assert [batch["id"].tolist() for batch in batches] == [[0]] * line.startswith("train")
        assert not dataset._reader.unreadable.is_shared()
        assert not dataset._epoch.is_shared()
    assert not task.dataset_to_epoch_iter


def test_training_needs_texts(tmp_path, folder):
    drop_texts(write_manifest(tmp_path, "train", [1.0, 0.5]))
    (tmp_path / "valid.tsv").write_text("audio\ntrain/000.wav\n")
    reason = r"2 recordings can be used \(2 without a text\).*transcribed by fairseq-generate"
    with pytest.raises(ValueError, match=reason):  # for dict.txt
        make_task(tmp_path)
    with pytest.raises(ValueError, match="dict.txt: no such dictionary, and no manifest .*copy"):
        make_task(tmp_path, train_subset="gone")
    (tmp_path / "dict.txt").write_bytes((folder / "dict.txt").read_bytes())
    task = make_task(tmp_path, criterion="cape_ctc", target_norm=False)
    task.build_criterion(task.args)
    for split in ("train", "valid"):
        with pytest.raises(ValueError, match="transcribed by fairseq-generate"):
            task.load_dataset(split)


def test_training_sets_of_any_name(tmp_path):
    """Several sets may be given; the dictionary is of all of them."""
    for seed, name in enumerate(("one", "two")):
        write_manifest(tmp_path, name, durations(5, seed), seed)
    (tmp_path / "two.tsv").write_text((tmp_path / "two.tsv").read_text().replace("ab", "xy"))
    task = make_task(tmp_path, "--padding-free", train_subset="one,two")
    assert "x" in task.target_dictionary.symbols
    task.load_dataset("one,two", combine=True)
    assert len(task.dataset("one,two")) == 10
    assert task.dataset("one,two").padding_free
    task.load_dataset("two")
    assert not task.dataset("two").training
    task.load_dataset("one,two", task_cfg=task.args)
    assert not task.dataset("one,two").training, "a training set that is decoded"
    write_manifest(tmp_path, "one1", durations(3))
    for combine, count in ((False, 5), (True, 8)):
        task.load_dataset("one", combine=combine)
        assert len(task.dataset("one")) == count


def test_recordings_longer_than_a_batch(tmp_path):
    """Decoded whatever their length. (In training fairseq leaves them out, and says so.)"""
    write_manifest(tmp_path, "train", [1.0, 3.0])
    dataset = training_set(tmp_path)
    dataset.training = False
    assert sorted(np.concatenate(make_batches(dataset, max_tokens=200))) == [0, 1]
    free = training_set(tmp_path, "--padding-free")
    assert [len(batch) for batch in make_batches(free, max_tokens=200)] == [1, 1]


def broken_set(tmp_path, split):
    """A set whose first recording has a right header and a damaged body."""
    manifest = write_manifest(tmp_path, split, [1.0, 0.5, 0.9])
    manifest.write_text(manifest.read_text().replace("000.wav", "000.flac"))
    flac = tmp_path / split / "000.flac"
    soundfile.write(flac, *soundfile.read(flac.with_suffix(".wav")))
    data = flac.read_bytes()
    half = len(data) // 2
    flac.write_bytes(data[:half] + bytes(20) + data[half + 20 :])
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("audio\twords\na.wav\thello\n", "needed: audio and tgt_text"),
        ("audio\ttext\ngone.wav\ta\n", "none of its 1 recordings"),
    ],
)
def test_bad_manifests_are_refused(tmp_path, text, message):
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_task(tmp_path)


def test_recording_of_an_untrue_duration_is_reported_and_replaced(tmp_path, caplog):
    """The hop of its batch would be wrong, and the batch cut to pieces."""
    manifest = write_manifest(tmp_path, "train", [1.0, 1.1])
    manifest.write_text("audio\ttext\tseconds\ntrain/000.wav\ta\t5.0\ntrain/001.wav\tb\t1.1\n")
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
