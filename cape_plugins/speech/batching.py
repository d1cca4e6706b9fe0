"""Batches of recordings without padding (CAPE Appendix C.3). Each recording gets a hop with which
it has as many frames as the other recordings of the batch; the few surplus frames are skipped.

    batches = PaddingFreeBatches(seconds, max_seconds=120, seed=1)
    batches.set_epoch(3)
    for batch in batches:                                    # Hop(index, seconds, seed)
        hops = [hop.seconds for hop in batch]
        generator = torch.Generator().manual_seed(batch[0].seed)
        frames = [log_mel(read(hop.index), hop_seconds=hop.seconds) for hop in batch]
        features, kept = equal_length(frames, generator)     # [B, T, bins], [B, T]
        nanoseconds = frame_nanoseconds(kept, hops)          # [B, T]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from cape_plugins.speech.features import HOP_SECONDS, WINDOW_SECONDS

FACTORS = (0.85, 1.15)  # durations are multiplied by U(0.85, 1.15) before sorting
# Shortest and longest hop as factors of the target. CAPE's code uses hops from 1 to 12 ms; the
# shortest hops occur in batches of very different durations. The mean hop of CAPE's code is 9.5 ms,
# because this code rounds hops down to whole ms.
HOP_RANGE = (0.5, 2.0)


class Hop(NamedTuple):
    """A recording of a batch.

    Attributes:
        index: Number of the recording.
        seconds: Distance between the frames of the recording.
        seed: Seed of the recording's random numbers in this epoch, so that these numbers do not
            depend on the process that loads the recording, or on when it is loaded.
    """

    index: int
    seconds: float
    seed: int


class PaddingFreeBatches(Sampler[list[Hop]]):
    """Batches of recordings of similar duration, for the `batch_sampler` of a DataLoader. The
    DataLoader then asks the data set for ``Hop(index, seconds)``.

    In each epoch, durations are perturbed, sorted and cut into batches again; a batch of mean
    duration m gives a recording of duration d the hop ``target_hop * d / m``. A batch is cut before
    a hop leaves the allowed range. The order depends only on seed and epoch, so a host may skip
    batches that were done before an interruption, and distribute the batches over processes.

    Args:
        seconds: Durations ``[N]``.
        max_seconds: Largest sum of durations of a batch; a longer recording is a batch by itself.
        seed: Seed of the perturbation and of the order of batches.
        target_hop: Hop of a recording of mean duration, in seconds.
        hops: Shortest and longest allowed hop in seconds; default half and twice the target.
        shuffle: Perturb durations, and put batches in random order; else sort by duration.
        num_batches: Number of batches in each epoch, for hosts that count epochs in batches, as the
            Trainer does when it resumes. Surplus batches are left out and missing batches repeated,
            both at random. By default all batches.
        num_replicas: Number of processes; each gets as many batches as the others, so up to
            num_replicas - 1 batches of an epoch are left out, at random.
        rank: Rank of this process.
        max_recordings: Largest number of recordings in a batch; default no limit.

    Raises:
        ValueError: if a duration is not positive, a setting is out of range, or there are fewer
            batches than processes.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        max_seconds: float = 120.0,
        seed: int = 0,
        target_hop: float = HOP_SECONDS,
        hops: tuple[float, float] | None = None,
        shuffle: bool = True,
        num_batches: int | None = None,
        num_replicas: int = 1,
        rank: int = 0,
        max_recordings: int | None = None,
    ) -> None:
        self.seconds = np.asarray(seconds, dtype=np.float64)
        usable = np.isfinite(self.seconds) & (self.seconds > WINDOW_SECONDS)
        if self.seconds.ndim != 1 or not usable.all():
            raise ValueError(
                "seconds must have the shape [recordings], and hold finite numbers above "
                f"{WINDOW_SECONDS} (one window); leave out recordings that are empty or too short."
            )
        low, high = HOP_RANGE
        hops = hops or (low * target_hop, high * target_hop)
        if not max_seconds > 0:
            raise ValueError(
                f"max_seconds={max_seconds} is not allowed; allowed: > 0, such as 120."
            )
        if not 0 < hops[0] <= target_hop <= hops[1] < 1:
            raise ValueError(
                f"hops={hops} with target_hop={target_hop} is not allowed; allowed: 0 < shortest "
                "<= target_hop <= longest < 1 second, such as (0.005, 0.02) with 0.01."
            )
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank={rank} is not allowed; allowed: 0 to {num_replicas - 1} (num_replicas - 1)."
            )
        self.max_seconds, self.target_hop, self.hops = max_seconds, target_hop, hops
        self.max_recordings = max_recordings or len(self.seconds)
        self.seed, self.shuffle = seed, shuffle
        self.num_batches, self.num_replicas, self.rank = num_batches, num_replicas, rank
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Sets the attribute `batches`, arrays of indices for all processes, for an epoch."""
        self.epoch = epoch
        rng = np.random.default_rng((self.seed, epoch))
        factors = np.ones(len(self.seconds))
        if self.shuffle:
            factors = rng.uniform(*FACTORS, len(self.seconds))
        order = np.argsort(-self.seconds * factors, kind="stable")
        self.batches = list(self._cut(order))
        count = len(self.batches)
        numbers = rng.permutation(count) if self.shuffle else np.arange(count)
        if count and self.num_batches:
            numbers = np.resize(numbers, self.num_batches)
        divisible = len(numbers) - len(numbers) % self.num_replicas
        if count and not divisible:
            raise ValueError(
                f"num_replicas={self.num_replicas} is not allowed with {len(numbers)} batches, of "
                f"which each process needs one; allowed: 1 to {len(numbers)}. Use fewer processes, "
                "or more and shorter batches (max_seconds, max_recordings)."
            )
        self.batches = [self.batches[number] for number in numbers[:divisible]]

    def _cut(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Batches of at most `max_seconds` and `max_recordings` with hops in the allowed range."""
        first, total, low, high = 0, 0.0, np.inf, 0.0
        for number, duration in enumerate(self.seconds[order]):
            new_total, new_low, new_high = (
                total + duration,
                min(low, duration),
                max(high, duration),
            )
            mean = new_total / (number - first + 1)
            fits = (
                new_total <= self.max_seconds
                and number - first < self.max_recordings
                and new_low / mean >= self.hops[0] / self.target_hop
                and new_high / mean <= self.hops[1] / self.target_hop
            )
            if number > first and not fits:
                yield order[first:number]
                first, new_total, new_low, new_high = number, duration, duration, duration
            total, low, high = new_total, new_low, new_high
        if len(order):
            yield order[first:]

    def __len__(self) -> int:
        return len(self.batches) // self.num_replicas

    def __iter__(self) -> Iterator[list[Hop]]:
        for number in range(self.rank, len(self.batches), self.num_replicas):
            indices = self.batches[number]
            hops = hops_of(self.seconds[indices], self.target_hop)
            rng = np.random.default_rng((self.seed, self.epoch, number))
            seeds = rng.integers(2**63, size=len(indices))
            rows = zip(indices.tolist(), hops.tolist(), seeds.tolist(), strict=True)
            yield [Hop(*row) for row in rows]

    def padding(self) -> float:
        """Share of frames that would be padding in these batches, if all hops were the same. For
        the padding of a padded training, which has sorted batches without perturbation, use
        ``shuffle=False``."""
        real = sum(self.seconds[b].sum() for b in self.batches)
        longest = sum(self.seconds[b].max() * len(b) for b in self.batches)
        return float(1 - real / longest) if longest else 0.0


def hops_of(seconds: np.ndarray, target_hop: float = HOP_SECONDS) -> np.ndarray:
    """Hops ``[B]`` in seconds that give recordings of these durations ``[B]`` as many frames as a
    recording of their mean duration has at `target_hop`."""
    return target_hop * seconds / seconds.mean()


def equal_length(
    frames: Sequence[Tensor], generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Skips frames of the longer recordings, chosen uniformly at random, so that all recordings
    have as many frames as the shortest one. The other frames keep their order.

    Args:
        frames: ``[T_i, bins]`` of each recording.
        generator: Generator of the choice; default torch's generator.

    Returns:
        ``[B, T, bins]`` and the indices of the frames that stay, ``[B, T]`` int64.

    Raises:
        ValueError: if there is no recording, or a recording has no frames.
    """
    length = min((len(features) for features in frames), default=0)
    if not length:
        raise ValueError(
            "frames holds no recording, or a recording without frames; leave such recordings out."
        )
    frame_indices = torch.stack(
        [
            torch.randperm(len(features), generator=generator)[:length].sort().values
            if len(features) > length
            else torch.arange(length)
            for features in frames
        ]
    )
    rows = zip(frames, frame_indices, strict=True)
    return torch.stack([features[row.to(features.device)] for features, row in rows]), frame_indices


def frame_nanoseconds(
    frame_indices: Tensor, hop_seconds: Sequence[float], window_seconds: float = WINDOW_SECONDS
) -> Tensor:
    """True times of the centres of frames since the beginning of the recording, also after frames
    were skipped. Integers, because hosts cast floats to half precision.

    Args:
        frame_indices: ``[B, T]`` indices of frames.
        hop_seconds: ``[B]``, distance of the frames before frames were skipped.
        window_seconds: Length of a frame.

    Returns:
        ``[B, T]`` int64.
    """
    hop = torch.tensor(hop_seconds, dtype=torch.float64, device=frame_indices.device)
    return ((frame_indices * hop[:, None] + window_seconds / 2) * 1e9).round().long()
