"""CTC loss over the true lengths, with word and letter error rates in validation."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor, nn

from cape_plugins.speech.ctc import best_path, ctc_loss, outputs_needed
from fairseq_user_dir.asr.scoring import count_errors

_SUMS = (
    "frames",
    "padding",
    "recordings",
    "unaligned",
    "word_errors",
    "words",
    "letter_errors",
    "letters",
)


@register_criterion("cape_ctc")
class CapeCtcCriterion(FairseqCriterion):
    """CTC over the outputs of the model without padding; the blank is ``<s>``, as in fairseq.
    (fairseq's criterion ``ctc`` uses the number of frames as the number of outputs, and counts EOS
    as a label.)

    Args:
        task: Task with the dictionary.
        target_norm: Divide the loss of a sample by the square root of the target's length, as in
            the paper's code; such losses are averaged over samples. Without this option losses are
            averaged over units.
    """

    def __init__(self, task: Any, target_norm: bool = False) -> None:
        super().__init__(task)
        self.target_norm = target_norm
        dictionary = task.target_dictionary
        self.blank, self.dictionary = dictionary.bos(), dictionary
        self.pad, self.eos = dictionary.pad(), dictionary.eos()

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Adds ``--target-norm``."""
        parser.add_argument(
            "--target-norm",
            action="store_true",
            help="divide the CTC loss of a sample by the square root of its target's length",
        )

    @classmethod
    def build_criterion(cls, args: Any, task: Any) -> CapeCtcCriterion:
        """See fairseq."""
        return cls(task, getattr(args, "target_norm", False))

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Returns the loss summed over the batch, the divisor of the loss, and the numbers to log.

        Raises:
            ValueError: for a model without CTC.
        """
        output = model(**sample["net_input"])
        if "lengths" not in output:
            raise ValueError(
                "criterion cape_ctc needs a CTC model such as cape_ctc_transformer, not "
                f"{type(model).__name__}; use label_smoothed_cross_entropy for this model."
            )
        log_probs = model.get_normalized_probs(output, log_probs=True).transpose(0, 1)
        lengths, target = output["lengths"], sample["target"]
        is_label = target.ne(self.pad) & target.ne(self.eos)
        sizes = is_label.sum(1)
        losses = ctc_loss(log_probs, lengths, target, is_label, self.blank)
        if self.target_norm:
            losses = losses / sizes.clamp(min=1).sqrt()
        # a recording that cannot be aligned has no loss and does not count
        aligned = (outputs_needed(target, is_label) <= lengths) & (sizes > 0)
        losses = losses * aligned
        count = int((sizes * aligned).sum())
        sample_size = int(aligned.sum()) if self.target_norm else count
        log = {
            "loss": utils.item(losses.sum().data),
            "ntokens": count,
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
            "frames": int(sample["net_input"]["src_lengths"].sum()),
            "padding": sample["net_input"]["src_tokens"].shape[:2].numel(),
            "recordings": sample["nsentences"],
            "unaligned": int(((sizes > 0) & ~aligned).sum()),
        }
        if not model.training:
            log.update(self._errors(log_probs, lengths, sample["texts"]))
        return losses.sum(), sample_size, log

    def _errors(self, log_probs: Tensor, lengths: Tensor, texts: list[str]) -> dict[str, int]:
        best = best_path(log_probs, lengths, self.blank)
        hypotheses = [self.dictionary.string(torch.tensor(path.tokens)) for path in best]
        return count_errors(texts, hypotheses[: len(texts)])

    @classmethod
    def reduce_metrics(cls, logging_outputs: Sequence[dict[str, Any]]) -> None:
        """Logs the loss in nats, and these numbers in percent: `wer`, `ler`, the share of padding,
        and the share of recordings with more units than outputs (`unaligned_percent`)."""
        total = {
            key: sum(log.get(key, 0) for log in logging_outputs)
            for key in ("loss", "sample_size", *_SUMS)
        }
        size = total["sample_size"]
        metrics.log_scalar("loss", total["loss"] / max(size, 1), size, round=3)
        for name in _SUMS:
            metrics.log_scalar_sum(f"_{name}", total[name])
        metrics.log_derived("padded_percent", lambda m: 100 - _percent(m, "frames", "padding"))
        if total["unaligned"]:
            metrics.log_derived(
                "unaligned_percent", lambda m: _percent(m, "unaligned", "recordings")
            )
        if any("words" in log for log in logging_outputs):
            metrics.log_derived("wer", lambda m: _percent(m, "word_errors", "words"))
            metrics.log_derived("ler", lambda m: _percent(m, "letter_errors", "letters"))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Always true: everything that is logged is a number."""
        return True


def _percent(meters: Any, part: str, whole: str) -> float:
    """The logged sum `part` in percent of the logged sum `whole`."""
    total = meters[f"_{whole}"].sum
    return round(float(100 * meters[f"_{part}"].sum / total), 3) if total else float("nan")
