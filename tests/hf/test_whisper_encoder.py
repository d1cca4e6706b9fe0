"""Whisper's encoder as a model alone: the states that it has inside a whole model."""

import copy

import pytest
import torch
from transformers import (
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import hf_models
from tests.support.whisper import MASK, RAGGED, SIZES, WHOLE, make_stock, switched

WHOLE_MODELS = [WhisperForConditionalGeneration, WhisperModel, WhisperForAudioClassification]
CAPE = {"type": "cape", "max_global_shift": 3.0}


def states(encoder, features=RAGGED, mask=MASK):
    with torch.no_grad():
        return encoder(features, attention_mask=mask).last_hidden_state


def load(folder, **settings):
    cape_class = hf_models.CapeWhisperEncoder
    return cape_class.from_pretrained(folder, output_loading_info=True, **settings)


def encoder_of(model):
    return model.encoder if hasattr(model, "encoder") else model.get_encoder()


@pytest.mark.parametrize("settings", ["cape", "abspos", "rope"])
@pytest.mark.parametrize("whole", WHOLE_MODELS)
def test_encoder_of_a_saved_model_has_its_states_at_natural_length(whole, settings, tmp_path):
    model = switched(settings, model=whole).eval()
    model.save_pretrained(tmp_path / "whole")
    encoder, report = load(tmp_path / "whole")
    expected = states(encoder_of(model))
    assert expected.shape[1] == RAGGED.shape[2] // 2
    assert not any(report.values())  # nothing is missing, and nothing is told to be left over
    assert torch.equal(states(encoder), expected)
    encoder.save_pretrained(tmp_path / "alone")
    again, report = load(tmp_path / "alone")
    assert not any(report.values())
    assert again.config.architectures == ["CapeWhisperEncoder"]
    assert again.config.position_embedding == model.config.position_embedding
    assert torch.equal(states(again), expected)


@pytest.mark.parametrize("whole", WHOLE_MODELS)
def test_encoder_of_a_stock_folder_takes_another_position_embedding(whole, tmp_path):
    stock = make_stock(whole)
    stock.save_pretrained(tmp_path)
    encoder, report = load(tmp_path, position_embedding=CAPE)
    assert not any(report.values())
    switched_whole = hf_models.switch(copy.deepcopy(stock), CAPE).eval()
    assert torch.equal(states(encoder), states(encoder_of(switched_whole)))
    encoder, _ = load(tmp_path, position_embedding={"type": "sinpos"})
    assert torch.equal(states(encoder, WHOLE, None), states(encoder_of(stock), WHOLE, None))


def test_switch_takes_an_encoder_alone():
    stock = WhisperEncoder(WhisperConfig(**SIZES)).eval()
    expected = states(stock, WHOLE, None)
    encoder = hf_models.switch(copy.deepcopy(stock), {"type": "sinpos"})
    assert torch.equal(states(encoder, WHOLE, None), expected)
    encoder = hf_models.switch(encoder, CAPE)
    assert isinstance(encoder, hf_models.CapeWhisperEncoder)
    assert states(encoder).shape == (3, RAGGED.shape[2] // 2, SIZES["d_model"])
    checks = hf_models.check_family(stock)
    assert {check.status for check in checks} == {"ok", "skip"}


def test_only_an_encoder_alone_draws_for_itself(tmp_path):
    model = switched("cape")
    model.save_pretrained(tmp_path)
    encoder = load(tmp_path)[0]
    expected = states(encoder)
    assert not torch.equal(states(encoder.train()), states(encoder))
    assert torch.equal(states(encoder.eval()), expected)
    assert torch.equal(states(encoder_of(model.train())), expected)  # the whole model draws
    assert not encoder_of(model).alone
