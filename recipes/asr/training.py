"""Batches of recordings for transformers' Trainer, padded or without padding."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer

from cape_plugins.speech.audio import TolerantReader
from cape_plugins.speech.batching import Hop, PaddingFreeBatches, equal_length, frame_nanoseconds
from cape_plugins.speech.features import SAMPLING_RATE, spec_augment
from recipes.asr.data import Recordings
from recipes.lab.hf_training import SetEpoch


class Labelled(Dataset):
    """Recordings with token ids as labels, by index, or by hop, which is handed on with them."""

    def __init__(self, recordings: Recordings, tokenizer: Any) -> None:
        self.recordings = recordings
        self.labels = [tokenizer(text=item.text).input_ids for item in recordings.items]
        self._read = TolerantReader(recordings.__getitem__, self.seconds)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def seconds(self) -> list[float]:
        return [item.seconds for item in self.recordings.items]

    def __getitem__(self, index: int | Hop) -> tuple[torch.Tensor, list[int], Hop | None]:
        hop = index if isinstance(index, Hop) else None
        place, waveform = self._read(hop.index if hop else index)
        return waveform, self.labels[place], hop


class DurationSampler(Sampler[int]):
    """Recordings of similar duration follow each other, so that batches have little padding.

    Durations are perturbed by a factor of U(0.85, 1.15) in each epoch, so that batches (of all
    processes together) differ (CAPE Appendix C.3), and batches come in random order, a smaller last
    one at the end. The order depends on the seed and the epoch alone.
    """

    def __init__(self, seconds: Sequence[float], batch_size: int, seed: int) -> None:
        self.seconds, self.batch_size, self.seed = np.asarray(seconds), batch_size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.seconds)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = np.argsort(self.seconds * rng.uniform(0.85, 1.15, len(self.seconds)))
        whole = len(order) // self.batch_size * self.batch_size
        # Any recording may be left over, not always the longest.
        left = rng.choice(len(order), len(order) - whole, replace=False)
        rows = np.delete(order, left).reshape(-1, self.batch_size)
        yield from rng.permutation(rows).flatten().tolist()
        yield from order[left].tolist()


class SpeechTrainer(Trainer):
    """Groups recordings by duration, or makes batches without padding, and masks features by
    SpecAugment.

    Masks are drawn here, after the batch was loaded: batches are loaded ahead, and a resumed
    training must draw the same ones.
    """

    masks: Mapping[str, Any] | None = None  # settings of SpecAugment
    batch_seconds: float | None = None  # of a batch without padding, per process; None: padded

    def _get_train_sampler(self, train_dataset: Any = None) -> DurationSampler:
        size = self.args.train_batch_size * self.args.world_size
        return DurationSampler(self.train_dataset.seconds, size, self.args.seed)

    def get_train_dataloader(self) -> DataLoader:
        """Padded batches of the Trainer; or those of PaddingFreeBatches, of which each process
        takes its own, so that accelerate must not share them out again."""
        if self.batch_seconds is None:
            return super().get_train_dataloader()
        make = partial(
            PaddingFreeBatches, self.train_dataset.seconds, self.batch_seconds, seed=self.args.seed
        )
        free, padded = make(shuffle=True), make(shuffle=False)
        if self.args.process_index == 0:
            print(
                f"{len(free)} batches without padding; sorted batches of {self.batch_seconds:g} s "
                f"would have {100 * padded.padding():.1f} %",
                flush=True,
            )
        # The Trainer takes it for granted that all epochs have the same number of batches.
        batches = make(
            num_batches=max(len(free), self.args.world_size),
            num_replicas=self.args.world_size,
            rank=self.args.process_index,
        )
        self.add_callback(SetEpoch(batches))
        return DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.masks is not None and model.training:
            features = inputs["input_features"].clone()
            mask = inputs.get("attention_mask")
            lengths = [features.shape[1]] * len(features) if mask is None else mask.sum(-1).tolist()
            for row, length in zip(features, lengths, strict=True):
                row[:length] = spec_augment(row[:length], **self.masks)
            inputs = {**inputs, "input_features": features}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Collator:
    """Waveforms and labels to a batch of features, without padding where each has a hop.

    In padded batches frames have the distance `hop_seconds`, by default that of the extractor.
    """

    def __init__(self, extractor: Any, hop_seconds: float | None = None) -> None:
        self.extractor = extractor
        self.more = {} if hop_seconds is None else {"hop_seconds": hop_seconds}

    def features(self, waveforms: Sequence[torch.Tensor]) -> Any:
        """``input_features`` and ``attention_mask``."""
        recordings = [waveform.numpy() for waveform in waveforms]
        return self.extractor(
            recordings, sampling_rate=SAMPLING_RATE, padding=True, return_tensors="pt", **self.more
        )

    def without_padding(
        self, waveforms: Sequence[torch.Tensor], hops: Sequence[Hop]
    ) -> dict[str, torch.Tensor]:
        """``input_features`` and the times of the frames that were not skipped."""
        seconds = [hop.seconds for hop in hops]
        frames = self.extractor(
            [waveform.numpy() for waveform in waveforms], SAMPLING_RATE, seconds, padding=False
        )["input_features"]
        generator = torch.Generator().manual_seed(hops[0].seed)
        features, kept = equal_length([torch.from_numpy(frame) for frame in frames], generator)
        times = frame_nanoseconds(kept, seconds, self.extractor.window_seconds)
        return {"input_features": features, "frame_nanoseconds": times}

    def __call__(
        self, samples: Sequence[tuple[torch.Tensor, list[int], Hop | None]]
    ) -> dict[str, Any]:
        waveforms, ids, hops = zip(*samples, strict=True)
        batch = (
            self.features(waveforms) if hops[0] is None else self.without_padding(waveforms, hops)
        )
        labels = [torch.tensor(labels) for labels in ids]
        return {**batch, "labels": torch.nn.utils.rnn.pad_sequence(labels, True, -100)}
