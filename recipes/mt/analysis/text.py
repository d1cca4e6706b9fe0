"""Stacked sentences (CAPE section 5.3, figure 8) and swapped ones (SHAPE section 3.2, table 1)."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from recipes.mt.corpus import Pair
from recipes.mt.prepare import SEPARATOR


def continue_sentence(text: str) -> str:
    """The end of a stacked sentence that is not the last: its full stop becomes a comma."""
    return f"{text[:-1]}," if text.endswith(".") else text


def lower_first(text: str) -> str:
    """The first letter in lower case; sentencepiece may have put its mark before it."""
    place = int(text.startswith("\u2581"))
    return text[:place] + text[place : place + 1].lower() + text[place + 1 :]


def stack_sentences(sentences: Sequence[str]) -> str:
    """One long sentence; all but the first begin in lower case."""
    first, *others = sentences
    parts = [first, *map(lower_first, others)]
    return " ".join([*map(continue_sentence, parts[:-1]), parts[-1]])


def stack_pairs(
    pairs: Iterable[Pair], target_length: Callable[[str], int], minimum: int
) -> Iterator[Pair]:
    """Stack consecutive pairs until the target has `minimum` tokens by `target_length(text)`.

    What is left at the end and too short is dropped.
    """
    group: list[Pair] = []
    for pair in pairs:
        group.append(pair)
        source, target = (stack_sentences(side) for side in zip(*group, strict=True))
        if target_length(target) >= minimum:
            yield source, target
            group = []


def first_to_end(text: str) -> str:
    """Move the first of the joined sentences to the end."""
    first, *others = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([*others, first])


def last_to_front(text: str) -> str:
    """The inverse of :func:`first_to_end`, for a translation, which may lack separators."""
    *others, last = text.split(f" {SEPARATOR} ")
    return f" {SEPARATOR} ".join([last, *others])
