"""The training data of SHAPE from any corpus (section 3.1): extrapolate and interpolate."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from pathlib import Path

from recipes.lab.options import positive
from recipes.lab.steps import CommandError
from recipes.mt.analysis.segmentation import open_subwords
from recipes.mt.corpus import Pair, read_pairs, write_columns
from recipes.mt.prepare import SEPARATOR, join_neighbours


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """Files in, files out."""
    add = parser.add_argument
    pair = {"nargs": 2, "type": Path, "required": True, "metavar": ("SOURCE", "TARGET")}
    add("--text", **pair, help="parallel text, plain or .gz")
    add("--output", **pair, help="files to write")


def add_extrapolate_options(parser: argparse.ArgumentParser) -> None:
    add_file_options(parser)
    add = parser.add_argument
    text = "longest side of a pair that is kept (default: %(default)s)"
    add("--max-length", type=positive, default=50, metavar="N", help=text)
    group = parser.add_mutually_exclusive_group()
    text = "count its subwords (default: words)"
    group.add_argument("--spm", type=Path, metavar="FILE", help=f"sentencepiece model: {text}")
    text = "subword-nmt codes, of tokenised text: count their subwords (default: words)"
    group.add_argument("--bpe", type=Path, metavar="FILE", help=text)


def add_interpolate_options(parser: argparse.ArgumentParser) -> None:
    add_file_options(parser)
    text = "neighbouring pairs that become one (default: %(default)s)"
    parser.add_argument("--count", type=positive, default=10, metavar="N", help=text)


def drop_long(pairs: Iterable[Pair], limit: int, length: Callable[[str], int]) -> Iterator[Pair]:
    """The pairs whose longer side has at most `limit` tokens."""
    return (pair for pair in pairs if max(map(length, pair)) <= limit)


def extrapolate(args: argparse.Namespace) -> None:
    """Drop the pairs with a long side."""
    encode: Callable[[str], str] = str
    for kind, option in (("sentencepiece", "spm"), ("bpe", "bpe")):
        if path := getattr(args, option):
            encode = open_subwords(kind, path, f"--{option}").encode
    seen = count()
    pairs = (pair for pair, _ in zip(read_pairs(*args.text, "--text"), seen, strict=False))
    kept = drop_long(pairs, args.max_length, lambda text: len(encode(text).split()))
    remedy = f"--max-length {args.max_length}: no pair is that short; give a larger number"
    print(f"{_write(args, kept, remedy)} of {next(seen)} pairs kept: {_shown(args)}")


def interpolate(args: argparse.Namespace) -> None:
    """Join neighbouring pairs."""
    if args.count < 2:
        raise CommandError(f"--count {args.count}: joins nothing; allowed: 2 or more")

    def checked(pairs: Iterable[Pair]) -> Iterator[Pair]:
        for number, pair in enumerate(pairs, 1):
            if any(SEPARATOR in text for text in pair):
                raise CommandError(
                    f"--text {args.text[0]} {args.text[1]}: line {number} has the separator"
                    f" {SEPARATOR}; give text that is not joined"
                )
            yield pair

    pairs = join_neighbours(checked(read_pairs(*args.text, "--text")), args.count)
    print(f"{_write(args, pairs, '--text: is empty')} joined pairs: {_shown(args)}")


def _write(args: argparse.Namespace, pairs: Iterator[Pair], remedy: str) -> int:
    source, target = args.output
    if source.resolve() == target.resolve():
        raise CommandError(f"--output {source} {target}: is one file; give a name for each side")
    for path in args.output:
        if any(path.resolve() == given.resolve() for given in args.text):
            raise CommandError(f"--output {path}: is a file of --text; give other names")
        if path.suffix == ".gz":
            raise CommandError(f"--output {path}: text is written as it is; leave out .gz")
    first = next(pairs, None)
    if first is None:
        raise CommandError(remedy)
    return write_columns(args.output, chain([first], pairs))


def _shown(args: argparse.Namespace) -> str:
    return " ".join(map(str, args.output))
