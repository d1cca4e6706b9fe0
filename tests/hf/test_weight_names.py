"""Older names of weights: checkpoints of this package hold new names, stock ones older names."""

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming

import hf_models
from hf_models.checks.tiny import tiny_model
from hf_models.switching.weight_names import OlderName

# patterns of transformers with names of weights before and after
RENAMINGS = {
    r"(?<!model\.)layer.": ("model.layer.", "layer.0.layer_scale1", "model.layer.0.layer_scale1"),
    "post_norm": ("mlp.post_norm", "layers.1.post_norm.weight", "layers.1.mlp.post_norm.weight"),
    r"encoder.layers": ("layers", "encoder.layers.0.mlp.weight", "layers.0.mlp.weight"),
}


@pytest.mark.parametrize("pattern", RENAMINGS)
def test_older_names_are_translated_and_new_names_stay(pattern):
    target, older, new = RENAMINGS[pattern]
    renaming = OlderName(pattern, target)
    assert renaming.rename_source_key(older)[0] == new
    assert renaming.rename_source_key(new)[0] == new


def test_stock_renaming_damages_a_new_name():
    """Without this, :class:`OlderName` would not be needed."""
    pattern, (target, _, new) = next(iter(RENAMINGS.items()))
    assert WeightRenaming(pattern, target).rename_source_key(new)[0] != new


@pytest.mark.parametrize("name", ["LagunaForCausalLM", "AXK1ForCausalLM"])
def test_model_without_head_takes_all_weights_of_a_model_with_head(name, tmp_path):
    model = tiny_model(getattr(transformers, name))
    hf_models.switch(model, {"type": "rope"})
    model.save_pretrained(tmp_path / "head")
    base, report = AutoModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not report["missing_keys"]
    assert_same_weights(base, model.model)

    base.save_pretrained(tmp_path / "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_same_weights(again.model, base)


def assert_same_weights(model, other):
    weights = other.state_dict()
    assert model.state_dict().keys() == weights.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
