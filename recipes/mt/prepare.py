"""Data preparation of the recipes: plain text to binarised subwords, in four steps that are kept.

text        the user's files, or built-in number lists; held-out lines become missing splits
tokenised   Moses normalisation and tokenisation, training pairs cleaned (not for sentencepiece)
subwords    joint segmentation learned on training text, length filter, joining of neighbours
binary      fairseq-preprocess with a joined dictionary
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

from recipes.lab.runs import binarise
from recipes.lab.steps import CommandError, progress, step
from recipes.lab.subwords import SEGMENTATIONS
from recipes.mt import number_lists
from recipes.mt.catalog import Recipe
from recipes.mt.corpus import (
    Moses,
    Row,
    fingerprint,
    join_neighbours,
    map_columns,
    read_lines,
    read_pairs,
    write_columns,
)

SAMPLE_SIZES = {"train": 600, "valid": 20, "test": 12}

# The user's text by split. Training and validation files are concatenated, test files are not.
Files = Mapping[str, Sequence[tuple[Path, Path]]]


def lengths_fit(pair: Row, low: int, high: int | None, max_ratio: float) -> bool:
    """The filter of clean-corpus-n.perl: both sides have `low` to `high` tokens, in proportion."""
    short, long = sorted(len(text.split()) for text in pair)
    return low <= short and long <= (high or long) and long <= max_ratio * short


def split_files(folder: Path, split: str, recipe: Recipe) -> list[Path]:
    """The source and the target file of a split."""
    return [folder / f"{split}.{language}" for language in recipe.languages]


def prepare(recipe: Recipe, files: Files, work: Path, sample: bool, workers: int) -> None:
    """Make the four folders of this module in `work`; finished ones are reused."""
    settings: dict[str, object] = {
        split: [fingerprint(path, f"--{split}") for pair in pairs for path in pair]
        for split, pairs in files.items()
    }
    settings |= {"hold_out_every": recipe.hold_out_every, "sample": sample}
    tests = [f"test{number or ''}" for number in range(max(1, len(files["test"])))]
    splits = ["train", "valid", *tests]
    text = step(work / "text", settings, partial(collect_text, recipe, files, sample))
    tokens = text
    if recipe.segmentation == "bpe":
        names = ("lowercase", "aggressive_hyphens", "clean", "max_ratio")
        settings |= {name: getattr(recipe, name) for name in names}
        make = partial(tokenise_text, recipe, splits, text, workers)
        tokens = step(work / "tokenised", settings, make)
    names = ("segmentation", "vocab_size", "max_subwords", "filter_valid", "join")
    settings |= {name: getattr(recipe, name) for name in names}
    make = partial(segment_text, recipe, splits, text, tokens, workers)
    subwords = step(work / "subwords", settings, make)
    prefixes = {split: str(subwords / split) for split in ("train", "valid")}
    prefixes["test"] = ",".join(str(subwords / test) for test in tests)
    step(work / "binary", settings, partial(binarise, prefixes, recipe.languages, workers))


# ---- steps -------------------------------------------------------------------------------------


def collect_text(recipe: Recipe, files: Files, sample: bool, folder: Path) -> None:
    """Write plain text ``{train,valid,test,test1...}.{language}``."""
    if not files["train"]:
        number_lists.write_number_lists(folder, sizes=SAMPLE_SIZES, languages=recipe.languages)
        return

    def read(split: str, pairs: Sequence[tuple[Path, Path]]) -> Iterator[Row]:
        lines = chain.from_iterable(read_pairs(*pair, f"--{split}") for pair in pairs)
        return islice(lines, SAMPLE_SIZES[split] if sample else None)

    every = recipe.hold_out_every
    places = {0: "valid", every // 2: "test"}  # line number modulo `every`
    held_out = {place: split for place, split in places.items() if not files[split]}
    for split in ("train", *held_out.values()):
        lines = enumerate(read("train", files["train"]))
        pairs = (pair for n, pair in lines if held_out.get(n % every, "train") == split)
        if write_columns(split_files(folder, split, recipe), pairs) == 0:
            raise CommandError(
                f"--train: too few lines to hold out every {every}th for --{split}; give --{split}"
            )
    if files["valid"]:
        write_columns(split_files(folder, "valid", recipe), read("valid", files["valid"]))
    for number, pair in enumerate(files["test"]):
        write_columns(split_files(folder, f"test{number or ''}", recipe), read("test", [pair]))


def tokenise_text(
    recipe: Recipe, splits: Sequence[str], text: Path, workers: int, folder: Path
) -> None:
    """Moses tokens of all splits; training pairs of unfit lengths are dropped."""
    flags = recipe.aggressive_hyphens, recipe.lowercase
    moses = [Moses(language, *flags) for language in recipe.languages]
    for split in splits:
        pairs = read_pairs(*split_files(text, split, recipe), split)
        pairs = map_columns([side.tokenise for side in moses], pairs, workers)
        pairs = iter(progress(pairs, f"tokenise {split}", unit="pair"))
        if split == "train":
            low, high = recipe.clean or (1, None)
            pairs = (pair for pair in pairs if lengths_fit(pair, low, high, recipe.max_ratio))
        write_columns(split_files(folder, split, recipe), pairs)


def segment_text(
    recipe: Recipe, splits: Sequence[str], text: Path, tokens: Path, workers: int, folder: Path
) -> None:
    """Subwords of all splits, and the plain text that they are to be compared with.

    Writes ``{split}.{language}``, ``model``, and for all splits but train ``{split}.reference``:
    the target side, untokenised, filtered and joined like the subwords.
    """
    languages = recipe.languages
    files = split_files(tokens, "train", recipe)
    model = SEGMENTATIONS[recipe.segmentation].train(files, folder / "model", recipe.vocab_size)
    for split in splits:
        rows = read_pairs(*split_files(tokens, split, recipe), split)
        rows = map_columns([model.encode, model.encode], rows, workers)
        names = [*languages, "reference"] if split != "train" else languages
        if split != "train":
            plain = read_lines(text / f"{split}.{languages[1]}", split)
            rows = ((*pair, reference) for pair, reference in zip(rows, plain, strict=True))
        rows = iter(progress(rows, f"segment {split}", unit="pair"))
        if split == "train" or (split == "valid" and recipe.filter_valid):
            limits = (1, recipe.max_subwords, recipe.max_ratio)
            rows = (row for row in rows if lengths_fit(row[:2], *limits))
        if recipe.join > 1:
            rows = join_neighbours(rows, recipe.join)
        write_columns([folder / f"{split}.{name}" for name in names], rows)
