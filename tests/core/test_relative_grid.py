"""Relative attention between patches against the formula with its T x T x d tensors."""

import itertools
import math

import pytest
import torch

from cape_plugins import RelativeGridPositions, relative_attention
from cape_plugins.mathematics import relative
from tests.core.test_relative import BATCH, DIM, HEADS, OPTIONS, assert_same, inputs

# (context, patches)
GRIDS = ((1, (1, 1)), (1, (2, 3)), (7, (2, 3)), (1, (1, 4)), (1, (2, 3, 2)))
AXES = ("times", "rows", "columns")


def embeddings(positions, patches, first, name):
    """``[H or 1, S, S, d]``, one pair of patches after the other."""
    places = list(itertools.product(*map(range, patches)))
    length = first + len(places)
    heads, _, _ = positions.rows.keys.shape
    out = torch.zeros(heads, length, length, DIM)
    context = positions.rows.context
    for (i, here), (j, there) in itertools.product(enumerate(places), repeat=2):
        for axis_name, start, end in zip(positions.axes, here, there, strict=True):
            axis, distance = getattr(positions, axis_name), end - start
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
@pytest.mark.parametrize(("context", "patches"), GRIDS)
@pytest.mark.parametrize(("beyond", "values", "heads"), [OPTIONS[0], OPTIONS[3], OPTIONS[6]])
def test_attention_equals_the_formula(context, beyond, values, heads, patches, first):
    axes = AXES[-len(patches) :]
    positions = RelativeGridPositions(context, DIM, heads, values, beyond, axes)
    length = first + math.prod(patches)
    tensors = inputs(length, length)
    output, weights = relative_attention(*tensors, positions, patches=patches, need_weights=True)
    expected, expected_weights = slow(*tensors, positions, patches, first)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)
    assert_same(output, expected, [*tensors, *positions.parameters()])


def test_blocks_of_queries_equal_one_pass(monkeypatch):
    """Blocks begin anywhere in a row of patches."""
    positions = RelativeGridPositions(3, DIM, values=True)
    tensors = inputs(13, 13)
    whole, _ = relative_attention(*tensors, positions, patches=(4, 3))
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 13 * BATCH * HEADS * 5)
    blocks, _ = relative_attention(*tensors, positions, patches=(4, 3))
    torch.testing.assert_close(blocks, whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("patches", [None, (4, 4)])
def test_patches_must_fit(patches):
    positions = RelativeGridPositions(2, DIM)
    with pytest.raises(ValueError, match=r"patches=.* is not allowed with 13 keys"):
        relative_attention(*inputs(13, 13), positions, patches=patches)
