"""CTC: loss and best path."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def ctc_loss(
    log_probs: Tensor,
    lengths: Tensor,
    targets: Tensor,
    is_label: Tensor,
    blank: int = 0,
    reduction: str = "none",
    zero_infinity: bool = True,
) -> Tensor:
    """CTC loss without padding, in nats.

    Args:
        log_probs: ``[B, T, V]`` float32.
        lengths: ``[B]``, outputs without padding.
        targets: ``[B, U]``.
        is_label: ``[B, U]`` bool, False on padding of `targets`.
        blank: Index of the blank.
        reduction: As in torch: "none" gives ``[B]``, "sum" and "mean" a number.
        zero_infinity: Whether samples that cannot be aligned (:func:`outputs_needed`) have a loss
            of 0 instead of infinity.
    """
    # torch would choose cuDNN's loss for some inputs, and this loss has other restrictions
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            targets.masked_select(is_label),
            lengths,
            is_label.sum(-1),
            blank,
            reduction,
            zero_infinity,
        )


def outputs_needed(targets: Tensor, is_label: Tensor) -> Tensor:
    """Fewest outputs ``[B]`` that CTC aligns with targets ``[B, U]``: one for each label, and a
    blank between equal labels. `is_label` is False on padding of the targets."""
    repeats = (targets[:, 1:] == targets[:, :-1]) & is_label[:, 1:]
    return is_label.sum(-1) + repeats.sum(-1)


class Hypothesis(NamedTuple):
    """Token indices, and the score of the path, a natural logarithm."""

    tokens: list[int]
    score: float


def best_path(log_probs: Tensor, lengths: Tensor, blank: int = 0) -> list[Hypothesis]:
    """The most probable path of each sample, repeated tokens and blanks removed.

    Args:
        log_probs: ``[B, T, V]``.
        lengths: ``[B]``, outputs without padding.
        blank: Index of the blank.
    """
    scores, indices = log_probs.max(-1)
    valid = torch.arange(log_probs.shape[1], device=lengths.device) < lengths[:, None]
    totals = (scores * valid).sum(1, dtype=torch.float32).tolist()
    rows = zip(indices.tolist(), lengths.tolist(), totals, strict=True)
    return [Hypothesis(collapse(row[:length], blank), total) for row, length, total in rows]


def collapse(path: Iterable[int], blank: int) -> list[int]:
    """A path without repetitions and blanks."""
    return [token for token, _ in groupby(path) if token != blank]
