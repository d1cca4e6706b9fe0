"""Rows of sinusoids that an encoding caches for counted positions: they equal rows of the grid, bit
for bit; and the operations of a step on a device (tests/support/operations.py)."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from cape_plugins import Sinusoid, token_position_at, token_positions
from cape_plugins.mathematics import encodings
from cape_plugins.mathematics.encodings import FREQUENCIES, KEPT_ROWS, LAYOUTS
from tests.support.core import make_encoder, make_positions
from tests.support.operations import operations

COUNTED = [
    (name, layout)
    for name, frequencies in FREQUENCIES.items()
    for layout in LAYOUTS
    if len(frequencies(4, torch.device("cpu"))) == 1
]


def counted(encode, first, length, start=2.0, step=1.1):
    numbers = torch.arange(first, first + length, dtype=torch.float32)[:, None]
    return encode.counted(numbers, first, start, step)


def exactly(encode, first, length, start=2.0, step=1.1):
    return encode.grid(start + torch.arange(first, first + length).float()[:, None] * step)


@pytest.mark.parametrize(("name", "layout"), COUNTED)
def test_kept_rows_equal_the_grid_bit_for_bit(name, layout):
    """A whole text, then one token after the other, past each growth and past what is kept."""
    encode = Sinusoid(16, name, layout)
    for first, length in ((0, 5), (5, 1), (6, 1), (63, 2), (100, 30), (3, 2), (4090, 10)):
        assert torch.equal(counted(encode, first, length), exactly(encode, first, length))
    for start, step in ((0.0, 1.0), (2.0, 1.0), (2.0, 1.1)):
        rows = counted(encode, 3, 4, start, step)
        assert torch.equal(rows, exactly(encode, 3, 4, start, step))


def test_kept_rows_are_used_and_belong_to_the_encoding():
    """A step within the cached rows encodes nothing; callers may change their results; copies have
    no cached rows."""
    encode = Sinusoid(16)
    first = counted(encode, 0, 5)
    calls, grid = [], encode.grid
    encode.grid = lambda rows: (calls.append(len(rows)), grid(rows))[1]
    counted(encode, 1, 3).zero_()
    assert not calls
    assert torch.equal(counted(encode, 0, 5), first)
    counted(encode, 5, 1)
    counted(encode, 6, 1)
    assert calls == [64]
    del encode.grid
    assert copy.deepcopy(encode)._kept_rows[1] is None
    assert len(pickle.dumps(encode)) < 2000
    assert not encode.state_dict()


def test_learned_frequencies_keep_no_rows():
    """Cached rows would come from earlier weights."""
    weights = nn.Parameter(torch.rand(1, 8))
    encode = Sinusoid(16, lambda dim, device: weights)
    before = counted(encode, 0, 5)
    with torch.no_grad():
        weights.mul_(2)
    assert not torch.equal(counted(encode, 0, 5), before)
    assert torch.equal(counted(encode, 0, 5), exactly(encode, 0, 5))
    counted(encode, 0, 5).sum().backward()
    assert weights.grad is not None


def test_capture_of_a_graph_neither_uses_nor_leaves_tensors(monkeypatch):
    """A replay overwrites tensors of its graph, and tensors that a graph reads must not be
    freed."""
    encode, coords = Sinusoid(16), torch.ones(1, 3, 1)
    expected = exactly(encode, 0, 5), encode(coords)
    earlier = counted(encode, 0, 5)
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})
    monkeypatch.setattr(encodings, "_in_graph_capture", lambda tensor: True)
    rows = counted(encode, 0, 5)
    assert rows.untyped_storage().data_ptr() != earlier.untyped_storage().data_ptr()
    assert torch.equal(rows, expected[0])
    assert torch.equal(encode(coords), expected[1])
    counted(encode, 0, 100)
    assert encode._kept_rows[1].shape[0] == 5
    assert not encodings._FREQUENCIES_AND_PHASES


LONG = KEPT_ROWS + 100


def embed(encoder, positions):
    return encoder(positions, encoder.draw(positions.rows.shape[0]))


@pytest.mark.parametrize("padded", [True, False])
def test_long_inputs_without_augmentation_cost_no_more_than_augmented_ones(padded):
    """Rows are kept for the next input, up to a number of bytes."""
    valid = torch.ones(1, LONG, dtype=torch.bool)
    positions = token_positions(valid) if padded else token_position_at(0, length=LONG)
    counts = {}
    for name in ("sinpos", "cape"):
        encoder = make_encoder(name)
        first = embed(encoder, positions)
        counts[name] = operations(lambda encoder=encoder: embed(encoder, positions)).launched
        if name == "sinpos":
            assert torch.equal(embed(encoder, positions), first)
    assert counts["sinpos"].total() <= counts["cape"].total()
    assert "aten::sin" not in counts["sinpos"]


def test_neutral_factors_launch_nothing():
    """gamma, alpha and unit of 1, a first position at 0."""
    raw = make_positions("image")
    neutral, scaled = (make_encoder("cape", "image", gamma=gamma) for gamma in (1.0, 0.5))
    assert operations(lambda: neutral.rows_and_step(raw)).launched.total() == 0
    assert operations(lambda: scaled.rows_and_step(raw)).launched.total() > 0


def test_far_positions_and_rows_beyond_a_number_of_bytes_are_not_kept(monkeypatch):
    encoder, most = make_encoder("sinpos").eval(), KEPT_ROWS + 10
    encoder(token_position_at(10**9))
    rows = encoder.encoding._kept_rows[1]
    assert rows is None or rows.shape[0] <= KEPT_ROWS
    monkeypatch.setattr(encodings, "KEPT_BYTES", most * encoder.encoding.dim * 4)
    encoder(token_position_at(0, length=most))
    rows = encoder.encoding._kept_rows[1]
    assert rows.shape[0] == most
    assert encoder(token_position_at(0, length=most + 1)).shape[1] == most + 1
    assert encoder.encoding._kept_rows[1] is rows


def test_fake_tensors_neither_use_nor_leave_rows():
    encode = Sinusoid(16)
    with FakeTensorMode():
        counted(encode, 0, 5)
    assert encode._kept_rows[1] is None
    counted(encode, 0, 5)
    with FakeTensorMode():
        assert type(counted(encode, 0, 5)) is not torch.Tensor
