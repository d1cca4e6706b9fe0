"""Columns of the data that the Trainer keeps are those that forward names."""

import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments, WhisperForAudioClassification
from transformers import WhisperForConditionalGeneration as Recogniser

from tests.support.whisper import switched


@pytest.mark.parametrize("model", [Recogniser, WhisperForAudioClassification])
def test_trainer_keeps_the_hop(model, tmp_path):
    row = {"input_features": [[0.0]], "labels": 0, "hop_nanoseconds": 5_000_000, "speaker": "a"}
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = Trainer(switched(model=model), arguments, train_dataset=Dataset.from_list([row]))
    (batch,) = trainer._remove_unused_columns(trainer.train_dataset)
    assert batch.keys() == row.keys() - {"speaker"}
