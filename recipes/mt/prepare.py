"""Data preparation of the recipes: plain text to binarised subwords, in four steps that are kept.

text        the user's files, or built-in number lists; held-out lines become missing splits
tokenised   Moses normalisation and tokenisation, training pairs cleaned (not for sentencepiece)
subwords    joint segmentation learned on training text, length filter, joining of neighbours
binary      fairseq-preprocess with a joined dictionary
"""

from argparse import Namespace
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

VALID_SIZES = "valid.sizes"  # lines of each validation file, which make one set together
SAMPLE_SIZES = {"train": 600, "valid": 20, "test": 12}
# A step knows and records all options of the text but these, which only later steps look at.
LATER = {"tokenised": ("segmentation", "vocab_size", "max_subwords", "filter_valid", "join")}
LATER["text"] = ("lowercase", "aggressive_hyphens", "clean", "max_ratio", *LATER["tokenised"])

# The user's text by split. Training and validation files are concatenated, test files are not.
Files = Mapping[str, Sequence[tuple[Path, Path]]]


def lengths_fit(pair: corpus.Row, low: int, high: int | None, max_ratio: float) -> bool:
    """The filter of clean-corpus-n.perl: both sides have `low` to `high` tokens, in proportion."""
    short, long = sorted(len(text.split()) for text in pair)
    return low <= short and long <= (high or long) and long <= max_ratio * short


def split_files(folder: Path, split: str, options: Namespace) -> list[Path]:
    return [folder / f"{split}.{language}" for language in options.languages]


def prepare(recipe: Text, files: Files, work: Path, sample: bool, workers: int) -> None:
    """Make the four folders of this module in `work`; finished ones are reused."""
    given = {
        split: [corpus.fingerprint(path, f"--{split}") for pair in pairs for path in pair]
        for split, pairs in files.items()
    }
    tests = [f"test{number or ''}" for number in range(max(1, len(files["test"])))]
    splits = ["train", "valid", *tests]

    def make(name: str, function: Callable[..., None], *inputs: Any) -> Path:
        known = [option for option in fields(Text) if option.name not in LATER.get(name, ())]
        options = {option.name: getattr(recipe, option.name) for option in known}
        settings = {**given, "sample": sample, **options}
        # of records that were written before an option was; the languages were those of the recipe
        unset = {option.name: option.default for option in known}
        if not matches(work / name, settings, unset={**unset, "languages": recipe.languages}):
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
    """Write plain text ``{train,valid,test,test1...}.{language}``."""
    if not files["train"]:
        write_number_lists(folder, sizes=SAMPLE_SIZES, languages=options.languages)
        return

    def read(split: str, pairs: Sequence[tuple[Path, Path]]) -> Iterator[corpus.Row]:
        lines = chain.from_iterable(corpus.read_pairs(*pair, f"--{split}") for pair in pairs)
        return islice(lines, SAMPLE_SIZES[split] if sample else None)

    every = options.hold_out_every
    places = {0: "valid", every // 2: "test"}  # line number modulo `every`
    held_out = {place: split for place, split in places.items() if not files[split]}
    for split in ("train", *held_out.values()):
        lines = enumerate(read("train", files["train"]))
        pairs = (pair for n, pair in lines if held_out.get(n % every, "train") == split)
        if corpus.write_columns(split_files(folder, split, options), pairs) == 0:
            raise CommandError(
                f"--train: too few lines to hold out every {every}th for --{split}; give --{split}"
            )
    if files["valid"]:
        parts = [read("valid", [pair]) for pair in files["valid"]]
        write_parts(split_files(folder, "valid", options), parts)
    for number, pair in enumerate(files["test"]):
        names = split_files(folder, f"test{number or ''}", options)
        corpus.write_columns(names, read("test", [pair]))


def write_parts(names: Sequence[Path], parts: Sequence[Iterator[corpus.Row]]) -> None:
    """Writes rows of several files one after the other, and how many each has."""
    sizes = [0] * len(parts)

    def counted() -> Iterator[corpus.Row]:
        for number, part in enumerate(parts):
            for row in part:
                sizes[number] += 1
                yield row

    corpus.write_columns(names, counted())
    write_lines(names[0].with_name(VALID_SIZES), map(str, sizes))


def part_sizes(folder: Path, whole: int | None) -> list[int | None]:
    """How many of the `whole` validation lines in `folder` belong to each of the user's files."""
    path = folder / VALID_SIZES
    return list(map(int, read_written(path))) if path.exists() else [whole]  # held out, or older


def tokenise_text(
    options: Namespace, splits: Sequence[str], text: Path, workers: int, folder: Path
) -> None:
    """Moses tokens of all splits; training pairs of unfit lengths are dropped."""
    flags = options.aggressive_hyphens, options.lowercase
    moses = [corpus.Moses(language, *flags).tokenise for language in options.languages]
    for split in splits:
        pairs = corpus.read_pairs(*split_files(text, split, options), split)
        pairs = corpus.map_columns(moses, pairs, workers)
        pairs = iter(progress(pairs, f"tokenise {split}", unit="pair"))
        if split == "train":
            limits = (*(options.clean or (1, None)), options.max_ratio)
            pairs = (pair for pair in pairs if lengths_fit(pair, *limits))
        corpus.write_columns(split_files(folder, split, options), pairs)


def segment_text(
    options: Namespace, splits: Sequence[str], text: Path, tokens: Path, workers: int, folder: Path
) -> None:
    """Write ``model`` and ``{split}.{language}``, and for all splits but train the plain text they
    are to be compared with, filtered and joined likewise: ``{split}.reference``."""
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
        is_filtered = split == "train" or (split == "valid" and options.filter_valid)
        if split != "valid":
            corpus.write_columns(names, fit_and_join(rows, options, is_filtered))
            continue
        # each file by itself, as test sets are: no sentences of two files are joined
        parts = (islice(rows, size) for size in part_sizes(text, None))
        write_parts(names, [fit_and_join(part, options, is_filtered) for part in parts])


def fit_and_join(
    rows: Iterator[corpus.Row], options: Namespace, is_filtered: bool
) -> Iterator[corpus.Row]:
    """Leaves out rows of unfit lengths, if `is_filtered`, and joins neighbours."""
    if is_filtered:
        limits = (1, options.max_subwords, options.max_ratio)
        rows = (row for row in rows if lengths_fit(row[:2], *limits))
    return corpus.join_neighbours(rows, options.join) if options.join > 1 else rows
