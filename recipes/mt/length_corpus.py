"""The corpora of the quickstart: short sentences for training, long ones for testing.

Either the built-in number lists (number_lists.py) or the user's own parallel text.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from recipes.lab.runs import binarise
from recipes.lab.steps import CommandError, step, write_lines
from recipes.lab.subwords import SentencePiece
from recipes.mt import number_lists
from recipes.mt.corpus import (
    fingerprint,
    languages_of,
    read_lines,
    read_pairs,
    split_pairs,
    write_columns,
)

MIN_PAIRS = 8  # fairseq drops a last batch that is no multiple of 8, and refuses an empty set


@dataclass(frozen=True)
class Lengths:
    """The groups of test sentences, from short to long."""

    name: str  # what the lengths count
    labels: tuple[str, ...]
    trained: int  # so many of the labels, from the first, occur in training


@dataclass(frozen=True)
class Corpus:
    """A binarised corpus with the test sentences by length."""

    folder: Path
    settings: Mapping[str, object]
    languages: tuple[str, str]
    lengths: Lengths

    def references(self) -> list[str]:
        """The target side of the test set."""
        return list(read_lines(self.folder / f"test.{self.languages[1]}", "--test"))


def finish_corpus(folder: Path, languages: tuple[str, str], vocab_size: int) -> None:
    """Segment and binarise the text files ``{train,valid,test}.{language}`` in `folder`."""
    files = [folder / f"train.{language}" for language in languages]
    subwords = SentencePiece.train(files, folder / "sentencepiece.model", vocab_size)
    prefixes = {split: folder / f"{split}.pieces" for split in ("train", "valid", "test")}
    for split, prefix in prefixes.items():
        for language in languages:
            lines = read_lines(folder / f"{split}.{language}", "--data")
            write_lines(Path(f"{prefix}.{language}"), map(subwords.encode, lines))
    binarise(prefixes, languages, 1, folder / "binary")


def prepare_number_lists(args: argparse.Namespace) -> Corpus:
    """The built-in corpus."""
    vocab_size = args.vocab_size or 140
    sizes = number_lists.SPLIT_SIZES | {"train": args.train_size, "test": args.test_size}
    settings = {"vocab_size": vocab_size, "lists": sizes}
    numbers = tuple(str(length) for length in range(1, number_lists.MAX_TEST_LENGTH + 1))
    lengths = Lengths("numbers in the list", numbers, number_lists.MAX_TRAIN_LENGTH)

    def make(folder: Path) -> None:
        number_lists.write_number_lists(folder, sizes=sizes)
        finish_corpus(folder, number_lists.LANGUAGES, vocab_size)

    folder = step(args.work / "number_lists" / "data", settings, make)
    return Corpus(folder, settings, number_lists.LANGUAGES, lengths)


def word_count(text: str) -> int:
    """Length of a sentence as the user sees it, before segmentation."""
    return len(text.split())


def length_bins(limit: int) -> dict[str, range]:
    """Bins of source words around the training `limit`: two within, three beyond."""
    edges = [0, limit // 2, limit, limit * 3 // 2, limit * 2]
    bins = {f"{low + 1}-{high}": range(low + 1, high + 1) for low, high in pairwise(edges)}
    return {label: bin for label, bin in bins.items() if bin} | {
        f"over {edges[-1]}": range(edges[-1] + 1, sys.maxsize)
    }


def read_splits(args: argparse.Namespace) -> dict[str, list[tuple[str, str]]]:
    """Read the user's files, without pairs that are empty on one side.

    Validation and test data are split off the training data where they are not given.
    """
    given = {}
    for split, option in (("train", "data"), ("valid", "valid"), ("test", "test")):
        if paths := getattr(args, option):
            given[split] = [pair for pair in read_pairs(*paths, f"--{option}") if all(pair)]
    total = len(given["train"])
    if total < 200:
        raise CommandError(
            f"--data {args.data[0]} {args.data[1]}: only {total} non-empty sentence pairs; at"
            " least 200 are needed"
        )
    sizes = {"valid": max(40, min(500, total // 20)), "test": min(1000, total // 10)}
    missing = {split: size for split, size in sizes.items() if split not in given}
    return given | split_pairs(given["train"], missing)


def prepare_files(args: argparse.Namespace) -> Corpus:
    """A corpus of the user's own text files, trained on its shorter sentences."""
    vocab_size = args.vocab_size or 4000
    languages = languages_of(*args.data)
    files = [path for paths in (args.data, args.valid, args.test) for path in paths or ()]
    splits = read_splits(args)
    if len(splits["train"]) < MIN_PAIRS:
        raise CommandError(
            f"--data {args.data[0]} {args.data[1]}: only {len(splits['train'])} training pairs are"
            " not also in validation or test data; give more, or more different sentences"
        )
    limit = args.max_train_length or int(
        median(word_count(source) for source, _ in splits["train"])
    )
    for split in ("train", "valid"):
        splits[split] = [pair for pair in splits[split] if max(map(word_count, pair)) <= limit]
        if len(splits[split]) < MIN_PAIRS:
            raise CommandError(
                f"--max-train-length {limit}: only {len(splits[split])} {split} pairs are that"
                f" short, {MIN_PAIRS} are needed; choose a larger length"
            )
    bins = length_bins(limit)
    groups = [
        next(label for label, bin in bins.items() if word_count(source) in bin)
        for source, _ in splits["test"]
    ]
    labels = tuple(label for label in bins if label in groups)
    trained = sum(bins[label][-1] <= limit for label in labels)
    lengths = Lengths("source words", labels, trained)
    settings = {
        "vocab_size": vocab_size,
        "max_train_length": limit,
        "files": [fingerprint(path, "--data") for path in files],
    }

    def make(folder: Path) -> None:
        for split, pairs in splits.items():
            write_columns([folder / f"{split}.{language}" for language in languages], pairs)
        write_lines(folder / "test.group", groups)
        finish_corpus(folder, languages, vocab_size)

    name = args.data[0].name.removesuffix(".gz")
    folder = step(args.work / name / "data", settings, make)
    return Corpus(folder, settings, languages, lengths)
