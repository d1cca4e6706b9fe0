"""Stacked and swapped sentences: the text functions, and the loss by position."""

from types import SimpleNamespace

import numpy as np
import pytest

from recipes.lab.steps import CommandError
from recipes.mt.analysis.length import stack_all
from recipes.mt.analysis.stack import (
    estimate,
    position_rows,
    stack_for,
    stack_sentences,
)
from recipes.mt.analysis.swap import first_to_end, last_to_front
from recipes.mt.corpus import SEPARATOR


def test_junctions_get_a_comma_and_lower_case():
    stacked = stack_sentences(["Das ist gut .", "Er kommt !", "Wer ?"])
    assert stacked == "Das ist gut , er kommt ! wer ?"
    assert stack_sentences(["Plain text.", "Next one."]) == "Plain text, next one."
    pieces = stack_sentences(["\u2581Ja .", "\u2581Das \u2581geht"])  # of sentencepiece
    assert pieces == "\u2581Ja , \u2581das \u2581geht"
    assert stack_sentences(["", "A .", ""]).split() == ["a", ","]


def test_stacks_of_each_number_hold_all_of_the_text():
    """But for a rest that is too short for one more."""
    pairs = [(f"S{n} .", f"T{n} .") for n in range(5)]
    stacked, groups = stack_all(pairs, [1, 2])
    assert groups == ["1"] * 5 + ["2"] * 2
    assert stacked == [*pairs, ("S0 , s1 .", "T0 , t1 ."), ("S2 , s3 .", "T2 , t3 .")]
    for counts in ([2, 1], [1, 1], [1, 6]):
        with pytest.raises(CommandError, match="--stack .* increasing numbers up to 5"):
            stack_all(pairs, counts)


def test_loss_is_averaged_over_the_sentences_that_reach_a_position():
    rows = position_rows([np.array([1.0, 2.0, 3.0]), np.array([3.0])], 2)
    assert [tuple(row.values()) for row in rows] == [(0, 2.0, 2, 0), (1, 2.0, 1, 0), (2, 3.0, 1, 1)]


def test_standard_errors_are_those_of_resampled_sentences():
    """Sentences differ in length; the bootstrap needs no formula."""
    rng = np.random.default_rng(2)
    losses = [rng.normal(4, 1) + rng.normal(0, 0.5, rng.integers(5, 30)) for _ in range(300)]
    _, (spread,) = estimate([losses], 40)
    resampled = [
        np.concatenate([losses[row] for row in rng.integers(0, 300, 300)]).mean()
        for _ in range(1000)
    ]
    assert spread == pytest.approx(np.std(resampled), rel=0.1)


def test_bands_of_several_seeds_are_over_seeds():
    """Means 1, 2, 3."""
    mean, spread = estimate([[np.full(4, value), np.full(4, value)] for value in (1, 2, 3.0)], 4)
    assert mean == pytest.approx([2.0])
    assert spread == pytest.approx([1.0])


def test_stacks_reach_their_length_in_the_subwords_of_every_model():
    lengths = (len, lambda text: len(text.split()))
    models = [SimpleNamespace(target_length=length) for length in lengths]
    pairs = [(f"s{n} .", f"t{n} .") for n in range(9)]
    (first, second) = stack_for(models, pairs, 8)
    assert first[1] == "t0 , t1 , t2 , t3 ."  # the words, of which there are fewer than letters
    assert second[0] == "s4 , s5 , s6 , s7 ."
    assert stack_for(models[:1], pairs, 8)[0][1] == "t0 , t1 ."


def test_swapping_there_and_back_gives_the_text():
    text = f" {SEPARATOR} ".join(["a b", "c", "d e"])
    swapped = f" {SEPARATOR} ".join(["c", "d e", "a b"])
    assert first_to_end(text) == swapped
    assert last_to_front(swapped) == text
    assert last_to_front("no separator") == "no separator"
