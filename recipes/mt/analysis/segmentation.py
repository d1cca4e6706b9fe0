"""Text to the subwords of a fairseq model, and back, by the files that its recipe has left."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from recipes.lab.steps import RECORD, CommandError
from recipes.lab.subwords import (
    CONTINUED,
    SEGMENTATIONS,
    WORD_START,
    SentencePiece,
    SubwordNMT,
    segmentation_of,
)
from recipes.mt.corpus import Moses, by_sentence

SOURCE, TARGET = 0, 1


class Segmentation:
    """Text to subwords separated by spaces, and back.

    Args:
        moses: Tokenisation of the source and of the target language before it.
    """

    def __init__(self, subwords: SentencePiece | SubwordNMT, moses: Sequence[Moses] = ()):
        self.subwords = subwords
        self.moses = moses
        # Is the separator of joined sentences a word of its own? Set by who knows the vocabulary.
        self.keeps_separator = False

    def encode(self, text: str, side: int) -> str:
        """Subwords of a text in the source (0) or target (1) language."""
        tokenise = self.moses[side].tokenise if self.moses else str
        return self._each_sentence(lambda part: self.subwords.encode(tokenise(part)), text)

    def decode(self, pieces: str) -> str:
        """Text in the target language."""
        detokenise = self.moses[TARGET].detokenise if self.moses else str
        return self._each_sentence(lambda part: detokenise(self.subwords.decode(part)), pieces)

    def plain(self, text: str) -> str:
        """A line of the test text as it is scored."""
        return text

    def _each_sentence(self, function: Callable[[str], str], text: str) -> str:
        return by_sentence(function, text) if self.keeps_separator else function(text)


class Segmented:
    """Text that is in the subwords of a model already. Their marks say how they are joined before
    anything is scored."""

    def __init__(self, subwords: Sequence[str]):
        segmentation = segmentation_of(subwords)
        self.keeps_separator = True  # the text has its separators already
        self.join: Callable[[str], str] = segmentation.decode if segmentation else str
        if not segmentation:
            print(f"--segmented: no subword of the model is marked by {WORD_START} or {CONTINUED}; "
                  "text is scored as it is", flush=True)  # fmt: skip

    def encode(self, text: str, side: int) -> str:
        return text

    def decode(self, pieces: str) -> str:
        return by_sentence(self.join, pieces)

    plain = decode


def open_subwords(method: str, path: Path, option: str) -> SentencePiece | SubwordNMT:
    """The subword model in a file."""
    try:
        return SEGMENTATIONS[method](path)
    except Exception as error:  # each library has errors of its own for a file of another kind
        raise CommandError(
            f"{option} {path}: cannot be read as a model of {method} ({error}); give the file that"
            " the training text was segmented with"
        ) from None


def found_beside(data: Path, languages: tuple[str, str]) -> Segmentation | None:
    """What recipes.mt.quickstart and recipes.mt.run have left beside the binarised `data`."""
    model = data.parent / "sentencepiece.model"
    if model.is_file():
        return Segmentation(open_subwords("sentencepiece", model, "segmentation"))
    model = data.parent / "subwords" / "model"
    if not model.is_file():
        return None
    settings = json.loads((model.parent / RECORD).read_text("utf-8"))
    subwords = open_subwords(settings["segmentation"], model, "segmentation")
    if settings["segmentation"] != "bpe":
        return Segmentation(subwords)
    flags = settings["aggressive_hyphens"], settings["lowercase"]
    return Segmentation(subwords, [Moses(language, *flags) for language in languages])


def given(spm: Path | None, bpe: Path | None, languages: tuple[str, str]) -> Segmentation | None:
    """What the options ``--spm`` and ``--bpe`` ask for; None if there are none."""
    if spm:
        return Segmentation(open_subwords("sentencepiece", spm, "--spm"))
    if bpe:  # as fairseq's own --tokenizer moses
        moses = [Moses(language, True, False) for language in languages]
        return Segmentation(open_subwords("bpe", bpe, "--bpe"), moses)
    return None
