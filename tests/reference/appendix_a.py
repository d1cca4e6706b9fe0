"""Independent references in numpy: CAPE's augmentation and embeddings, Shaw's relative attention.

Written from the equations, for clarity and not for speed; the random numbers are arguments:

* Likhomanenko et al., "CAPE: Encoding Relative Positions with Continuous Augmented Positional
  Embeddings", NeurIPS 2021: Eq. 1 and its audio variant, Eq. 5-7, and Appendix A.
* Shaw et al., "Self-Attention with Relative Position Representations", NAACL 2018: Eq. 3 and 4.

The library never imports this file.
"""

import math

import numpy as np


def augment_positions_1d(
    positions: np.ndarray,
    mean_normalize: bool = False,
    global_shift: np.ndarray | float = 0.0,
    local_shift: np.ndarray | float = 0.0,
    log_scale: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Appendix A, one dimension: ``(n - mean + global + local) * exp(log_scale)``.

    Positions and local shifts (Eq. 6) are ``[B, T]``, global shifts (Eq. 5) and logarithms of
    lambda (Eq. 7) are ``[B]``; the result is ``[B, T]`` float64. Positions are NaN on padding, and
    are left alone, unlike in the paper.
    """
    positions = np.array(positions, dtype=np.float64)
    if mean_normalize:
        positions = positions - np.nanmean(positions, axis=1, keepdims=True)
    shift = np.reshape(global_shift, (-1, 1)) + np.asarray(local_shift)
    return (positions + shift) * np.exp(np.reshape(log_scale, (-1, 1)))


def sinusoids_1d(positions: np.ndarray, channels: int, factor: float = 1.0) -> np.ndarray:
    """Eq. 1 for text (factor 1, positions in tokens), its audio variant (factor 30, in seconds).

    Channels come in pairs (cos, sin) of omega_k = factor * 10000^(-2k/K) for k = 1 .. K/2, as the
    text below Eq. 1 counts them. Positions are ``[B, T]``, NaN on padding, where the result,
    ``[B, T, K]`` float64, is zero.
    """
    batch, length = positions.shape
    embedding = np.zeros((batch, length, channels))
    for b in range(batch):
        for t in range(length):
            if math.isnan(positions[b, t]):
                continue
            for k in range(1, channels // 2 + 1):
                omega = factor * 10000 ** (-2 * k / channels)
                embedding[b, t, 2 * k - 2] = math.cos(omega * positions[b, t])
                embedding[b, t, 2 * k - 1] = math.sin(omega * positions[b, t])
    return embedding


def patch_grid(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Appendix A's grid: x runs from -1 to 1 down the rows, y along the columns.

    Both are ``[rows, columns]`` float64. The paper has square grids only. A single row or column is
    in the middle, at 0.
    """
    x = np.linspace(-1, 1, rows) if rows > 1 else np.zeros(1)
    y = np.linspace(-1, 1, columns) if columns > 1 else np.zeros(1)
    return np.repeat(x[:, None], columns, axis=1), np.repeat(y[None, :], rows, axis=0)


def cape_2d(
    rows: int,
    columns: int,
    channels: int,
    global_shift: np.ndarray,
    local_shift: np.ndarray,
    log_scale: np.ndarray,
    first_angle: int = 0,
) -> np.ndarray:
    """Appendix A, two dimensions: shift each coordinate, scale both alike, embed (Eq. 3 and 4).

    Component k = 1 .. K/2 has the radius 10^(2k/K). Its angle is k - 1 in the code of Appendix A
    (`first_angle` 0), but k in Eq. 4 and in the released code (`first_angle` 1). Global shifts are
    ``[B, 2]`` and local ones ``[B, rows, columns, 2]``, for x and y; `log_scale` is ``[B]``. The
    result is ``[B, rows, columns, K]`` float64: all cosines, then all sines.
    """
    x, y = patch_grid(rows, columns)
    scale = np.exp(log_scale)[:, None, None]
    x = (x + global_shift[:, 0, None, None] + local_shift[..., 0]) * scale
    y = (y + global_shift[:, 1, None, None] + local_shift[..., 1]) * scale
    half = channels // 2
    embedding = np.empty((*x.shape, channels))
    for k in range(1, half + 1):
        radius, angle = 10 ** (k / half), k - 1 + first_angle
        phase = math.pi * radius * (math.cos(angle) * x + math.sin(angle) * y)
        embedding[..., k - 1] = np.cos(phase)
        embedding[..., half + k - 1] = np.sin(phase)
    return embedding


def relative_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    key_table: np.ndarray,
    value_table: np.ndarray | None = None,
    beyond: str = "clip",
    allowed: np.ndarray | None = None,
    query_offset: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Shaw et al., Eq. 3 and 4, one query and one key at a time.

    Query i attends to key j with the logit ``q_i . (k_j + a_ij) / sqrt(d)`` and collects
    ``v_j + b_ij``, where a_ij and b_ij are the rows of the tables for the distance j - i.

    Args:
        query: ``[B, H, Tq, d]``, not yet scaled; keys and values are ``[B, H, Tk, d]``.
        key_table: ``[2c + 1, d]``, or ``[H, 2c + 1, d]`` with a table per head; row j - i + c.
        value_table: The same for values; None for no relative values.
        beyond: Distances beyond the context c: "clip" takes the outermost row, "zero" takes none.
        allowed: bool, broadcasts to ``[B, H, Tq, Tk]``, False where attention is masked.
        query_offset: Position of the first query among the keys (incremental decoding).

    Returns the output ``[B, H, Tq, d]`` and the weights ``[B, H, Tq, Tk]``, float64.
    """
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    may = np.broadcast_to(True if allowed is None else allowed, (batch, heads, queries, keys))
    output = np.zeros((batch, heads, queries, dim))
    weights = np.zeros((batch, heads, queries, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        attended = [j for j in range(keys) if may[b, h, i, j]]
        distance = [j - (i + query_offset) for j in attended]
        logits = [
            query[b, h, i] @ (key[b, h, j] + _row(key_table, h, delta, beyond)) / math.sqrt(dim)
            for j, delta in zip(attended, distance, strict=True)
        ]
        total = sum(math.exp(logit - max(logits)) for logit in logits)
        for j, delta, logit in zip(attended, distance, logits, strict=True):
            weight = math.exp(logit - max(logits)) / total
            content = value[b, h, j]
            if value_table is not None:
                content = content + _row(value_table, h, delta, beyond)
            weights[b, h, i, j] = weight
            output[b, h, i] += weight * content
    return output, weights


def _row(table: np.ndarray, head: int, distance: int, beyond: str) -> np.ndarray:
    """The relative embedding of one distance, ``[d]``."""
    if table.ndim == 3:
        table = table[head]
    context = len(table) // 2
    if abs(distance) <= context:
        return table[context + distance]
    if beyond == "zero":
        return np.zeros_like(table[0])
    return table[-1] if distance > 0 else table[0]
