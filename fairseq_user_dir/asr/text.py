"""Texts as letters or subwords, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor

from cape_plugins.utils.files import writing

SPACE = "|"  # between words
SUBWORD_SPACE = "\u2581"  # sentencepiece's mark at the beginning of words
DICTIONARY, SUBWORD_MODEL = "dict.txt", "spm.model"
UNKNOWN = ("\u2047", "\ufffd")  # unknown units in references, and in hypotheses


class TextDictionary(Dictionary):
    """A fairseq dictionary of letters or subwords. The method `string` returns words. The CTC blank
    is the symbol ``<s>``, as in fairseq's CTC criterion. `string` writes an unknown unit as one
    letter, ⁇ in a reference and � in a hypothesis, so the two never match."""

    def string(
        self,
        tensor: Tensor,
        bpe_symbol: str | None = None,
        escape_unk: bool = False,
        extra_symbols_to_ignore: Any | None = None,
        unk_string: str | None = None,
        include_eos: bool = False,
        separator: str = " ",
    ) -> str:
        """Words, for letters and for subwords; see fairseq."""
        if tensor.dim() == 2:
            return "\n".join(
                self.string(row, bpe_symbol, escape_unk, extra_symbols_to_ignore) for row in tensor
            )
        ignored = {self.bos(), self.eos(), self.pad(), *(extra_symbols_to_ignore or ())}
        unknown = UNKNOWN[0] if escape_unk else UNKNOWN[1]  # fairseq sets escape_unk for references
        names = [
            unknown if index == self.unk() else self[index]
            for index in tensor.tolist()
            if index not in ignored
        ]
        text = "".join(names)
        return " ".join(text.replace(SUBWORD_SPACE, " ").replace(SPACE, " ").split())


class Targets:
    """Turns words into the units of a model: subwords if there is a sentencepiece model, otherwise
    letters."""

    def __init__(self, subword_model: str | None = None) -> None:
        self.subwords = None
        if subword_model is not None:
            from sentencepiece import SentencePieceProcessor

            if not os.path.isfile(subword_model):
                raise ValueError(f"--subword-model {subword_model}: no such file")
            self.subwords = SentencePieceProcessor(model_file=subword_model)

    def units(self, text: str) -> list[str]:
        """Names of the units of a text."""
        if self.subwords is not None:
            return self.subwords.encode(text, out_type=str)
        return list(text.replace(" ", SPACE))

    def encode(self, text: str, dictionary: Dictionary) -> Tensor:
        """``[U]`` int64, without EOS; units that the dictionary lacks are ``<unk>``."""
        numbers = [dictionary.index(unit) for unit in self.units(text)]
        return torch.tensor(numbers, dtype=torch.long)

    def dictionary(self, texts: Iterable[str]) -> TextDictionary:
        """A dictionary of all subwords, in the order of the model, or of all letters of the texts,
        in sorted order."""
        dictionary = TextDictionary()
        if self.subwords is not None:
            size = self.subwords.get_piece_size()
            pieces = map(self.subwords.id_to_piece, range(size))
            names = [name for name in pieces if name not in ("<s>", "</s>", "<pad>", "<unk>")]
        else:
            letters = {letter for text in texts for letter in text.replace(" ", SPACE)}
            names = sorted(letters | {SPACE})
        for name in names:
            dictionary.add_symbol(name)
        return dictionary


def save(dictionary: Dictionary, path: str) -> None:
    """Writes a dictionary in one step, so that other processes never read an incomplete file.

    Raises:
        ValueError: if the folder cannot be written to.
    """
    try:
        with writing(Path(path)) as file:
            dictionary.save(file)
    except OSError as error:
        raise ValueError(
            f"{path} does not exist and cannot be made ({error.strerror}); put a dictionary there, "
            "or make the folder writable."
        ) from None
