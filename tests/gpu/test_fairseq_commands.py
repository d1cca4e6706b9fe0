"""Trainings and generations by fairseq's command lines on a GPU, in half precision."""

import pytest
import torch

from cape_plugins import TYPES
from tests.fairseq.test_commands import SHOWN
from tests.support.fairseq_models import (
    CLI_VARIANTS,
    final_state,
    forced_scores,
    generate_words,
    holds,
    lines,
    lm_words,
    load,
    run_here,
    train_words,
)
from tests.support.gpu import ON_GPU, deterministic

HALF = ["--fp16", "--fp16-init-scale", 4] if ON_GPU else []


def on_gpu(words):
    """A command line of the tests, on the GPU."""
    return [word for word in words if not (ON_GPU and word == "--cpu")]


def train(corpus, folder, *options, updates):
    return run_here(*on_gpu(train_words(corpus.binary, folder, *options, updates=updates)))


@pytest.mark.parametrize("name", TYPES)
def test_half_precision_trains_and_generates(name, corpus, test_data, tmp_path):
    """The checkpoint loads on the CPU, where one pass gives the scores of the GPU's beam search."""
    log = train(corpus, tmp_path, *CLI_VARIANTS[name], *HALF, updates=8)
    assert "loss nan" not in log
    checkpoint = tmp_path / "checkpoint_last.pt"
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    assert holds(state["model"]["decoder.layers.0.fc1.weight"], torch.float16) == bool(HALF)
    model, task = load(checkpoint, test_data)
    model.float()
    for half, atol in ([], SHOWN), (HALF[:1], 0.05):
        output = run_here(*on_gpu(generate_words(test_data, checkpoint, "--beam", 3, *half)))
        sources, hypotheses, scores = (lines(output, letter) for letter in "SHP")
        assert len(hypotheses) == 24
        for i in list(hypotheses)[:6]:
            printed = torch.tensor([float(score) for score in scores[i][0][0].split()])
            forced = forced_scores(model, task, sources[i][0][0], hypotheses[i][0][1])
            torch.testing.assert_close(forced, printed, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["cape", "randpos", "fire", "cape+relative"])
def test_training_resumes_bit_for_bit(name, corpus, tmp_path):
    """In float32: with --fp16 fairseq stores rounded weights, whatever the positions."""
    options = [*CLI_VARIANTS[name], "--save-interval-updates", 4, "--disable-validation"]
    with deterministic():
        train(corpus, tmp_path / "whole", *options, updates=8)
        train(corpus, tmp_path / "again", *options, updates=4)
        log = train(corpus, tmp_path / "again", *options, updates=8)
    assert "@ 4 updates" in log
    states = [final_state(tmp_path / folder) for folder in ("whole", "again")]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_language_model_trains_in_half_precision(corpus, tmp_path):
    words = [*lm_words(corpus.lm, tmp_path, *HALF), "--max-update", 8]
    assert "loss nan" not in run_here(*on_gpu(words))
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True, map_location="cpu")
    assert all(value.isfinite().all() for value in state["model"].values())
