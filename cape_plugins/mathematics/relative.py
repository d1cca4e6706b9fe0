"""Self-attention with learned relative positions (Shaw et al., NAACL 2018).

    score(i, j) = q_i . (k_j + a^K[j - i]) / sqrt(d),    out_i = sum_j p(i, j) (v_j + a^V[j - i])

No T x T x d tensor is ever built: queries are first multiplied with the table of 2 C + 1 distances,
which gives ``[T, 2 C + 1]`` numbers per head, linear in the context C. *Skewing* moves these
numbers to their keys: row i of a padded matrix, read with a row stride one element shorter, begins
one column further to the right. Long inputs are processed in blocks of queries, and the backward
pass recomputes the scores of each block, so memory grows with T, not with T x T.

Patches of an image have two embeddings, a^K[di] for the distance in rows plus a^K[dj] for the
distance in columns: two tables of 2 C + 1 rows, and no more memory.

Shapes: B batch, H heads, T queries, S keys, d channels per head, C context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cape_plugins.mathematics.relative_tables import RelativeGridPositions, RelativePositions

# Scores of one block of queries, about 128 MiB in float32: large enough for full speed, small
# enough to bound memory. The backward pass costs one more forward of the attention.
BLOCK_ELEMENTS = 2**25


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: RelativePositions | RelativeGridPositions,
    *,
    query_offset: int | Tensor = 0,
    patches: Sequence[int] | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention with relative keys and, optionally, values.

    Args:
        query: ``[B, H, T, d]``, not scaled.
        key: ``[B, H, S, d]``.
        value: ``[B, H, S, d]``.
        positions: Relative embeddings.
        query_offset: Index of the first query among the keys: S - T in incremental decoding. If
            keys are a buffer of fixed size (static caches), a tensor without dimensions, whose
            value the host does not read.
        patches: (height, width) in patches, or the sizes of other axes;
            :class:`RelativeGridPositions` need these sizes. The patches are the last keys, row by
            row; earlier keys, such as a class token, have no place in the image and no relative
            embedding.
        attn_mask: bool (True: do not attend) or float added to the scores, ``[T, S]`` or any shape
            that broadcasts to ``[B, H, T, S]``.
        key_padding_mask: ``[B, S]`` bool, True on padding.
        dropout: Probability of dropping an attention weight.
        need_weights: Whether to return the weights before dropout.

    Returns:
        Output ``[B, H, T, d]`` and the weights ``[B, H, T, S]`` or None.

    Raises:
        ValueError: if `query_offset` or `patches` do not fit the keys.
    """
    if hasattr(positions, "axes"):  # isinstance would fail, because adapters wrap modules
        sizes = () if patches is None else tuple(patches)
        if len(sizes) != len(positions.axes) or math.prod(sizes) > key.shape[2]:
            raise ValueError(
                f"patches={patches} is not allowed with {key.shape[2]} keys; allowed: (height, "
                "width) of the image in patches, of which each is a key."
            )
    else:
        patches = None
    query = query * query.shape[-1] ** -0.5
    batch, heads, length, _ = query.shape
    block = max(1, BLOCK_ELEMENTS // max(1, batch * heads * key.shape[2]))
    arguments = (key, value, positions, patches, key_padding_mask, dropout)
    if need_weights or block >= length:
        output, weights = _attend(query, attn_mask, query_offset, *arguments)
        return output, weights if need_weights else None
    outputs = []
    for first in range(0, length, block):
        rows = slice(first, first + block)
        mask = attn_mask
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., rows, :]
        inputs = (query[:, :, rows], mask, query_offset + first, *arguments)
        if torch.is_grad_enabled():
            output, _ = checkpoint(_attend, *inputs, use_reentrant=False)
        else:
            output, _ = _attend(*inputs)
        outputs.append(output)
    return torch.cat(outputs, dim=2), None


def _attend(
    query: Tensor,
    attn_mask: Tensor | None,
    query_offset: int | Tensor,
    key: Tensor,
    value: Tensor,
    positions: RelativePositions | RelativeGridPositions,
    patches: Sequence[int] | None,
    key_padding_mask: Tensor | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """One block of queries; see :func:`relative_attention`. The query is scaled already."""
    num_keys = key.shape[2]
    if patches is None:
        scores = relative_scores(query, positions, num_keys, query_offset)
    else:
        scores = _grid_scores(query, positions, num_keys, query_offset, patches)
    scores = torch.baddbmm(scores.flatten(0, 1), query.flatten(0, 1), key.flatten(0, 1).mT)
    scores = scores.view(*query.shape[:3], num_keys)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    dropped = F.dropout(weights, dropout) if dropout else weights
    output = dropped @ value
    if positions.values is not None and patches is None:
        output = output + relative_values(dropped, positions, query_offset)
    elif positions.values is not None:
        output = output + _grid_values(dropped, positions, query_offset, patches)
    return output, weights


def relative_scores(
    query: Tensor, positions: RelativePositions, num_keys: int, query_offset: int | Tensor = 0
) -> Tensor:
    """``q_i . a^K[j - i]`` for every query and key.

    Args:
        query: ``[B, H, T, d]``.
        positions: Relative embeddings.
        num_keys: S.
        query_offset: Index of the first query among the keys.

    Returns:
        ``[B, H, T, S]``, in general a view of a ``[B, H, T, S + T]`` tensor.
    """
    length = query.shape[2]
    if isinstance(query_offset, Tensor):
        query_index = torch.arange(length, device=query.device) + query_offset
        return _gathered_scores(query, positions, query_index, num_keys)
    low, high, left, right = _distances(positions, length, num_keys, query_offset)
    table = positions.keys[:, low:high].to(query.dtype)
    scores = query @ table.mT  # [B, H, T, distances within the context]
    if not positions.clip:
        return _skew(F.pad(scores, (left, right + 1)), num_keys)
    # The outermost distances are computed again, in a separate product, instead of sliced from
    # `scores`: the gradient of a slice would be a zero tensor as large as `scores`.
    leftmost, rightmost = query @ table[:, :1].mT, query @ table[:, -1:].mT
    shape = scores.shape[:-1]
    by_distance = (leftmost.expand(*shape, left), scores, rightmost.expand(*shape, right + 1))
    return _skew(torch.cat(by_distance, dim=-1), num_keys)


def relative_values(
    weights: Tensor, positions: RelativePositions, query_offset: int | Tensor = 0
) -> Tensor:
    """``sum_j p(i, j) a^V[j - i]``.

    Args:
        weights: ``[B, H, T, S]``, after dropout.
        positions: Relative embeddings with values.
        query_offset: Index of the first query among the keys.

    Returns:
        ``[B, H, T, d]``.
    """
    length, num_keys = weights.shape[2:]
    if isinstance(query_offset, Tensor):
        query_index = torch.arange(length, device=weights.device) + query_offset
        return _gathered_values(weights, positions, query_index)
    low, high, left, right = _distances(positions, length, num_keys, query_offset)
    by_distance = _unskew(weights)
    within_context = by_distance[..., left : by_distance.shape[-1] - right]
    if positions.clip:
        tails = torch.zeros_like(within_context)
        if left:
            tails[..., 0] += by_distance[..., :left].sum(-1)
        if right:
            tails[..., -1] += by_distance[..., -right:].sum(-1)
        within_context = within_context + tails
    return within_context @ positions.values[:, low:high].to(weights.dtype)


def _gathered_scores(
    query: Tensor, positions: RelativePositions, query_index: Tensor, num_keys: int
) -> Tensor:
    """:func:`relative_scores` for queries at any places ``[T]`` among the keys 0 .. S - 1. For few
    queries or keys only, because the gradient of a gather is slower than the gradient of a view."""
    row, in_context = _rows(positions, query_index, num_keys)
    by_row = query @ positions.keys.to(query.dtype).mT
    scores = by_row.gather(-1, row.expand(*query.shape[:2], -1, -1))
    return scores if positions.clip else scores * in_context


def _gathered_values(weights: Tensor, positions: RelativePositions, query_index: Tensor) -> Tensor:
    """:func:`relative_values` for queries at any places; see :func:`_gathered_scores`."""
    row, in_context = _rows(positions, query_index, weights.shape[-1])
    by_row = weights.new_zeros(*weights.shape[:-1], positions.values.shape[1])
    weights = weights if positions.clip else weights * in_context
    by_row = by_row.scatter_add(-1, row.expand_as(weights), weights)
    return by_row @ positions.values.to(weights.dtype)


def _rows(
    positions: RelativePositions, query_index: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Row of the table for each query and key, ``[T, S]``, and whether their distance is within the
    context, ``[T, S]`` bool."""
    distance = torch.arange(num_keys, device=query_index.device) - query_index[:, None]
    context = positions.context
    return distance.clamp(-context, context) + context, distance.abs() <= context


def _grid_scores(
    query: Tensor,
    positions: RelativeGridPositions,
    num_keys: int,
    query_offset: int | Tensor,
    patches: Sequence[int],
) -> Tensor:
    """``q . (a^K[di] + a^K[dj])``, ``[B, H, T, S]``; 0 if query or key is no patch."""
    indices, is_patch = _axis_indices(query.shape[2], num_keys, query_offset, patches, query.device)
    query = query * is_patch
    scores = None
    for axis, index, size in zip(positions.axes, indices, patches, strict=True):
        by_axis = _gathered_scores(query, getattr(positions, axis), index, size)
        if scores is not None:
            by_axis = (scores[..., None] + by_axis[..., None, :]).flatten(-2)
        scores = by_axis
    return F.pad(scores, (num_keys - scores.shape[-1], 0))


def _grid_values(
    weights: Tensor,
    positions: RelativeGridPositions,
    query_offset: int | Tensor,
    patches: Sequence[int],
) -> Tensor:
    """``sum_j p(i, j) (a^V[di] + a^V[dj])`` over patches, ``[B, H, T, d]``; 0 for other queries."""
    length, num_keys = weights.shape[2:]
    indices, is_patch = _axis_indices(length, num_keys, query_offset, patches, weights.device)
    weights = (weights[..., num_keys - math.prod(patches) :] * is_patch).unflatten(-1, patches)
    first = weights.dim() - len(patches)
    output = None
    for number, (axis, index) in enumerate(zip(positions.axes, indices, strict=True)):
        other_axes = [first + other for other in range(len(patches)) if other != number]
        by_axis = weights.sum(other_axes) if other_axes else weights
        values = _gathered_values(by_axis, getattr(positions, axis), index)
        output = values if output is None else output + values
    return output


def _axis_indices(
    length: int,
    num_keys: int,
    query_offset: int | Tensor,
    patches: Sequence[int],
    device: torch.device,
) -> tuple[list[Tensor], Tensor]:
    """Index of each query on each axis of the grid, ``[T]``, and whether the query is a patch,
    ``[T, 1]``."""
    patch = torch.arange(length, device=device) + query_offset - (num_keys - math.prod(patches))
    is_patch = (patch >= 0)[:, None]
    indices = []
    for axis in range(len(patches)):
        # no remainder by a size: onnxscript translates it wrongly if the size is symbolic
        count = math.prod(patches[axis + 1 :])
        # The clamp follows the division: Inductor of torch 2.13 cannot divide a clamped number.
        index = (patch // count).clamp(min=0)
        patch = patch - index * count
        indices.append(index)
    return indices, is_patch


def _distances(
    positions: RelativePositions, length: int, num_keys: int, query_offset: int
) -> tuple[int, int, int, int]:
    """Rows low .. high of the table that T queries and S keys can meet, and the numbers of columns
    of the ``[T, S + T - 1]`` matrix of distances that lie left and right of the context."""
    if not 0 <= query_offset <= num_keys - length:
        raise ValueError(
            f"query_offset={query_offset} is not allowed with {length} queries and {num_keys} "
            f"keys; allowed: 0 to {num_keys - length}, because every query is one of the keys."
        )
    smallest, largest = -(query_offset + length - 1), num_keys - 1 - query_offset
    low, high = max(smallest, -positions.context), min(largest, positions.context)
    return (
        low + positions.context,
        high + positions.context + 1,
        low - smallest,
        largest - high,
    )


def _skew(by_distance: Tensor, num_keys: int) -> Tensor:
    """Turns ``[.., T, S + T]``, in which column c of row i is the distance c - (T - 1) + offset,
    into ``[.., T, S]``, in which column j is key j: row i begins at column T - 1 - i.

    Returns a view of `by_distance`, which must be a whole contiguous tensor: a storage offset of 0
    is assumed, because torch.compile cannot read the offset. The last column is never read.
    """
    *shape, length, width = by_distance.shape
    strides = (*by_distance.stride()[:-2], width - 1, 1)
    return by_distance.as_strided((*shape, length, num_keys), strides, length - 1)


def _unskew(by_key: Tensor) -> Tensor:
    """The inverse of :func:`_skew`: ``[.., T, S]`` to ``[.., T, S + T - 1]``, zero elsewhere."""
    *shape, length, num_keys = by_key.shape
    width = num_keys + length
    flat = F.pad(by_key, (0, length - 1)).flatten(-2)  # rows of width - 1
    flat = F.pad(flat, (length - 1, 1))
    return flat.view(*shape, length, width)[..., :-1]
