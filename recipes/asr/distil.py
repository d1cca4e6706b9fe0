"""Distillation of a Whisper that pads recordings to 30 s: a model at natural length learns to
compute the states of the padded model. whisper-acft (FUTO) does this with the states of the
decoder; here the targets are the last states of the encoder, so training needs no texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_models.seams.natural_length import STRIDE
from recipes.asr.data import Collator, Sample, SpeechTrainer

PADDED_FEATURES = "padded_features"


class TwoLengths(Collator):
    """Makes batches at natural length that also hold the features padded to 30 s."""

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """See :class:`Collator`; ``padded_features`` are ``[B, bins, T]`` of 30 s."""
        padded = self.features([sample[0] for sample in samples], padding="max_length")
        return {**super().__call__(samples), PADDED_FEATURES: padded["input_features"]}


class DistillingTrainer(SpeechTrainer):
    """Trainer whose targets are the encoder states of a padded `teacher`, over the frames of each
    recording. The decoder gets no gradient and stays unchanged."""

    teacher: Any = None  # stock model in evaluation mode, on the device of the trained model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # compute_loss returns a mean, which the Trainer has to divide by the accumulated batches
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Returns the mean squared error of the states; batches come from :class:`TwoLengths`."""
        mask = inputs["attention_mask"]
        # one token, because the whole model has to be called: DistributedDataParallel sums the
        # gradients of calls of the module that it wraps
        output = model(
            input_features=inputs["input_features"],
            attention_mask=mask,
            decoder_input_ids=inputs["labels"][:, :1].clamp(min=0),
        )
        states = output.encoder_last_hidden_state
        with torch.no_grad():
            encoder = self.teacher.get_encoder()
            targets = encoder(inputs[PADDED_FEATURES]).last_hidden_state
        loss = state_error(states, targets, mask[:, ::STRIDE])
        return (loss, output) if return_outputs else loss


def state_error(states: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error over the positions of the recordings.

    Args:
        states: ``[B, T, C]``.
        targets: ``[B, T', C]``; T' is T or more.
        valid: ``[B, T]``, 0 on padding.
    """
    errors = (states - targets[:, : states.shape[1]]).float().square().mean(-1)
    return errors[valid.bool()].mean()
