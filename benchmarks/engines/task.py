"""The input of all translators: sentences, the size of a batch, and options of the search.

A function of a folder and a :class:`Search` makes a translator. The folder has the models and the
sentences as lists of words. Words are numbers: word n has the id ``n + SPECIAL``, after `<s>`,
`<pad>`, `</s>` and `<unk>`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SPECIAL, PAD, EOS = 4, 1, 2
SOURCES = "sources.json"

Step = Callable[[], object]


@dataclass(frozen=True)
class Search:
    """Number of sentences in a batch, and options of the search.

    Attributes:
        batch: Number of sentences.
        beam: Width of the beam; 1 is greedy.
        length: Exact number of tokens of each hypothesis.
        threads: Threads of the engine.
    """

    batch: int
    beam: int
    length: int
    threads: int


def read_sources(folder: Path, search: Search) -> list[list[str]]:
    """The first sentences of the folder, without `</s>`."""
    return json.loads((folder / SOURCES).read_text("utf-8"))[: search.batch]


def source_ids(folder: Path, search: Search) -> np.ndarray:
    """The first sentences as ids int64 [B, T] with `</s>`, padded at the end."""
    sentences = read_sources(folder, search)
    ids = np.full((len(sentences), 1 + max(map(len, sentences))), PAD)
    for row, words in zip(ids, sentences, strict=True):
        row[: len(words) + 1] = [*(int(word) + SPECIAL for word in words), EOS]
    return ids
