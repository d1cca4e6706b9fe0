"""Columns of the data that the Trainer keeps are those that forward names."""

import inspect

import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments, WhisperForAudioClassification, WhisperModel
from transformers import WhisperForConditionalGeneration as Recogniser

import hf_models
from tests.support.hf import FAMILIES
from tests.support.whisper import switched

FRAMES = {"hop_nanoseconds", "frame_nanoseconds"}


def speech_models():
    yield from (
        switched(model=m) for m in (Recogniser, WhisperModel, WhisperForAudioClassification)
    )
    yield from (FAMILIES[name].build({"type": "cape"}) for name in ("speech_to_text", "speech_ctc"))


def test_forward_names_what_frames_need():
    for model in speech_models():
        named = inspect.signature(model.forward).parameters
        assert named.keys() >= FRAMES
        assert named.keys() >= {"input_features", "attention_mask"}
        assert "labels" in named or type(model) is hf_models.CapeWhisperModel


@pytest.mark.parametrize("model", [Recogniser, WhisperForAudioClassification])
def test_trainer_keeps_the_hop(model, tmp_path):
    row = {"input_features": [[0.0]], "labels": 0, "hop_nanoseconds": 5_000_000, "speaker": "a"}
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = Trainer(switched(model=model), arguments, train_dataset=Dataset.from_list([row]))
    (batch,) = trainer._remove_unused_columns(trainer.train_dataset)
    assert batch.keys() == row.keys() - {"speaker"}
