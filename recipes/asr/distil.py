"""Distillation of a Whisper that pads recordings to 30 s: at natural length, the decoder learns to
compute the states that it has in the padded model, as in whisper-acft (FUTO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.asr.data import Collator, Sample, SpeechTrainer

PADDED_FEATURES = "padded_features"


class TwoLengths(Collator):
    """Makes batches at natural length that also hold the features padded to 30 s."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """See :class:`Collator`; ``padded_features`` are ``[B, bins, T]`` of 30 s."""
        padded = self.features([sample[0] for sample in samples], padding="max_length")
        return {**super().__call__(samples), PADDED_FEATURES: padded["input_features"]}


class DistillingTrainer(SpeechTrainer):
    """Trainer whose targets are the decoder states of a padded `teacher`, over the tokens of each
    text. All weights are trained: the decoder, too, has to do without the silence that it attends
    to in the padded model."""

    teacher: Any = None  # stock model in evaluation mode, on the device of the trained model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # compute_loss returns a mean, which the Trainer has to divide by the accumulated batches
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Returns the sum of :func:`state_error` over the layers of the decoder; batches come from
        :class:`TwoLengths`."""
        batch = {**inputs}
        padded, labels = batch.pop(PADDED_FEATURES), batch["labels"]
        output = model(**batch, output_hidden_states=True)
        with torch.no_grad():
            teacher = self.teacher(padded, labels=labels, output_hidden_states=True)
        # the first states are the embeddings of the tokens, before all layers
        states, targets = output.decoder_hidden_states[1:], teacher.decoder_hidden_states[1:]
        errors = map(state_error, states, targets, [labels != -100] * len(states))
        loss = torch.stack([*errors]).sum()
        return (loss, output) if return_outputs else loss


def state_error(states: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over the tokens of the texts.

    Args:
        states, targets: ``[B, T, C]``.
        valid: ``[B, T]``, false on padding.
    """
    return (states - targets)[valid].float().square().mean()
