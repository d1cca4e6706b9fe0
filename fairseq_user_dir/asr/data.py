"""Batches of speech for fairseq, padded or without padding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from torch import Tensor

from cape_plugins.speech.audio import AudioError, TolerantReader
from cape_plugins.speech.batching import (
    PaddingFreeBatches,
    equal_length,
    frame_nanoseconds,
    hops_of,
)
from cape_plugins.speech.features import HOP_SECONDS, SAMPLING_RATE, WINDOW_SECONDS, log_mel
from cape_plugins.speech.manifest import Utterance, load
from fairseq_user_dir.asr.text import Targets

logger = logging.getLogger(__name__)


MAX_UNKNOWN = 0.1  # share of the training units that the dictionary may lack
LEAST_LEFT = 0.1  # least share of the training data that must fit into a batch
# A duration in a manifest may be wrong by this share, or by these seconds if that is more.
TOLERANCE = 0.02
SLACK = 0.05


class Sample(NamedTuple):
    """One utterance that was read. `content` holds samples ``[N]`` or features ``[T, bins]``,
    `target` the units ``[U]`` without EOS. `index` is the index that was asked for; the contents
    may come from another recording, see :class:`SpeechDataset`."""

    index: int
    content: Tensor
    target: Tensor
    seconds: float
    text: str


class SpeechDataset(FairseqDataset):
    """Recordings with texts, or without texts for transcription.

    In training, a recording that cannot be read is replaced by a recording of similar duration;
    in other data it is left out of its batch. Both cases are reported.

    Args:
        utterances: Lines of a manifest; lines without a duration are left out.
        dictionary: Units of the texts.
        targets: Turns texts into units.
        hop_seconds: Distance between frames; in batches without padding, the hop of a recording of
            mean duration.
        num_mel_bins: Number of features of a frame.
        training: Whether the recordings are training data, see above.
        padding_free: Make batches without padding (CAPE Appendix C.3); in training only.
        seed: Seed of the batches without padding.
        shared: Whether processes of a data loader read from this dataset; data that change are then
            in shared memory.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        dictionary: Dictionary,
        targets: Targets,
        hop_seconds: float = HOP_SECONDS,
        num_mel_bins: int = 80,
        training: bool = False,
        padding_free: bool = False,
        seed: int = 1,
        shared: bool = True,
    ) -> None:
        self.utterances, self.dictionary = list(utterances), dictionary
        self.targets = [targets.encode(utterance.text, dictionary) for utterance in utterances]
        self.seconds = np.array([utterance.seconds for utterance in utterances])
        frames = (self.seconds - WINDOW_SECONDS) / hop_seconds + 1e-6
        lengths = [len(target) + 1 for target in self.targets]  # with EOS
        self.sizes = np.stack([frames.astype(np.int64) + 1, np.array(lengths)], axis=1)
        self.hop_seconds, self.num_mel_bins = hop_seconds, num_mel_bins
        self.training, self.padding_free = training, padding_free and training
        self.seed, self._epoch = seed, torch.ones((), dtype=torch.long)
        if shared:
            self._epoch.share_memory_()
        self._check_units()
        self._reader = TolerantReader(self._load, self.seconds, shared)

    def _check_units(self) -> None:
        """Reports the number of units that the dictionary lacks.

        Raises:
            ValueError: if the dictionary lacks more than a tenth of the units of the training data.
        """
        unknown = [int((target == self.dictionary.unk()).sum()) for target in self.targets]
        total = sum(map(len, self.targets))
        if not any(unknown):
            return
        worst = self.utterances[int(np.argmax(unknown))]
        message = (
            f"{sum(unknown)} of {total} units of the texts are not in the dictionary, such as in "
            f"{worst.text!r} ({worst.id}). Do case, subword model and dict.txt belong together? "
            "If there is no dict.txt, the task makes a dictionary of the training texts."
        )
        if self.training and sum(unknown) > MAX_UNKNOWN * total:
            raise ValueError(message)
        logger.warning("%s", message)

    # ---- methods that fairseq calls --------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the batches without padding."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """See fairseq. The epoch lies in shared memory, because processes of a data loader live
        longer than an epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.utterances)

    def num_tokens(self, index: int) -> int:
        """Number of frames at the hop of the dataset, which ``--max-tokens`` counts."""
        return self.sizes[index, 0]

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Numbers of frames ``[n]`` of the recordings `indices` ``[n]``, at the hop of the
        dataset."""
        return self.sizes[indices, 0]

    def size(self, index: int) -> tuple[int, int]:
        """Numbers of frames and of units."""
        return tuple(self.sizes[index].tolist())

    def ordered_indices(self) -> np.ndarray:
        """Indices of the recordings, the longest first, so that a lack of memory shows at once."""
        order = np.argsort(-self.seconds, kind="stable")
        return order[self.seconds[order] > 0]

    def filter_indices_by_size(
        self, indices: np.ndarray, max_sizes: Any
    ) -> tuple[np.ndarray, list[int]]:
        """See fairseq. Reports how many recordings a training leaves out, and a limit that would
        keep all recordings.

        Raises:
            ValueError: if a training leaves out more than nine tenths.
        """
        short_enough, too_long = super().filter_indices_by_size(indices, max_sizes)
        if not self.training or not too_long:
            return short_enough, too_long
        frames, units = max_sizes if isinstance(max_sizes, Sequence) else (max_sizes, max_sizes)
        message = (
            f"{len(too_long)} of {len(indices)} recordings have more than {frames} frames or "
            f"{units} units and are left out. The lowest of --max-tokens, --max-source-positions "
            f"and --max-target-positions counts; --max-tokens {self.sizes[indices].max()} fits all."
        )
        if len(short_enough) < LEAST_LEFT * len(indices):
            raise ValueError(message)
        logger.warning("%s", message)
        return short_enough, too_long

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """Batches of at most `max_tokens` frames and `max_sentences` recordings.
        `required_batch_size_multiple`, 8 by default, is ignored: fairseq would leave out the last
        recordings. Recordings without text have separate batches, which come first: fairseq scores
        batches with targets, and shows the score only if the last batch has targets."""
        longest = int(self.sizes[indices, 0].max(initial=0))
        if max_tokens and longest > max_tokens and not self.training:
            max_tokens = longest  # recordings longer than a batch are decoded, too
        if not self.padding_free:
            has_text = np.array(
                [bool(self.utterances[index].text) for index in indices], dtype=bool
            )
            batches = super().batch_by_size(indices[~has_text], max_tokens, max_sentences, 1)
            batches += super().batch_by_size(indices[has_text], max_tokens, max_sentences, 1)
            return batches
        indices = np.sort(indices)
        settings = {
            "seconds": self.seconds[indices],
            "max_seconds": max_tokens * self.hop_seconds if max_tokens else np.inf,
            "max_recordings": max_sentences,
            "seed": self.seed,
            "target_hop": self.hop_seconds,
        }
        batches = PaddingFreeBatches(**settings)
        batches.set_epoch(self.epoch)
        padded = PaddingFreeBatches(**settings, shuffle=False)
        logger.info(
            "%d batches without padding; sorted batches of the same size would have %.1f %%",
            len(batches),
            100 * padded.padding(),
        )
        return [indices[batch] for batch in batches.batches]

    def __getitem__(self, index: int) -> Sample | None:
        index = int(index)
        if self.training:
            read_index, content = self._reader(index)
        else:
            read_index, content = index, self._reader.attempt(index)
            if content is None:
                return None
        text = self.utterances[read_index].text
        return Sample(
            index, content, self.targets[read_index], float(self.seconds[read_index]), text
        )

    def _load(self, index: int) -> Tensor:
        utterance = self.utterances[index]
        content = load(utterance)
        if content.dim() == 1:
            seconds = len(content) / SAMPLING_RATE
            if abs(seconds - utterance.seconds) > max(SLACK, TOLERANCE * utterance.seconds):
                raise AudioError(
                    f"{utterance.audio} has {seconds:.2f} s, its manifest says "
                    f"{utterance.seconds:.2f}; correct the column seconds, or leave it out."
                )
        return content

    def collater(self, samples: Sequence[Sample | None]) -> dict[str, Any]:
        """Makes a batch. If no recording could be read, the batch has no id and holds silence
        without a text, which counts in no score: fairseq would replace an empty batch by another
        batch.

        Returns:
            In `net_input` the features ``[B, T, bins]`` as `src_tokens`, their lengths ``[B]``,
            the distance between frames ``[B]`` and, if frames were skipped, the time ``[B, T]`` of
            each frame in nanoseconds. Also targets with EOS, padded on the right, or None for
            recordings without text.
        """
        rows = [sample for sample in samples if sample is not None]
        if not samples:
            return {}
        if not rows:
            silence = torch.zeros(SAMPLING_RATE)
            rows = [Sample(-1, silence, torch.zeros(0, dtype=torch.long), 1.0, "")]
        hops = np.full(len(rows), self.hop_seconds)
        if self.padding_free:
            hops = hops_of(np.array([sample.seconds for sample in rows]), self.hop_seconds)
        net_input = self._features(rows, hops)
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        ends = [torch.tensor([pad if sample.index < 0 else eos]) for sample in rows]
        targets = [torch.cat((s.target, end)) for s, end in zip(rows, ends, strict=True)]
        target = data_utils.collate_tokens(targets, pad)
        net_input["prev_output_tokens"] = data_utils.collate_tokens(
            targets, pad, eos, move_eos_to_beginning=True
        )
        lengths = target.ne(pad).sum(1)
        recordings = [sample for sample in rows if sample.index >= 0]
        return {
            "id": torch.tensor([sample.index for sample in recordings], dtype=torch.long),
            "texts": [sample.text for sample in recordings],
            "net_input": net_input,
            "target": None
            if recordings and not any(sample.text for sample in recordings)
            else target,
            "target_lengths": lengths,
            "ntokens": int(lengths.sum()),
            "nsentences": len(recordings),
        }

    def _features(self, samples: Sequence[Sample], hops: np.ndarray) -> dict[str, Tensor]:
        frames = [self._frames(s, hop) for s, hop in zip(samples, hops.tolist(), strict=True)]
        nanoseconds = torch.from_numpy(np.rint(hops * 1e9).astype(np.int64))
        lengths = torch.tensor([len(features) for features in frames])
        if not self.padding_free:
            features = torch.nn.utils.rnn.pad_sequence(frames, batch_first=True)
            return {
                "src_tokens": features,
                "src_lengths": lengths,
                "hop_nanoseconds": nanoseconds,
            }
        with data_utils.numpy_seed(self.seed, self.epoch, samples[0].index):
            generator = torch.Generator().manual_seed(int(np.random.randint(2**31)))
        features, frame_indices = equal_length(frames, generator)
        return {
            "src_tokens": features,
            "src_lengths": torch.full_like(lengths, features.shape[1]),
            "hop_nanoseconds": nanoseconds,
            "frame_nanoseconds": frame_nanoseconds(frame_indices, hops.tolist()),
        }

    def _frames(self, sample: Sample, hop: float) -> Tensor:
        if sample.content.dim() == 1:
            return log_mel(sample.content, SAMPLING_RATE, self.num_mel_bins, hop)
        bins = sample.content.shape[1]
        if self.padding_free or self.hop_seconds != HOP_SECONDS or bins != self.num_mel_bins:
            raise ValueError(
                f"{self.utterances[sample.index].audio} holds {bins} features of frames at "
                f"{HOP_SECONDS} s; allowed: {self.num_mel_bins} features, without --padding-free "
                "and --hop-seconds, which need recordings. Give a manifest of audio files."
            )
        return sample.content
