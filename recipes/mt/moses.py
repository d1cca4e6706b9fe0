"""Moses text processing by sacremoses: what tokenizer.perl and its companions do to WMT text."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

from recipes.mt.corpus import Row

CHUNK = 500  # rows handed to a worker at a time
BLOCK = 200_000  # rows held in memory: a pool reads all its input at once


class Moses:
    """Normalise, clean of control characters, and tokenise one language; and the way back."""

    def __init__(self, language: str, aggressive_hyphens: bool, lowercase: bool):
        self.normalizer = MosesPunctNormalizer(lang=language, post_remove_control_chars=True)
        self.tokenizer = MosesTokenizer(lang=language)
        self.detokenizer = MosesDetokenizer(lang=language)
        self.aggressive_hyphens = aggressive_hyphens
        self.lowercase = lowercase

    def tokenise(self, text: str) -> str:
        """``tokenizer.perl`` (with ``-a`` for aggressive hyphens), special characters escaped."""
        tokens = self.tokenizer.tokenize(
            self.normalizer.normalize(text),
            aggressive_dash_splits=self.aggressive_hyphens,
            return_str=True,
        )
        return tokens.lower() if self.lowercase else tokens

    def detokenise(self, tokens: str) -> str:
        """``detokenizer.perl``."""
        return self.detokenizer.detokenize(tokens.split())


_functions: Sequence[Callable[[str], str]]  # of a worker process, sent once and not with each chunk


def _set_functions(functions: Sequence[Callable[[str], str]]) -> None:
    global _functions
    _functions = functions


def _call(row: Row) -> Row:
    return tuple(function(text) for function, text in zip(_functions, row, strict=True))


def map_columns(
    functions: Sequence[Callable[[str], str]], rows: Iterable[Row], workers: int
) -> Iterator[Row]:
    """Apply one function to each column of `rows`, in order, in `workers` processes."""
    if workers == 1:
        for row in rows:
            yield tuple(function(text) for function, text in zip(functions, row, strict=True))
        return
    # Spawned, because a process with threads (progress bars, pools) must not be forked.
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(workers, initializer=_set_functions, initargs=(functions,)) as pool:
        rows = iter(rows)
        while block := list(islice(rows, BLOCK)):
            yield from pool.imap(_call, block, chunksize=CHUNK)
