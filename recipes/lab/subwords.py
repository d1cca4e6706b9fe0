"""Subword segmentation by sentencepiece, or by subword-nmt (the BPE of the papers): ``train``,
``encode`` (text to pieces separated by spaces) and ``decode`` (the inverse)."""

import contextlib
import fileinput
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from cape_plugins.utils.files import writing
from recipes.lab.steps import CommandError

WORD_START = "\u2581"  # sentencepiece puts this mark before the first piece of a word
CONTINUED = "@@"  # subword-nmt puts this mark after all pieces of a word except the last
SETTINGS = {"model_type": "bpe", "hard_vocab_limit": False, "character_coverage": 1.0}
SETTINGS |= {"bos_id": -1, "eos_id": -1}  # fairseq adds special symbols
SETTINGS |= {"input_sentence_size": 5_000_000, "num_threads": 1, "minloglevel": 2}


class SentencePiece:
    """Joint sentencepiece model; reads and writes plain text."""

    def __init__(self, model: Path):
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    @classmethod
    def train(
        cls, files: Sequence[Path], model: Path, vocab_size: int, **options: Any
    ) -> "SentencePiece":
        """Trains a joint BPE model on `files` and writes it to `model`; more `options` go to
        sentencepiece."""
        settings = {"input": list(map(str, files)), "vocab_size": vocab_size, **SETTINGS, **options}
        try:
            with writing(model, "wb") as file:
                sentencepiece.SentencePieceTrainer.train(model_writer=file, **settings)
        except RuntimeError as error:
            raise CommandError(
                f"--vocab-size {vocab_size}: sentencepiece refuses it for this text ({error});"
                " choose another size, at least the number of different characters"
            ) from None
        return cls(model)

    def encode(self, text: str) -> str:
        return " ".join(self.processor.encode(text, out_type=str))

    @staticmethod
    def decode(pieces: str) -> str:
        return pieces.replace(" ", "").replace(WORD_START, " ").strip()


class SubwordNMT:
    """Joint BPE codes of subword-nmt; reads and writes tokenised text."""

    def __init__(self, codes: Path):
        with open(codes, encoding="utf-8") as file:
            self.bpe = BPE(file)

    @classmethod
    def train(cls, files: Sequence[Path], codes: Path, merges: int) -> "SubwordNMT":
        """Learns `merges` joint merge operations on `files`, and writes them to `codes`."""
        with (
            fileinput.FileInput(files, encoding="utf-8") as texts,
            writing(codes) as output,
            # subword-nmt warns if the text allows fewer merges, which is no problem
            contextlib.redirect_stderr(io.StringIO()),
        ):
            learn_bpe(texts, output, merges)
        return cls(codes)

    def encode(self, text: str) -> str:
        return self.bpe.process_line(text)

    @staticmethod
    def decode(pieces: str) -> str:
        return re.sub(f"{CONTINUED}( |$)", "", pieces)


SEGMENTATIONS = {"sentencepiece": SentencePiece, "bpe": SubwordNMT}


def segmentation_of(subwords: Iterable[str]) -> type[SentencePiece] | type[SubwordNMT] | None:
    """The class that made these subwords, recognised by their marks; None if there are no marks, as
    in words."""
    marked: Counter = Counter()
    for subword in subwords:
        marked[SentencePiece] += subword.startswith(WORD_START)
        marked[SubwordNMT] += subword.endswith(CONTINUED)
    likely = max(marked, key=marked.get, default=None)
    return likely if marked[likely] else None
