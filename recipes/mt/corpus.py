"""Parallel text: reading with checks, writing, splitting. Files are streamed: WMT is large."""

import contextlib
import gzip
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from recipes.lab.steps import CommandError, digest, writing

Row = tuple[str, ...]  # aligned lines of several files
Pair = tuple[str, str]  # source and target


def unreadable(option: str, path: Path, error: Exception) -> CommandError:
    """The error for a file that does not exist or cannot be read."""
    reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
    return CommandError(f"{option} {path}: {reason}; name a plain or .gz text file")


def fingerprint(path: Path, option: str) -> str:
    """Name and digest of an input file, for the record of what a step was made from."""
    try:
        return f"{path.name} {digest(path)}"
    except OSError as error:
        raise unreadable(option, path, error) from None


def read_lines(path: Path, option: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or gzip (``.gz``), stripped.

    Only a line feed ends a line (not U+2028 and the like, which occur inside crawled sentences).
    `option` names the command-line option in errors.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                number += 1
                yield line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{option} {path}: line {number} is not UTF-8 ({error.reason}); convert the file, for"
            f" example with: iconv -f latin1 -t utf-8"
        ) from None
    except (OSError, EOFError) as error:  # EOFError: half a gzip file
        raise unreadable(option, path, error) from None
    if number == 0:
        raise CommandError(f"{option} {path}: is empty; give a file with one sentence a line")


def read_pairs(source: Path, target: Path, option: str) -> Iterator[Pair]:
    """Yield the sentence pairs of two aligned files, which must have the same number of lines."""
    pairs = zip_longest(read_lines(source, option), read_lines(target, option))
    for number, (left, right) in enumerate(pairs, 1):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise CommandError(
                f"{option} {source} {target}: {short} ends after {number - 1} lines but {long}"
                " goes on; line n of one file must be the translation of line n of the other"
            )
        yield left, right


def write_columns(paths: Sequence[Path], rows: Iterable[Row]) -> int:
    """Write rows to aligned files, one column each, atomically. Returns the number of rows."""
    count = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(writing(path)) for path in paths]
        for row in rows:
            count += 1
            for file, text in zip(files, row, strict=True):
                file.write(f"{text}\n")
    return count


def languages_of(source: Path, target: Path) -> Pair:
    """Language codes from file names such as ``train.en.gz``; "source" and "target" without."""
    codes = tuple(
        path.name.removesuffix(".gz").rpartition(".")[2].lower() for path in (source, target)
    )
    usable = all(code.isalpha() and 2 <= len(code) <= 3 for code in codes) and codes[0] != codes[1]
    return codes if usable and "txt" not in codes else ("source", "target")


def split_pairs(pairs: list[Pair], sizes: dict[str, int], seed: int = 0) -> dict[str, list[Pair]]:
    """Split off random pairs; the rest is "train", without pairs that also occur in another split.

    >>> split_pairs([(str(i), str(i)) for i in range(5)], {"test": 2})["test"]
    [('4', '4'), ('2', '2')]
    """
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    splits, start = {}, 0
    for name, size in sizes.items():
        splits[name] = shuffled[start : start + size]
        start += size
    held_out = {pair for split in splits.values() for pair in split}
    splits["train"] = [pair for pair in shuffled[start:] if pair not in held_out]
    return splits
