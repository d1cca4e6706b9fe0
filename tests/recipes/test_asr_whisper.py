"""A small Whisper padded to 30 s and at natural length."""

import csv
import json

import numpy as np
import pytest

pytest.importorskip("transformers")
import soundfile
import torch
import transformers

from cape_plugins.speech.manifest import Utterance
from recipes.asr import whisper
from recipes.asr.data import Recordings
from recipes.lab.steps import CommandError

TINY = json.dumps({"max_source_positions": 100, "d_model": 16, "num_mel_bins": 8})


def make_pool(*seconds):
    """Recordings of constants, so that what was joined can be told."""
    waves = [np.full(int(16000 * length), n + 1, np.float32) for n, length in enumerate(seconds)]
    rows = zip(waves, seconds, strict=True)
    return Recordings(Utterance(str(n), w, f"word{n + 1}", s) for n, (w, s) in enumerate(rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tones of 0.3 to 0.5 s, each with its text."""
    place = tmp_path_factory.mktemp("words")
    for number in range(12):
        times = np.arange(4800 + 300 * number) / 16000
        tone = 0.3 * np.sin(2 * np.pi * 200 * (1 + number % 3) * times)
        soundfile.write(place / f"{number}.wav", tone, 16000)
        (place / f"{number}.txt").write_text(["low", "middle", "high"][number % 3])
    return place


def test_texts_belong_to_what_is_joined():
    strings = whisper.join(make_pool(0.5, 0.3, 0.9, 1.7), 20, 1.0, 2.0, seed=0)
    assert len(strings) == 20
    for index, item in enumerate(strings.items):
        wave = strings[index]
        assert 1.0 <= item.seconds <= 2.0
        assert len(wave) == round(16000 * item.seconds)
        spoken = [f"word{int(n)}" for n in torch.unique(wave)]
        assert spoken == sorted({*item.text.split()})
        assert wave[0] == int(item.text.split()[0].removeprefix("word"))
    again = whisper.join(make_pool(0.5, 0.3, 0.9, 1.7), 20, 1.0, 2.0, seed=0)
    other = whisper.join(make_pool(0.5, 0.3, 0.9, 1.7), 20, 1.0, 2.0, seed=1)
    texts, same, changed = ([item.text for item in part.items] for part in (strings, again, other))
    assert texts == same != changed


def test_padded_models_are_given_30_seconds_and_others_what_there_is(tmp_path):
    processor = whisper.make_processor(tmp_path / "processor", ["one"], whisper.SIZES)
    waves = [torch.randn(16000), torch.randn(8000)]
    shapes = {
        padded: whisper.Recogniser(processor, padded).collate.features(waves).input_features.shape
        for padded in (True, False)
    }
    assert shapes == {True: (2, 24, 1500), False: (2, 24, 50)}


def test_variants_begin_with_the_same_weights(tmp_path):
    tokenizer = whisper.make_processor(tmp_path / "p", ["one"], whisper.SIZES).tokenizer
    models = []
    for settings in ({}, {"type": "cape"}):
        torch.manual_seed(1)
        model = whisper.build_stock(None, whisper.SIZES, tokenizer)
        if settings:
            whisper.hf_models.switch(model, settings, natural_length=True)
        models.append(model.state_dict())
    shared = models[0].keys() & models[1].keys()
    assert models[0].keys() - shared == {"model.encoder.embed_positions.weight"}
    assert all(torch.equal(models[0][name], models[1][name]) for name in shared)


@pytest.mark.slow
def test_the_comparison_of_a_folder_is_written_and_taken_up_again(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(whisper, "STRINGS", {"train": 40, "timed": 240})
    words = ["--dataset", str(folder), "--model-config", TINY, "--limit", "2", "--seeds", "1"]
    words += ["--max_steps", "2", "--train-seconds", "0.8", "2", "--output", str(tmp_path)]
    words += ["--compare", "cape"]
    whisper.main(words)
    said = capsys.readouterr().out
    assert "train_runtime" in said
    rows, times = (
        list(csv.DictReader((tmp_path / f"{name}.csv").open())) for name in ("scores", "times")
    )
    assert {row["variant"] for row in rows} == {"cape", "padded"}
    assert {row["duration"] for row in rows} == {*whisper.durations(0.8, 2.0)}
    assert {row["work"] for row in times} == {"training", "recognition"}
    assert all(float(row["ratio"]) == 1 for row in times if row["variant"] == "padded")
    assert (tmp_path / "scores.png").stat().st_size > 1000 < (tmp_path / "times.png").stat().st_size
    page = (tmp_path / "scores.md").read_text()
    assert "an epoch of training, and recognition, of 8 recordings of 4." in page
    assert "**In training**: 0.8-2 s" in page
    whisper.main(words)
    assert "train_runtime" not in capsys.readouterr().out
    saved = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "cape-seed1")
    assert saved.config.position_embedding["type"] == "cape"
    assert saved.config.decoder_position_embedding["type"] == "cape"
    assert saved.config.hop_seconds == pytest.approx(0.15)
    stock = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / "padded-seed1")
    assert type(stock) is transformers.WhisperForConditionalGeneration


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--train-seconds", "2", "1"), r"--train-seconds 2 1: the numbers must increase"),
        (("--train-seconds", "0.1", "0.2"), r"recordings of 0\.3 s and more cannot be joined"),
    ],
)
def test_durations_that_cannot_be_made_are_refused(words, message, folder, tmp_path):
    with pytest.raises(CommandError, match=message):
        whisper.main(["--dataset", str(folder), "--output", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_models_of_other_types_are_refused(folder, tmp_path):
    transformers.BartConfig().save_pretrained(tmp_path / "model")
    words = ["--dataset", str(folder), "--model", str(tmp_path / "model")]
    with pytest.raises(CommandError, match=r"is of the type bart; allowed: whisper"):
        whisper.main([*words, "--output", str(tmp_path / "out")])
