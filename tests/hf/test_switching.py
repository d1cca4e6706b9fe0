"""Switching the positions of a built stock model; a refused switch leaves the model unchanged."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import hf_models
from cape_plugins.mathematics.binding import Bound
from hf_models import CapeBertModel
from hf_models.seams import attention
from hf_models.seams.tokens import TokenModel
from tests.support.hf import ALPHA, FAMILIES, WITH_STOCK, answer, batch, sentences

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit(width=12):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 12}
    sizes |= {"hidden_size": width, "image_size": 16, "patch_size": 8}
    return ViTForImageClassification(ViTConfig(**sizes)).eval()


def test_rows_of_special_tokens_are_kept_in_the_tokens():
    """Without positions, a class token stays where its row of the table had put it."""
    stock = FAMILIES["vit"].build_stock()
    embeddings = stock.vit.embeddings
    expected = embeddings.cls_token + embeddings.position_embeddings[:, :1]
    hf_models.switch(stock, {"type": "nopos"})
    assert torch.equal(stock.vit.embeddings.cls_token, expected)


def test_models_that_share_a_configuration_are_left_alone():
    row = FAMILIES["marian"]
    config = row.stock_config(**row.sizes)
    models = [row.stock_model(config).eval() for _ in range(2)]
    hf_models.switch(models[0], {"type": "cape", "source_scale": ALPHA})
    assert type(models[1].config) is type(config) is row.stock_config
    assert models[0].model.encoder.config is models[0].config


class Wrapped(nn.Module):
    peft_config = {}  # noqa: RUF012


CAPE = {"type": "cape"}
REFUSED = [
    (lambda: nn.Linear(2, 2), CAPE, r"Linear.*cannot be switched.*docs/families"),
    (FAMILIES["marian"].build_stock, CAPE, r"source_scale='auto'.*cannot be counted"),
    (Wrapped, CAPE, r"Switch it before peft wraps it \(get_peft_model\)"),
    (vit, "cape", r"position_embedding=.*is not allowed; allowed: a dict"),
]


@pytest.mark.parametrize(("build", "settings", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_switched_is_refused_and_unchanged(build, settings, message):
    model = build()
    stock = type(model)
    with pytest.raises(ValueError, match=message):
        hf_models.switch(model, settings)
    assert type(model) is stock


def test_nothing_stays_bound_after_a_call():
    model = FAMILIES["marian"].build({"type": "cape", "source_scale": ALPHA}).train()
    model(**batch("marian"))
    holders = [module for module in model.modules() if isinstance(module, Bound)]
    assert [module.bound for module in holders] == [None] * 4
    with pytest.raises(ValueError, match="mask"):
        model(**{**batch("marian"), "attention_mask": torch.ones(3, 2)})
    assert [module.bound for module in holders] == [None] * 4


@pytest.mark.parametrize("name", ["abspos", "relpos"])
def test_new_tables_have_the_precision_of_the_model(name):
    switched = hf_models.switch(FAMILIES["marian"].build_stock().bfloat16(), {"type": name})
    assert {parameter.dtype for parameter in switched.parameters()} == {torch.bfloat16}


def test_refused_attention_leaves_the_configuration_alone():
    row = FAMILIES["speech_to_text"]
    config = row.config(**{**row.sizes, "conv_kernel_sizes": [4, 4]}, position_embedding={})
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="kernel size 4"):
        row.model(config)
    assert config._attn_implementation == "sdpa"


def test_refused_setting_leaves_the_model_as_it_was():
    model = vit(width=15)  # odd, which no sinusoid fits
    expected, names, config = model(IMAGES).logits, list(model.state_dict()), model.config
    with pytest.raises(ValueError, match="15"):
        hf_models.switch(model, CAPE)
    assert type(model) is ViTForImageClassification
    assert model.config is config
    assert list(model.state_dict()) == names
    assert torch.equal(model(IMAGES).logits, expected)
    assert type(hf_models.switch(model, {"type": "nopos"})).__name__.startswith("Cape")


def test_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch):
    model, inputs = FAMILIES["bert"].build_stock(), sentences()
    expected = model(**inputs).logits
    monkeypatch.setattr(TokenModel, "install_positions", lambda *parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf_models.switch(model, CAPE)
    assert type(model) is FAMILIES["bert"].stock_model
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["foo", "hidden_size"])
def test_fields_that_the_stock_model_has_or_nobody_knows_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name}=64 cannot be set by switch.*drop_path_rate"):
        hf_models.switch(vit(), {"type": "cape"}, **{name: 64})


def test_family_without_relative_attention_refuses_it(monkeypatch):
    monkeypatch.setattr(
        "hf_models.seams.tokens.add_positions_to_attention", lambda *args, **kwargs: None
    )
    model = FAMILIES["bert"].build_stock()
    with pytest.raises(ValueError, match=r"in attention.*have no effect.*such as 'cape'"):
        hf_models.switch(model, {"type": "relpos"})
    assert not isinstance(model.base_model, CapeBertModel)
    assert callable(attention.add_positions_to_attention)


@pytest.mark.parametrize("name", ["", "vit.embeddings"])
def test_model_with_hooks_of_accelerate_is_refused(name):
    model = vit()
    dispatch_model(model.get_submodule(name), {"": "cpu"}, force_hooks=True)
    with pytest.raises(ValueError, match=rf"'{name}' has a replaced forward.*Switch .* before"):
        hf_models.switch(model, CAPE)
    assert type(model) is ViTForImageClassification
    assert model(IMAGES).logits.isfinite().all()


# ---- attention functions and places of weights with which relative positions would be wrong ------


@pytest.mark.parametrize("family", ["marian", "bert"])
def test_attention_without_a_whole_mask_is_refused(family):
    model = FAMILIES[family].build({"type": "relpos", "relative_context": 3})
    expected = answer(model(**batch(family)))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*allowed: eager, sdpa.*set_attn_impl"):
        model(**batch(family))
    model.set_attn_implementation("sdpa")
    assert torch.equal(answer(model(**batch(family))), expected)


# reads its table without a call, as the stock model does at other sizes of images
NOT_OFFLOADED = {"siglip_vision_model"}


@torch.no_grad()
@pytest.mark.parametrize("family", [name for name in WITH_STOCK if name not in NOT_OFFLOADED])
def test_models_with_stock_tables_are_offloaded(family):
    model = FAMILIES[family].build({"type": FAMILIES[family].stock_type})
    expected = answer(model(**batch(family)))
    cpu_offload(model, execution_device="cpu")
    assert torch.equal(answer(model(**batch(family))), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_offloaded_tables_are_refused(family):
    model = FAMILIES[family].build({"type": "relpos", "relative_context": 3})
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match=r"device 'meta'.*allowed:.* cpu.*without offloading"):
        model(**batch(family))
