"""Stacked and swapped sentences: the text functions, and the loss by position."""

import math

import pytest

from recipes.mt.prepare import SEPARATOR
from recipes.mt.probes import (
    first_to_end,
    last_to_front,
    loss_by_position,
    stack_pairs,
    stack_sentences,
)


def test_junctions_get_a_comma_and_lower_case():
    stacked = stack_sentences(["Das ist gut .", "Er kommt !", "Wer ?"])
    assert stacked == "Das ist gut , er kommt ! wer ?"
    assert stack_sentences(["Plain text.", "Next one."]) == "Plain text, next one."
    assert stack_sentences(["Allein ."]) == "Allein ."


def test_empty_sentences_can_be_stacked():
    assert stack_sentences(["", "A .", ""]).split() == ["a", ","]


def test_pairs_are_stacked_until_the_target_is_long_enough():
    pairs = [(f"S{n} .", f"T{n} x y .") for n in range(7)]
    stacked = list(stack_pairs(pairs, lambda text: len(text.split()), 10))
    assert stacked == [
        ("S0 , s1 , s2 .", "T0 x y , t1 x y , t2 x y ."),
        ("S3 , s4 , s5 .", "T3 x y , t4 x y , t5 x y ."),
    ]


def test_loss_is_averaged_over_the_sentences_that_reach_a_position():
    rows = loss_by_position(["-1.0 -2.0 -3.0", "-3.0"])
    assert [row[0] for row in rows] == [0, 1, 2]
    assert [row[1] for row in rows] == pytest.approx([math.log(4), math.log(4), math.log(8)])
    assert [row[2] for row in rows] == [2, 1, 1]


def test_swap_and_back():
    text = f" {SEPARATOR} ".join(["a b", "c", "d e"])
    swapped = f" {SEPARATOR} ".join(["c", "d e", "a b"])
    assert first_to_end(text) == swapped
    assert last_to_front(swapped) == text
    assert last_to_front("no separator") == "no separator"
