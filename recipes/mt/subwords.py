"""Subword segmentation behind one interface: sentencepiece, or subword-nmt (the BPE of the papers).

Both have ``train``, ``encode`` (text -> pieces separated by spaces) and ``decode`` (the inverse).
"""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from recipes.steps import CommandError


class SentencePiece:
    """Joint sentencepiece model; reads and writes plain, untokenised text."""

    def __init__(self, model: Path):
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    @classmethod
    def train(cls, files: Sequence[Path], model: Path, vocab_size: int) -> "SentencePiece":
        """Train a joint BPE model on `files` and write it to `model`."""
        try:
            with open(model, "wb") as file:
                sentencepiece.SentencePieceTrainer.train(
                    input=[str(path) for path in files],
                    model_writer=file,
                    vocab_size=vocab_size,
                    model_type="bpe",
                    hard_vocab_limit=False,
                    character_coverage=1.0,
                    bos_id=-1,  # fairseq brings its own special symbols
                    eos_id=-1,
                    input_sentence_size=5_000_000,
                    num_threads=1,
                    minloglevel=2,
                )
        except RuntimeError as error:
            raise CommandError(
                f"--vocab-size {vocab_size}: sentencepiece refuses it for this text ({error});"
                " choose another size, at least the number of different characters"
            ) from None
        return cls(model)

    def encode(self, text: str) -> str:
        return " ".join(self.processor.encode(text, out_type=str))

    def decode(self, pieces: str) -> str:
        return pieces.replace(" ", "").replace("\u2581", " ").strip()
