"""Metrics of phone classification against examples that were worked out by hand."""

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("soundfile")
from recipes.phones import analysis
from recipes.phones.pictures import off_diagonal
from recipes.phones.report import nearest_heads, printed_errors


def numbered(text):
    """``"uh k:sil"`` to targets and predictions; a frame without colon is right."""
    frames = [frame.partition(":")[::2] for frame in text.split()]
    names = sorted({name for frame in frames for name in frame if name})
    target = np.array([names.index(a) for a, _ in frames])
    return target, np.array([names.index(b or a) for a, b in frames])


@pytest.mark.parametrize(
    ("text", "types"),
    [
        # the examples of the thesis
        ("uh uh uh:k k k", "0 0 1 0 0"),
        ("v dh:v dh:v dh:v ah", "0 1 1 1 0"),
        ("ah ah ah:v r:v r", "0 0 2 2 0"),
        ("k k:sil k:sil k:sil k", "0 3 3 3 0"),
        # single frames of a run may differ: n stands before d, not beside l
        ("n d:n d:n l:n l", "0 1 1 2 0"),
        # the other side of a boundary that the run does not reach
        ("v dh dh dh:v ah", "0 0 0 2 0"),
        ("v dh dh:v dh dh ah", "0 0 3 0 0 0"),
        # both sides of one boundary exchanged
        ("a a:b b:a b", "0 1 1 0"),
        # reaching a boundary from the right, and both ends of the utterance
        ("a:b b b:a", "1 0 3"),
        ("a:b a b", "3 0 0"),
        # four wrong frames in a row have no type, two runs with a right frame between have
        ("a b:a b:a b:a b:a c", "0 -1 -1 -1 -1 0"),
        ("a b:a b b:c c", "0 1 0 1 0"),
    ],
)
def test_frame_errors_have_their_types(text, types):
    target, prediction = numbered(text)
    assert " ".join(map(str, analysis.frame_error_types(target, prediction))) == types


def test_errors_are_counted_over_utterances():
    texts = ("uh uh uh:k k k", "k k:a k:a k:a k", "a b:a b:a b:a b:a c")
    targets, predictions = zip(*map(numbered, texts), strict=True)
    assert analysis.error_types(targets, predictions) == (1, 0, 3, 4)
    assert analysis.error_types(targets, targets) == (0, 0, 0, 0)
    assert analysis.error_rate(targets, predictions) == pytest.approx(100 * 8 / 16)


def test_smoothness_counts_changes_inside_utterances():
    assert analysis.class_changes([np.array([1, 1, 2, 2, 1]), np.array([3, 3]), np.array([4])]) == 2


def test_confusions_are_percent_of_the_target():
    targets = [np.array([0, 0, 0, 1]), np.array([1, 0])]
    predictions = [np.array([0, 1, 1, 1]), np.array([1, 2])]
    matrix = analysis.confusions(targets, predictions, 4)
    assert matrix.tolist() == [[25, 50, 25, 0], [0, 100, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert analysis.top_confusions(matrix, "abcd", 2) == [("a", "b", 50.0), ("a", "c", 25.0)]


def test_attention_is_averaged_by_distance():
    weights = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.9, 0.1]])
    assert np.allclose(analysis.attention_by_distance(weights, 2), [0.0, 0.55, 0.3, 0.5, 0.0])
    assert analysis.near_attention(weights, 0) == pytest.approx(0.3)
    assert analysis.near_attention(weights, 1) == pytest.approx(1.0)
    shifted = np.eye(12, k=-3)[None, None]  # each query looks three frames back
    head, *_ = analysis.head_rows(shifted, 5)
    assert list(head.values())[:4] == [1, 1, -3, 1.0]


# Table 5.11 of the thesis
TARGET, INC, EXC = np.array([[0, 0, 2, 2, 2], [0, 0, 0, 2, 2], [0, 1, 3, 3, 2]])


def test_frames_are_those_where_each_model_has_its_type_of_error():
    predictions = {"inc": INC, "exc": EXC}
    assert analysis.matching_frames(TARGET, predictions, {"inc": 1}) == [(2, 3)]
    assert analysis.matching_frames(TARGET, predictions, {"inc": 1, "exc": 2}) == [(2, 3)]
    assert analysis.matching_frames(TARGET, predictions, {"inc": 0, "exc": 2}) == [(1, 2), (3, 4)]
    assert analysis.matching_frames(TARGET, predictions, {"exc": 3}) == []
    ends = {"inc": np.array([1, 0, 2, 2, 0])}
    assert analysis.frame_error_types(TARGET, ends["inc"]).tolist() == [3, 0, 0, 0, 3]
    assert analysis.matching_frames(TARGET, ends, {"inc": 3}) == []


def test_errors_are_printed_as_in_the_thesis():
    names, classes = ["other", "4ayc030p"], ["d", "dh", "ih", "t"]
    predictions = {"inc": [TARGET, INC], "exc": [TARGET, EXC]}
    lines = printed_errors(names, [TARGET, TARGET], predictions, classes)
    start = lines.index("M-inc has type 1 where M-exc has type 2 (Tables 5.10 and 5.11):")
    assert lines[start + 2 : start + 7] == [
        "| 4ayc030p, frame | 0 | 1 | 2 | 3 | 4 |",
        "|---|---|---|---|---|---|",
        "| target | d | d | ih | ih | ih |",
        "| M-inc | d | d | d | ih | ih |",
        "| M-exc | d | dh | t | t | ih |",
    ]
    assert lines[lines.index("M-exc, type 3 (Table 5.8):") + 2] == "none"


def test_attention_between_classes_is_compared_to_uniform():
    """Two utterances, by hand: the first attends to its own class only."""
    labels = [np.array([0, 0, 1, 1]), np.array([0, 2])]
    within_class = np.kron(np.eye(2), np.full((2, 2), 0.5))
    weights = [within_class[None, None], np.full((1, 1, 2, 2), 0.5)]
    attention, uniform = analysis.class_attention(weights, labels, 3)
    assert attention[0, 0].tolist() == [[2.5, 0, 0.5], [0, 2, 0], [0.5, 0, 0.5]]
    assert uniform.tolist() == [[1.5, 1, 0.5], [1, 1, 0], [0.5, 0, 0.5]]
    (row,) = analysis.class_rows(attention, uniform, ["z", "aa", "s"])
    assert row["same class"] == pytest.approx((2.5 + 2 + 0.5) / 3)
    assert row["same group"] == pytest.approx((2.5 + 2 + 0.5 + 0.5 + 0.5) / 4)
    assert row["all to z"] == pytest.approx(3 / 3)
    assert row["z to z"] == pytest.approx(2.5 / 1.5)
    assert row["z to s"] == row["s to z"] == pytest.approx(1)
    (other,) = analysis.class_rows(attention, uniform, ["p", "t", "k"])
    assert other["z to s"] is None
    assert "same group" not in other


def test_heads_are_followed_that_are_nearest_in_the_first_epoch():
    rows = [
        {"trained": "inc", "seed": seed, "epoch": epoch, "layer": layer, "head": head, "near": near}
        for seed in (1, 2)
        for epoch, layer, head, near in [
            # the nearest head of a layer is another one with each seed
            *((10, 1, seed, 0.2), (10, 1, 3 - seed, 0.6), (10, 2, 1, 0.5), (10, 2, 2, 0.1)),
            *((30, 1, 1, 0.9), (30, 1, 2, 0.3), (30, 2, 1, 0.4), (30, 2, 2, 0.8)),
        ]
    ]
    assert nearest_heads(rows) == [
        {"trained": "inc", "seed": 1, "layer": 1, "head": 2, "epoch 10": 0.6, "epoch 30": 0.3},
        {"trained": "inc", "seed": 1, "layer": 2, "head": 1, "epoch 10": 0.5, "epoch 30": 0.4},
        {"trained": "inc", "seed": 2, "layer": 1, "head": 1, "epoch 10": 0.6, "epoch 30": 0.9},
        {"trained": "inc", "seed": 2, "layer": 2, "head": 1, "epoch 10": 0.5, "epoch 30": 0.4},
    ]


def test_pictures_of_confusions_leave_out_what_the_thesis_leaves_out():
    matrix = np.full((3, 3), 10.0)
    shown = off_diagonal(matrix, ["nsn", "s", "sil"])
    assert shown.tolist() == [[0, 10, 10], [10, 0, 10], [0, 10, 0]]
    assert off_diagonal(matrix, ["p", "s", "sil"]).sum() == 60
    assert (matrix == 10).all()
