"""Proves that a model without augmentation is the stock model bit for bit: parameters, state-dict
keys, gradients and outputs after several updates, in this process and by ``fairseq-train``; and
that such stock and cape models load each other's parameters."""

import pytest
import torch

from cape_plugins import TYPES
from cape_plugins.mathematics import encodings
from tests.fairseq.conftest import UPDATES
from tests.support.fairseq_models import (
    IDENTICAL,
    STOCK,
    VARIANTS,
    batch,
    build,
    build_variant,
    differences,
    flags,
    loss_of,
    parameters,
    run_here,
    switched_off,
    train,
    train_words,
)
from tests.support.operations import operations

SETTINGS = {
    "post-LN": {},
    "pre-LN": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "three heads": {
        **dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), 36),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 3),
    },
    "shared embeddings, no scale": {"share_all_embeddings": True, "no_scale_embedding": True},
    "layer drop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
    "embedding norm": {"layernorm_embedding": True},
}


def after_training(model):
    """Parameters, the gradients of the last update, and outputs in evaluation."""
    train(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    outputs = {}
    for left in (True, False):
        source, previous = batch(9, left)
        with torch.no_grad():
            logits, extra = model(source, source.ne(1).sum(1), previous)
        outputs |= {f"logits {left}": logits, f"attention {left}": extra["attn"][0]}
    return model.state_dict(), gradients, outputs


EACH = [(name, "post-LN") for name in IDENTICAL]
EACH += [("cape", setting) for setting in SETTINGS if setting != "post-LN"]


@pytest.mark.parametrize(("name", "setting"), EACH)
def test_equals_stock_after_updates(name, setting):
    options = {"dropout": 0.1, "attention_dropout": 0.1, **SETTINGS[setting]}
    stock = build("transformer_tiny", **options, **STOCK[TYPES[name].encoding])
    start = {key: value.clone() for key, value in stock.state_dict().items()}
    ours = build(position_embedding=name, **switched_off(name), **options)
    assert differences(ours.state_dict(), start) == []
    expected, actual = after_training(stock), after_training(ours)
    assert len(differences(expected[0], start)) > 10  # so it did learn something
    for ours_part, stock_part in zip(actual, expected, strict=True):
        assert differences(ours_part, stock_part) == []
    ours.load_state_dict(start, strict=True)  # of a stock model, and back again
    stock.load_state_dict(ours.state_dict(), strict=True)
    assert differences(ours.state_dict(), start) == []
    assert differences(stock.state_dict(), start) == []


@pytest.mark.slow
def test_fairseq_train_writes_the_stock_parameters(corpus, trained, tmp_path):
    words = flags({"position_embedding": "cape", **switched_off("cape")})
    run_here(*train_words(corpus.binary, tmp_path, *words, updates=UPDATES))
    stock = parameters(trained("stock"))
    for checkpoint in (tmp_path / "checkpoint_last.pt", trained("sinpos")):
        assert differences(parameters(checkpoint), stock) == []
    assert differences(parameters(trained("cape")), stock)


def test_tables_of_old_fairseq_checkpoints_are_dropped():
    """fairseq before 0.12 stored its sinusoid tables."""
    model = build(seed=1)
    state = {name: value.clone() for name, value in build(seed=2).state_dict().items()}
    for side in ("encoder", "decoder"):
        state[f"{side}.embed_positions.weights"] = torch.zeros(66, 32)
        state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    model.load_state_dict(state, strict=True)
    assert differences(model.state_dict(), build(seed=2).state_dict()) == []


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Removes cached frequencies that other tests have made."""
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})


def step(model):
    """A training step, the first one."""
    return operations(lambda: loss_of(model.train(), 0).backward())


@pytest.fixture(scope="module")
def stock():
    return step(build("transformer_tiny"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_waits_no_more_often_than_the_stock_model(stock, name):
    cape = step(build_variant(name))
    assert cape.read.total() <= stock.read.total(), cape.read


def test_a_step_of_cape_launches_few_operations_more_than_the_stock_model(stock):
    assert 0 < step(build()).launched.total() - stock.launched.total() <= 40
