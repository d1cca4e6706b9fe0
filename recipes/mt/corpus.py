"""Reads and prepares parallel text: files, pairs, Moses tokens, subwords. Files are streamed,
because WMT is large."""

import contextlib
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

from cape_plugins.utils.files import writing
from cape_plugins.utils.texts import text_lines
from recipes.lab import subwords
from recipes.lab.steps import CommandError, digest, recorded

Row = tuple[str, ...]  # aligned lines of several files
Pair = tuple[str, str]  # source and target
Functions = Sequence[Callable[[str], str]]  # one for each column
Subwords = subwords.SentencePiece | subwords.SubwordNMT

SEPARATOR = "<sep>"  # between joined sentences
CHUNK = 500  # number of rows in one task of a worker
BLOCK = 200_000  # number of rows in memory: a pool would read all its input at once


def unreadable(option: str, path: Path, error: Exception) -> CommandError:
    reason = f"cannot be read ({error})"
    if isinstance(error, FileNotFoundError):
        reason = "is a folder" if path.is_dir() else "no such file"
    return CommandError(f"{option} {path}: {reason}; name a plain or .gz text file")


def fingerprint(path: Path, option: str) -> str:
    """Name and digest of an input file, for the record of a step that reads the file."""
    try:
        return f"{path.name} {digest(path)}"
    except OSError as error:
        raise unreadable(option, path, error) from None


def read_lines(path: Path, option: str) -> Iterator[str]:
    """Yields the stripped lines of a text file, see :func:`cape_plugins.utils.texts.text_lines`;
    errors name `option`."""
    try:
        yield from map(str.strip, text_lines(path))
    except OSError as error:
        raise unreadable(option, path, error) from None
    except ValueError as error:
        raise CommandError(f"{option} {error}") from None


def read_pairs(source: Path, target: Path, option: str) -> Iterator[Pair]:
    """Yields the sentence pairs of two files, which must have the same number of lines, and at
    least one line with text in both files."""
    any_text = False
    pairs = zip_longest(read_lines(source, option), read_lines(target, option))
    for number, (left, right) in enumerate(pairs):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise CommandError(
                f"{option} {source} {target}: {short} ends after {number} lines, and {long} is "
                "longer; line n of one file must be the translation of line n of the other"
            )
        any_text = any_text or bool(left and right)
        yield left, right
    if not any_text:
        raise CommandError(
            f"{option} {source} {target}: no line has text in both files; line n of one file must"
            " be the translation of line n of the other"
        )


def write_columns(paths: Sequence[Path], rows: Iterable[Row]) -> int:
    """Writes rows to aligned files, one column each, atomically. Returns the number of rows."""
    count = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(writing(path)) for path in paths]
        for count, row in enumerate(rows, 1):  # noqa: B007 used after the loop
            for file, text in zip(files, row, strict=True):
                file.write(f"{text}\n")
    return count


def languages_of(source: Path, target: Path) -> Pair:
    """Returns language codes from file names such as ``train.en.gz``, or "source" and "target" if
    names have no codes. Endings of two or three letters count as codes, also `.src` and `.tgt`;
    recipes.mt.run compares only codes of two letters with the languages of a recipe."""
    names = (path.name.removesuffix(".gz").lower() for path in (source, target))
    codes = tuple(name.rpartition(".")[2] for name in names)
    usable = all(code.isalpha() and 2 <= len(code) <= 3 for code in codes) and codes[0] != codes[1]
    return codes if usable and "txt" not in codes else ("source", "target")


def split_pairs(pairs: list[Pair], sizes: dict[str, int], seed: int = 0) -> dict[str, list[Pair]]:
    """Splits off random pairs; the rest is "train", without pairs that also occur in another split.

    >>> split_pairs([(str(i), str(i)) for i in range(5)], {"test": 2})["test"]
    [('4', '4'), ('2', '2')]
    """
    shuffled = iter(random.Random(seed).sample(pairs, len(pairs)))
    splits = {name: list(islice(shuffled, size)) for name, size in sizes.items()}
    held_out = {pair for split in splits.values() for pair in split}
    return {**splits, "train": [pair for pair in shuffled if pair not in held_out]}


def join_neighbours(rows: Iterable[Row], count: int) -> Iterator[Row]:
    """Joins each `count` neighbouring rows into one, with :data:`SEPARATOR` between (SHAPE, 3.1).
    The last group may be smaller, so that a test set loses no sentence."""
    rows = iter(rows)
    while group := list(islice(rows, count)):
        yield tuple(f" {SEPARATOR} ".join(column) for column in zip(*group, strict=True))


def by_sentence(function: Callable[[str], str], text: str) -> str:
    """Applies `function` to each of the sentences that separators join."""
    if SEPARATOR not in text:
        return function(text)
    return f" {SEPARATOR} ".join(function(part.strip()) for part in text.split(SEPARATOR))


class Moses:
    """Prepares text of one language with sacremoses: normalises it, removes control characters, and
    tokenises it."""

    def __init__(self, language: str, aggressive_hyphens: bool, lowercase: bool):
        self.normalizer = MosesPunctNormalizer(lang=language, post_remove_control_chars=True)
        self.tokenizer = MosesTokenizer(lang=language)
        self.detokenizer = MosesDetokenizer(lang=language)
        self.flags = {"aggressive_dash_splits": aggressive_hyphens, "return_str": True}
        self.lowercase = lowercase

    def tokenise(self, text: str) -> str:
        """Tokenises like ``tokenizer.perl`` (with aggressive hyphens, like ``tokenizer.perl -a``),
        and escapes special characters."""
        tokens = self.tokenizer.tokenize(self.normalizer.normalize(text), **self.flags)
        return tokens.lower() if self.lowercase else tokens

    def detokenise(self, tokens: str) -> str:
        """Joins tokens like ``detokenizer.perl``."""
        return self.detokenizer.detokenize(tokens.split())


_functions: Functions  # in a worker process: sent once, not with each chunk


def _set_functions(functions: Functions) -> None:
    global _functions
    _functions = functions


def _call(row: Row, functions: Functions | None = None) -> Row:
    return tuple(f(text) for f, text in zip(functions or _functions, row, strict=True))


def map_columns(functions: Functions, rows: Iterable[Row], workers: int) -> Iterator[Row]:
    """Applies one function to each column of `rows`, in order, in `workers` processes."""
    if workers == 1:
        yield from (_call(row, functions) for row in rows)
        return
    # Spawned, because a process with threads (progress bars, pools) must not be forked.
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(workers, _set_functions, (functions,)) as pool:
        rows = iter(rows)
        while block := list(islice(rows, BLOCK)):
            yield from pool.imap(_call, block, chunksize=CHUNK)


class Segmentation:
    """Turns text into the subwords of a model, and back; `moses` first tokenises source and
    target."""

    def __init__(self, model: Subwords, moses: Sequence[Moses] = ()):
        self.model, self.moses = model, moses
        # Whether the separator of joined sentences is one word of the vocabulary; set by the host.
        self.keeps_separator = False

    def encode(self, text: str, side: int) -> str:
        """Subwords of a text in the source (0) or target (1) language."""
        tokenise = self.moses[side].tokenise if self.moses else str
        return self._each_sentence(lambda part: self.model.encode(tokenise(part)), text)

    def decode(self, pieces: str) -> str:
        detokenise = self.moses[1].detokenise if self.moses else str
        return self._each_sentence(lambda part: detokenise(self.model.decode(part)), pieces)

    def plain(self, text: str) -> str:
        """Returns a line of the test text in the form for scoring."""
        return text

    def _each_sentence(self, function: Callable[[str], str], text: str) -> str:
        return by_sentence(function, text) if self.keeps_separator else function(text)


class Segmented:
    """Text that is already in the subwords of a model; marks of the subwords show how to join them.
    Subwords are joined before BLEU is computed and words are counted; the text is not detokenised,
    because its tokenisation is not known."""

    keeps_separator = True

    def __init__(self, vocabulary: Sequence[str]):
        segmentation = subwords.segmentation_of(vocabulary)
        self.join: Callable[[str], str] = segmentation.decode if segmentation else str
        if not segmentation:
            marks = f"{subwords.WORD_START} or {subwords.CONTINUED}"
            problem = f"--segmented: no subword of the model is marked by {marks}"
            print(f"{problem}; subwords are scored without joining", flush=True)

    def encode(self, text: str, side: int) -> str:
        return text

    def decode(self, pieces: str) -> str:
        return by_sentence(self.join, pieces)

    plain = decode


def open_subwords(method: str, path: Path, option: str) -> Subwords:
    """The subword model in a file."""
    try:
        return subwords.SEGMENTATIONS[method](path)
    except Exception as error:  # each library has other errors for a file of another kind
        raise CommandError(
            f"{option} {path}: cannot be read as a model of {method} ({error}); give the file that"
            " the training text was segmented with"
        ) from None


def open_segmentation(
    data: Path, languages: Pair, spm: Path | None = None, bpe: Path | None = None
) -> Segmentation | None:
    """Opens the model of ``--spm`` or ``--bpe``, or the model that quickstart or run has stored
    beside `data`."""
    method, option, flags = "sentencepiece", "segmentation", ()
    if spm:
        path, option = spm, "--spm"
    elif bpe:  # as with fairseq's --tokenizer moses
        method, path, option, flags = "bpe", bpe, "--bpe", (True, False)
    elif not (path := data.parent / "sentencepiece.model").is_file():
        path = data.parent / "subwords" / "model"
        if not path.is_file():
            return None
        settings = recorded(path.parent)
        method = settings["segmentation"]
        flags = settings.get("aggressive_hyphens"), settings.get("lowercase")
    moses = [Moses(language, *flags) for language in languages] if method == "bpe" else ()
    return Segmentation(open_subwords(method, path, option), moses)
