"""Data preparation of the recipes: plain text to binarised subwords, in four steps (folders).

text        the user's files, or built-in number lists; held-out lines become missing splits
tokenised   Moses normalisation and tokenisation, training pairs cleaned (not for sentencepiece)
subwords    joint segmentation learned on training text, length filter, joining of neighbours
binary      fairseq-preprocess with a joined dictionary
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from recipes.lab.runs import binarise
from recipes.lab.steps import CommandError, matches, progress, read_written, step, write_lines
from recipes.lab.subwords import SEGMENTATIONS
from recipes.mt import corpus
from recipes.mt.catalog import Text
from recipes.mt.number_lists import write_number_lists

# number of lines of each validation file; the files together are one set
VALID_SIZES = "valid.sizes"
SAMPLE_SIZES = {"train": 600, "valid": 20, "test": 12}
# A step gets and records all options of the text except these, which only later steps need.
LATER = {"tokenised": ("segmentation", "vocab_size", "max_subwords", "filter_valid", "join")}
LATER["text"] = ("lowercase", "aggressive_hyphens", "clean", "max_ratio", *LATER["tokenised"])

DOING = {
    "text": "copies the text",
    "tokenised": "Moses tokens of all splits, and cleaning of train",
    "subwords": "learns subwords on train and applies them; both take long on a large text",
    "binary": "fairseq-preprocess",
}

# The user's text by split. Training and validation files are concatenated, test files are not.
Files = Mapping[str, Sequence[tuple[Path, Path]]]


class Cleaning:
    """The filter of clean-corpus-n.perl. Leaves out, and counts, pairs of a split that do not have
    `low` to `high` tokens (`unit`) on both sides, and pairs of which one side is more than
    `max_ratio` times as long as the other."""

    def __init__(self, split: str, unit: str, low: int, high: int | None, max_ratio: float):
        self.split, self.unit = split, unit
        self.low, self.high, self.max_ratio = low, high, max_ratio
        self.total = 0
        self.removed: Counter[str] = Counter()  # by reason

    def why_unfit(self, pair: corpus.Row) -> str:
        """The reason to leave a pair out; empty for a pair to keep."""
        short, long = sorted(len(text.split()) for text in pair)
        if short < self.low:
            return f"of fewer than {self.low} {self.unit} on a side" if short else "empty on a side"
        if self.high and long > self.high:
            return f"of more than {self.high} {self.unit} on a side"
        if long > self.max_ratio * short:
            return f"more than {self.max_ratio:g} times as long on one side"
        return ""

    def fitting(self, rows: Iterator[corpus.Row]) -> Iterator[corpus.Row]:
        """The rows whose first two columns are a pair to keep."""
        for row in rows:
            self.total += 1
            if reason := self.why_unfit(row[:2]):
                self.removed[reason] += 1
            else:
                yield row

    def report(self) -> None:
        """Prints how many pairs were left out, and why. Refuses a split of which no pair is
        left."""
        by, count = f"cleaning by {self.unit} removed", self.removed.total()
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.removed.items())
        if count == self.total:
            raise CommandError(
                f"--{self.split}: {by} all {count} pairs ({reasons}); check that line n of one file"
                " is the translation of line n of the other"
            )
        why = f" ({reasons})" if reasons else ""
        print(f"{self.split}: {by} {count or 'none'} of {self.total} pairs{why}", flush=True)


def split_files(folder: Path, split: str, options: Namespace) -> list[Path]:
    return [folder / f"{split}.{language}" for language in options.languages]


def prepare(recipe: Text, files: Files, work: Path, sample: bool, workers: int) -> None:
    """Makes the four folders of this module in `work`; finished folders are reused."""
    digests = {
        split: [corpus.fingerprint(path, f"--{split}") for pair in pairs for path in pair]
        for split, pairs in files.items()
    }
    tests = [f"test{number or ''}" for number in range(max(1, len(files["test"])))]
    splits = ["train", "valid", *tests]

    def make(name: str, function: Callable[..., None], *inputs: Any) -> Path:
        step_options = [option for option in fields(Text) if option.name not in LATER.get(name, ())]
        options = {option.name: getattr(recipe, option.name) for option in step_options}
        settings = {**digests, "sample": sample, **options}
        if matches(work / name, settings):
            print(f"prepare {name}: already finished", flush=True)
        else:
            print(f"prepare {name}: {DOING[name]}", flush=True)
            step(work / name, settings, partial(function, Namespace(**options), *inputs))
        return work / name

    text = tokens = make("text", collect_text, files, sample)
    if recipe.segmentation == "bpe":
        tokens = make("tokenised", tokenise_text, splits, text, workers)
    subwords = make("subwords", segment_text, splits, text, tokens, workers)
    prefixes = {split: str(subwords / split) for split in ("train", "valid")}
    prefixes["test"] = ",".join(str(subwords / test) for test in tests)
    make("binary", lambda options, folder: binarise(prefixes, options.languages, workers, folder))


def collect_text(options: Namespace, files: Files, sample: bool, folder: Path) -> None:
    """Writes plain text ``{train,valid,test,test1...}.{language}``."""
    if not files["train"]:
        write_number_lists(folder, sizes=SAMPLE_SIZES, languages=options.languages)
        return
    counts = {}

    def read(split: str, pairs: Sequence[tuple[Path, Path]]) -> Iterator[corpus.Row]:
        lines = chain.from_iterable(corpus.read_pairs(*pair, f"--{split}") for pair in pairs)
        return islice(lines, SAMPLE_SIZES[split] if sample else None)

    every = options.hold_out_every
    remainders = {0: "valid", every // 2: "test"}  # line number modulo `every`
    held_out = {remainder: split for remainder, split in remainders.items() if not files[split]}
    for split in ("train", *held_out.values()):
        lines = enumerate(read("train", files["train"]))
        pairs = (pair for n, pair in lines if held_out.get(n % every, "train") == split)
        counts[split] = corpus.write_columns(split_files(folder, split, options), pairs)
        if not counts[split]:
            raise CommandError(
                f"--train: too few lines to hold out every {every}th for --{split}; give --{split}"
            )
    if files["valid"]:
        parts = [read("valid", [pair]) for pair in files["valid"]]
        counts["valid"] = write_parts(split_files(folder, "valid", options), parts)
    for number, pair in enumerate(files["test"]):
        name = f"test{number or ''}"
        rows = read("test", [pair])
        counts[name] = corpus.write_columns(split_files(folder, name, options), rows)
    first, *others = (f"{split} {count}" for split, count in counts.items())
    print(f"read: {', '.join([f'{first} pairs', *others])}", flush=True)


def write_parts(names: Sequence[Path], parts: Sequence[Iterator[corpus.Row]]) -> int:
    """Writes the rows of several files one after the other, and in another file the number of rows
    of each file. Returns the number of all rows."""
    sizes = [0] * len(parts)

    def counted() -> Iterator[corpus.Row]:
        for number, part in enumerate(parts):
            for row in part:
                sizes[number] += 1
                yield row

    total = corpus.write_columns(names, counted())
    write_lines(names[0].with_name(VALID_SIZES), map(str, sizes))
    return total


def part_sizes(folder: Path, whole: int | None) -> list[int | None]:
    """Numbers of validation lines in `folder` by file of the user; they add up to `whole`."""
    path = folder / VALID_SIZES
    # held-out lines count as one file
    return list(map(int, read_written(path))) if path.exists() else [whole]


def tokenise_text(
    options: Namespace, splits: Sequence[str], text: Path, workers: int, folder: Path
) -> None:
    """Writes Moses tokens of all splits, without training pairs of unsuitable lengths."""
    flags = options.aggressive_hyphens, options.lowercase
    cleaning = Cleaning("train", "words", *(options.clean or (1, None)), options.max_ratio)
    moses = [corpus.Moses(language, *flags).tokenise for language in options.languages]
    for split in splits:
        pairs = corpus.read_pairs(*split_files(text, split, options), split)
        pairs = corpus.map_columns(moses, pairs, workers)
        pairs = iter(progress(pairs, f"tokenise {split}", unit="pair"))
        if split == "train":
            pairs = cleaning.fitting(pairs)
        corpus.write_columns(split_files(folder, split, options), pairs)
    cleaning.report()


def segment_text(
    options: Namespace, splits: Sequence[str], text: Path, tokens: Path, workers: int, folder: Path
) -> None:
    """Writes ``model`` and ``{split}.{language}``. For all splits but train also writes
    ``{split}.reference``, the plain text to compare with, filtered and joined in the same way."""
    files = split_files(tokens, "train", options)
    model = SEGMENTATIONS[options.segmentation].train(files, folder / "model", options.vocab_size)
    for split in splits:
        rows = corpus.read_pairs(*split_files(tokens, split, options), split)
        rows = corpus.map_columns([model.encode, model.encode], rows, workers)
        names = split_files(folder, split, options)
        if split != "train":
            names.append(folder / f"{split}.reference")
            plain = corpus.read_lines(split_files(text, split, options)[1], split)
            rows = ((*pair, reference) for pair, reference in zip(rows, plain, strict=True))
        rows = iter(progress(rows, f"segment {split}", unit="pair"))
        cleaning = None
        if split == "train" or (split == "valid" and options.filter_valid):
            cleaning = Cleaning(split, "subwords", 1, options.max_subwords, options.max_ratio)
        if split == "valid":
            # each file separately, like test sets: sentences of two files are never joined
            parts = (islice(rows, size) for size in part_sizes(text, None))
            write_parts(names, [fit_and_join(part, options, cleaning) for part in parts])
        else:
            corpus.write_columns(names, fit_and_join(rows, options, cleaning))
        if cleaning:
            cleaning.report()


def fit_and_join(
    rows: Iterator[corpus.Row], options: Namespace, cleaning: Cleaning | None
) -> Iterator[corpus.Row]:
    """Leaves out rows that `cleaning` removes, and joins neighbours."""
    if cleaning:
        rows = cleaning.fitting(rows)
    return corpus.join_neighbours(rows, options.join) if options.join > 1 else rows
