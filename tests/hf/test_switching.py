"""Switching the positions of a built stock model, and a family that no one has seen."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import hf_models
from cape_plugins.mathematics.binding import Bound
from tests.support.hf import ALPHA, FAMILIES, batch


def test_rows_of_special_tokens_are_kept_in_the_tokens():
    """Without positions, a class token stays where its row of the table had put it."""
    stock = FAMILIES["vit"].build_stock()
    embeddings = stock.vit.embeddings
    expected = embeddings.cls_token + embeddings.position_embeddings[:, :1]
    switched = hf_models.switch(stock, {"type": "nopos"})
    assert torch.equal(switched.vit.embeddings.cls_token, expected)


def test_models_that_share_a_configuration_are_left_alone():
    row = FAMILIES["marian"]
    config = row.stock_config(**row.sizes)
    models = [row.stock_model(config).eval() for _ in range(2)]
    hf_models.switch(models[0], {"type": "cape", "source_scale": ALPHA})
    assert type(models[1].config) is type(config) is row.stock_config
    assert models[0].model.encoder.config is models[0].config


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(2, 2), {"type": "cape"}, r"Linear.*cannot be switched.*MarianMTModel"),
        ("marian", {"type": "cap"}, r"'cap'.*allowed"),
        ("marian", {"type": "cape"}, r"source_scale='auto'.*cannot be counted"),
        ("marian", {"type": "sinpos", "gamma": 2}, r"gamma"),
    ],
)
def test_what_cannot_be_switched_is_refused_and_unchanged(model, settings, message):
    model = FAMILIES[model].build_stock() if isinstance(model, str) else model
    stock = type(model)
    with pytest.raises(ValueError, match=message):
        hf_models.switch(model, settings)
    assert type(model) is stock


def test_nothing_stays_bound_after_a_call():
    model = FAMILIES["marian"].build({"type": "cape", "source_scale": ALPHA}).train()
    model(**batch("marian"))
    bound = [module.bound for module in model.modules() if isinstance(module, Bound)]
    assert len(bound) == 4
    assert bound == [None] * 4
    with pytest.raises(ValueError, match="mask"):
        model(**{**batch("marian"), "attention_mask": torch.ones(3, 2)})
    assert all(m.bound is None for m in model.modules() if isinstance(m, Bound))


@pytest.mark.parametrize("name", ["abspos", "relpos"])
def test_new_tables_have_the_precision_of_the_model(name):
    switched = hf_models.switch(FAMILIES["marian"].build_stock().bfloat16(), {"type": name})
    assert {parameter.dtype for parameter in switched.parameters()} == {torch.bfloat16}


def test_recorded_states_are_those_of_the_switched_parts():
    """transformers knows by the name of a class what a part records."""
    with patch.dict(_CAN_RECORD_REGISTRY, clear=True):  # where other tests have built such parts
        model = hf_models.switch(FAMILIES["marian"].build_stock(), {"type": "sinpos"})
        output = model(**batch("marian"), output_hidden_states=True)
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 3


def test_refused_attention_leaves_the_configuration_alone():
    row = FAMILIES["speech_to_text"]
    config = row.config(**{**row.sizes, "conv_kernel_sizes": [4, 4]}, position_embedding={})
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="kernel size 4"):
        row.model(config)
    assert config._attn_implementation == "sdpa"
