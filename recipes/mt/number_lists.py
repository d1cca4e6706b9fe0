"""A small parallel corpus of real language: lists of numbers, written out in English and German.

    81, 7, 36   ->   eighty-one, seven, thirty-six
                     einundachtzig, sieben, sechsunddreißig

German puts units before tens ("einundachtzig" is one-and-eighty), so a model has to reorder words
within a number and to keep track of its position in the list. Training lists are short and test
lists are long, so the corpus tests length generalisation. Each list has one right translation.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import product
from math import ceil
from pathlib import Path

from num2words import num2words

from recipes.lab.steps import CommandError, write_lines

LANGUAGES = ("en", "de")
MAX_NUMBER = 99
MAX_TRAIN_LENGTH = 4
MAX_TEST_LENGTH = 12
SPLIT_SIZES = {"train": 20000, "valid": 400, "test": 1200}

NumberList = tuple[int, ...]


def spell(numbers: Sequence[int], language: str) -> str:
    """Writes a list of numbers out in words, separated by commas."""
    try:
        return ", ".join(num2words(number, lang=language) for number in numbers)
    except NotImplementedError:
        why = "there are no built-in number lists in this language; give your text by --train"
        raise CommandError(f"language {language}: {why}") from None


def draw_split(
    rng: random.Random, size: int, max_length: int, forbidden: set[NumberList], distinct: bool
) -> list[NumberList]:
    """Draws about `size` lists of 1..`max_length` numbers, equally many of each length. With
    `distinct`, no list is drawn twice, and only a fifth of the hundred lists of one number is
    drawn, so that some are left for training."""
    lists: list[NumberList] = []
    seen = set(forbidden)
    for length in range(1, max_length + 1):
        most = (MAX_NUMBER + 1) ** length // 5 if distinct else size
        end = len(lists) + min(ceil(size / max_length), most)
        while len(lists) < end:
            candidate = tuple(rng.randint(0, MAX_NUMBER) for _ in range(length))
            if candidate not in seen:
                lists.append(candidate)
                seen |= {candidate} if distinct else set()
    return lists


def make_number_lists(
    seed: int = 0, sizes: Mapping[str, int] = SPLIT_SIZES
) -> dict[str, list[NumberList]]:
    """Disjoint sets of lists: 1..4 numbers for training and validation, 1..12 for the test."""
    rng = random.Random(seed)
    test = draw_split(rng, sizes["test"], MAX_TEST_LENGTH, set(), distinct=True)
    valid = draw_split(rng, sizes["valid"], MAX_TRAIN_LENGTH, set(test), distinct=True)
    train = draw_split(rng, sizes["train"], MAX_TRAIN_LENGTH, {*test, *valid}, distinct=False)
    rng.shuffle(train)
    return {"train": train, "valid": valid, "test": test}


def write_number_lists(
    folder: Path, seed: int = 0, sizes: Mapping[str, int] = SPLIT_SIZES, languages=LANGUAGES
) -> None:
    """Writes ``{train,valid,test}.{language}``, and in ``test.group`` the lengths of the lists."""
    splits = make_number_lists(seed, sizes)
    for split, language in product(splits, languages):
        lines = (spell(numbers, language) for numbers in splits[split])
        write_lines(folder / f"{split}.{language}", lines)
    write_lines(folder / "test.group", (str(len(numbers)) for numbers in splits["test"]))
