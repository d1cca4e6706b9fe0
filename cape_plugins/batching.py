"""Batches of recordings without padding (CAPE Appendix C.3): each recording gets the hop that gives
it as many frames as its neighbours have, and the few frames that are left over are skipped.

    batches = PaddingFreeBatches(seconds, max_seconds=120, seed=1)
    batches.set_epoch(3)
    for batch in batches:                                    # Hop(index, seconds)
        frames = [log_mel(read(hop.index), hop_seconds=hop.seconds) for hop in batch]
        features, kept = equal_length(frames)                # [B, T, bins], [B, T]
        times = frame_times(kept, [hop.seconds for hop in batch])  # [B, T]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from cape_plugins.features import WINDOW_SECONDS

PERTURBATION = 0.15  # durations are multiplied by U(1 - 0.15, 1 + 0.15) before they are sorted
HOPS = (
    0.005,
    0.020,
)  # the papers' code has hops from 1 to 12 ms; the lowest come from ragged batches


class Hop(NamedTuple):
    """A recording of a batch and the distance of its frames in seconds."""

    index: int
    seconds: float


class PaddingFreeBatches(Sampler[list[Hop]]):
    """Batches of recordings of similar duration, for the `batch_sampler` of a DataLoader, whose
    data set is then asked for ``Hop(index, seconds)``.

    Durations are perturbed, sorted and cut into batches anew in each epoch; a batch of mean
    duration m gives a recording of duration d the hop ``target_hop * d / m``. Where that leaves the
    allowed range, the batch is cut there. The order depends on seed and epoch alone, so that
    hosts may skip what was done before an interruption and deal the batches out to processes.

    Args:
        seconds: Durations ``[N]``.
        max_seconds: Of a batch in sum; a longer recording is a batch by itself.
        seed: Of the perturbation and of the order of batches.
        target_hop: Of a recording of mean duration, in seconds.
        hops: Shortest and longest allowed hop in seconds.
        shuffle: Perturb, and batches in random order; without, the order is by duration.

    Raises:
        ValueError: if a duration is not positive or a setting is out of range.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        max_seconds: float = 120.0,
        seed: int = 0,
        target_hop: float = 0.010,
        hops: tuple[float, float] = HOPS,
        shuffle: bool = True,
    ) -> None:
        self.seconds = np.asarray(seconds, dtype=np.float64)
        if self.seconds.ndim != 1 or not (self.seconds > WINDOW_SECONDS).all():
            raise ValueError(
                f"seconds must be [recordings] of more than {WINDOW_SECONDS} (one window); leave "
                "out recordings that are empty or too short."
            )
        if not max_seconds > 0:
            raise ValueError(
                f"max_seconds={max_seconds} is not allowed; allowed: > 0, such as 120."
            )
        if not 0 < hops[0] <= target_hop <= hops[1] < 1:
            raise ValueError(
                f"hops={hops} with target_hop={target_hop} is not allowed; allowed: 0 < shortest "
                "<= target_hop <= longest < 1 second, such as (0.005, 0.02) with 0.01."
            )
        self.max_seconds, self.seed, self.target_hop, self.hops = (
            max_seconds,
            seed,
            target_hop,
            hops,
        )
        self.shuffle = shuffle
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Makes the batches of an epoch."""
        self.epoch = epoch
        rng = np.random.default_rng((self.seed, epoch))
        factors = np.ones(len(self.seconds))
        if self.shuffle:
            factors = rng.uniform(1 - PERTURBATION, 1 + PERTURBATION, len(self.seconds))
        order = np.argsort(-self.seconds * factors, kind="stable")
        self.batches = list(self._cut(order))
        if self.shuffle:
            self.batches = [self.batches[i] for i in rng.permutation(len(self.batches))]

    def _cut(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Batches of at most `max_seconds`, whose hops are in the allowed range."""
        first, total, low, high = 0, 0.0, np.inf, 0.0
        for place, duration in enumerate(self.seconds[order]):
            new_total, new_low, new_high = (
                total + duration,
                min(low, duration),
                max(high, duration),
            )
            mean = new_total / (place - first + 1)
            fits = (
                new_total <= self.max_seconds
                and new_low / mean >= self.hops[0] / self.target_hop
                and new_high / mean <= self.hops[1] / self.target_hop
            )
            if place > first and not fits:
                yield order[first:place]
                first, new_total, new_low, new_high = place, duration, duration, duration
            total, low, high = new_total, new_low, new_high
        if len(order):
            yield order[first:]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Hop]]:
        for indices in self.batches:
            durations = self.seconds[indices]
            hops = self.target_hop * durations / durations.mean()
            yield [Hop(int(i), float(hop)) for i, hop in zip(indices, hops, strict=True)]

    def padding(self) -> float:
        """Share of frames that would be padding in these batches, were all hops the same; sorted
        batches without perturbation are what padded training would use: ``shuffle=False``."""
        longest = sum(self.seconds[b].max() * len(b) for b in self.batches)
        return float(1 - self.seconds.sum() / longest) if longest else 0.0


def equal_length(
    frames: Sequence[Tensor], generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Skips frames of the longer recordings, uniformly at random, until all are as short as the
    shortest. The order of those that stay is kept.

    Args:
        frames: ``[T_i, bins]`` of each recording.
        generator: Of the choice; default torch's own.

    Returns:
        ``[B, T, bins]`` and the indices of the frames that stay, ``[B, T]`` int64.

    Raises:
        ValueError: if there is no recording, or one without frames.
    """
    length = min((len(one) for one in frames), default=0)
    if not length:
        raise ValueError("frames holds no recording, or one without frames; leave it out.")
    kept = torch.stack(
        [
            torch.randperm(len(one), generator=generator)[:length].sort().values
            if len(one) > length
            else torch.arange(length)
            for one in frames
        ]
    )
    rows = zip(frames, kept, strict=True)
    return torch.stack([one[row.to(one.device)] for one, row in rows]), kept


def frame_times(
    kept: Tensor, hop_seconds: Tensor | Sequence[float], window_seconds: float = WINDOW_SECONDS
) -> Tensor:
    """True times of the centres of frames in seconds, also where frames were skipped.

    Args:
        kept: ``[B, T]`` indices of frames.
        hop_seconds: ``[B]``, distance of the frames before any was skipped.
        window_seconds: Length of a frame.

    Returns:
        ``[B, T]`` float32.
    """
    hop = torch.as_tensor(hop_seconds, dtype=torch.float32, device=kept.device)
    return kept.float() * hop[:, None] + window_seconds / 2
