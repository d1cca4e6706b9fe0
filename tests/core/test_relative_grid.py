"""Relative attention between patches against the formula with its T x T x d tensors."""

import itertools

import pytest
import torch

from cape_plugins import RelativeGridPositions, relative_attention
from cape_plugins.mathematics import relative

BATCH, HEADS, DIM = 2, 2, 3
OPTIONS = list(itertools.product(("clip", "zero"), (False, True), (None, HEADS)))
GRIDS = ((1, 1), (2, 3), (5, 2), (1, 4))


def inputs(length):
    return [torch.randn(BATCH, HEADS, length, DIM, requires_grad=True) for _ in range(3)]


def embeddings(positions, patches, first, name):
    """``[H or 1, S, S, d]``, one pair of patches after the other."""
    height, width = patches
    length = first + height * width
    heads = positions.rows.keys.shape[0]
    out = torch.zeros(heads, length, length, DIM)
    context = positions.rows.context
    for i, j in itertools.product(range(height * width), repeat=2):
        for axis, distance in (
            (positions.rows, j // width - i // width),
            (positions.columns, j % width - i % width),
        ):
            if abs(distance) <= context or axis.clip:
                row = max(-context, min(context, distance)) + context
                out[:, first + i, first + j] += getattr(axis, name)[:, row]
    return out


def slow(query, key, value, positions, patches, first):
    a_key = embeddings(positions, patches, first, "keys")
    scores = torch.einsum("bhtd,bhtsd->bhts", query, key[:, :, None] + a_key) / DIM**0.5
    weights = scores.softmax(-1)
    value = value[:, :, None].expand(-1, -1, query.shape[2], -1, -1)
    if positions.values is not None:
        value = value + embeddings(positions, patches, first, "values")
    return torch.einsum("bhts,bhtsd->bhtd", weights, value), weights


@pytest.mark.parametrize("first", [0, 1], ids=["patches", "class-token"])
@pytest.mark.parametrize("patches", GRIDS, ids=str)
@pytest.mark.parametrize(("beyond", "values", "heads"), OPTIONS)
@pytest.mark.parametrize("context", [1, 7])
def test_attention_equals_the_formula(context, beyond, values, heads, patches, first):
    positions = RelativeGridPositions(context, DIM, heads, values, beyond)
    tensors = inputs(first + patches[0] * patches[1])
    output, weights = relative_attention(*tensors, positions, patches=patches, need_weights=True)
    expected, expected_weights = slow(*tensors, positions, patches, first)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)
    direction = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    wanted = [*tensors, *positions.parameters()]
    for actual, other in zip(
        *(torch.autograd.grad((o * direction).sum(), wanted) for o in (output, expected)),
        strict=True,
    ):
        torch.testing.assert_close(actual, other, atol=1e-5, rtol=1e-4)


def test_blocks_of_queries_equal_one_pass(monkeypatch):
    """Blocks begin anywhere in a row of patches."""
    positions = RelativeGridPositions(3, DIM, values=True)
    tensors = inputs(13)
    whole, _ = relative_attention(*tensors, positions, patches=(4, 3))
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 13 * BATCH * HEADS * 5)
    blocks, _ = relative_attention(*tensors, positions, patches=(4, 3))
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-5)


def test_a_larger_image_has_the_same_distances():
    """What one patch sees of its neighbours does not depend on the width of the image."""
    positions = RelativeGridPositions(2, DIM)
    small, large = torch.arange(12).reshape(3, 4), torch.arange(30).reshape(5, 6)[1:4, 1:5]
    query = torch.randn(1, 1, 1, DIM)
    scores = {
        grid: relative._grid_scores(
            query.expand(1, 1, grid[0] * grid[1], DIM), positions, grid[0] * grid[1], 0, grid
        )[0, 0]
        for grid in ((3, 4), (5, 6))
    }
    inner = scores[5, 6][large.flatten()][:, large.flatten()]
    torch.testing.assert_close(inner, scores[3, 4][small.flatten()][:, small.flatten()])


@pytest.mark.parametrize("patches", [None, (4, 4)])
def test_patches_must_fit(patches):
    positions = RelativeGridPositions(2, DIM)
    with pytest.raises(ValueError, match=r"patches=.* is not allowed with 13 keys"):
        relative_attention(*inputs(13), positions, patches=patches)
