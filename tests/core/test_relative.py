"""Relative attention against two slow references, the numpy loop and the T x T x d formula in
torch, which has gradients: for every combination of options, in texts and between patches."""

import itertools
import math

import numpy as np
import pytest
import torch

from cape_plugins import RelativeGridPositions, RelativePositions, relative_attention
from cape_plugins.mathematics import relative
from tests.reference import appendix_a

BATCH, HEADS, DIM = 2, 2, 3
QUERIES = 5

# (context, query offset, number of keys): contexts smaller than, equal to and larger than the
# queries; whole sequence, incremental steps, windows inside of the keys
PLACES = ((1, 0, 5), (5, 2, 7), (9, 0, 8), (1, 4, 12))
OPTIONS = list(itertools.product(("clip", "zero"), (False, True), (None, HEADS)))


def make(context, beyond="clip", values=False, heads=None):
    return RelativePositions(context, DIM, heads, values, beyond)


def inputs(keys=QUERIES, queries=QUERIES):
    shapes = ((BATCH, HEADS, queries, DIM), (BATCH, HEADS, keys, DIM), (BATCH, HEADS, keys, DIM))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def slow(query, key, value, positions, *, query_offset=0, mask=None, keep=None):
    """Shaw et al. Eq. 3 and 4 with the T x S x d tensors written out.

    `mask` is added to the scores, `keep` multiplies the weights (dropout).
    """
    row = torch.arange(key.shape[2])[None] - torch.arange(query.shape[2])[:, None] - query_offset
    context = positions.context
    inside = (row.abs() <= context) | torch.tensor(positions.clip)
    row = row.clamp(-context, context) + context
    a_key = positions.keys[:, row] * inside[..., None]  # [H or 1, T, S, d]
    scores = torch.einsum("bhtd,bhtsd->bhts", query, key[:, :, None] + a_key)
    scores = scores / query.shape[-1] ** 0.5
    weights = (scores if mask is None else scores + mask).softmax(-1)
    after_dropout = weights if keep is None else weights * keep
    value = value[:, :, None].expand(-1, -1, query.shape[2], -1, -1)
    if positions.values is not None:
        value = value + positions.values[:, row] * inside[..., None]
    return torch.einsum("bhts,bhtsd->bhtd", after_dropout, value), weights


def gradients(output, tensors):
    direction = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
    return torch.autograd.grad((output * direction).sum(), tensors)


def assert_same(actual, expected, tensors):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    pairs = gradients(actual, tensors), gradients(expected, tensors)
    torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("context", "offset", "keys"), PLACES)
@pytest.mark.parametrize(("beyond", "values", "heads"), OPTIONS)
def test_outputs_and_gradients_equal_the_slow_loop(beyond, values, heads, context, offset, keys):
    positions, tensors = make(context, beyond, values, heads), inputs(keys)
    query, key, value = tensors
    actual, weights = relative_attention(
        query, key, value, positions, query_offset=offset, need_weights=True
    )
    tables = [t.detach().numpy() for t in positions.parameters()]
    loop = appendix_a.relative_attention(
        *(t.detach().numpy() for t in tensors),
        *(tables if heads else (table[0] for table in tables)),
        beyond=beyond,
        query_offset=offset,
    )
    np.testing.assert_allclose(actual.detach().numpy(), loop[0], atol=1e-5)
    np.testing.assert_allclose(weights.detach().numpy(), loop[1], atol=1e-6)
    expected, expected_weights = slow(query, key, value, positions, query_offset=offset)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-4)
    assert_same(actual, expected, [*tensors, *positions.parameters()])
    without, none = relative_attention(query, key, value, positions, query_offset=offset)
    assert none is None
    assert torch.equal(without, actual)


@pytest.mark.parametrize(("beyond", "values", "heads"), OPTIONS)
def test_offset_on_the_device_gives_the_same(beyond, values, heads):
    """Static caches know the offset as a tensor only."""
    positions, tensors = make(3, beyond, values, heads), inputs(12)
    from_number, from_tensor = (
        relative_attention(*tensors, positions, query_offset=number)[0]
        for number in (4, torch.tensor(4))
    )
    assert_same(from_tensor, from_number, [*tensors, *positions.parameters()])


def causal(queries=QUERIES, keys=QUERIES):
    return torch.ones(queries, keys).triu(1 + keys - queries).bool()


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
MASKS = {
    "bool": {"attn_mask": causal()},
    "float": {"attn_mask": torch.zeros(5, 5).masked_fill(causal(), float("-inf"))},
    "bias": {"attn_mask": torch.linspace(-2, 2, 25).reshape(5, 5)},
    "padding": {"key_padding_mask": PADDING},
    "bool and padding": {"attn_mask": causal(), "key_padding_mask": PADDING},
    "left padding and bias": {
        "attn_mask": torch.linspace(-2, 2, 25).reshape(5, 5),
        "key_padding_mask": PADDING.flip(1),
    },
}


def as_addend(attn_mask=None, key_padding_mask=None):
    total = torch.zeros(1, 1, 1, 1)
    for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
        total = total if mask is None else total + mask
    return total


@pytest.mark.parametrize("mask", MASKS)
def test_masks_equal_both_references(mask):
    positions, tensors = make(2, values=True), inputs()
    unmasked, _ = relative_attention(*tensors, positions)
    actual, weights = relative_attention(*tensors, positions, **MASKS[mask], need_weights=True)
    addend = as_addend(**MASKS[mask])
    expected, _ = slow(*tensors, positions, mask=addend)
    assert not torch.allclose(actual, unmasked)
    assert_same(actual, expected, [*tensors, *positions.parameters()])
    assert weights[addend.isinf().expand_as(weights)].eq(0).all()
    loop = appendix_a.relative_attention(
        *(t.detach().numpy() for t in tensors),
        *(t[0].detach().numpy() for t in positions.parameters()),
        allowed=~addend.isinf().numpy(),
    )
    if mask not in ("bias", "left padding and bias"):
        np.testing.assert_allclose(actual.detach().numpy(), loop[0], atol=1e-5)


@pytest.mark.parametrize(("beyond", "values", "heads"), OPTIONS)
def test_a_step_equals_the_row_of_the_full_pass(beyond, values, heads):
    positions, (query, key, value) = make(2, beyond, values, heads), inputs()
    full, _ = relative_attention(query, key, value, positions, attn_mask=causal())
    forgotten = 0.0
    for t in range(QUERIES):
        prefix = (query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1], positions)
        step, _ = relative_attention(*prefix, query_offset=t)
        torch.testing.assert_close(step[:, :, 0], full[:, :, t], atol=1e-5, rtol=1e-4)
        wrong, _ = relative_attention(*prefix)
        forgotten = max(forgotten, (wrong[:, :, 0] - full[:, :, t]).abs().max().item())
    assert forgotten > 1e-3  # a forgotten offset is noticed


@pytest.mark.parametrize("offset", [-7, -1, 3, 20])
def test_queries_outside_of_the_keys_are_refused(offset):
    """Allowed are offsets 0 to keys - queries = 2; the others would give a wrong result."""
    with pytest.raises(ValueError, match=rf"query_offset={offset} .*allowed"):
        relative_attention(*inputs(4, 2), make(1), query_offset=offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(dtype):
    positions, tensors = make(2, values=True), inputs()
    expected, _ = relative_attention(*tensors, positions)
    half, _ = relative_attention(*(t.to(dtype) for t in tensors), positions)
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), expected, atol=0.05, rtol=0.05)
    with torch.autocast("cpu", dtype):
        auto, _ = relative_attention(*tensors, positions)
    torch.testing.assert_close(auto.float(), expected, atol=0.05, rtol=0.05)
    gradients(auto, list(positions.parameters()))


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


def slow_on_grid(query, key, value, positions, patches, first):
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
    expected, expected_weights = slow_on_grid(*tensors, positions, patches, first)
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
