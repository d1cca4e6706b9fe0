"""Training steps wait for a GPU no more often than training steps of the stock models, and launch
only a few more operations. Counted on any device (tests/support/operations.py)."""

import pytest
import torch

from cape_plugins.mathematics import encodings
from hf_models.host import ALWAYS_DRAWS
from hf_models.seams.frames import check_mask
from tests.support import whisper
from tests.support.hf import ALL, FAMILIES, OF_FAMILY, ROTARY, batch, families_of, loss
from tests.support.operations import operations

# Waits in a step for which there is no stock model, or that positions cannot do without.
WAITS = {
    # it has the layers of Speech2Text, which look whether anything is padded, and before
    # transformers 5.23 each at a random number; the loss takes the labels without their padding
    "speech_ctc": {
        "aten::_local_scalar_dense": 1
        + ALWAYS_DRAWS * FAMILIES["speech_ctc"].sizes["encoder_layers"],
        "aten::masked_select": 1,
    },
    # the number of packed texts is the number of orders to draw, read together with the longest
    "drawn positions of packed texts": {"cape_plugins::sample_positions": 1},
}
# Operations that a step of cape adds to a step of the stock model, at most.
ADDED = {"marian": 45, "vit": 30, "whisper": 40}


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Removes cached frequencies that other tests have made."""
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})


def step(model, inputs):
    """A training step, the first one."""
    model.train()
    return operations(lambda: loss(model(**inputs)).backward())


def stock_step(family, inputs):
    return step(FAMILIES[family].build_stock(), {**inputs, **FAMILIES[family].stock_call})


def whisper_steps(**mask):
    """Of the stock model and of ours at natural length."""
    whole = {"input_features": whisper.WHOLE, "labels": whisper.LABELS}
    ragged = {**whole, "input_features": whisper.RAGGED, **mask}
    return step(whisper.make_stock(), whole), step(whisper.switched(), ragged)


def packed():
    """Two rows of three texts each."""
    lengths = (4, 5, 3), (2, 3, 7)
    numbers = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    ids = torch.arange(24).view(2, 12) + 1
    return {"input_ids": ids, "position_ids": torch.stack(numbers), "labels": ids}


@pytest.mark.parametrize(("family", "name"), ALL)
def test_a_step_waits_no_more_often_than_the_stock_model(family, name):
    inputs = batch(family)
    cape = step(FAMILIES[family].build(OF_FAMILY[family][name]), inputs).read
    allowed = WAITS[family] if family in WAITS else stock_step(family, inputs).read
    assert cape.total() <= sum(allowed.values()), cape


@pytest.mark.parametrize("mask", [{"attention_mask": whisper.MASK}, {}], ids=len)
def test_whisper_at_natural_length_waits_no_more_often_than_the_stock_model(mask):
    stock, cape = whisper_steps(**mask)
    assert cape.read.total() <= stock.read.total(), cape.read


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("family", families_of("rotary"))
def test_a_step_of_packed_texts_waits_once_where_positions_are_drawn(family, name):
    model = FAMILIES[family].build(OF_FAMILY[family][name])
    sampling = model.config.position_config.sampling
    exception = WAITS["drawn positions of packed texts"] if sampling else {}
    allowed = stock_step(family, packed()).read
    assert step(model, packed()).read == allowed + type(allowed)(exception)


def test_waits_are_seen():
    """In each way in which a program can read a number."""
    mask, numbers = torch.tensor([True, False]), torch.arange(2.0)
    for ask in (
        lambda: bool(mask.any()),
        lambda: numbers.cpu(),
        lambda: numbers[mask],
        lambda: torch.equal(mask, mask),
    ):
        assert operations(ask).read.total() == 1
    assert not operations(lambda: numbers[numbers.long()] * mask).read


def test_values_are_checked_but_in_training_on_another_device():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    for training in (True, False):
        for dtype in (torch.long, torch.bool, torch.bfloat16):
            with pytest.raises(ValueError, match="padding before frames"):
                check_mask(mask.to(dtype), 2, 3, training)
    check_mask(mask[:1], 1, 3, False)
    check_mask(mask.to("meta"), 2, 3, True)  # has no values that could be read
    with pytest.raises(ValueError, match="shape"):
        check_mask(mask.to("meta"), 2, 4, True)
    assert not operations(lambda: check_mask(mask[:1], 1, 3, True)).read


@pytest.mark.parametrize("family", ADDED)
def test_a_step_of_cape_launches_few_operations_more_than_the_stock_model(family):
    if family == "whisper":
        stock, cape = whisper_steps(attention_mask=whisper.MASK)
    else:
        inputs = batch(family)
        if "pixel_values" in inputs:  # of the size for which the stock table need not be resized
            inputs["pixel_values"] = inputs["pixel_values"].new_zeros(3, 3, 32, 32)
        cape = step(FAMILIES[family].build(OF_FAMILY[family]["cape"]), inputs)
        stock = stock_step(family, inputs)
    assert 0 < cape.launched.total() - stock.launched.total() <= ADDED[family]
