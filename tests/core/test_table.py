"""The learned table: rows that wrap around, bicubic resizing, gradients, and every kind of
positions."""

import pytest
import torch
from torch.nn import functional as F

from cape_plugins import (
    PositionConfig,
    PositionTable,
    build_position_encoder,
    token_positions,
)
from tests.support.core import valid_mask

CPU = torch.device("cpu")


def make_table_encoder(domain, size, dim=5, std=None):
    config = PositionConfig("abspos", domain)
    return build_position_encoder(config, dim, table_size=size, table_std=std)


def image_of(table):
    """``[1, K, height, width]``"""
    return table.weight.detach().unflatten(0, table.size).permute(2, 0, 1)[None]


@pytest.mark.parametrize("length", [4, 5, 6, 17])
def test_rows_wrap_around_at_exactly_the_length(length):
    table = PositionTable(3, 5)
    assert torch.equal(table.rows(length), table.weight[torch.arange(length) % 5])


@pytest.mark.parametrize("left", [False, True])
def test_tokens_take_the_row_of_their_index(left):
    encoder, valid = make_table_encoder("text", 4), valid_mask(left=left)
    result = encoder(token_positions(valid))
    weight = encoder.encoding.weight
    for row in range(len(valid)):
        expected = [weight[i % 4] for i in range(int(valid[row].sum()))]
        assert torch.equal(result[row][valid[row]], torch.stack(expected))
    assert result[~valid].eq(0).all()
    result.sum().backward()
    assert weight.grad[:, 0].tolist() == [4.0, 3.0, 2.0, 2.0]  # padding teaches nothing
    half = encoder(token_positions(valid), dtype=torch.bfloat16)
    assert torch.equal(half, result.to(torch.bfloat16))


@pytest.mark.parametrize("size", [(8, 10), (2, 2), (5, 4)])
def test_resize_is_bicubic(size):
    table = PositionTable(3, (4, 5))
    assert table.resize(4, 5) is table.weight
    expected = F.interpolate(image_of(table), size, mode="bicubic", align_corners=False)
    actual = table.resize(*size).unflatten(0, size).permute(2, 0, 1)[None]
    torch.testing.assert_close(actual, expected)
    wrong = F.interpolate(image_of(table), size, mode="bilinear", align_corners=False)
    assert not torch.allclose(actual, wrong)
    table.to(torch.bfloat16)  # is resized in float32
    expected = F.interpolate(image_of(table).float(), size, mode="bicubic", align_corners=False)
    assert torch.equal(table.resize(*size), expected[0].flatten(1).T.to(torch.bfloat16))


def test_weights_begin_with_the_deviation_asked_for():
    assert PositionTable(64, 2000).weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    encoder = make_table_encoder("text", 2000, dim=64, std=0.02)
    assert encoder.encoding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert list(encoder.state_dict()) == ["encoding.weight"]
    assert encoder.encoding.weight.requires_grad
    assert "size=(2, 3)" in repr(PositionTable(4, (2, 3)))
