"""Proves that checkpoints of stock and cape models load into each other wherever the parameters
are the same, and that averaged checkpoints decode."""

import pytest
import torch

from cape_plugins import TYPES
from tests.support.fairseq_models import (
    IDENTICAL,
    STOCK,
    VARIANTS,
    build,
    build_variant,
    differences,
    generate_words,
    lines,
    load,
    parameters,
    run_here,
    train_words,
)

SAME = [
    name
    for name, settings in VARIANTS.items()
    if settings["position_embedding"] in IDENTICAL and "position_relative_context" not in settings
]


@pytest.mark.parametrize("name", SAME)
def test_stock_and_cape_load_each_other(name):
    encoding = TYPES[VARIANTS[name]["position_embedding"]].encoding
    stock = build("transformer_tiny", seed=1, **STOCK[encoding])
    ours = build_variant(name, seed=2)
    assert differences(ours.state_dict(), stock.state_dict())
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert differences(ours.state_dict(), stock.state_dict()) == []
    other = build_variant(name, seed=3)
    stock.load_state_dict(other.state_dict(), strict=True)
    assert differences(stock.state_dict(), other.state_dict()) == []


def test_tables_of_old_fairseq_checkpoints_are_dropped():
    """fairseq before 0.12 stored its sinusoid tables."""
    model = build(seed=1)
    state = {name: value.clone() for name, value in build(seed=2).state_dict().items()}
    for side in ("encoder", "decoder"):
        state[f"{side}.embed_positions.weights"] = torch.zeros(66, 32)
        state[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    model.load_state_dict(state, strict=True)
    assert differences(model.state_dict(), build(seed=2).state_dict()) == []


# ------------------------------------------------------------------------------ by the commands


@pytest.mark.slow
def test_averaged_checkpoint_decodes(run_cli, corpus, test_data, trained, tmp_path):
    run_here(*train_words(corpus.binary, tmp_path, "--save-interval-updates", 10, updates=20))
    average = tmp_path / "average.pt"
    run_cli(
        "python", "-m", "fairseq_user_dir.average", "--inputs", tmp_path,
        "--num-update-checkpoints", 2, "--output", average, fresh=True,
    )  # fmt: skip
    first, second = (parameters(tmp_path / f"checkpoint_1_{i}.pt") for i in (10, 20))
    for name, value in parameters(average).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)
    assert differences(first, second)
    output = run_here(*generate_words(test_data, average))
    assert len(lines(output, "H")) == 24
    tuning = ["--finetune-from-model", average]
    log = run_here(*train_words(corpus.binary, tmp_path / "tuned", *tuning, updates=1))
    assert "Loaded checkpoint" in log
    model, _ = load(average, test_data)
    assert model.position_config == load(trained("cape"), test_data)[0].position_config
