"""A model that `switch` refuses to change stays what it was; copies keep their settings."""

import pytest
import torch
from accelerate import dispatch_model
from transformers import ViTConfig, ViTForImageClassification

import hf_models
from hf_models.families.bert import CapeBertModel
from hf_models.seams.attention import add_relative_positions
from hf_models.seams.text import TokenModel
from tests.support.hf import FAMILIES, sentences

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 12}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit(width=12):
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": width, "image_size": 16, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(**sizes)).eval()


def test_refused_setting_leaves_the_model_as_it_was():
    model = vit(width=15)  # odd, which no sinusoid fits
    expected, names, config = model(IMAGES).logits, list(model.state_dict()), model.config
    with pytest.raises(ValueError, match="15"):
        hf_models.switch(model, {"type": "cape"})
    assert type(model) is ViTForImageClassification
    assert model.config is config
    assert list(model.state_dict()) == names
    assert torch.equal(model(IMAGES).logits, expected)
    assert type(hf_models.switch(model, {"type": "nopos"})).__name__.startswith("Cape")


def test_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch):
    model = FAMILIES["bert"].build_stock()
    inputs = sentences()
    expected = model(**inputs).logits

    def fail(*args):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(TokenModel, "install_positions", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        hf_models.switch(model, {"type": "cape"})
    assert type(model) is FAMILIES["bert"].stock_model
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("settings", [None, "cape", 3])
def test_settings_that_are_no_dict_are_refused(settings):
    with pytest.raises(ValueError, match=r"position_embedding=.*is not allowed; allowed: a dict"):
        hf_models.switch(vit(), settings)


@pytest.mark.parametrize("name", ["foo", "hidden_size"])
def test_fields_that_the_stock_model_has_or_nobody_knows_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}=64 cannot be set by switch.*drop_path_rate"):
        hf_models.switch(vit(), {"type": "cape"}, **{name: 64})


def test_family_without_relative_attention_refuses_it(monkeypatch):
    monkeypatch.setattr("hf_models.seams.text.add_relative_positions", lambda *args: None)
    model = FAMILIES["bert"].build_stock()
    with pytest.raises(ValueError, match=r"relative_context has no effect.*add_relative_positions"):
        hf_models.switch(model, {"type": "relpos"})
    assert not isinstance(model.base_model, CapeBertModel)
    assert add_relative_positions.__module__ == "hf_models.seams.attention"


def test_model_that_peft_has_wrapped_is_told_to_be_switched_before():
    wrapped = torch.nn.Module()
    wrapped.peft_config = {}
    with pytest.raises(ValueError, match=r"Switch it before peft wraps it \(get_peft_model\)"):
        hf_models.switch(wrapped, {"type": "cape"})


@pytest.mark.parametrize("name", ["", "vit.embeddings"])
def test_model_with_hooks_of_accelerate_is_refused(name):
    model = vit()
    dispatch_model(model.get_submodule(name), {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match=rf"ViT\w+ '{name}' has a forward.*Switch .* before"):
        hf_models.switch(model, {"type": "cape"})
    assert type(model) is ViTForImageClassification
    assert model(IMAGES).logits.isfinite().all()
