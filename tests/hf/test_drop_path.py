"""Stochastic depth of vision transformers. test_models.py shows that rate 0 is the stock model."""

import pytest
import torch
from torch import nn

from hf_models import CapeViTConfig
from hf_models.seams.drop_path import DropPath
from tests.support.hf import VIT

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))


def build(name, layers, **sizes):
    deep = VIT._replace(sizes={**VIT.sizes, "num_hidden_layers": layers})
    return deep.build({"type": name}, **sizes)


def test_rates_grow_over_depth_and_the_state_dict_equals_the_stock_model():
    model = build("cape", 5, drop_path_rate=0.2)
    rates = [getattr(layer.dropout, "rate", 0.0) for layer in model.vit.layers]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert type(model.vit.layers[0].dropout) is nn.Dropout
    plain = build("cape", 5)
    assert plain.state_dict().keys() == model.state_dict().keys()


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


def test_a_batch_that_loses_every_branch_is_finite():
    """Dividing by the observed share of the batch would be 0/0."""
    drop = DropPath(1 - 1e-12, nn.Identity()).train()
    branch = torch.ones(4, 2, 3, requires_grad=True)
    out = drop(branch)
    assert not out.any()
    out.sum().backward()
    assert not branch.grad.any()


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_bad_rates_are_refused(rate):
    with pytest.raises(Exception, match=f"drop_path_rate={rate} is not allowed"):
        CapeViTConfig(drop_path_rate=rate)


def test_rate_is_saved_and_stays_behind_in_a_stock_model(tmp_path):
    from hf_models.convert import convert

    model = VIT.build({"type": "abspos"}, drop_path_rate=0.1)
    model.save_pretrained(tmp_path / "cape")
    again = type(model).from_pretrained(tmp_path / "cape")
    assert again.config.drop_path_rate == 0.1
    assert again.vit.layers[1].dropout.rate == 0.1
    stock = convert(tmp_path / "cape", tmp_path / "stock", None)
    assert "drop_path_rate" not in stock.config.to_dict()
    assert torch.equal(stock(IMAGES).logits, model(IMAGES).logits)
