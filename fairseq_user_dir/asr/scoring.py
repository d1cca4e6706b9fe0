"""Word and letter error rates, computed with jiwer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.scoring import BaseScorer, register_scorer


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, int]:
    """Errors and lengths of the references, in words and in letters; the error rate is errors
    divided by length. Pairs without a reference do not count.

    Raises:
        ImportError: without the package jiwer.
    """
    try:
        import jiwer
    except ImportError as error:
        raise ImportError(
            f"error rates need the package jiwer ({error}); pip install jiwer"
        ) from None
    pairs = [(r, h) for r, h in zip(references, hypotheses, strict=True) if r.strip()]
    counts = {"word_errors": 0, "words": 0, "letter_errors": 0, "letters": 0}
    if not pairs:
        return counts
    references, hypotheses = map(list, zip(*pairs, strict=True))
    for unit, process in (("word", jiwer.process_words), ("letter", jiwer.process_characters)):
        out = process(references, hypotheses)
        counts[f"{unit}_errors"] = out.substitutions + out.deletions + out.insertions
        counts[f"{unit}s"] = out.hits + out.substitutions + out.deletions
    return counts


@register_scorer("cape_wer", dataclass=FairseqDataclass)
class ErrorRateScorer(BaseScorer):
    """``fairseq-generate --scoring cape_wer``: word and letter error rate in percent."""

    def score(self) -> float:
        """Word error rate in percent."""
        return self._rates()[0]

    def result_string(self) -> str:
        """Word and letter error rate, as text."""
        words, letters = self._rates()
        return f"WER {words:.2f} LER {letters:.2f}"

    def _rates(self) -> tuple[float, float]:
        counts: dict[str, Any] = count_errors(self.ref, self.pred)
        return tuple(
            100.0 * counts[f"{unit}_errors"] / max(counts[f"{unit}s"], 1)
            for unit in ("word", "letter")
        )
