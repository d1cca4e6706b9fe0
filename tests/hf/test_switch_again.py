"""A model that was switched already is switched again, in place."""

import copy
import re

import peft
import pytest
import torch
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_models
from tests.support.hf import ALPHA, FAMILIES, VARIANTS, WITH_STOCK, answer, batch


def evaluated(model, inputs):
    with torch.no_grad():
        return answer(model.eval()(**inputs))


@pytest.mark.parametrize("family", WITH_STOCK)
def test_second_switch_gives_what_one_switch_does(family):
    """In the same stock modules and parameters: hooks, optimizers, adapters and references to
    modules stay valid. Random numbers of the caller stay, although the stock model that shows what
    to undo draws weights, too."""
    row, inputs, settings = FAMILIES[family], batch(family), VARIANTS[family]["cape"]
    model = hf_models.switch(row.build_stock(seed=1), {"type": row.stock_type})
    before = [dict(model.named_parameters()), dict(model.named_modules())]
    state = torch.get_rng_state()
    again = hf_models.switch(model, settings)
    assert torch.equal(torch.get_rng_state(), state)
    once = hf_models.switch(row.build_stock(seed=1), settings)
    assert again is model
    assert type(again) is row.model
    assert again.config.position_embedding == once.config.position_embedding
    assert again.state_dict().keys() == once.state_dict().keys()
    assert torch.equal(evaluated(again, inputs), evaluated(once, inputs))
    kinds = [{n: type(module) for n, module in m.named_modules()} for m in (model, once)]
    assert kinds[0] == kinds[1]
    changed = re.compile("posit|relative|conv$|dropout")
    for old, new in zip(before, (model.named_parameters(), model.named_modules()), strict=True):
        now = dict(new)
        assert all(now[n] is value for n, value in old.items() if not changed.search(n))
    with pytest.raises(ValueError, match="a model was built from this configuration"):
        again.config.position_embedding = {"type": "nopos"}


def test_weights_that_were_untied_stay_untied():
    model, inputs = FAMILIES["marian"].build_stock(), batch("marian")
    settings = {"type": "cape", "source_scale": ALPHA}
    hf_models.switch(model, settings)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    expected = evaluated(model, inputs)
    hf_models.switch(model, settings)
    assert torch.equal(evaluated(model, inputs), expected)


def test_what_its_owner_changed_stays():
    """Changes that are not in the configuration."""
    model, calls = FAMILIES["marian"].build({"type": "relpos"}).half().train(), []
    encoder = model.get_encoder()
    layer = encoder.layers[0].eval()
    layer.fc1.float()
    layer.dropout, model.note = 0.33, "mine"
    model.gradient_checkpointing_enable()
    layer.register_forward_hook(lambda *_: calls.append(1))
    encoder.register_forward_hook(lambda *_: calls.append(2))
    hf_models.switch(model, {"type": "sinpos"})
    assert model.get_encoder() is encoder
    assert encoder.layers[0] is layer
    assert (layer.fc1.weight.dtype, layer.fc2.weight.dtype) == (torch.float32, torch.float16)
    assert (layer.dropout, model.note) == (0.33, "mine")
    assert model.is_gradient_checkpointing
    assert (model.training, encoder.positions.training, layer.training) == (True, True, False)
    evaluated(model.float(), batch("marian"))
    assert calls == [1, 2]


OLD_PEFT = Version(peft.__version__) < Version(MIN_PEFT_VERSION)
NATIVE = pytest.mark.skipif(OLD_PEFT, reason="this transformers asks for a newer peft")


@pytest.mark.parametrize("wrapped", [True, pytest.param(False, marks=NATIVE)])
def test_adapters_stay(wrapped):
    model, inputs = FAMILIES["marian"].build({"type": "relpos"}), batch("marian")
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, adapter) if wrapped else model.add_adapter(adapter)
    hf_models.switch(model, {"type": "sinpos"})
    names = [name for name, _ in model.named_parameters()]
    assert any("lora_A" in name for name in names)
    assert not any("relative" in name for name in names)
    assert evaluated(model, inputs).isfinite().all()


def test_layers_that_the_configuration_does_not_know_are_refused():
    model, inputs = FAMILIES["marian"].build({"type": "relpos"}), batch("marian")
    layers = model.model.encoder.layers
    layers.append(copy.deepcopy(layers[0]))
    expected = evaluated(model, inputs)
    with pytest.raises(ValueError, match=r"'model\.encoder\.layers.*switch before parts are added"):
        hf_models.switch(model, {"type": "sinpos"})
    assert torch.equal(evaluated(model, inputs), expected)
