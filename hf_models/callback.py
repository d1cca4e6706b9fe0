"""Random numbers of data-parallel training, for transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from cape_plugins.mathematics.augmentation import rank_seed


class RankSeedCallback(TrainerCallback):
    """Gives each process different random numbers within a training step.

    The Trainer seeds all processes alike, so all would draw the same positions and the same dropout
    masks. The models of this package draw positions by rank without this callback; compiled models
    cannot, and need the callback. Between the steps all processes share one stream again. The order
    of the data may depend on this stream, and checkpoints save the state of the stream, so a
    resumed training draws the same numbers.
    """

    def __init__(self) -> None:
        self._common: list[tuple[Any, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves the common stream."""
        self._restore()
        if args.world_size == 1:
            return
        seed = rank_seed(args.process_index)
        self._common = [(torch.random, torch.get_rng_state())]
        if args.device.type != "cpu":
            module = torch.get_device_module(args.device)
            self._common.append((module, module.get_rng_state()))
        torch.manual_seed(seed)  # on all devices

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Returns to the common stream."""
        self._restore()

    def _restore(self) -> None:
        for module, state in self._common:
            module.set_rng_state(state)
        self._common = []
