"""Subword targets for CTC, in transformers' interface."""

from __future__ import annotations

import os
import shutil
from itertools import groupby
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer, Wav2Vec2CTCTokenizer

SPACE = "▁"  # sentencepiece's mark for the space before a word


class CapeSpeechTokenizer(Wav2Vec2CTCTokenizer):
    """Pieces of a sentencepiece model as classes of CTC.

    Decoding collapses repeated classes and removes blanks, as in ``Wav2Vec2CTCTokenizer``, the
    tokenizer for letters.

    Args:
        vocab_file: sentencepiece model with the piece `pad_token`.
        pad_token: The CTC blank.
        unk_token: Piece of characters that the model does not know.

    Raises:
        ValueError: if the sentencepiece model has no piece `pad_token`.
    """

    vocab_files_names: ClassVar = {"vocab_file": "spm.model"}

    def __init__(
        self,
        vocab_file: str,
        pad_token: str = "<pad>",
        unk_token: str = "<unk>",
        **kwargs: Any,
    ) -> None:
        import sentencepiece

        self.vocab_file = vocab_file
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        names = [self.pieces.id_to_piece(index) for index in range(self.pieces.get_piece_size())]
        self.encoder = {name: index for index, name in enumerate(names)}
        self.decoder = dict(enumerate(names))
        if str(pad_token) not in self.encoder:
            raise ValueError(
                f"{vocab_file} has no piece {str(pad_token)!r} for the blank; train it with "
                f"--pad_id=0 --pad_piece={pad_token}."
            )
        self._word_delimiter_token = None
        self.replace_word_delimiter_char = " "
        kwargs.pop("bos_token", None)
        kwargs.pop("eos_token", None)
        PreTrainedTokenizer.__init__(
            self, pad_token=pad_token, unk_token=unk_token, special_tokens_pattern="none", **kwargs
        )

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.pieces.encode(text, out_type=str)

    def convert_tokens_to_string(
        self,
        tokens: list[str],
        group_tokens: bool = True,
        spaces_between_special_tokens: bool = False,
        output_char_offsets: bool = False,
        output_word_offsets: bool = False,
    ) -> dict[str, Any]:
        """Text of the classes at each position, and the positions of pieces and words.

        Args:
            tokens: Pieces and blanks.
            group_tokens: Collapse repeated tokens.
            spaces_between_special_tokens: Has no effect, because pieces contain spaces.
            output_char_offsets: Whether to return the offsets of pieces, too.
            output_word_offsets: Whether to return the offsets of words, too.
        """
        runs = [(key, len(list(run))) for key, run in groupby(tokens)] if group_tokens else None
        offsets, end = [], 0
        for piece, length in runs or [(token, 1) for token in tokens]:
            start, end = end, end + length
            if piece != self.pad_token:
                offsets.append({"char": piece, "start_offset": start, "end_offset": end})
        text = "".join(offset["char"] for offset in offsets).replace(SPACE, " ").strip()
        return {
            "text": text,
            "char_offsets": offsets if output_char_offsets else None,
            "word_offsets": self._get_word_offsets(offsets) if output_word_offsets else None,
        }

    @staticmethod
    def _get_word_offsets(
        offsets: list[dict[str, Any]], word_delimiter_char: str = SPACE
    ) -> list[dict[str, Any]]:
        """Offsets of words, from the offsets of pieces; the pipeline calls this method, too."""
        words: list[dict[str, Any]] = []
        for offset in offsets:
            piece = offset["char"]
            if piece.startswith(SPACE) or not words:
                words.append({"word": "", "start_offset": offset["start_offset"]})
            words[-1]["word"] += piece.removeprefix(SPACE)
            words[-1]["end_offset"] = offset["end_offset"]
        return words

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Copies the sentencepiece model."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        path = os.path.join(save_directory, prefix + self.vocab_files_names["vocab_file"])
        if os.path.abspath(path) != os.path.abspath(self.vocab_file):
            shutil.copyfile(self.vocab_file, path)
        return (path,)

    def __getstate__(self) -> dict[str, Any]:  # a sentencepiece model cannot be pickled
        return {**self.__dict__, "pieces": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import sentencepiece

        self.__dict__.update(state)
        self.pieces = sentencepiece.SentencePieceProcessor(model_file=self.vocab_file)
