"""Relative attention on long inputs: no T x T x d tensor is ever created, and blocks of queries
give the same results as one pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cape_plugins import RelativePositions, relative_attention
from cape_plugins.mathematics import relative
from tests.core.test_relative import (
    BATCH,
    HEADS,
    MASKS,
    OPTIONS,
    QUERIES,
    assert_same,
    gradients,
    inputs,
    make,
    slow,
)

ROW = BATCH * HEADS * QUERIES  # scores of one query


class Created(TorchDispatchMode):
    """Records the sizes of all tensors that operations return, views excluded."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and not function.is_view:
                self.sizes.append(tensor.numel())
        return result


def created(attention, length, context, dim=16, **options):
    """Sizes of all tensors created by a forward and backward of one head."""
    positions = RelativePositions(context, dim, **options)
    tensors = [torch.randn(1, 1, length, dim, requires_grad=True) for _ in range(3)]
    with Created() as record:
        output = attention(*tensors, positions)[0]
        output.sum().backward()
    return record.sizes


@pytest.mark.parametrize("options", [{}, {"beyond": "zero"}, {"values": True}])
@pytest.mark.parametrize("context", [4, 400])
def test_no_tensor_of_length_squared_times_dimension(context, options):
    length, dim = 64, 16
    assert max(created(slow, length, context, dim, **options)) >= length * length * dim
    largest = max(created(relative_attention, length, context, dim, **options))
    table = (2 * context + 1) * dim
    assert largest <= max(2 * length * length, table)


def test_blocks_bound_the_largest_tensor(monkeypatch):
    length, dim = 128, 8
    whole = max(created(relative_attention, length, 16, dim))
    assert whole >= length * length
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 8 * length)
    blocked = max(created(relative_attention, length, 16, dim))
    assert blocked <= max(3 * 8 * length, length * dim)


def run(positions, tensors, **options):
    torch.manual_seed(5)
    output, _ = relative_attention(*tensors, positions, **options)
    return output, gradients(output, [*tensors, *positions.parameters()])


def assert_blocks_equal_whole(monkeypatch, positions, tensors, **options):
    """In blocks of two queries."""
    whole, expected = run(positions, tensors, **options)
    blocks = []
    attend = relative._attend

    def counting(query, *arguments):
        blocks.append(query.shape[2])
        return attend(query, *arguments)

    monkeypatch.setattr(relative, "_attend", counting)
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 2 * tensors[1].shape[2] * BATCH * HEADS)
    actual, gradient = run(positions, tensors, **options)
    forward = -(-QUERIES // 2)
    assert len(blocks) == 2 * forward  # scores are recomputed in the backward pass
    assert sum(blocks[:forward]) == QUERIES
    torch.testing.assert_close(actual, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(relative_attention(*tensors, positions, **options)[0], whole)


@pytest.mark.parametrize(("beyond", "values", "heads"), OPTIONS)
def test_blocks_equal_one_pass(monkeypatch, beyond, values, heads):
    """Of queries in the middle of the keys."""
    positions = make(2, beyond, values, heads)
    assert_blocks_equal_whole(monkeypatch, positions, inputs(7), query_offset=2)


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_with_masks_equal_one_pass(monkeypatch, mask):
    positions = make(2, values=True)
    assert_blocks_equal_whole(monkeypatch, positions, inputs(), **MASKS[mask])


def test_dropout_in_blocks_is_the_same_when_recomputed(monkeypatch):
    """Each block draws a mask once, and the backward pass recomputes the block with the same
    mask."""
    positions, tensors = make(2, values=True), inputs()
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 2 * ROW)
    torch.manual_seed(5)
    actual, _ = relative_attention(*tensors, positions, dropout=0.5)
    torch.manual_seed(5)
    keep = [
        torch.nn.functional.dropout(torch.ones(BATCH, HEADS, rows, QUERIES), 0.5)
        for rows in (2, 2, 1)
    ]
    expected, _ = slow(*tensors, positions, keep=torch.cat(keep, dim=2))
    torch.manual_seed(6)  # what happens in between must not matter
    assert_same(actual, expected, [*tensors, *positions.parameters()])
