"""CTC decoding: the best path, or a beam with an optional n-gram language model."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cape_plugins.speech.ctc import Hypothesis, best_path, collapse
from cape_plugins.utils.texts import text_lines

logger = logging.getLogger(__name__)

# tokens that do not occur in texts, such as <s>, <unk>, [PAD]
_SPECIAL = re.compile(r"<.*>|\[.*\]")
_NO_WORD = "\ufffe"  # a word that no language model knows


class BeamDecoder:
    """Beam search of flashlight-text, over tokens or over the words of a lexicon. The wheel of
    flashlight-text contains KenLM; pyctcdecode does not run with numpy 2, and kenlm has no wheels.

    Args:
        tokens: Names of the classes ``[V]``, the blank included.
        blank: Index of the blank.
        beam: Number of hypotheses that are kept.
        lm: File of an n-gram model (ARPA or binary, read by KenLM): a model of words if there is a
            lexicon, otherwise a model of tokens.
        lexicon: Spellings, the tokens of each word in the order of `words`.
        words: Names of the words.
        lm_weight: Factor on the score of the language model.
        word_score: Score added for each word of a lexicon.
        separator: Token between words, if there is one. The separator ends each word of a lexicon,
            also if its spelling has no separator, and the text, also if the model puts no separator
            at its end.

    Raises:
        ImportError: without the package flashlight-text.
        ValueError: for a setting that is not allowed, a spelling with unknown tokens, or a language
            model that knows none of the tokens or words. A model that knows few of them is
            reported.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        blank: int = 0,
        beam: int = 50,
        lm: str | os.PathLike | None = None,
        lexicon: Mapping[str, Sequence[Sequence[str]]] | None = None,
        lm_weight: float = 1.0,
        word_score: float = 0.0,
        separator: str | None = None,
    ) -> None:
        decoder, dictionary = _flashlight()
        if beam < 1:
            raise ValueError(f"beam={beam} is not allowed; allowed: >= 1 hypotheses, such as 50.")
        if lm is not None and not os.path.isfile(lm):
            raise ValueError(f"lm={str(lm)!r}: no such file; give an ARPA or KenLM binary file.")
        if lexicon is not None and (lm is None or not lexicon):
            raise ValueError(
                "a lexicon needs words, and a language model of these words; give both."
            )
        self.blank = blank
        silence = tokens.index(separator) if separator in tokens else blank
        self._end = silence if lexicon is not None and silence != blank else None
        names = dictionary.Dictionary(list(tokens if lexicon is None else lexicon))
        if lexicon is not None and "<unk>" not in lexicon:
            names.add_entry("<unk>")
        model = decoder.ZeroLM()
        if lm is not None:
            model = _language_model(lm, names)
            _check_vocabulary(lm, model, names, tokens, lexicon, separator)
        common = {
            "beam_size": beam,
            "beam_size_token": len(tokens),
            "beam_threshold": 50.0,
            "lm_weight": lm_weight,
            "sil_score": 0.0,
            "log_add": lm is None,  # without a language model, alignments of one text add up
            "criterion_type": decoder.CriterionType.CTC,
        }
        if lexicon is None:
            options = decoder.LexiconFreeDecoderOptions(**common)
            self._decoder = decoder.LexiconFreeDecoder(options, model, silence, blank, [])
            return
        trie = _trie(decoder, model, names, lexicon, list(tokens), silence, self._end is not None)
        options = decoder.LexiconDecoderOptions(
            **common, word_score=word_score, unk_score=float("-inf")
        )
        unknown = names.get_index("<unk>")
        self._decoder = decoder.LexiconDecoder(
            options, trie, model, silence, blank, unknown, [], False
        )

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """The best hypothesis of each sample, for ``[B, T, V]`` and ``[B]``."""
        emissions = log_probs.detach().float().cpu()
        hypotheses = []
        for row, length in zip(emissions, lengths.tolist(), strict=True):
            row = self._with_end(row[:length])
            results = self._decoder.decode(row.data_ptr(), *row.shape)
            if not results:  # no word of the lexicon fits
                hypotheses.append(Hypothesis([], float("-inf")))
                continue
            # the decoder puts a separator at both ends
            path = [token for token in results[0].tokens[1:-1] if token >= 0]
            tokens = collapse(path, self.blank)
            while self._end is not None and tokens and tokens[-1] == self._end:
                tokens.pop()
            hypotheses.append(Hypothesis(tokens, results[0].score))
        return hypotheses

    def _with_end(self, row: Tensor) -> Tensor:
        """Adds a separator as a last output: a word of a lexicon is complete only at a separator,
        and models are trained without a separator after the last word."""
        if self._end is None:
            return row.contiguous()
        last = row.new_full((1, row.shape[1]), -1e3)
        last[0, self._end] = 0.0
        return torch.cat((row, last))


def build_decoder(
    tokens: Sequence[str],
    blank: int,
    beam: int = 1,
    lm: str | None = None,
    lexicon: str | None = None,
    lm_weight: float = 1.0,
    word_score: float = 0.0,
    separator: str | None = None,
) -> Callable[[Tensor, Tensor], list[Hypothesis]]:
    """A function of ``[B, T, V]`` log probabilities and lengths ``[B]`` that gives hypotheses.

    Args:
        beam: 1 for the best path; for other values, and the other arguments, see
            :class:`BeamDecoder`.
        lexicon: File for :func:`read_lexicon`.

    Raises:
        ValueError: names the flags ``--ctc-...``, which all commands have, and the mistake.
    """
    if beam == 1:
        if lm or lexicon:
            raise ValueError(
                "--ctc-lm and --ctc-lexicon need a beam; give --ctc-beam of 2 or more, such as 50."
            )
        return partial(best_path, blank=blank)
    try:
        spellings = read_lexicon(lexicon) if lexicon else None
        return BeamDecoder(tokens, blank, beam, lm, spellings, lm_weight, word_score, separator)
    except ValueError as error:
        raise ValueError(
            f"--ctc-beam {beam} with --ctc-lm {lm}, --ctc-lexicon {lexicon}: {error}"
        ) from None


def read_lexicon(path: str | os.PathLike) -> dict[str, list[list[str]]]:
    """Reads a file with a word and the tokens of the word in each line. A word with several
    spellings has several lines.

    Returns:
        The spellings of each word, each a list of tokens.

    Raises:
        ValueError: if there is no such file, a line has no tokens, or the file has no word; names
            the line.
    """
    if not os.path.isfile(path):
        raise ValueError(f"lexicon {os.fspath(path)!r}: no such file.")
    lexicon: dict[str, list[list[str]]] = {}
    for number, line in enumerate(text_lines(path), start=1):
        word, *tokens = line.split() or [""]
        if word and not tokens:
            raise ValueError(
                f"{os.fspath(path)}, line {number}: the word {word!r} has no tokens; write for "
                "example: two t w o |"
            )
        if word:
            lexicon.setdefault(word, []).append(tokens)
    if not lexicon:
        raise ValueError(f"lexicon {os.fspath(path)!r} is empty; write lines such as: two t w o |")
    return lexicon


def _trie(
    decoder: Any,
    model: Any,
    names: Any,
    lexicon: Mapping[str, Sequence[Sequence[str]]],
    tokens: Sequence[str],
    silence: int,
    separated: bool,
) -> Any:
    class_of = {token: number for number, token in enumerate(tokens)}
    trie, start = decoder.Trie(len(tokens), silence), model.start(False)
    for word, spellings in lexicon.items():
        word_index = names.get_index(word)
        _, score = model.score(start, word_index)
        for spelling in spellings:
            unknown = [token for token in spelling if token not in class_of]
            if unknown:
                raise ValueError(
                    f"the lexicon spells {word!r} with {unknown[0]!r}, which is no class of this "
                    "model; make the lexicon of the tokens of this model."
                )
            path = [class_of[token] for token in spelling]
            if separated and path[-1] != silence:
                path.append(silence)
            trie.insert(path, word_index, score)
    trie.smear(decoder.SmearingMode.MAX)
    return trie


def _flashlight() -> tuple[Any, Any]:
    try:
        from flashlight.lib.text import decoder, dictionary
    except ImportError as error:
        raise ImportError(
            f"beam search needs the package flashlight-text ({error}); pip install "
            "flashlight-text, or decode without a beam."
        ) from None
    return decoder, dictionary


def _language_model(path: str | os.PathLike, names: Any) -> Any:
    """KenLM's model of a file. Adds to `names` a word that no model knows; names with the score of
    this word are unknown to the model. Binary files do not show their vocabulary.

    Raises:
        ValueError: if the file cannot be read.
    """
    from flashlight.lib.text.decoder.kenlm import KenLM

    names.add_entry(_NO_WORD)
    try:
        return KenLM(os.fspath(path), names)
    except RuntimeError as error:
        raise ValueError(
            f"lm={os.fspath(path)!r} is no n-gram model of order 2 or more, ARPA or KenLM binary "
            f"({error})."
        ) from None


def _check_vocabulary(
    lm: str | os.PathLike,
    model: Any,
    names: Any,
    tokens: Sequence[str],
    lexicon: Mapping[str, Any] | None,
    separator: str | None,
) -> None:
    """Refuses a model that knows none of the tokens, or words of the lexicon; reports a model that
    looks as if made for other data. All names that a model does not know have the same score."""
    start = model.start(False)
    _, unknown_score = model.score(start, names.get_index(_NO_WORD))
    expected = [name for name in lexicon or tokens if not _SPECIAL.fullmatch(name)]
    unknown = [
        name for name in expected if model.score(start, names.get_index(name))[1] == unknown_score
    ]
    entries = "words of the lexicon"
    remedy = "both must spell words in the same way, including upper and lower case"
    if lexicon is None:
        entries = "units"
        remedy = (
            "a model of words needs a lexicon with the units of each word (--ctc-lexicon), a model "
            "of units the units of this model"
        )
    if len(unknown) == len(expected):
        raise ValueError(
            f"lm={os.fspath(lm)!r} knows none of the {len(expected)} {entries}, such as "
            f"{', '.join(map(repr, unknown[:3]))}; {remedy}."
        )
    if len(unknown) > len(expected) / 2 or separator in unknown:
        unknown.sort(key=lambda name: name != separator)
        logger.warning(
            "lm=%r lacks %d of the %d %s, such as %s; %s.",
            os.fspath(lm),
            len(unknown),
            len(expected),
            entries,
            ", ".join(map(repr, unknown[:3])),
            remedy,
        )
