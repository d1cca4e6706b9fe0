"""Moses text processing by sacremoses: what tokenizer.perl and its companions do to WMT text."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

CHUNK = 500  # sentences handed to a worker at a time
BLOCK = 200_000  # sentences held in memory: a pool reads all its input at once


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


_function: Callable[[str], str]  # of a worker process; set once instead of sent with every chunk


def _set_function(function: Callable[[str], str]) -> None:
    global _function
    _function = function


def _call(text: str) -> str:
    return _function(text)


def parallel_map(
    function: Callable[[str], str], lines: Iterable[str], workers: int
) -> Iterator[str]:
    """Like ``map``, in order, in `workers` processes."""
    if workers == 1:
        yield from map(function, lines)
        return
    with multiprocessing.Pool(workers, initializer=_set_function, initargs=(function,)) as pool:
        lines = iter(lines)
        while block := list(islice(lines, BLOCK)):
            yield from pool.imap(_call, block, chunksize=CHUNK)
