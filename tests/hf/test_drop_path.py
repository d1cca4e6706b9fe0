"""Stochastic depth of vision transformers. test_models.py shows that rate 0 is the stock model."""

import pytest
import torch
from torch import nn

from hf_models.convert import convert
from hf_models.seams.drop_path import DropPath
from tests.hf.test_families import output, stock_batch
from tests.support.hf import VIT


def test_rates_grow_over_depth_are_saved_and_stay_behind_in_a_stock_model(tmp_path):
    sizes = {"num_hidden_layers": 5, "drop_path_rate": 0.2}
    VIT.build({"type": "abspos"}, **sizes).save_pretrained(tmp_path / "cape")
    model = VIT.model.from_pretrained(tmp_path / "cape")
    rates = [getattr(layer.dropout, "rate", 0.0) for layer in model.vit.layers]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert type(model.vit.layers[0].dropout) is nn.Dropout
    stock = convert(tmp_path / "cape", tmp_path / "stock", None)
    assert "drop_path_rate" not in stock.config.to_dict()
    assert stock.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(*(output(each, stock_batch("vit")) for each in (stock, model)))


def test_samples_keep_the_branch_or_lose_it_and_the_mean_stays():
    drop = DropPath(0.25, nn.Identity()).train()
    branch = torch.randn(20000, 2, 3).abs() + 1
    out = drop(branch)
    passed = out[:, 0, 0] != 0
    torch.testing.assert_close(out[passed], branch[passed] / 0.75)
    assert not out[~passed].any()
    assert float(passed.float().mean()) == pytest.approx(0.75, abs=0.02)
    assert float(out.mean()) == pytest.approx(float(branch.mean()), rel=0.02)
    assert torch.equal(drop.eval()(branch), branch)

    # a batch that loses every branch: dividing by the observed share of the batch would be 0/0
    drop = DropPath(1 - 1e-12, nn.Identity()).train()
    branch = torch.ones(4, 2, 3, requires_grad=True)
    out = drop(branch)
    assert not out.any()
    out.sum().backward()
    assert not branch.grad.any()
