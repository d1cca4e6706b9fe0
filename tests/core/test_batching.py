"""Batches without padding: hops, order, epochs, and the frames that stay."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from cape_plugins.speech.batching import PaddingFreeBatches, equal_length, frame_nanoseconds
from cape_plugins.speech.features import log_mel

RATE = 8000


@pytest.fixture
def seconds():
    return np.random.default_rng(0).gamma(2.0, 3.0, 500) + 0.3


def test_an_epoch_holds_every_recording_once_in_batches_that_are_full_but_not_over(seconds):
    batches = list(sampler := PaddingFreeBatches(seconds, 60))
    hops = [hop for batch in batches for hop in batch]
    assert sorted(hop.index for hop in hops) == list(range(500))
    assert len({hop.seed for hop in hops}) == 500
    assert len(batches) == len(sampler)
    sums = [sum(seconds[hop.index] for hop in batch) for batch in batches]
    assert all(total <= 60 or len(batch) == 1 for total, batch in zip(sums, batches, strict=True))
    assert np.median(sums) > 50
    assert max(map(len, PaddingFreeBatches(seconds, 60, max_recordings=4))) == 4


def test_hops_give_the_frames_of_the_mean_duration(seconds):
    for batch in PaddingFreeBatches(seconds, 60):
        durations = np.array([seconds[hop.index] for hop in batch])
        frames = durations / [hop.seconds for hop in batch]
        np.testing.assert_allclose(frames, durations.mean() / 0.01)
        assert all(0.005 <= hop.seconds <= 0.02 for hop in batch)


@pytest.mark.parametrize("target", [0.005, 0.03])
def test_hops_follow_the_target(seconds, target):
    batches = PaddingFreeBatches(seconds, 60, target_hop=target)
    assert max(len(batch) for batch in batches) > 5
    hops = [hop.seconds for batch in batches for hop in batch]
    assert target / 2 <= min(hops) < max(hops) <= 2 * target
    assert np.mean(hops) == pytest.approx(target, rel=0.05)


def test_a_ragged_rest_is_cut_where_hops_would_leave_the_range():
    batches = list(PaddingFreeBatches([10.0, 9.0, 1.0, 0.9, 0.1], 100, shuffle=False))
    assert [[hop.index for hop in batch] for batch in batches] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("ratio", "mixed"), [(1.36, False), (1.3, True)])
def test_durations_are_perturbed_by_15_percent(ratio, mixed):
    """CAPE Appendix C.3: the factors are U(0.85, 1.15), which lets durations change places that
    differ by less than 1.15 / 0.85 = 1.353."""
    batches = PaddingFreeBatches([1.0, 1.0, ratio, ratio], max_recordings=2)
    pairs = set()
    for epoch in range(1000):
        batches.set_epoch(epoch)
        pairs |= {frozenset(batch.tolist()) for batch in batches.batches}
    assert (pairs != {frozenset((0, 1)), frozenset((2, 3))}) == mixed


def test_order_depends_on_seed_and_epoch_alone(seconds):
    first, second = PaddingFreeBatches(seconds, 60, seed=1), PaddingFreeBatches(seconds, 60, seed=1)
    second.set_epoch(7)
    second.set_epoch(0)
    assert list(first) == list(second)
    first.set_epoch(1)
    assert list(first) != list(second)
    members = [{frozenset(h.index for h in batch) for batch in b} for b in (first, second)]
    # batches differ, not only their order
    assert len(members[0] & members[1]) < len(members[0]) / 2
    assert list(PaddingFreeBatches(seconds, 60, seed=2)) != list(second)


def test_processes_share_an_epoch(seconds):
    whole = list(PaddingFreeBatches(seconds, 60, seed=1))
    options = {"seed": 1, "num_replicas": 3}
    parts = [list(PaddingFreeBatches(seconds, 60, **options, rank=rank)) for rank in range(3)]
    assert {len(part) for part in parts} == {len(whole) // 3}
    assert [batch for batches in zip(*parts, strict=True) for batch in batches] == (
        whole[: len(whole) // 3 * 3]
    )


@pytest.mark.parametrize("more", [-3, 0, 5])
def test_epochs_of_a_fixed_number_of_batches(seconds, more):
    free = PaddingFreeBatches(seconds, 60)
    fixed = PaddingFreeBatches(seconds, 60, num_batches=len(free) + more)
    assert len(fixed) == len(list(fixed)) == len(free) + more
    indices = [tuple(h.index for h in batch) for batch in free]
    assert [tuple(h.index for h in batch) for batch in fixed] == (indices * 2)[: len(fixed)]


class Tones(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __getitem__(self, hop):
        wave = torch.randn(int(self.seconds[hop.index] * RATE), generator=torch.Generator())
        return hop, log_mel(wave * 0.1, RATE, 8, hop.seconds)


def test_from_durations_to_a_batch_without_padding():
    """Recordings differ by a third, their frames by a few, and after skipping by none."""
    seconds = [2.0, 1.8, 1.6, 1.5]
    sampler = PaddingFreeBatches(seconds, 20)
    loader = DataLoader(Tones(seconds), batch_sampler=sampler, collate_fn=list)
    (batch,) = loader
    lengths = [len(frames) for _, frames in batch]
    assert max(lengths) - min(lengths) <= 2
    features, frame_numbers = equal_length([frames for _, frames in batch])
    assert features.shape == (4, min(lengths), 8)
    times = frame_nanoseconds(frame_numbers, [hop.seconds for hop, _ in batch]) * 1e-9
    assert (times.diff() > 0).all(), "order is kept"
    for row, (hop, frames) in enumerate(batch):
        assert torch.equal(features[row], frames[frame_numbers[row]])
        true = hop.seconds * frame_numbers[row] + 0.0125
        torch.testing.assert_close(times[row], true.float())
        assert times[row, -1] <= seconds[hop.index] - 0.0125 + 1e-4


def test_frames_are_skipped_uniformly():
    counts = torch.zeros(20)
    for _ in range(2000):
        _, frame_numbers = equal_length([torch.zeros(20, 1), torch.zeros(15, 1)])
        counts[frame_numbers[0]] += 1
    assert (counts / 2000 - 0.75).abs().max() < 0.05
    assert torch.equal(frame_numbers[1], torch.arange(15))
