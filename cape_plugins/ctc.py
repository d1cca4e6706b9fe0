"""Decoding of CTC outputs: the best path, or a beam with an optional n-gram language model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Hypothesis(NamedTuple):
    """Token indices, and the score of their path, a natural logarithm."""

    tokens: list[int]
    score: float


def best_path(log_probs: Tensor, lengths: Tensor, blank: int = 0) -> list[Hypothesis]:
    """The most probable path of each sample, repeated tokens and blanks removed.

    Args:
        log_probs: ``[B, T, V]``.
        lengths: ``[B]``, outputs without padding.
        blank: Index of the blank.
    """
    scores, indices = log_probs.max(-1)
    valid = torch.arange(log_probs.shape[1], device=lengths.device) < lengths[:, None]
    totals = (scores * valid).sum(1, dtype=torch.float32).tolist()
    rows = zip(indices.tolist(), lengths.tolist(), totals, strict=True)
    return [Hypothesis(collapse(row[:length], blank), total) for row, length, total in rows]


def collapse(path: Iterable[int], blank: int) -> list[int]:
    """A path without repetitions and blanks."""
    return [token for token, _ in groupby(path) if token != blank]


class BeamDecoder:
    """Beam search of flashlight-text, by tokens or by the words of a lexicon.

    Args:
        tokens: Names of the classes ``[V]``, the blank included.
        blank: Index of the blank.
        beam: Number of hypotheses that are kept.
        lm: File of an n-gram model (ARPA or binary, read by KenLM), of words with a lexicon and
            of tokens without.
        lexicon: Spellings, the tokens of each word in the order of `words`.
        words: Names of the words.
        lm_weight: Factor on the score of the language model.
        word_score: Added for each word of a lexicon.
        separator: Token between words, if there is one.

    Raises:
        ImportError: without the package flashlight-text.
        ValueError: for a setting that is not allowed or a spelling with unknown tokens.
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
        if lexicon is not None and lm is None:
            raise ValueError("a lexicon needs a language model of its words; give lm.")
        self.blank = blank
        silence = tokens.index(separator) if separator in tokens else blank
        names = dictionary.Dictionary(list(lexicon or tokens))
        if lexicon is not None and "<unk>" not in lexicon:
            names.add_entry("<unk>")
        model = decoder.ZeroLM() if lm is None else _kenlm()(os.fspath(lm), names)
        common = {
            "beam_size": beam,
            "beam_size_token": len(tokens),
            "beam_threshold": 50.0,
            "lm_weight": lm_weight,
            "sil_score": 0.0,
            "log_add": lm is None,  # without a model, alignments of one text add up
            "criterion_type": decoder.CriterionType.CTC,
        }
        if lexicon is None:
            options = decoder.LexiconFreeDecoderOptions(**common)
            self._decoder = decoder.LexiconFreeDecoder(options, model, silence, blank, [])
            return
        trie = _trie(decoder, model, names, lexicon, list(tokens), silence)
        options = decoder.LexiconDecoderOptions(
            **common, word_score=word_score, unk_score=float("-inf")
        )
        unknown = names.get_index("<unk>")
        self._decoder = decoder.LexiconDecoder(
            options, trie, model, silence, blank, unknown, [], False
        )

    def __call__(self, log_probs: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """The best hypothesis of each sample, for ``[B, T, V]`` and ``[B]``."""
        emissions = log_probs.detach().float().cpu().contiguous()
        found = []
        for row, length in zip(emissions, lengths.tolist(), strict=True):
            results = self._decoder.decode(row.data_ptr(), length, row.shape[1])
            if not results:  # no word of the lexicon fits
                found.append(Hypothesis([], float("-inf")))
                continue
            # the decoder puts a separator at either end
            path = [token for token in results[0].tokens[1:-1] if token >= 0]
            found.append(Hypothesis(collapse(path, self.blank), results[0].score))
        return found


def read_lexicon(path: str | os.PathLike) -> dict[str, list[list[str]]]:
    """A file with a word and its tokens in each line; a word may have several spellings.

    Raises:
        ValueError: naming the line without tokens.
    """
    lexicon: dict[str, list[list[str]]] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            word, *tokens = line.split() or [""]
            if word and not tokens:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: the word {word!r} has no tokens; write "
                    "for example: two t w o |"
                )
            if word:
                lexicon.setdefault(word, []).append(tokens)
    return lexicon


def _trie(
    decoder: Any,
    model: Any,
    names: Any,
    lexicon: Mapping[str, Sequence[Sequence[str]]],
    tokens: Sequence[str],
    silence: int,
) -> Any:
    index = {token: place for place, token in enumerate(tokens)}
    trie, start = decoder.Trie(len(tokens), silence), model.start(False)
    for word, spellings in lexicon.items():
        place = names.get_index(word)
        _, score = model.score(start, place)
        for spelling in spellings:
            unknown = [token for token in spelling if token not in index]
            if unknown:
                raise ValueError(
                    f"the lexicon spells {word!r} with {unknown[0]!r}, which is no class of this "
                    "model; make the lexicon of the model's own tokens."
                )
            trie.insert([index[token] for token in spelling], place, score)
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


def _kenlm() -> Any:
    from flashlight.lib.text.decoder.kenlm import KenLM

    return KenLM
