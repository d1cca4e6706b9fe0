"""Source scale alpha = target tokens / source tokens of the training data (CAPE section 5.3).

Alpha brings the positions of a source sentence and of its translation to a common scale. Alpha is
stored as two integers, never as a rounded number. Tokens are counted as in fairseq: the
end-of-sentence token belongs to a sentence, a beginning-of-sentence token does not. The sums equal
the numbers that ``fairseq-preprocess`` prints and writes into preprocess.log. The paper's numbers
(appendix D.1: 1.0337 for German, 1.1632 for French) leave out end-of-sentence tokens, as the
notebook of the paper shows; so does ``eos=False``.

This module reads fairseq's index files without fairseq, and opens the data files beside the index
files only if the data are raw text.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cape_plugins.utils.texts import text_lines

_MAX_COUNT = 2**63 - 1  # counts are stored in int64 tensors of checkpoints
USUAL = (0.5, 2.0)  # alpha between languages; measured values are 0.94 to 1.3
_REMEDY = "or give the ratio yourself, for example --position-source-scale 1.05"


@dataclass(frozen=True)
class TokenCounts:
    """Number of source and target tokens, the exact form of alpha.

    Args:
        source: Tokens on the source side, 1 to 2^63 - 1.
        target: Tokens on the target side, 1 to 2^63 - 1.

    Raises:
        ValueError: if a count is not an integer in that range.
    """

    source: int
    target: int

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int):
                raise ValueError(
                    f"{name} token count {count!r} must be an integer from 1 to 2^63 - 1; "
                    "count the training data with `cape-plugins alpha`."
                )
            if not 1 <= count <= _MAX_COUNT:
                raise ValueError(
                    f"{name} token count {count} is outside 1 to 2^63 - 1, so there is no source "
                    f"scale; check that the training data are not empty, {_REMEDY}."
                )

    @property
    def alpha(self) -> float:
        """Target tokens per source token."""
        return self.target / self.source

    @property
    def doubt(self) -> str:
        """Advice on what to check if alpha is unusual, otherwise empty."""
        low, high = USUAL
        if low <= self.alpha <= high:
            return ""
        return (
            f"alpha {self.alpha:.3g} is outside of {low:g} to {high:g}; check that line n of one "
            "side is the translation of line n of the other, and that both are in subwords: "
            "languages without spaces between words need them, or --tokenizer"
        )

    def __str__(self) -> str:
        return f"{self.target}/{self.source}"


class _Side(NamedTuple):
    """Counts of one side of the corpus."""

    sentences: int
    tokens: int


def count_token_lists(
    source: Iterable[Sequence[object]],
    target: Iterable[Sequence[object]],
    names: tuple[str, str] = ("the source token lists", "the target token lists"),
) -> TokenCounts:
    """Counts tokenised sentences in memory. The tokens of a sentence count; EOS is not added.

    Args:
        source: Source sentences, each a sequence of tokens or token ids.
        target: The translations, in the same number.
        names: Names of `source` and `target` in error texts.

    Raises:
        ValueError: if a sentence is plain text, if the numbers of sentences differ, or if a side
            has no tokens.
    """
    return _total(
        [(names[0], _count_lists("source", source))],
        [(names[1], _count_lists("target", target))],
    )


def _count_lists(name: str, sentences: Iterable[Sequence[object]]) -> _Side:
    number = tokens = 0
    for sentence in sentences:
        # the length of a string is its number of characters: alpha would be wrong without an error
        if isinstance(sentence, str | bytes):
            raise ValueError(
                f"{name} sentence {number + 1} is plain text, {sentence[:40]!r}; "
                "pass sequences of tokens, for example sentence.split()."
            )
        number += 1
        tokens += len(sentence)
    return _Side(number, tokens)


def count_text_files(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str], eos: bool = True
) -> TokenCounts:
    """Counts the whitespace-separated tokens of two parallel text files, one sentence a line.

    Args:
        source_path: Source text in UTF-8 after subword segmentation; ``.gz`` is decompressed.
        target_path: Target text, with the same number of lines.
        eos: Count one end-of-sentence token a line, as in fairseq.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is empty, damaged or not UTF-8, or if the line counts differ.
    """
    source, target = ((str(p), _count_text(Path(p), eos)) for p in (source_path, target_path))
    return _total([source], [target])


def count_lengths(
    source: Sequence[int], target: Sequence[int], names: tuple[str, str], eos: int = 0
) -> TokenCounts:
    """Counts the tokens of sentences of known lengths, plus `eos` tokens a sentence; see
    :func:`count_token_lists`."""
    sides = [_Side(len(lengths), sum(lengths) + eos * len(lengths)) for lengths in (source, target)]
    return _total([(names[0], sides[0])], [(names[1], sides[1])])


def by_tokenizer(name: str) -> Callable[..., Any]:
    """A function that counts raw text with a tokenizer of transformers: the entry point `name` of
    the Hugging Face part, because this package imports no host.

    Raises:
        ImportError: if the Hugging Face part is not installed.
    """
    (counter,) = entry_points(group="cape_plugins.alpha", name=name) or (None,)
    try:
        if counter is None:
            raise ImportError("the package cape-plugins is not installed")
        return counter.load()
    except ImportError as error:
        raise ImportError(
            f"--tokenizer needs transformers ({error}); install it: pip install 'cape-plugins[hf]'"
        ) from None


def _count_text(path: Path, eos: bool) -> _Side:
    lines = tokens = 0
    for line in text_lines(path):
        lines += 1
        tokens += len(line.split())  # at white space of any kind, as in fairseq
    return _Side(lines, tokens + lines * eos)


def count_binarized(
    data_dirs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    source_lang: str,
    target_lang: str,
    split: str = "train",
    eos: bool = True,
) -> TokenCounts:
    """Counts the training data of a fairseq translation task from its index files.

    Sums over `split`, `split`1, `split`2 ... and over all folders, because fairseq trains on all
    of them. Files may be named ``train.SRC-TGT.*`` or ``train.TGT-SRC.*`` and have any format that
    fairseq-preprocess writes: mmap, cached, lazy or raw. Every sentence pair counts once,
    whatever the value of ``--upsample-primary``.

    Args:
        data_dirs: One or several folders; a string is split at ``:``, as in fairseq.
        source_lang: Source language as in the file names, for example "de".
        target_lang: Target language.
        split: Name of the training subset (``--train-subset``).
        eos: Count the end-of-sentence token that ends each sentence of the data.

    Raises:
        FileNotFoundError: if a folder or one side of a data set is missing.
        ValueError: if an index file is damaged or of an unknown format, or if the two sides have
            different numbers of sentences.
    """
    folders = _split_folders(data_dirs)
    sources: list[tuple[str, _Side]] = []
    targets: list[tuple[str, _Side]] = []
    for folder in folders:
        for stem in _find_stems(folder, source_lang, target_lang, split):
            for lang, sides in ((source_lang, sources), (target_lang, targets)):
                path = _data_file(f"{stem}.{lang}")
                if path is None:
                    raise FileNotFoundError(
                        f"{stem}.{lang}(.idx) is missing beside the other language of the pair; "
                        f"run fairseq-preprocess for both languages, {_REMEDY}."
                    )
                count = _count_index if path.suffix == ".idx" else _count_text
                sides.append((str(path), count(path, eos)))
    return _total(sources, targets)


def _split_folders(
    data_dirs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Path]:
    if isinstance(data_dirs, str):
        folders = [Path(part) for part in data_dirs.split(os.pathsep) if part]
    elif isinstance(data_dirs, os.PathLike):
        folders = [Path(data_dirs)]
    else:
        folders = [Path(part) for part in data_dirs]
    if not folders:
        raise ValueError(
            f"data folder {data_dirs!r} is empty; give the folder that fairseq-preprocess wrote, "
            f"or several with {os.pathsep!r} between them."
        )
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data folder {folder} does not exist; give the folder that fairseq-preprocess "
                f"wrote (its --destdir), {_REMEDY}."
            )
    return folders


def _find_stems(folder: Path, source_lang: str, target_lang: str, split: str) -> list[str]:
    """Paths up to the language, ``DIR/train.de-en``, of `split`, `split`1 ... in one folder."""
    pairs = (f"{source_lang}-{target_lang}", f"{target_lang}-{source_lang}")
    stems: list[str] = []
    while True:
        name = split + (str(len(stems)) if stems else "")
        present = [
            stem
            for stem in (str(folder / f"{name}.{pair}") for pair in pairs)
            if _data_file(f"{stem}.{source_lang}") or _data_file(f"{stem}.{target_lang}")
        ]
        if not present:
            break
        stems.append(present[0])
    if not stems:
        raise FileNotFoundError(
            f"{folder} has no data set {split}.{pairs[0]}.{source_lang} or "
            f"{split}.{pairs[1]}.{source_lang}; check --source-lang {source_lang}, --target-lang "
            f"{target_lang} and the subset {split!r}, {_REMEDY}."
        )
    return stems


def _data_file(prefix: str) -> Path | None:
    """The file with the sentence lengths: an index, or the text itself (raw data)."""
    for path in (Path(f"{prefix}.idx"), Path(prefix)):
        if path.is_file():
            return path
    return None


def _count_index(path: Path, eos: bool) -> _Side:
    """Counts of an index file, whose lengths include EOS."""
    sizes = read_index_sizes(path)
    return _Side(len(sizes), int(sizes.sum(dtype=np.int64)) - len(sizes) * (not eos))


_MMAP = b"MMIDIDX\x00\x00"
_LEGACY = b"TNTIDX\x00\x00"


def read_index_sizes(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads the sentence lengths from a fairseq ``.idx`` file.

    All numbers are little-endian. Both formats begin with a magic string and a version:

    * mmap: uint8 type code, uint64 number of sentences n, n int32 lengths, n int64 offsets;
    * cached and lazy (one format, from TorchNet): uint64 type code and element size, uint64 n and
      number of lengths (n for text), n + 1 int64 and n + 1 int64 offsets, n int64 lengths.

    Returns:
        ``[n]`` int32 or int64, tokens per sentence with the end-of-sentence token.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the file has another format or version, is cut off, or has negative lengths.
    """
    path = Path(path)
    _require_file(path)
    with path.open("rb") as file:
        head = file.read(48)
        if head.startswith(_MMAP):
            version, _, number = _unpack("<QBQ", head, len(_MMAP), path)
            start, dtype, end = 26, np.dtype("<i4"), 26 + 12 * number
        elif head.startswith(_LEGACY):
            version, _, _, number, lengths = _unpack("<QQQQQ", head, len(_LEGACY), path)
            start, dtype = 48 + 16 * (number + 1), np.dtype("<i8")
            end = start + 8 * number
            if lengths != number:
                raise _damaged(path, f"it has {lengths} lengths for {number} sentences")
        else:
            raise ValueError(
                f"{path} begins with {head[:9]!r}, not with the mark of an mmap, cached or lazy "
                "index; preprocess with --dataset-impl mmap (the default), "
                f"{_REMEDY}."
            )
        if version != 1:
            raise _damaged(path, f"its version is {version}, known is 1")
        if path.stat().st_size != end:
            raise _damaged(path, f"it has {path.stat().st_size} bytes, its header states {end}")
        file.seek(start)
        sizes = np.fromfile(file, dtype=dtype, count=number)
    if number and sizes.min() < 0:
        raise _damaged(path, f"it has a sentence of length {sizes.min()}")
    return sizes


def _unpack(layout: str, head: bytes, start: int, path: Path) -> tuple[int, ...]:
    if len(head) < start + struct.calcsize(layout):
        raise _damaged(path, f"it ends inside its header, after {len(head)} bytes")
    return struct.unpack_from(layout, head, start)


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"{path} is damaged: {reason}. Delete the folder and run fairseq-preprocess again, "
        f"{_REMEDY}."
    )


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")


def _total(sources: list[tuple[str, _Side]], targets: list[tuple[str, _Side]]) -> TokenCounts:
    """Adds up the pairs of data sets; each data set comes with the name that an error shows."""
    for (source_name, source), (target_name, target) in zip(sources, targets, strict=True):
        if source.sentences != target.sentences:
            raise ValueError(
                f"{source_name} has {source.sentences} sentences, {target_name} has "
                f"{target.sentences}; allowed: the same number, because sentence n of one "
                "translates sentence n of the other. Prepare both sides again from one corpus."
            )
    return TokenCounts(
        source=sum(side.tokens for _, side in sources),
        target=sum(side.tokens for _, side in targets),
    )
