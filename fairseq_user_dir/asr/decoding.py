"""CTC decoding in the interface of fairseq's sequence generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from cape_plugins.speech.ctc_decoder import build_decoder
from fairseq_user_dir.asr.text import SPACE


class CtcGenerator:
    """Decodes by the best path, or by a beam search with an optional n-gram model; averages the
    probabilities of several models.

    Args:
        dictionary: Units; ``<s>`` is the blank.
        settings: Arguments of :func:`~cape_plugins.speech.ctc_decoder.build_decoder`: beam, lm,
            lexicon and weights.

    Raises:
        ValueError: for a setting that is not allowed.
    """

    def __init__(self, dictionary: Dictionary, **settings: Any) -> None:
        self.symbols_to_strip_from_output = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
        symbols, blank = dictionary.symbols, dictionary.bos()
        self._decode = build_decoder(symbols, blank, **settings, separator=SPACE)

    @torch.no_grad()
    def generate(
        self, models: Sequence[nn.Module], sample: dict[str, Any], **kwargs: Any
    ) -> list[list[dict[str, Any]]]:
        """One hypothesis for each sample, in fairseq's form."""
        probs: Tensor | float = 0.0
        lengths = None
        for model in models:
            output = model(**sample["net_input"])
            lengths = output["lengths"]
            probs = probs + model.get_normalized_probs(output, log_probs=False).transpose(0, 1)
        log_probs = (probs / len(models)).clamp(min=1e-30).log()
        return [
            [
                {
                    "tokens": torch.tensor(hypothesis.tokens, dtype=torch.long),
                    "score": hypothesis.score,
                    "attention": None,
                    "alignment": None,
                    # scores of single tokens: none, because a text has many alignments
                    "positional_scores": torch.zeros(0),
                }
            ]
            for hypothesis in self._decode(log_probs, lengths)
        ]
