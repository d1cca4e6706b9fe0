"""Whisper: checkpoints, conversion, features and pipeline."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    WhisperFeatureExtractor,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)

import hf_models
from hf_models.convert import convert
from tests.support.whisper import encoder_sizes, save_with_processor, switched


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stock checkpoint with its processor, which writes letters."""
    path = tmp_path_factory.mktemp("whisper") / "stock"
    save_with_processor(path)
    return path


@pytest.fixture(scope="module")
def cape_folder(folder):
    convert(str(folder), folder.parent / "cape", {"type": "cape"})
    return folder.parent / "cape"


def wave(seconds, seed=0):
    samples = np.random.default_rng(seed).standard_normal(int(16000 * seconds))
    return (0.1 * samples).astype(np.float32)


def test_auto_classes_load_models_and_processors(folder, cape_folder):
    cape = {"position_embedding": {"type": "cape"}}
    for auto, name in (
        (AutoModel, "Model"),
        (AutoModelForSpeechSeq2Seq, "ForConditionalGeneration"),
        (AutoModelForAudioClassification, "ForAudioClassification"),
    ):
        for source, fields in ((folder, cape), (cape_folder, {})):
            loaded = auto.from_pretrained(source, **fields)
            assert type(loaded).__name__ == f"CapeWhisper{name}"
    assert type(AutoTokenizer.from_pretrained(cape_folder)) is WhisperTokenizer
    for extractor in (
        AutoFeatureExtractor.from_pretrained(cape_folder),
        AutoProcessor.from_pretrained(cape_folder).feature_extractor,
    ):
        assert type(extractor) is hf_models.CapeWhisperFeatureExtractor


def test_converted_there_and_back_a_checkpoint_is_what_it_was(folder, tmp_path, capsys):
    convert(str(folder), tmp_path / "same", {"type": "sinpos"})
    assert "has the same outputs as" in capsys.readouterr().out
    convert(str(folder), tmp_path / "cape", {"type": "cape"}, neutral=True)
    assert "padding: masked where a mask is given" in capsys.readouterr().out
    stock = WhisperForConditionalGeneration.from_pretrained(folder)
    for source, natural in (("same", False), ("cape", True)):
        saved = json.loads((tmp_path / source / "processor_config.json").read_text())
        name = "CapeWhisperFeatureExtractor" if natural else "WhisperFeatureExtractor"
        assert saved["feature_extractor"]["feature_extractor_type"] == name
        convert(str(tmp_path / source), tmp_path / f"{source}-stock", None)
        back = WhisperForConditionalGeneration.from_pretrained(tmp_path / f"{source}-stock")
        assert back.generation_config.no_timestamps_token_id
        weights = back.state_dict()
        assert all(torch.equal(v, weights[name]) for name, v in stock.state_dict().items())
        extractor = AutoProcessor.from_pretrained(tmp_path / f"{source}-stock").feature_extractor
        assert type(extractor) is WhisperFeatureExtractor


def test_features_equal_stock_without_the_silence():
    cape, stock = hf_models.CapeWhisperFeatureExtractor(), WhisperFeatureExtractor()
    waves = [wave(seconds) for seconds in (1.5, 0.97, 0.01)]
    arguments = {"sampling_rate": 16000, "return_tensors": "pt"}
    batch = cape(waves, **arguments)
    full = stock(waves, return_attention_mask=True, **arguments)
    assert batch.attention_mask.sum(-1).tolist() == [150, 97, 1]
    for i, recording in enumerate(waves):
        alone = cape(recording, **arguments).input_features
        for among_others in (batch, full):
            frames = among_others.input_features[i, :, : alone.shape[-1]]
            torch.testing.assert_close(alone[0], frames, rtol=0, atol=1e-6)
    same = cape(waves, padding="max_length", **arguments)
    assert torch.equal(same.input_features, full.input_features)
    assert cape(wave(31), **arguments).input_features.shape[-1] == 3100


def test_features_have_any_hop_and_may_be_padded_later():
    extractor = hf_models.CapeWhisperFeatureExtractor()
    waves = [wave(0.5), wave(0.2)]
    fine = extractor(waves, sampling_rate=16000, hop_seconds=0.005, return_tensors="pt")
    assert fine.input_features.shape == (2, 80, 100)
    assert fine.hop_nanoseconds.tolist() == [5_000_000] * 2
    items = [extractor(w, sampling_rate=16000)["input_features"][0] for w in waves]
    batch = extractor.pad([{"input_features": item} for item in items], return_tensors="pt")
    assert batch.input_features.shape == (2, 80, 50)
    assert batch.attention_mask.sum(-1).tolist() == [50, 20]
    for hop, shown in ((1e-6, "1e-06"), ("x", "'x'"), ([0.01, 0.01], "")):
        with pytest.raises(ValueError, match=rf"hop_seconds={shown}.*at least one sample"):
            extractor(waves, hop_seconds=hop)
    with pytest.raises(ValueError, match=r"shape \(0,\).*at least one"):
        extractor([wave(0)])


def test_pipeline_recognises_at_natural_length(cape_folder):
    recognise = pipeline("automatic-speech-recognition", model=str(cape_folder))
    options = {"max_new_tokens": 6, "num_beams": 1}
    encoder = recognise.model.get_encoder()

    def sizes(seconds):
        call = partial(recognise, wave(seconds), generate_kwargs=options)
        return encoder_sizes(recognise.model, call)

    assert set(sizes(0.5)) == {25}
    for stamps in (True, "word"):
        recognise.model.generation_config.alignment_heads = [[0, 0], [1, 1]]
        chunks = recognise(wave(0.5), return_timestamps=stamps, generate_kwargs=options)["chunks"]
        assert all(len(chunk["timestamp"]) == 2 for chunk in chunks)
    options |= {"one_piece": True, "language": "en"}
    assert sizes(30.5) == [1525]
    assert encoder is recognise.model.get_encoder()


def test_pipeline_takes_batches(cape_folder):
    """Each recording gets the text that it gets alone, for all lengths of the recordings."""
    recognise = pipeline("automatic-speech-recognition", model=str(cape_folder))
    vocabulary = recognise.tokenizer.get_vocab()
    others = [number for name, number in vocabulary.items() if not name.isalpha()]
    letters = {"suppress_tokens": sorted(others)}
    options = {"max_new_tokens": 6, "num_beams": 1, "language": "en"}
    waves = [wave(seconds, seed) for seed, seconds in enumerate((0.5, 0.2, 0.33, 1.1, 0.4))]
    for number, recording in enumerate(waves):
        recording *= np.sin(np.arange(len(recording)) * 0.1 * (number + 1))

    def run(batch_size, suppressed, **more):
        arguments = {"batch_size": batch_size, "generate_kwargs": {**options, **suppressed}}
        return recognise([recording.copy() for recording in waves], **arguments, **more)

    alone = run(1, letters)
    assert run(3, letters) == alone
    assert len({text["text"] for text in alone}) > 1
    assert encoder_sizes(recognise.model, lambda: run(3, letters)) == [25, 55]
    for more, suppressed in (({"return_timestamps": True}, {}), ({"chunk_length_s": 0.3}, letters)):
        assert run(3, suppressed, **more) == run(1, suppressed, **more)


@pytest.mark.parametrize("model", [WhisperForConditionalGeneration, WhisperForAudioClassification])
def test_trainer_keeps_the_hop(model, tmp_path):
    """A column of the data that forward names."""
    row = {"input_features": [[0.0]], "labels": 0, "hop_nanoseconds": 5_000_000, "speaker": "a"}
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = Trainer(switched(model=model), arguments, train_dataset=Dataset.from_list([row]))
    (batch,) = trainer._remove_unused_columns(trainer.train_dataset)
    assert batch.keys() == row.keys() - {"speaker"}
