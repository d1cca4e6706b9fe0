"""The speech recipe: synthetic speech, reading of data, batches, and its command line."""

import argparse
import csv
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
from recipes.asr.manifest import usable
from recipes.lab.steps import CommandError
from tests.support.plots import assert_lines
from tests.support.tables import read_scores

QUICK = ("--max_steps", 4, "--save_steps", 2, "--per_device_eval_batch_size", 16)
TINY = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16, "encoder_attention_heads": 2}
TINY_SEQ2SEQ = {
    **TINY,
    "model_type": "cape_speech_to_text",
    "decoder_layers": 1,
    "decoder_ffn_dim": 16,
    "decoder_attention_heads": 2,
    "conv_channels": 16,
}


# ---- data ----------------------------------------------------------------------------------------


def write_wavs(folder, count, seed=0, rate=16000):
    """Speech-like noise with its texts, "a b", "a b c" ... in turn."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for n in range(count):
        name = f"{n:03}.wav"
        soundfile.write(folder / name, rng.normal(0, 0.1, int(rate * (0.3 + 0.05 * n))), rate)
        texts[name] = "a b c d e f"[: 3 + 2 * (n % 5)]
    return texts


def arguments(*words):
    return asr.make_options().parse_args([str(word) for word in words])


def test_folder_with_texts_beside_the_recordings(tmp_path):
    for name, text in write_wavs(tmp_path / "all", 20).items():
        (tmp_path / "all" / name).with_suffix(".txt").write_text(text + "\n")
    splits = given_recordings(arguments("--dataset", tmp_path / "all"))
    assert [len(splits[name]) for name in ("train", "test")] == [18, 2]
    item = splits["train"].items[3]
    assert item.audio.with_suffix(".txt").read_text() == item.text + "\n"
    assert len(splits["train"][3]) == round(item.seconds * 16000)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_folder_with_metadata_and_splits(tmp_path, suffix):
    for split, count in (("train", 4), ("test", 3)):
        texts = write_wavs(tmp_path / split, count)
        rows = [{"file_name": name, "transcription": text} for name, text in texts.items()]
        with open(tmp_path / split / f"metadata.{suffix}", "w", newline="") as file:
            if suffix == "csv":
                table = csv.DictWriter(file, rows[0])
                table.writeheader()
                table.writerows(rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    splits = given_recordings(arguments("--dataset", tmp_path))
    assert [item.text for item in splits["test"].items] == list(texts.values())
    assert len(splits["train"]) == 4


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_tables_of_every_format_are_read(tmp_path, suffix, monkeypatch):
    import pandas

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = write_wavs(tmp_path / "wavs", 12, rate=8000)
    if suffix == "parquet":  # with the bytes in it, as on the hub
        audio = [{"bytes": (tmp_path / "wavs" / n).read_bytes(), "path": n} for n in texts]
    else:
        audio = [f"wavs/{name}" for name in texts]
    frame = pandas.DataFrame({"audio": audio, "said": list(texts.values())})
    path = tmp_path / f"train.{suffix}"
    {
        "csv": lambda: frame.to_csv(path, index=False),
        "tsv": lambda: frame.to_csv(path, index=False, sep="\t"),
        "jsonl": lambda: frame.to_json(path, orient="records", lines=True),
        "parquet": lambda: frame.to_parquet(path),
    }[suffix]()
    splits = given_recordings(arguments("--train-file", path, "--text-column", "said"))
    assert len(splits["train"]) == 11
    waveform = splits["train"][5]
    assert len(waveform) == pytest.approx(splits["train"].items[5].seconds * 16000, abs=2)


@pytest.mark.parametrize("option", ["--test-file", "--validation-file"])
def test_paths_of_each_table_begin_at_its_own_folder(option, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tables = []
    for name, count in (("train", 5), ("test", 3)):
        texts = write_wavs(tmp_path / name / "wavs", count)
        tables.append(tmp_path / name / "table.csv")
        lines = ["audio,text", *(f"wavs/{path},{name} {text}" for path, text in texts.items())]
        tables[-1].write_text("".join(f"{line}\n" for line in lines))
    splits = given_recordings(arguments("--train-file", tables[0], option, tables[1]))
    assert {name: len(part) for name, part in splits.items()} == {"train": 5, "test": 3}
    for name, part in splits.items():
        assert {item.audio.parent for item in part.items} == {tmp_path / name / "wavs"}
        assert all(item.text.startswith(name) for item in part.items)
    whole = given_recordings(arguments("--train-file", tables[0]))
    assert {item.audio.parent for item in whole["test"].items} == {tmp_path / "train/wavs"}


def test_hub_layout_needs_no_torchcodec(tmp_path, monkeypatch):
    """A data set whose column is declared as Audio, which datasets decodes by torchcodec only."""
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = write_wavs(tmp_path / "wavs", 6)
    rows = {
        "audio": [
            {"bytes": (tmp_path / "wavs" / name).read_bytes(), "path": name} for name in texts
        ],
        "text": list(texts.values()),
    }
    data = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    decoded = data.features.copy()
    decoded["audio"] = datasets.Audio(sampling_rate=16000)
    data.info.features = decoded
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=data, test=data)
    )
    parquet = argparse.Namespace(config=None)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: parquet)
    splits = given_recordings(arguments("--dataset", "some/name"))
    assert [item.text for item in splits["train"].items] == list(texts.values())
    assert len(splits["train"][2]) == 6400


def test_bad_recordings_are_counted(tmp_path, capsys):
    texts = write_wavs(tmp_path, 4)
    paths = [tmp_path / name for name in texts]
    paths[0].write_bytes(b"")
    paths[1].unlink()
    soundfile.write(paths[2], np.zeros(100), 16000)
    texts = ["a", "a", "a", "a", " ", None]
    rows = [Utterance("0", *row) for row in zip([*paths, paths[3], paths[3]], texts, strict=True)]
    items = usable(iter(rows), 6, "train")
    assert [item.audio for item in items] == paths[3:]
    output = capsys.readouterr().out
    reasons = "2 unreadable, 1 of no more than 0.025 s, 2 without a text"
    assert f"train data: 5 of 6 skipped ({reasons})" in output
    assert "000.wav cannot be decoded" in output
    with pytest.raises(CommandError, match=r"none of 1 .*000\.wav cannot be decoded"):
        usable(rows[:1], 1, "test")


# ---- batches -------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_not_scored():
    items = [Utterance("0", None, "a b", 0.5), Utterance("1", None, "x y", 0.9)]
    rows = {row["duration"]: row for row in asr.scored(items, ["a c", None])}
    assert {name: (row["wer"], row["count"]) for name, row in rows.items()} == {
        "0-1 s": (50.0, 1),
        "all": (50.0, 1),
    }


def test_what_ctc_cannot_align_is_left_out(capsys):
    texts = ("aab", "abc", "abcd", "xyz")
    items = [Utterance("0", np.full(1600, n, "f"), text, 0.1) for n, text in enumerate(texts)]
    data = Labelled(Recordings(items), [list(map(ord, text)) for text in texts])
    model = asr.CapeSpeechForCTC(asr.CapeSpeechConfig(**TINY))  # 8 frames, 3 outputs
    fitting = asr.fitting(data, model)
    assert [item.text for item in fitting.recordings.items] == ["abc", "xyz"]
    assert "2 of 4 skipped (2 with more labels than outputs" in capsys.readouterr().out
    assert len(fitting) == 2
    # labels stay with their recordings
    pairs = [fitting[index][:2] for index in range(2)]
    assert [(int(wave[0]), ids) for wave, ids in pairs] == [
        (1, list(map(ord, "abc"))),
        (3, list(map(ord, "xyz"))),
    ]


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_built_in_speech_is_compared(tmp_path, monkeypatch, capsys):
    """Trained on less of it here, because the speech takes longer than the training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asr_data, "TRAIN_STRINGS", 200)
    speech = synthetic()
    monkeypatch.setattr(asr, "synthetic", lambda: speech)
    command = ["--output", "out", *map(str, QUICK), "--model-config", json.dumps(TINY)]
    asr.main([*command, "--compare", "sinpos", "cape"])
    output = capsys.readouterr().out
    assert "Word error rate, % by duration" in output
    assert "Letter error rate, % by duration" in output
    bins = ("0-1 s", "1-2 s", "2-4 s", "4-8 s", "8-16 s", "16-32 s", "all")
    assert tuple(read_scores(tmp_path / "out", "wer")["cape"]) == bins
    assert_lines(tmp_path / "out/scores.png")
    rows = (tmp_path / "out/cape/hypotheses.tsv").read_text().splitlines()
    assert len(rows) == 451, "with a header"
    # the folder is a complete recogniser
    from transformers import AutoModelForCTC, AutoProcessor, pipeline

    test = speech["test"].items
    assert [row.split("\t")[0] for row in rows[1:]] == [item.text for item in test]
    path = str(tmp_path / "out/cape")
    model, processor = AutoModelForCTC.from_pretrained(path), AutoProcessor.from_pretrained(path)
    alone = Recordings(test[7:8])
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
    other = ["--position-embedding", "cape", "--position-max-global-shift", "3"]
    with pytest.raises(CommandError, match="made with other settings"):
        asr.main([*command, *other])


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 20), ("test", 5)):
        for name, text in write_wavs(tmp_path / "data" / split, count).items():
            (tmp_path / "data" / split / name).with_suffix(".txt").write_text(text)
    return tmp_path / "data"


PADDED = ("--per_device_train_batch_size", 8)
PADDING_FREE = ("--padding-free", 4, "--dataloader_num_workers", 1)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [PADDED, PADDING_FREE], ids=["padded", "padding-free"])
def test_interrupted_training_ends_alike(run_cli, repo_root, tmp_path, folder, batches):
    """Positions, dropout, masks, batches, skipped frames, and what takes the place of a recording
    with a broken body; stopped in the middle of an epoch."""
    flac = folder / "train/011.flac"
    soundfile.write(flac, np.random.default_rng(3).normal(0, 0.1, 16000), 16000)
    data = flac.read_bytes()
    flac.write_bytes(data[:9000] + bytes(20) + data[9020:])
    flac.with_suffix(".txt").write_text("a b")
    (folder / "train/011.wav").unlink()
    command = ("python", repo_root / "recipes/asr/finetune_hf.py", "--dataset", folder, *QUICK)
    command += ("--model-config", json.dumps(TINY), "--position-embedding", "cape")
    command += ("--lr_scheduler_type", "constant", *batches)
    run = run_cli(*command, "--max_steps", 8, "--output", "whole", cwd=tmp_path)
    assert "011.flac" in run.stderr
    assert "Another one takes its place (1 of 20 so far)" in run.stderr
    assert ("batches without padding; sorted batches of 4 s would have" in run.stdout) == (
        batches == PADDING_FREE
    )
    run_cli(*command, "--max_steps", 4, "--output", "again", cwd=tmp_path)
    run_cli(*command, "--max_steps", 8, "--output", "again", cwd=tmp_path)
    whole, again = (
        load_file(tmp_path / name / "cape/model.safetensors") for name in ("whole", "again")
    )
    assert all(torch.equal(whole[key], again[key]) for key in whole)


@pytest.mark.slow
def test_subwords_and_mixed_precision_and_accumulation(run_cli, repo_root, tmp_path, folder):
    (tmp_path / "sizes.json").write_text(json.dumps(TINY))
    run_cli(
        "accelerate", "launch", "--cpu", "--num_processes", 1,
        repo_root / "recipes/asr/finetune_hf.py", "--dataset", folder, "--output", "out", *QUICK,
        "--model-config", "sizes.json", "--position-embedding", "cape", "--vocab-size", 14,
        "--bf16", "--gradient_accumulation_steps", 2, "--max-seconds", 1, cwd=tmp_path,
    )  # fmt: skip
    from transformers import AutoProcessor

    import hf_models

    processor = AutoProcessor.from_pretrained(tmp_path / "out/cape")
    assert type(processor.tokenizer) is hf_models.CapeSpeechTokenizer
    assert len(processor.tokenizer) <= 14
    assert "all" in read_scores(tmp_path / "out", "wer")["cape"]


@pytest.mark.slow
def test_decoder_from_scratch_and_finetuned(run_cli, repo_root, tmp_path, folder):
    command = ("python", repo_root / "recipes/asr/finetune_hf.py", "--dataset", folder, *QUICK)
    first = ("--model-config", json.dumps(TINY_SEQ2SEQ), "--vocab-size", 16, "--output", "first")
    run_cli(*command, *first, "--position-embedding", "sinpos", cwd=tmp_path)
    second = ("--model", "first/sinpos", "--output", "second", "--position-embedding", "cape")
    run_cli(*command, *second, "--beam", 2, cwd=tmp_path)
    config = json.loads((tmp_path / "second/cape/config.json").read_text())
    assert config["position_embedding"]["type"] == "cape"
    assert config["model_type"] == "cape_speech_to_text"
    from transformers import pipeline

    recogniser = pipeline("automatic-speech-recognition", model=str(tmp_path / "second/cape"))
    assert isinstance(recogniser(np.zeros(16000, np.float32))["text"], str)


@pytest.mark.slow
def test_two_processes_share_the_evaluation(run_cli, repo_root, tmp_path, folder):
    """The same trained model scores alike, whether one process or two recognise."""
    program = repo_root / "recipes/asr/finetune_hf.py"
    options = ("--dataset", folder, "--output", "out", *QUICK, "--use_cpu")
    options += ("--model-config", json.dumps(TINY), "--position-embedding", "cape")
    options += ("--padding-free", 3)
    two = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    run_cli(*two, program, *options, cwd=tmp_path)
    together = (tmp_path / "out/cape/hypotheses.tsv").read_text()
    assert len(together.splitlines()) == 6
    run_cli("python", program, *options, cwd=tmp_path)  # finds the training finished
    assert (tmp_path / "out/cape/hypotheses.tsv").read_text() == together


BAD = [
    (["--beam", "3"], "--beam is for models with decoder"),
    (["--ctc-lm", "gone"], "need a beam; give --ctc-beam"),
    (["--ctc-lm", "gone", "--ctc-beam", "9"], "lm='gone': no such file"),
    (["--padding-free", "9", "--model-config", '{"model_type": "speech_to_text"}'], "by CTC"),
    (["--max-seconds", "0.01"], "--max-seconds 0.01"),
    (["--model-config", '{"hiden_size": 1}'], "CapeSpeechConfig has no hiden_size"),
    (
        ["--preset", "wsj", "--model", "x"],
        "--preset wsj has no effect on the checkpoint of --model",
    ),
    (
        ["--preset", "wsj", "--model-config", '{"model_type": "speech_to_text"}'],
        "is for CTC models",
    ),
    (["--model-config", "nope.json"], "--model-config nope.json: No such file"),
    (["--model-config", "[1]"], "--model-config [1]"),
    (["--model", "/nope"], "--model /nope: no such folder"),
    (["--compare", "foo"], "--compare foo is unknown; allowed: nopos"),
    (["--test-file", "a.csv"], "--test-file needs --train-file"),
    (["--position-embedding", "sinpos", "--position-max-global-shift", "3"], "max-global-shift 3"),
    (["--model-config", '{"model_type": "bert"}'], "model_type 'bert' is not allowed"),
    (["--train-file", "gone.csv"], "gone.csv: no such file"),
    (["--train-file", __file__], "unknown format"),
    (["--dataset", "EMPTY"], "cannot be read"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(
        asr,
        "synthetic",
        lambda: {"train": Recordings([Utterance("0", None, "a", 1.0)]), "test": None},
    )
    words = [str(tmp_path) if word == "EMPTY" else word for word in words]
    with pytest.raises(CommandError, match=re.escape(message)):
        asr.main([*words, "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hop-seconds", "3"], "'3' is not allowed; allowed: 0.001 to 0.1"),
        (["--padding-free", "0"], "'0' is not allowed; allowed: 0.1 to"),
    ],
)
def test_values_that_the_parser_refuses(words, message, capsys):
    with pytest.raises(SystemExit):
        asr.main(words)
    assert message in capsys.readouterr().err
