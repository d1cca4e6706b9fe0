"""Training steps of fairseq wait for a GPU no more often than those of the stock models, and launch
few operations more (tests/support/operations.py)."""

import pytest

from cape_plugins.mathematics import encodings
from tests.support.fairseq_models import VARIANTS, build, build_variant, loss_of
from tests.support.operations import operations

ADDED = 40  # operations of a step of cape beyond those of the stock model, at most


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Frequencies that other tests have made are not there."""
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})


def step(model):
    """A training step, the first one."""
    return operations(lambda: loss_of(model.train(), 0).backward())


@pytest.fixture(scope="module")
def stock():
    return step(build("transformer_tiny"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_waits_no_more_often_than_that_of_the_stock_model(stock, name):
    own = step(build_variant(name))
    assert own.read.total() <= stock.read.total(), own.read


def test_a_step_of_cape_launches_few_operations_more_than_that_of_the_stock_model(stock):
    own = step(build())
    assert 0 < own.launched.total() - stock.launched.total() <= ADDED
