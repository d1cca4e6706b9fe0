"""The speech recipe: synthetic speech, reading of data, batches, and its command line."""

import argparse
import json
import re

import numpy as np
import pytest

pytest.importorskip("transformers")
import soundfile
import torch
from safetensors.torch import load_file

from cape_plugins.speech.manifest import Utterance
from recipes.asr import data as asr_data
from recipes.asr import finetune_hf as asr
from recipes.asr.data import Labelled, Recordings, given_recordings, synthetic
from recipes.lab.steps import CommandError
from tests.support.plots import COLOURS, assert_lines
from tests.support.speech_data import write
from tests.support.tables import read_scores

QUICK = ("--max_steps", 4, "--save_steps", 2, "--per_device_eval_batch_size", 16)
TINY = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2}
DECODER = {"decoder_layers": 1, "decoder_ffn_dim": 16, "decoder_attention_heads": 2}
TINY_SEQ2SEQ = {**TINY, **DECODER, "model_type": "cape_speech_to_text", "conv_channels": 16}


def write_wavs(folder, count, rate=16000):
    """Noise with its texts, "a b", "a b c" ... in turn."""
    texts = {f"{n:03}.wav": "a b c d e f"[: 3 + 2 * (n % 5)] for n in range(count)}
    for n, name in enumerate(texts):
        write(folder / name, 0.3 + 0.05 * n, rate)
    return texts


def arguments(*words):
    return asr.make_options().parse_args([str(word) for word in words])


def test_paths_of_each_table_begin_at_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tables = []
    for name, count in (("train", 5), ("test", 3)):
        texts = write_wavs(tmp_path / name / "wavs", count, rate=8000)
        tables.append(tmp_path / name / "table.csv")
        lines = ["audio,said", *(f"wavs/{path},{name} {text}" for path, text in texts.items())]
        tables[-1].write_text("".join(f"{line}\n" for line in lines))
    words = ("--train-file", tables[0], "--text-column", "said")
    splits = given_recordings(arguments(*words, "--test-file", tables[1]))
    assert {name: len(part) for name, part in splits.items()} == {"train": 5, "test": 3}
    for name, part in splits.items():
        assert {item.audio.parent for item in part.items} == {tmp_path / name / "wavs"}
        assert all(item.text.startswith(name) for item in part.items)
        assert len(part[2]) == pytest.approx(part.items[2].seconds * 16000, abs=2), "of 8 kHz"
    whole = given_recordings(arguments(*words))
    assert {item.audio.parent for item in whole["test"].items} == {tmp_path / "train/wavs"}


def test_hub_layout_needs_no_torchcodec(tmp_path, monkeypatch):
    """A data set whose column is declared as Audio, which datasets decodes by torchcodec only."""
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = write_wavs(tmp_path / "wavs", 6)
    files = [{"bytes": (tmp_path / "wavs" / name).read_bytes(), "path": name} for name in texts]
    data = datasets.Dataset.from_dict({"audio": files, "text": list(texts.values())})
    data = data.cast_column("audio", datasets.Audio(decode=False))
    audio = datasets.Audio(sampling_rate=16000)
    data.info.features = datasets.Features({**data.features, "audio": audio})
    splits = datasets.DatasetDict(train=data, test=data)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: splits)
    parquet = argparse.Namespace(config=None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: parquet)
    splits = given_recordings(arguments("--dataset", "some/name"))
    assert [item.text for item in splits["train"].items] == list(texts.values())
    assert len(splits["train"][2]) == 6400


def test_what_ctc_cannot_align_is_left_out(capsys):
    texts = ("aab", "abc", "abcd", "xyz")
    items = [Utterance("0", np.full(1600, n, "f"), text, 0.1) for n, text in enumerate(texts)]
    data = Labelled(Recordings(items), [list(map(ord, text)) for text in texts])
    model = asr.CapeSpeechForCTC(asr.CapeSpeechConfig(**TINY))  # 8 frames, 3 outputs
    fitting = asr.fitting(data, model)
    assert [item.text for item in fitting.recordings.items] == ["abc", "xyz"]
    assert "2 of 4 skipped (2 with more labels than outputs" in capsys.readouterr().out
    assert len(fitting) == 2
    pairs = [fitting[index][:2] for index in range(2)]  # labels stay with their recordings
    assert [(int(wave[0]), "".join(map(chr, ids))) for wave, ids in pairs] == [
        *((1, "abc"), (3, "xyz"))
    ]


@pytest.fixture
def main(tmp_path, monkeypatch):
    """The command in this process, with options of a short training."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: asr.main([str(word) for word in (*QUICK, *words)])


@pytest.mark.slow
def test_built_in_speech_is_compared(tmp_path, main, monkeypatch, capsys):
    """Trains and tests on less speech than the command, because making speech takes longer than the
    training."""
    monkeypatch.setattr(asr_data, "TRAIN_STRINGS", 60)
    monkeypatch.setattr(asr_data, "TEST_WORDS", dict.fromkeys(asr_data.TEST_WORDS, 2))
    speech = synthetic()
    longest = max(item.seconds for item in speech["train"].items)
    assert longest < 3
    assert max(item.seconds for item in speech["test"].items) > 8 * longest
    monkeypatch.setattr(asr, "synthetic", lambda: speech)
    command = ("--output", "out", "--model-config", json.dumps(TINY))
    main(*command, "--compare", "cape")
    output = capsys.readouterr().out
    assert all(f"{what} error rate, % by duration" in output for what in ("Word", "Letter"))
    scores = read_scores(tmp_path / "out", "wer")["cape"]
    assert {"1-2 s", "2-4 s", "16-32 s", "all"} <= {*scores}
    assert_lines(tmp_path / "out/scores.png", COLOURS[:1])
    # the folder is a complete recogniser
    from transformers import AutoModelForCTC, AutoProcessor, pipeline

    test = speech["test"].items
    rows = (tmp_path / "out/cape/hypotheses.tsv").read_text().splitlines()
    assert [row.split("\t")[0] for row in rows[1:]] == [item.text for item in test]
    path = str(tmp_path / "out/cape")
    model, processor = AutoModelForCTC.from_pretrained(path), AutoProcessor.from_pretrained(path)
    alone = Recordings(test[1:2])
    plain, beam, slow = (
        asr.recognise(model, processor, alone, 1, arguments(*words))
        for words in ((), ("--ctc-beam", 20), ("--hop-seconds", 0.013))
    )
    assert isinstance(beam[0], str)
    assert slow != plain
    (hypothesis,) = plain
    recogniser = pipeline("automatic-speech-recognition", model=path)
    assert recogniser(alone[0].numpy())["text"] == hypothesis
    # another type in the same folder is not taken for it
    with pytest.raises(CommandError, match="made with other settings"):
        main(*command, "--position-embedding", "cape", "--position-max-global-shift", 3)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 20), ("test", 5)):
        for name, text in write_wavs(tmp_path / "data" / split, count).items():
            (tmp_path / "data" / split / name).with_suffix(".txt").write_text(text)
    return tmp_path / "data"


@pytest.mark.slow
@pytest.mark.usefixtures("ended_loaders")
def test_interrupted_training_ends_alike(tmp_path, run_cli, repo_root, main, folder):
    """Positions, dropout, masks, batches, skipped frames, and what takes the place of a recording
    with a broken body; stopped in the middle of an epoch."""
    flac = folder / "train/011.flac"
    soundfile.write(flac, np.random.default_rng(3).normal(0, 0.1, 16000), 16000)
    data = flac.read_bytes()
    flac.write_bytes(data[:9000] + bytes(20) + data[9020:])
    flac.with_suffix(".txt").write_text("a b")
    (folder / "train/011.wav").unlink()
    command = ("--dataset", folder, "--model-config", json.dumps(TINY), "--padding-free", 4)
    command += ("--position-embedding", "cape", "--lr_scheduler_type", "constant")
    command += ("--dataloader_num_workers", 1)
    program = ("python", repo_root / "recipes/asr/finetune_hf.py", *QUICK, *command)
    done = run_cli(*program, "--max_steps", 8, "--output", "whole", cwd=tmp_path)
    assert "011.flac" in done.stderr
    assert "Another recording takes its place (1 of 20 so far)" in done.stderr
    assert "batches without padding; sorted batches of 4 s would have" in done.stdout
    for steps in (4, 8):
        main(*command, "--max_steps", steps, "--output", "again")
    files = (tmp_path / name / "cape/model.safetensors" for name in ("whole", "again"))
    whole, again = map(load_file, files)
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@pytest.mark.slow
def test_decoder_from_scratch_and_finetuned(tmp_path, main, folder, monkeypatch):
    seq2seq = asr.hf_models.CapeSpeech2TextForConditionalGeneration
    write = seq2seq.generate  # such a model would write as much as it may
    short = {"max_new_tokens": 5}
    monkeypatch.setattr(seq2seq, "generate", lambda *args, **more: write(*args, **more | short))
    sizes = ("--model-config", json.dumps(TINY_SEQ2SEQ), "--vocab-size", 16, "--output", "first")
    main("--dataset", folder, *sizes, "--position-embedding", "sinpos")
    again = ("--model", "first/sinpos", "--output", "second", "--position-embedding", "cape")
    main("--dataset", folder, *again, "--beam", 2)
    config = json.loads((tmp_path / "second/cape/config.json").read_text())
    assert config["position_embedding"]["type"] == "cape"
    assert config["model_type"] == "cape_speech_to_text"
    from transformers import pipeline

    recogniser = pipeline("automatic-speech-recognition", model=str(tmp_path / "second/cape"))
    assert isinstance(recogniser(np.zeros(16000, np.float32))["text"], str)


SEQ2SEQ = ("--model-config", '{"model_type": "speech_to_text"}')
BAD = [
    (["--beam", "3"], "--beam is for models with a decoder"),
    (["--ctc-lm", "gone", "--ctc-beam", "9"], "lm='gone': no such file"),
    (["--padding-free", "9", *SEQ2SEQ], "for CTC models"),
    (["--max-seconds", "0.01"], "--max-seconds 0.01"),
    (["--model-config", '{"hiden_size": 1}'], "CapeSpeechConfig has no hiden_size"),
    (["--preset", "wsj", "--model", "x"], "has no effect on the checkpoint of --model"),
    (["--preset", "wsj", *SEQ2SEQ], "is for CTC models"),
    (["--model-config", "nope.json"], "--model-config nope.json: No such file"),
    (["--model-config", "[1]"], "--model-config [1]"),
    (["--model", "/nope"], "--model /nope: no such folder"),
    (["--test-file", "a.csv"], "--test-file needs --train-file"),
    (["--model-config", '{"model_type": "bert"}'], "model_type 'bert' is not allowed"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_refused(words, message, main, monkeypatch):
    speech = {"train": Recordings([Utterance("0", None, "a", 1.0)]), "test": None}
    monkeypatch.setattr(asr, "synthetic", lambda: speech)
    with pytest.raises(CommandError, match=re.escape(message)):
        main(*words, "--output", "out")
