"""The built-in corpus: language, lengths, and no test list in training."""

import pytest

from recipes.mt.number_lists import MAX_NUMBER, make_number_lists, spell, write_number_lists

SIZES = {"train": 800, "valid": 80, "test": 240}


@pytest.fixture(scope="module")
def splits():
    return make_number_lists(seed=1, sizes=SIZES)


def test_numbers_are_spelled_in_each_language():
    assert spell((81, 7, 36), "en") == "eighty-one, seven, thirty-six"
    assert spell((81, 7, 36), "de") == "einundachtzig, sieben, sechsunddreißig"  # units first
    assert spell((99,), "fr") == "quatre-vingt-dix-neuf"


def test_training_lists_are_short_with_all_numbers_and_tests_long(splits):
    assert {len(numbers) for numbers in splits["train"]} == {1, 2, 3, 4}
    assert {len(numbers) for numbers in splits["valid"]} == {1, 2, 3, 4}
    assert {len(numbers) for numbers in splits["test"]} == set(range(1, 13))
    assert {n for numbers in splits["train"] for n in numbers} == set(range(MAX_NUMBER + 1))


def test_splits_are_disjoint_and_held_out_lists_distinct(splits):
    train, valid, test = (set(splits[name]) for name in ("train", "valid", "test"))
    assert not train & test
    assert not train & valid
    assert not valid & test
    assert len(test) == len(splits["test"])
    assert len(valid) == len(splits["valid"])


def test_training_keeps_lists_of_one_number_and_longer_tests_are_equally_many(splits):
    assert len({numbers for numbers in splits["train"] if len(numbers) == 1}) >= 60
    counts = [sum(len(numbers) == n for numbers in splits["test"]) for n in range(2, 13)]
    assert counts == [20] * 11


def test_seed_decides_which_lists_are_made(splits):
    assert make_number_lists(seed=1, sizes=SIZES) == splits
    assert make_number_lists(seed=2, sizes=SIZES) != splits


def test_files_are_aligned(tmp_path):
    write_number_lists(tmp_path, sizes=SIZES)
    lines = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    names = {f"{split}.{side}" for split in SIZES for side in ("en", "de")}
    assert set(lines) == {*names, "test.group"}
    for split in SIZES:
        assert len(lines[f"{split}.en"]) == len(lines[f"{split}.de"])
    assert [str(line.count(",") + 1) for line in lines["test.de"]] == lines["test.group"]
