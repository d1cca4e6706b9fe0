"""Training steps of fairseq wait for a GPU no more often than those of the stock models, and launch
few operations more (tests/support/operations.py)."""

import argparse

import pytest

pytest.importorskip("soundfile")
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.speech_to_text.s2t_transformer import S2TTransformerModel

from cape_plugins.mathematics import encodings
from tests.support.fairseq_models import VARIANTS, build, build_lm, build_variant, loss_of
from tests.support.fairseq_speech import (
    CTC,
    S2T,
    SEQ2SEQ,
    SIZES,
    TYPES,
    durations,
    make_model,
    make_task,
    write_manifest,
)
from tests.support.operations import operations

ADDED = 40  # operations of a step of cape beyond those of the stock model, at most


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Frequencies that other tests have made are not there."""
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})


def step(model, loss):
    """A training step, the first one."""
    model.train()
    return operations(lambda: loss(model).backward())


def translating(model):
    return step(model, lambda model: loss_of(model, 0))


@pytest.fixture(scope="module")
def stock():
    return translating(build("transformer_tiny"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_waits_no_more_often_than_that_of_the_stock_model(stock, name):
    own = translating(build_variant(name))
    assert own.read.total() <= stock.read.total(), own.read


@pytest.mark.parametrize("name", ["sinpos", "cape", "relpos", "randpos"])
def test_a_step_of_a_language_model_waits_no_more_often_than_that_of_the_stock_model(name):
    own = translating(build_lm("--position-embedding", name))
    assert own.read.total() <= translating(build_lm(arch="transformer_lm")).read.total(), own.read


def test_a_step_of_cape_launches_few_operations_more_than_that_of_the_stock_model(stock):
    own = translating(build())
    assert 0 < own.launched.total() - stock.launched.total() <= ADDED


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    write_manifest(folder, "train", durations(12))
    task = make_task(folder)
    task.load_dataset("train")
    dataset = task.dataset("train")
    return task, dataset.collater([dataset[index] for index in range(4)])["net_input"]


def stock_speech_model(task):
    args = argparse.Namespace(arch="s2t_transformer_xs", **SIZES)
    args.max_source_positions, args.max_target_positions = 1000, 100
    args.input_channels = 1
    ARCH_CONFIG_REGISTRY["s2t_transformer_xs"](args)
    args.input_feat_per_channel = 8
    torch.manual_seed(1)
    return S2TTransformerModel.build_model(args, task)


@pytest.mark.parametrize(
    ("name", "arch"), [*((name, CTC) for name in TYPES), ("cape", S2T), ("relpos", SEQ2SEQ)]
)
def test_a_step_of_a_speech_model_waits_no_more_often_than_that_of_the_stock_model(
    recordings, name, arch
):
    """Also of models that fairseq does not have."""
    task, inputs = recordings

    def loss(model):
        output = model(**inputs)
        return (output["encoder_out"] if arch == CTC else output[0]).square().mean()

    own = step(make_model(task, arch, name), loss)
    shown = {key: inputs[key] for key in ("src_tokens", "src_lengths", "prev_output_tokens")}
    stock = step(stock_speech_model(task), lambda model: model(**shown)[0].square().mean())
    assert own.read.total() <= stock.read.total(), own.read
