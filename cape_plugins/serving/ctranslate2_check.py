"""The check of a folder for ctranslate2: sentences, their translations, and the comparison with
translations of the host. Takes objects of ctranslate2, but does not import ctranslate2.

Facts about the engine come from trials with ctranslate2 4.8.5; see docs/decisions.md, Serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cape_plugins.checkpoints.fairseq_files import reason
from cape_plugins.utils.texts import text_lines

BEAM = 5
CHECKED = 200  # largest number of sentences of a check
LONGEST = 20  # number of these sentences that are the longest of the text
# Difference of scores per token, natural logarithm. Rounding gives 1e-6; a wrong position, norm or
# token gives 1e-2 and more.
TOLERANCE = 1e-4
EXACT = (None, "float32")  # precisions that keep the weights


class Hypothesis(NamedTuple):
    """The best translation of a sentence by beam search.

    Attributes:
        tokens: Tokens without EOS.
        score: Mean natural log-probability of the tokens and EOS.
        ended: Whether the model chose EOS and no token is padding. Only such hypotheses can be
            compared. At the limit of length a host forces EOS, but the engine returns a hypothesis
            without EOS. No host chooses padding, but the engine may, if the model is hardly
            trained.
    """

    tokens: tuple[str, ...]
    score: float
    ended: bool


def search_options(max_tokens: int) -> dict[str, Any]:
    """Options of ``Translator.translate_batch`` that give the beam search of the hosts.

    Args:
        max_tokens: Longest translation, EOS included; at most the rows of the target table.
    """
    return {
        "beam_size": BEAM,
        "max_input_length": 0,
        "max_decoding_length": max_tokens,
        "min_decoding_length": 0,
    }


def read_sentences(path: Path, length: Callable[[str], int] = len) -> list[str]:
    """At most :data:`CHECKED` lines of a text that are not empty, in order. The :data:`LONGEST`
    longest lines are among these lines, because their positions differ most from the positions of
    training. The other lines are evenly spread over the text, because parts of a text may differ.

    Args:
        path: Text in UTF-8.
        length: Function that measures a line, to find the longest lines.

    Raises:
        ValueError: if the file cannot be read as UTF-8, or all lines are empty.
    """
    try:
        sentences = [line for line in text_lines(path) if line.strip()]
    except OSError as error:
        remedy = "give a text in UTF-8, one sentence a line"
        raise ValueError(f"--check {path} cannot be read ({reason(error)}); {remedy}.") from None
    except ValueError as error:
        raise ValueError(f"--check {error}") from None
    if not sentences:
        raise ValueError(f"--check {path} has no sentence; give a text, one sentence a line.")
    if len(sentences) <= CHECKED:
        return sentences
    by_length = sorted(range(len(sentences)), key=lambda number: length(sentences[number]))
    shorter = sorted(by_length[:-LONGEST])
    spread = [shorter[i * len(shorter) // (CHECKED - LONGEST)] for i in range(CHECKED - LONGEST)]
    return [sentences[number] for number in sorted((*by_length[-LONGEST:], *spread))]


def translate(
    translator: Any,
    sources: Sequence[Sequence[str]],
    max_tokens: int,
    eos: str = "</s>",
    pad: str = "<blank>",
    **options: Any,
) -> list[Hypothesis]:
    """Translations by the engine, in the order of the sources.

    Args:
        translator: ``ctranslate2.Translator``.
        sources: Tokens of the sentences, in the form that the engine needs.
        max_tokens: See :func:`search_options`.
        eos: End of a translation.
        pad: Name of padding.
        options: Other options of ``translate_batch``, such as a target prefix.
    """
    results = translator.translate_batch(
        [list(source) for source in sources],
        **{**search_options(max_tokens), **options},
        max_batch_size=32,
        return_scores=True,
        return_end_token=True,
    )
    hypotheses = []
    for result in results:
        tokens = tuple(result.hypotheses[0])
        ended = tokens[-1:] == (eos,)
        words = tokens[:-1] if ended else tokens
        hypotheses.append(Hypothesis(words, result.scores[0], ended and pad not in words))
    return hypotheses


def compare(
    host: Sequence[Hypothesis],
    engine: Sequence[Hypothesis],
    lengths: Sequence[int],
    quantization: str | None = None,
) -> str:
    """Compares translations that ended by themselves; returns a line for the report.

    Args:
        host: Translations by the exported model.
        engine: Translations of the same sentences by the folder.
        lengths: Tokens of the source sentences, BOS and EOS included.
        quantization: Precision of the weights of the folder.

    Raises:
        ValueError: if scores or tokens of translations differ although the weights were not
            rounded. Equally likely tokens may differ, because rounding decides between them.
    """
    pairs, compared_lengths, other_lengths = [], [], []
    for ours, theirs, length in zip(host, engine, lengths, strict=True):
        if ours.ended and theirs.ended:
            pairs.append((ours, theirs))
            compared_lengths.append(length)
        else:
            other_lengths.append(length)
    if not pairs:
        raise ValueError(
            f"--check compares translations that end by themselves, and none of {len(host)} "
            "translations ended within the length. Give sentences like the training data, a "
            "longer table (--max-target-tokens), or a model that is trained."
        )
    num_same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
    largest = largest_of(abs(ours.score - theirs.score) for ours, theirs in pairs)
    report = (
        f"check: {num_same} of {len(pairs)} translations of sources of up to "
        f"{max(compared_lengths)} tokens are the same, scores differ by at most {largest:.1e}"
    )
    if other_lengths:
        report += (
            f"; {len(other_lengths)} more, of up to {max(other_lengths)} tokens, not compared, "
            "reached the limit of length or contain padding, which fairseq and transformers "
            "never choose"
        )
    refuse_difference(largest, report, quantization)
    return report


def check_length(side: str, longest: int, limits: Mapping[str, int | None]) -> None:
    """Refuses sentences of a check that are longer than the table of a side.

    Raises:
        ValueError: names the length that is needed.
    """
    limit = limits[side]
    if limit is not None and longest > limit:
        raise ValueError(
            f"--check: a sentence has {longest} tokens, BOS and EOS included, and the table "
            f"{limit}; give --max-{side}-tokens {longest} or more, or shorter sentences."
        )


def largest_of(differences: Iterable[float]) -> float:
    """The largest of the numbers; 0 if there are none, NaN if one of them is NaN."""
    return max(differences, key=lambda value: (math.isnan(value), value), default=0.0)


def refuse_difference(largest: float, report: str, quantization: str | None = None) -> None:
    """Refuses a folder with results that differ from the results of the exported model.

    Raises:
        ValueError: if scores differ by more than rounding, and no weight has been rounded.
    """
    if quantization in EXACT and not largest <= TOLERANCE:
        raise ValueError(
            f"{report}; allowed: {TOLERANCE:.0e}. The folder computes something else than the "
            "model and has not been written: report this with the settings of the model, or "
            "serve the model with fairseq or transformers."
        )
