"""Recordings with their texts for transformers' Trainer, from hub data sets, tables, folders or
espeak-ng, in padded batches or in batches without padding."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer

from cape_plugins.speech.audio import TolerantReader, read_audio, resample
from cape_plugins.speech.batching import (
    FACTORS,
    Hop,
    PaddingFreeBatches,
    equal_length,
    frame_nanoseconds,
)
from cape_plugins.speech.features import SAMPLING_RATE, spec_augment
from cape_plugins.speech.manifest import Utterance, measured
from recipes.asr.corpora import TEST_WORDS, TRAIN_STRINGS, TRAIN_WORDS, recordings_in, split_folder
from recipes.asr.manifest import usable
from recipes.lab.data import (
    add_data_args,
    check_columns,
    fingerprint,
    given_tables,
    train_and_test,
)
from recipes.lab.hf_training import SetEpoch
from recipes.lab.synthesis import make_speech

FOLDERS = {"train": ("train",), "test": ("test", "validation", "valid", "dev")}
Sample = tuple[torch.Tensor, list[int], Hop | None]  # waveform, labels


class Recordings(Dataset):
    """Dataset of waveforms ``[samples]`` at 16 kHz. The audio of an item is a path, bytes, a
    waveform, or the number of a row. In the last case the column `column` of `rows` holds the
    recordings."""

    def __init__(self, items: Iterable[Utterance], rows: Any = None, column: str = "") -> None:
        self.items, self.rows, self.column = list(items), rows, column

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        source = self.items[index].audio
        if isinstance(source, int):
            source = _cell(self.rows[source][self.column])
        if isinstance(source, np.ndarray):
            return torch.from_numpy(source)
        if isinstance(source, Mapping):
            samples = torch.as_tensor(np.asarray(source["array"], dtype=np.float32))
            return resample(samples, source["sampling_rate"], SAMPLING_RATE)
        return read_audio(source, SAMPLING_RATE)

    def fingerprint(self) -> str:
        """Fingerprint of texts and durations, computed without reading recordings."""
        return fingerprint([f"{item.seconds:.3f} {item.text}" for item in self.items])


def _cell(value: Any) -> Any:
    """Returns the content of a cell: the path of a file, the bytes of a file, or samples with their
    rate. soundfile decodes the bytes, because the package datasets decodes with torchcodec only."""
    if isinstance(value, Mapping) and value.get("array") is None:
        return value.get("bytes") or value.get("path")
    return value


def synthetic() -> dict[str, Recordings]:
    """Strings of spoken digits in many voices: short strings for training, short to long strings
    for tests."""
    train = make_speech(0, TRAIN_STRINGS, (1, TRAIN_WORDS))
    sets = enumerate(TEST_WORDS.items(), start=1)
    test = [s for seed, (words, count) in sets for s in make_speech(seed, count, words)]
    return {
        split: Recordings(
            Utterance(str(n), spoken.waveform, spoken.text, len(spoken.waveform) / SAMPLING_RATE)
            for n, spoken in enumerate(speech)
        )
        for split, speech in (("train", train), ("test", test))
    }


def add_recording_args(parser: argparse.ArgumentParser) -> None:
    """Adds options for the user's recordings."""
    add_data_args(parser)
    parser.add_argument(
        "--audio-column", default="audio", help="column of paths or bytes (default: audio)"
    )
    parser.add_argument("--text-column", default="text", help="column of texts (default: text)")


def given_recordings(args: argparse.Namespace) -> dict[str, Recordings]:
    """The splits train and test of ``--dataset`` or ``--train-file``."""
    from datasets import Audio

    if args.dataset and recordings_in(Path(args.dataset)):
        sets = split_folder(Path(args.dataset), FOLDERS)
        return {name: Recordings(usable(rows, len(rows), name)) for name, rows in sets.items()}
    data = given_tables(args, (args.audio_column, args.text_column))
    parts = train_and_test(data, args.train_split, args.test_split)
    check_columns(args, parts["train"], "audio_column", "text_column")
    audio, text = args.audio_column, args.text_column

    def measure(base: Path, numbered: tuple[int, Mapping[str, Any]]) -> Utterance:
        index, row = numbered
        source, spoken, seconds = _cell(row[audio]), row[text], None
        if isinstance(source, str):
            source = base / source
        if isinstance(source, Mapping):
            seconds = len(source["array"]) / source["sampling_rate"]
        spoken = spoken.strip() if isinstance(spoken, str) else ""
        utterance = measured(Utterance(str(index), source, spoken, seconds))
        # a path, or the number of the row, is enough to read a recording again
        return utterance._replace(audio=source if isinstance(source, Path) else index)

    for name, part in parts.items():
        if isinstance(part.features[audio], Audio):
            part = part.cast_column(audio, Audio(decode=False))  # soundfile decodes instead
        rows = usable(enumerate(part), len(part), name, partial(measure, folder_of(args, name)))
        parts[name] = Recordings(rows, part, audio)
    return parts


def folder_of(args: argparse.Namespace, split: str) -> Path:
    """Returns the folder that paths of a split are relative to: the folder of the split's table, or
    of the training table if the test is split off from training."""
    test_file = args.test_file or args.validation_file if split == "test" else None
    table = Path(test_file or args.train_file or args.dataset)
    return table.parent if table.is_file() else Path()


class Labelled(Dataset):
    """Recordings with token ids as labels. An index may be a Hop; the sample then holds this
    Hop."""

    def __init__(self, recordings: Recordings, labels: Sequence[list[int]]) -> None:
        self.recordings, self.labels = recordings, labels
        self.seconds = [item.seconds for item in recordings.items]
        self._read = TolerantReader(recordings.__getitem__, self.seconds)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | Hop) -> Sample:
        hop = index if isinstance(index, Hop) else None
        read_index, waveform = self._read(hop.index if hop else index)
        return waveform, self.labels[read_index], hop


class DurationSampler(Sampler[int]):
    """Sampler that puts recordings of similar duration next to each other, so that batches have
    little padding.

    Durations are perturbed by a factor of U(0.85, 1.15) in each epoch (CAPE Appendix C.3). The
    batches of all processes together come in random order; a smaller batch is the last.
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
        order = np.argsort(self.seconds * rng.uniform(*FACTORS, len(self.seconds)))
        whole = len(order) // self.batch_size * self.batch_size
        # Any recording may be in the last, smaller batch, not always the longest.
        left = rng.choice(len(order), len(order) - whole, replace=False)
        rows = np.delete(order, left).reshape(-1, self.batch_size)
        yield from rng.permutation(rows).flatten().tolist()
        yield from order[left].tolist()


class SpeechTrainer(Trainer):
    """Trainer with batches of recordings of similar duration, or without padding, and SpecAugment.

    Features are masked after a batch is loaded: batches are loaded ahead of their update, and a
    resumed training must draw the same masks. The loader of batches without padding is not passed
    to accelerate, which would divide its batches between the processes a second time.
    """

    masks: Mapping[str, Any] | None = None  # settings of SpecAugment
    # seconds of a batch without padding, per process; None for padded batches
    batch_seconds: float | None = None
    frames_last = False  # whether features are [B, bins, T] instead of [B, T, bins]

    def _get_train_sampler(self, train_dataset: Any = None) -> DurationSampler:
        size = self.args.train_batch_size * self.args.world_size
        sampler = DurationSampler(self.train_dataset.seconds, size, self.args.seed)
        self.add_callback(SetEpoch(sampler))
        return sampler

    def get_train_dataloader(self) -> DataLoader:
        """Returns the Trainer's loader of padded batches, or a loader of PaddingFreeBatches, which
        already give each process its share: accelerate must not divide the batches again."""
        if self.batch_seconds is None:
            return super().get_train_dataloader()
        limits = (self.train_dataset.seconds, self.batch_seconds)
        make = partial(PaddingFreeBatches, *limits, seed=self.args.seed)
        free, padded = make(shuffle=True), make(shuffle=False)
        processes, rank = self.args.world_size, self.args.process_index
        if rank == 0:
            print(
                f"{len(free)} batches without padding; sorted batches of {self.batch_seconds:g} s "
                f"would have {100 * padded.padding():.1f} %",
                flush=True,
            )
        # The Trainer assumes that all epochs have the same number of batches.
        count = max(len(free), processes)
        batches = make(num_batches=count, num_replicas=processes, rank=rank)
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
            masked = inputs["input_features"].clone()
            features = masked.transpose(1, 2) if self.frames_last else masked
            mask = inputs.get("attention_mask")
            lengths = [features.shape[1]] * len(features) if mask is None else mask.sum(-1).tolist()
            for row, length in zip(features, lengths, strict=True):
                row[:length] = spec_augment(row[:length], **self.masks)
            inputs = {**inputs, "input_features": masked}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Collator:
    """Makes batches of features from waveforms and labels. A batch has no padding if each sample
    has a hop. Other batches are padded, and their frames are `hop_seconds` apart (default: the hop
    of the extractor)."""

    def __init__(self, extractor: Any, hop_seconds: float | None = None) -> None:
        self.extractor = extractor
        self.more = {} if hop_seconds is None else {"hop_seconds": hop_seconds}

    def features(self, waveforms: Sequence[torch.Tensor], **more: Any) -> Any:
        """Returns ``input_features`` and ``attention_mask``; passes `more` to the extractor."""
        recordings = [waveform.numpy() for waveform in waveforms]
        more = {"padding": True, "return_tensors": "pt", **self.more, **more}
        return self.extractor(recordings, sampling_rate=SAMPLING_RATE, **more)

    def without_padding(
        self, waveforms: Sequence[torch.Tensor], hops: Sequence[Hop]
    ) -> dict[str, torch.Tensor]:
        """Returns ``input_features`` and the times of the frames that were not skipped."""
        seconds = [hop.seconds for hop in hops]
        more = {"hop_seconds": seconds, "padding": False, "return_tensors": None}
        frames = self.features(waveforms, **more)["input_features"]
        generator = torch.Generator().manual_seed(hops[0].seed)
        features, kept_frames = equal_length(list(map(torch.from_numpy, frames)), generator)
        times = frame_nanoseconds(kept_frames, seconds, self.extractor.window_seconds)
        return {"input_features": features, "frame_nanoseconds": times}

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        waveforms, ids, hops = zip(*samples, strict=True)
        padded = hops[0] is None
        batch = self.features(waveforms) if padded else self.without_padding(waveforms, hops)
        labels = [torch.tensor(labels) for labels in ids]
        return {**batch, "labels": torch.nn.utils.rnn.pad_sequence(labels, True, -100)}
