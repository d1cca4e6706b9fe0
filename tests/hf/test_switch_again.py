"""A model that was switched already is switched again, in place."""

import pytest
import torch

import hf_models
from hf_models.checks.tiny import fill_zeros
from tests.support import whisper
from tests.support.hf import (
    ALPHA,
    FAMILIES,
    OF_FAMILY,
    VARIANTS,
    WITH_STOCK,
    answer,
    batch,
)


def evaluated(model, inputs):
    with torch.no_grad():
        return answer(model.eval()(**inputs))


@pytest.mark.parametrize("family", WITH_STOCK)
def test_second_switch_gives_what_one_switch_does(family):
    row, inputs, settings = FAMILIES[family], batch(family), VARIANTS[family]["cape"]
    model = hf_models.switch(row.build_stock(seed=1), {"type": row.stock_type})
    again = hf_models.switch(model, settings)
    once = hf_models.switch(row.build_stock(seed=1), settings)
    assert again is model
    assert type(again) is row.model
    assert again.config.position_embedding == once.config.position_embedding
    assert again.state_dict().keys() == once.state_dict().keys()
    assert torch.equal(evaluated(again, inputs), evaluated(once, inputs))
    with pytest.raises(ValueError, match="a model was built from this configuration"):
        again.config.position_embedding = {"type": "nopos"}


@pytest.mark.parametrize("family", WITH_STOCK)
def test_built_model_is_switched_saved_and_loaded(family, tmp_path):
    row, inputs = FAMILIES[family], batch(family)
    model = fill_zeros(
        hf_models.switch(row.build(VARIANTS[family]["cape"]), {"type": row.stock_type})
    )
    model.save_pretrained(tmp_path)
    again = row.auto.from_pretrained(tmp_path)
    assert again.config.position_embedding == {"type": row.stock_type}
    assert torch.equal(evaluated(again, inputs), evaluated(model, inputs))


def test_whisper_keeps_its_decoder_table_and_further_fields():
    model = whisper.switched("cape", natural_length=True, hop_seconds=0.02)
    table = model.model.decoder.embed_positions.weight.clone()
    hf_models.switch(model, {"type": "nopos"})
    assert torch.equal(model.model.decoder.embed_positions.weight, table)
    assert (model.config.natural_length, model.config.hop_seconds) == (True, 0.02)
    hf_models.switch(model, {"type": "nopos"}, hop_seconds=0.01)
    assert model.config.hop_seconds == 0.01


@pytest.mark.parametrize("name", ["abspos", "relpos"])
def test_learned_positions_that_stay_are_kept(name):
    """Of types that the stock model does not have."""
    settings = {**OF_FAMILY["marian"][name], "relative_context": 2}
    model = FAMILIES["marian"].build(settings)
    before = {n: value.clone() for n, value in model.state_dict().items()}
    hf_models.switch(model, {**settings, "relative_beyond": "zero"})
    assert model.config.position_config.relative_beyond == "zero"
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())


def test_relative_attention_ends_with_its_type():
    row, inputs = FAMILIES["marian"], batch("marian")
    model = row.build({"type": "relpos"})
    hf_models.switch(model, {"type": "sinpos"})
    assert not any("relative" in name for name in model.state_dict())
    stock = row.build_stock()
    stock.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(evaluated(model, inputs), evaluated(stock, inputs))


def test_mode_precision_attention_and_frozen_parameters_stay():
    model = FAMILIES["vit"].build_stock(attn_implementation="eager").bfloat16()
    hf_models.switch(model, {"type": "abspos"}).train()
    for parameter in model.vit.parameters():
        parameter.requires_grad_(False)
    hf_models.switch(model, {"type": "cape"})
    assert model.training
    assert model.vit.embeddings.training
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    learning = {name for name, value in model.named_parameters() if value.requires_grad}
    assert learning == {"classifier.weight", "classifier.bias"}


def test_refused_second_switch_leaves_the_model_as_it_was():
    model, inputs = (
        FAMILIES["marian"].build({"type": "cape", "source_scale": ALPHA}),
        batch("marian"),
    )
    expected = evaluated(model, inputs)
    for settings in ({"type": "rope"}, {"type": "cape"}, "sinpos"):
        with pytest.raises(ValueError, match=r"rope|source_scale|sinpos"):
            hf_models.switch(model, settings)
    assert model.config.position_embedding["type"] == "cape"
    assert torch.equal(evaluated(model, inputs), expected)


def test_model_without_a_stock_one_is_told_how_its_type_changes(tmp_path):
    model = FAMILIES["speech_ctc"].build({"type": "cape"})
    with pytest.raises(ValueError, match=r"^model is a CapeSpeechForCTC.*from_pretrained\(FOLDER"):
        hf_models.switch(model, {"type": "nopos"})
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, position_embedding={"type": "nopos"})
    assert again.config.position_embedding == {"type": "nopos"}
