"""CTC decoding in the interface of fairseq's sequence generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from cape_plugins.speech.ctc import BeamDecoder, best_path, read_lexicon
from fairseq_user_dir.asr.text import SPACE


class CtcGenerator:
    """The best path, or a beam with an optional n-gram model; several models are averaged.

    Args:
        dictionary: Of the units; its ``<s>`` is the blank.
        beam: Hypotheses of the beam, 1 for the best path.
        lm: File of an n-gram model.
        lexicon: File with the units of each word.
        lm_weight: Factor on the score of the model.
        word_score: Added for each word.

    Raises:
        ValueError: for a setting that is not allowed.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        beam: int = 1,
        lm: str | None = None,
        lexicon: str | None = None,
        lm_weight: float = 1.0,
        word_score: float = 0.0,
    ) -> None:
        self.blank = dictionary.bos()
        self.symbols_to_strip_from_output = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
        self._beam = None
        if beam == 1 and (lm or lexicon):
            raise ValueError(
                "--ctc-lm and --ctc-lexicon need a beam; give --ctc-beam of 2 or more, such as 50."
            )
        if beam != 1:
            try:
                spellings = read_lexicon(lexicon) if lexicon else None
                self._beam = BeamDecoder(
                    dictionary.symbols,
                    self.blank,
                    beam,
                    lm,
                    spellings,
                    lm_weight,
                    word_score,
                    SPACE,
                )
            except ValueError as error:
                raise ValueError(
                    f"--ctc-beam {beam} with --ctc-lm {lm}, --ctc-lexicon {lexicon}: {error}"
                ) from None

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
        if self._beam is None:
            found = best_path(log_probs, lengths, self.blank)
        else:
            found = self._beam(log_probs, lengths)
        return [
            [
                {
                    "tokens": torch.tensor(one.tokens, dtype=torch.long),
                    "score": one.score,
                    "attention": None,
                    "alignment": None,
                    "positional_scores": torch.zeros(0),  # alignments are not unique
                }
            ]
            for one in found
        ]
