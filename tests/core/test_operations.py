"""Operations and memory of the core in training (tests/support/operations.py)."""

import pytest
import torch

from cape_plugins import token_position_at, token_positions
from cape_plugins.mathematics import encodings
from cape_plugins.mathematics.encodings import KEPT_ROWS
from tests.support.core import make_encoder, make_positions, valid_mask
from tests.support.operations import operations

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


def test_rows_beyond_a_number_of_bytes_are_not_kept(monkeypatch):
    encoder, most = make_encoder("sinpos").eval(), KEPT_ROWS + 10
    monkeypatch.setattr(encodings, "KEPT_BYTES", most * encoder.encoding.dim * 4)
    encoder(token_position_at(0, length=most))
    rows = encoder.encoding._kept_rows[1]
    assert rows.shape[0] == most
    assert encoder(token_position_at(0, length=most + 1)).shape[1] == most + 1
    assert encoder.encoding._kept_rows[1] is rows


def test_a_far_position_keeps_no_rows_before_it():
    encoder = make_encoder("sinpos").eval()
    encoder(token_position_at(10**9))
    rows = encoder.encoding._kept_rows[1]
    assert rows is None or rows.shape[0] <= KEPT_ROWS


@pytest.mark.parametrize("name", ["sinpos", "cape"])
@pytest.mark.parametrize("padded", [True, False])
def test_a_result_may_be_changed_by_its_owner(name, padded):
    encoder = make_encoder(name).eval()
    positions = token_positions(valid_mask()) if padded else token_position_at(0, length=6)
    result = encoder(positions)
    expected = result.clone()
    result.fill_(7.0)
    assert torch.equal(encoder(positions), expected)


def test_neutral_factors_launch_nothing():
    """gamma, alpha and unit of 1, a first position at 0."""
    raw = make_positions("image")
    neutral, scaled = (make_encoder("cape", "image", gamma=gamma) for gamma in (1.0, 0.5))
    assert operations(lambda: neutral.rows_and_step(raw)).launched.total() == 0
    assert operations(lambda: scaled.rows_and_step(raw)).launched.total() > 0
