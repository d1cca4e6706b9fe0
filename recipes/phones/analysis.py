"""Computes errors, confusions and attention of models; all functions are pure functions of
arrays."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix

MAX_RUN = 3  # frames; in longer runs of wrong frames the context is also wrong
SILENCE = "sil"
_VOWELS = "aa ae ah ao aw ax ax-h axr ay eh er ey ih ix iy ow oy uh uw ux"
VOWELS = {*_VOWELS.split()}
FRICATIVES = ("z", "s")  # models without positions confuse these two
Frames = Sequence[np.ndarray]  # targets or predictions, integers [T] for each utterance


def error_rate(targets: Frames, predictions: Frames) -> float:
    """The thesis's PER: wrong frames in percent of all frames."""
    wrong = sum(int((a != b).sum()) for a, b in zip(targets, predictions, strict=True))
    return 100 * wrong / sum(map(len, targets))


def class_changes(frames: Frames) -> int:
    """Smoothness: how often the class differs between consecutive frames; lower is smoother."""
    return sum(int((classes[1:] != classes[:-1]).sum()) for classes in frames)


def confusions(targets: Frames, predictions: Frames, num_classes: int) -> np.ndarray:
    """``[targets, predictions]`` in percent of the frames of the target; 0 for a target without
    frames."""
    frames = np.concatenate(targets), np.concatenate(predictions)
    return 100 * confusion_matrix(*frames, labels=range(num_classes), normalize="true")


def top_confusions(
    matrix: np.ndarray, classes: Sequence[str], count: int
) -> list[tuple[str, str, float]]:
    """The largest entries off the diagonal: target, prediction, percent."""
    beside = matrix - np.diag(np.diag(matrix))
    largest = np.argsort(-beside, axis=None, kind="stable")[:count]
    pairs = (np.unravel_index(index, matrix.shape) for index in largest)
    return [(classes[a], classes[b], float(beside[a, b])) for a, b in pairs]


def error_types(targets: Frames, predictions: Frames) -> tuple[int, ...]:
    """Numbers of wrong frames of types 1, 2 and 3, and in long runs."""
    types = Counter(np.concatenate([*map(frame_error_types, targets, predictions)]).tolist())
    return tuple(types[number] for number in (1, 2, 3, -1))


def frame_error_types(target: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Types of frames ``[T]`` by the rule of README.md: 1, 2 or 3 for wrong frames, 0 for right
    frames, -1 in long runs. The rule agrees with all worked examples of the thesis: a frame has
    type 1 only if its prediction is the target on the other side of a boundary of its phone, and
    the run of errors reaches this boundary."""
    types = np.zeros(len(target), dtype=int)
    starts = np.flatnonzero(np.diff(target)) + 1  # first frames of phones, without the first phone
    runs = np.flatnonzero(np.diff(target != prediction, prepend=False, append=False))
    for first, end in runs.reshape(-1, 2).tolist():
        # the boundary before frame b is reached by runs with frame b - 1 or b
        reached = starts[(starts >= first) & (starts <= end)]
        for frame in range(first, end):
            left, right = reached[reached <= frame][-1:], reached[reached > frame][:1]
            # targets on the other side of the boundaries of its phone
            others = [*target[left - 1], *target[right]]
            types[frame] = 1 if prediction[frame] in others else 2 if len(reached) else 3
        if end - first > MAX_RUN:
            types[first:end] = -1
    return types


def matching_frames(
    target: np.ndarray, predictions: Mapping[str, np.ndarray], wanted: Mapping[str, int]
) -> list[tuple[int, int]]:
    """First frame and end of the stretches of one utterance in which each model has its `wanted`
    type of error (see :func:`frame_error_types`). Stretches at the ends of the utterance are left
    out."""
    match = np.ones(len(target), dtype=bool)
    for model, number in wanted.items():
        match &= frame_error_types(target, predictions[model]) == number
    stretches = np.flatnonzero(np.diff(match, prepend=False, append=False)).reshape(-1, 2)
    return [(a, b) for a, b in stretches.tolist() if a > 0 and b < len(target)]


def class_attention(
    weights: Sequence[np.ndarray], labels: Frames, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Attention ``[layers, H, C, C]`` from the frames of each class (rows) to the frames of each
    class (columns), and uniform attention ``[C, C]``, with equal weights for all frames.

    Args:
        weights: ``[layers, H, T, T]`` of each utterance.
        labels: ``[T]`` of each utterance.
        num_classes: C.
    """
    attention, uniform = 0.0, 0.0
    for weight, label in zip(weights, labels, strict=True):
        member = np.eye(num_classes)[label]
        attention = attention + member.T @ weight @ member
        counts = member.sum(0)
        uniform = uniform + np.outer(counts, counts / len(label))
    return attention, uniform


def class_rows(
    attention: np.ndarray, uniform: np.ndarray, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows with layer, head, and a column for each relation of :func:`relations`: its attention as
    a multiple of uniform attention. The arrays come from :func:`class_attention`."""
    pairs = relations(classes)
    return [
        {
            "layer": layer + 1,
            "head": head + 1,
            **{name: _ratio(attention[layer, head], uniform, pair) for name, pair in pairs.items()},
        }
        for layer, head in np.ndindex(*attention.shape[:2])
    ]


def relations(classes: Sequence[str]) -> dict[str, np.ndarray]:
    """Pairs of classes, query and key, whose attention the thesis shows (5.4): bool ``[C, C]`` by
    name. Groups are vowels, silence and all others."""
    groups = np.array([group_of(name) for name in classes])
    members = {name: np.array([other.lower() == name for other in classes]) for name in FRICATIVES}
    everything = np.ones(len(classes), dtype=bool)
    pairs = {"same class": np.eye(len(classes), dtype=bool)}
    if "vowel" in groups:  # otherwise the names are in another phonetic alphabet
        pairs["same group"] = groups[:, None] == groups
    pairs |= {f"all to {name}": np.outer(everything, keys) for name, keys in members.items()}
    pairs |= {
        f"{query} to {key}": np.outer(members[query], members[key])
        for query in FRICATIVES
        for key in FRICATIVES
    }
    return pairs


def group_of(name: str) -> str:
    """Vowel, consonant or silence, for the thesis's and TIMIT's names of phones."""
    return "vowel" if name.lower() in VOWELS else name if name == SILENCE else "consonant"


def _ratio(attention: np.ndarray, uniform: np.ndarray, pairs: np.ndarray) -> float | None:
    expected = uniform[pairs].sum()
    return float(attention[pairs].sum() / expected) if expected > 0 else None


def attention_by_distance(weights: np.ndarray, farthest: int) -> np.ndarray:
    """Mean attention weight ``[.., 2 D + 1]`` of the keys up to D < T frames before and after their
    query. `weights` are ``[.., T, T]``, queries in rows."""
    distances = range(-farthest, farthest + 1)
    means = [np.diagonal(weights, d, axis1=-2, axis2=-1).mean(-1) for d in distances]
    return np.stack(means, axis=-1)


def near_attention(weights: np.ndarray, farthest: int) -> float:
    """Share of the attention ``[.., T, T]`` to keys at most `farthest` frames away."""
    index = np.arange(weights.shape[-1])
    near = np.abs(index[:, None] - index) <= farthest
    return float((weights * near).sum(-1).mean())


def head_rows(weights: np.ndarray, near: int, farthest: int = 10) -> list[dict[str, Any]]:
    """Rows with layer, head, distance (key minus query) with the largest mean weight, that weight,
    and the share of the attention at most `near` frames away. `weights` are ``[layers, H, T,
    T]``."""
    farthest = min(farthest, weights.shape[-1] - 1)
    by_distance = attention_by_distance(weights, farthest)
    return [
        {
            "layer": layer + 1,
            "head": head + 1,
            "distance": int(by_distance[layer, head].argmax()) - farthest,
            "weight": float(by_distance[layer, head].max()),
            "near": near_attention(weights[layer, head], near),
        }
        for layer, head in np.ndindex(*weights.shape[:2])
    ]
