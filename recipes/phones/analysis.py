"""What frames, predictions and attention tell: pure functions of arrays.

Targets and predictions are lists of integer arrays ``[T]``, one for each utterance.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from sklearn.metrics import confusion_matrix

MAX_RUN = 3  # frames; the context of longer runs of wrong frames is wrong itself
Frames = Sequence[np.ndarray]


def error_rate(targets: Frames, predictions: Frames) -> float:
    """The thesis's PER: wrong frames in percent of all frames."""
    wrong = sum(int((a != b).sum()) for a, b in zip(targets, predictions, strict=True))
    return 100 * wrong / sum(map(len, targets))


def class_changes(frames: Frames) -> int:
    """Smoothness: how often the class differs between consecutive frames; lower is smoother."""
    return sum(int((classes[1:] != classes[:-1]).sum()) for classes in frames)


def confusions(targets: Frames, predictions: Frames, num_classes: int) -> np.ndarray:
    """``[targets, predictions]`` in percent of the frames of the target, 0 where it has none."""
    matrix = confusion_matrix(
        np.concatenate(targets), np.concatenate(predictions), labels=range(num_classes)
    )
    return 100 * matrix / matrix.sum(1, keepdims=True).clip(min=1)


def top_confusions(
    matrix: np.ndarray, classes: Sequence[str], count: int
) -> list[tuple[str, str, float]]:
    """The largest entries beside the diagonal: target, prediction, percent."""
    beside = matrix - np.diag(np.diag(matrix))
    places = np.argsort(-beside, axis=None, kind="stable")[:count]
    pairs = (np.unravel_index(place, matrix.shape) for place in places)
    return [(classes[a], classes[b], float(beside[a, b])) for a, b in pairs]


# ---- types of errors -----------------------------------------------------------------------------


def error_types(targets: Frames, predictions: Frames) -> tuple[int, ...]:
    """Numbers of wrong frames of types 1, 2 and 3, and in long runs."""
    counts: Counter[int] = Counter()
    for target, prediction in zip(targets, predictions, strict=True):
        counts.update(frame_error_types(target, prediction).tolist())
    return tuple(counts[type_number] for type_number in (1, 2, 3, -1))


def frame_error_types(target: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """``[T]`` types of wrong frames: 1, 2 or 3; 0 for right frames, -1 in long runs.

    A *boundary frame* has a neighbour, the frame before or after, with another target. A *run* is a
    maximal sequence of wrong frames; it is *at the boundary* if one of its frames is a boundary
    frame. Runs of more than three frames have no type. In the others,

    * a frame of a run that is not at the boundary is of type 3;
    * a frame of a run at the boundary is of type 1 if its predicted class is the target on the
      other side of a boundary of its own phone that the run reaches, that is, one with a frame of
      the run directly before or after it;
    * and of type 2 otherwise.

    So single frames of a run may have different types, and the middle of a phone of three frames
    that is replaced by its neighbour has type 1.
    """
    types = np.zeros(len(target), dtype=int)
    starts = np.flatnonzero(np.diff(target)) + 1  # of phones, without the first
    edges = [0, *starts.tolist(), len(target)]
    for first, end in _runs(target != prediction):
        if end - first > MAX_RUN:
            types[first:end] = -1
            continue
        # the boundary before frame b is reached by runs with frame b - 1 or b
        reached = set(starts[(starts >= first) & (starts <= end)].tolist())
        if not reached:
            types[first:end] = 3
            continue
        for frame in range(first, end):
            phone = int(np.searchsorted(starts, frame, side="right"))
            left, right = edges[phone], edges[phone + 1]
            others = [target[left - 1]] if left in reached else []
            others += [target[right]] if right in reached else []
            types[frame] = 1 if prediction[frame] in others else 2
    return types


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """First index and end of each maximal sequence of true flags."""
    padded = np.concatenate(([False], flags, [False])).astype(int)
    changes = np.flatnonzero(np.diff(padded)).tolist()
    return zip(changes[::2], changes[1::2], strict=True)


# ---- attention -----------------------------------------------------------------------------------


def attention_by_distance(weights: np.ndarray, farthest: int) -> np.ndarray:
    """Mean weight ``[.., 2 D + 1]`` of the keys up to D < T frames before and after their query, of
    ``[.., T, T]``, queries in rows."""
    distances = range(-farthest, farthest + 1)
    means = [np.diagonal(weights, d, axis1=-2, axis2=-1).mean(-1) for d in distances]
    return np.stack(means, axis=-1)


def near_attention(weights: np.ndarray, farthest: int) -> float:
    """Share of the attention ``[.., T, T]`` on keys that are at most `farthest` frames away."""
    index = np.arange(weights.shape[-1])
    near = np.abs(index[:, None] - index) <= farthest
    return float((weights * near).sum(-1).mean())


def head_rows(
    weights: np.ndarray, near: int, farthest: int = 10
) -> list[tuple[int, int, int, float, float]]:
    """Layer, head, distance (of key minus query) with the largest mean weight, that weight, and the
    share of the attention at most `near` frames away; of ``[layers, H, T, T]``."""
    farthest = min(farthest, weights.shape[-1] - 1)
    by_distance = attention_by_distance(weights, farthest)
    rows = []
    for layer, head in np.ndindex(*weights.shape[:2]):
        peak = int(by_distance[layer, head].argmax())
        weight = float(by_distance[layer, head, peak])
        share = near_attention(weights[layer, head], near)
        rows.append((layer + 1, head + 1, peak - farthest, weight, share))
    return rows
