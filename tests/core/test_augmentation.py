"""Drawing and applying of augmentation: distributions, what is shared or independent, the order of
operations, and the numpy code of the appendix with injected draws."""

import math

import numpy as np
import pytest
import torch

from cape_plugins import (
    Draw,
    PositionConfig,
    Sinusoid,
    augment,
    coordinate_positions,
    draw_global,
    draw_local,
    patch_positions,
)
from cape_plugins.mathematics.augmentation import rank_seed
from cape_plugins.settings.domains import DOMAINS
from tests.reference import appendix_a
from tests.support.core import default_dtype, random_numbers_untouched, valid_mask, whole_positions

MANY = 4000


def distance_to_uniform(sample, low, high):
    """Kolmogorov-Smirnov distance; 1.63 / sqrt(n) is exceeded by chance once in a hundred."""
    ordered = np.sort((np.asarray(sample) - low) / (high - low))
    n = len(ordered)
    above, below = np.arange(1, n + 1) / n, np.arange(n) / n
    return max(np.abs(above - ordered).max(), np.abs(ordered - below).max())


@pytest.mark.parametrize("domain", DOMAINS)
def test_shift_is_uniform_between_the_half_widths(domain):
    width = PositionConfig("cape", domain).max_global_shift
    shift = draw_global(MANY, max_global_shift=width).shift.flatten()
    bound = 1.63 / math.sqrt(MANY)
    assert distance_to_uniform(shift, -2 * width, 2 * width) > bound  # twice the width is noticed
    assert distance_to_uniform(shift, 0, 2 * width) > bound  # so is one side only
    assert distance_to_uniform(shift, -width, width) < bound
    assert 0.99 * width < shift.abs().max() <= width * (1 + 1e-6)


def test_scale_is_log_uniform_with_median_one():
    largest = 1.4
    scale = draw_global(MANY, max_global_scale=largest).scale.flatten()
    bound = 1.63 / math.sqrt(MANY)
    log_largest = math.log(largest)
    released = 0.7 + 0.7 * torch.rand(MANY)  # plain uniform, as in the released code
    assert distance_to_uniform(released.log(), -log_largest, log_largest) > bound
    assert distance_to_uniform(scale.log(), -log_largest, log_largest) < bound
    assert scale.median().item() == pytest.approx(1.0, abs=0.02)
    assert (1 - 1e-6) / largest <= scale.min() < 1.01 / largest
    assert 0.99 * largest < scale.max() <= largest * (1 + 1e-6)


@pytest.mark.parametrize("largest", [1, 3, 500])
def test_offsets_are_integers_from_zero_to_the_maximum_inclusive(largest):
    offset = draw_global(MANY, max_offset=largest).offset
    assert offset.dtype == torch.float32
    assert torch.equal(offset, offset.round())
    counts = torch.bincount(offset.flatten().long())
    assert len(counts) == largest + 1  # the largest is reached, nothing beyond
    assert counts[0] > 0
    expected = MANY / (largest + 1)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < largest + 4 * math.sqrt(2 * largest)


def test_one_draw_for_each_sample_and_axis_and_one_scale_for_both_axes():
    draw = draw_global(MANY, 2, max_global_shift=0.5, max_global_scale=1.4)
    assert draw.shift.shape == (MANY, 1, 2)
    assert draw.scale.shape == (MANY, 1, 1)
    for values in (draw.shift[..., 0], draw.shift[..., 1], draw.scale):
        assert values.unique().numel() > 0.99 * MANY  # samples differ
    x, y, scale = draw.shift[:, 0, 0], draw.shift[:, 0, 1], draw.scale[:, 0, 0]
    correlation = torch.corrcoef(torch.stack((x, y, scale)))
    assert (correlation - torch.eye(3)).abs().max() < 4 / math.sqrt(MANY)


def test_local_shifts_are_independent_for_positions_samples_axes_and_calls():
    coords = torch.zeros(50, 20, 2)
    first, second = draw_local(coords, 1.0, 0.5), draw_local(coords, 1.0, 0.5)
    assert torch.cat((first, second)).unique().numel() > 0.99 * 4000
    pairs = {
        "calls": (first, second),
        "positions": (first[:, 1:], first[:, :-1]),
        "samples": (first[1:], first[:-1]),
        "axes": (first[..., 0], first[..., 1]),
    }
    for name, (a, b) in pairs.items():
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel()), name


def test_only_what_is_switched_on_is_drawn():
    with random_numbers_untouched():
        assert draw_global(3) == Draw(batch_size=3)
    maxima = {"shift": {"max_global_shift": 5.0}, "scale": {"max_global_scale": 1.4}}
    for part, maximum in {**maxima, "offset": {"max_offset": 9}}.items():
        draw = draw_global(2, **maximum)
        drawn = [name for name, value in draw._asdict().items() if value is not None]
        assert drawn == [part, "batch_size"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_draws_are_float32_whatever_the_default_or_autocast(dtype):
    with default_dtype(dtype), torch.autocast("cpu", torch.bfloat16):
        draw = draw_global(200, 2, max_global_shift=5.0, max_global_scale=1.4, max_offset=9)
        local = draw_local(torch.zeros(2, 3, 1, dtype=torch.float32), 1.0, 0.5)
    assert all(part.dtype == torch.float32 for part in (*draw[:3], local))
    assert draw.shift.unique().numel() > 390  # bfloat16 has 256 numbers between two powers of two


def least_distances(positions, local):
    """Smallest distance between neighbours along each axis, as multiples of the step."""
    moved = augment(positions.coords, local_shift=local) / positions.step
    sizes = positions.patches or moved.shape[1:2]
    cells = moved.unflatten(1, sizes)
    # axes have the slowest first, coordinates the fastest
    return [cells[..., -1 - i].diff(dim=1 + i).min().item() for i in range(len(sizes))]


@pytest.mark.parametrize("domain", DOMAINS)
def test_local_shifts_of_half_a_step_keep_the_order(domain):
    positions = whole_positions(domain, 400, larger=True)
    half, wide = (draw_local(positions.coords, positions.step, width, 400) for width in (0.5, 0.75))
    assert min(least_distances(positions, wide)) < -0.1  # three quarters of a step do not
    for distance in least_distances(positions, half):
        assert 0 < distance < 0.6  # 1 without any shift; 1 / (N - 1) more on an axis of N patches
    local = (half / positions.step).flatten(0, 1)[:MANY, 0]
    assert distance_to_uniform(local, -0.5, 0.5) < 1.63 / math.sqrt(MANY)


def test_shifts_come_before_the_scale_as_by_hand():
    coords = torch.tensor([[[0.0], [2.0]]])
    draw = Draw(torch.tensor([[[10.0]]]), torch.tensor([[[2.0]]]))
    local = torch.tensor([[[0.25], [-0.5]]])
    result = augment(coords, mean_normalize=True, draw=draw, local_shift=local, step=0.5)
    # (0 - 1 + 10 + .25) * 2, (2 - 1 + 10 - .5) * 2
    assert result.flatten().tolist() == [18.5, 21.0]
    assert coords.flatten().tolist() == [0.0, 2.0]  # the argument is left alone
    offset = augment(coords, draw=Draw(offset=torch.tensor([[[3.0]]])), step=0.5)
    assert offset.flatten().tolist() == [1.5, 3.5]  # three steps of one half


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mean_normalize", [False, True])
@pytest.mark.parametrize("domain", ["text", "audio"])
def test_one_dimension_equals_the_code_of_the_appendix(domain, mean_normalize, left):
    rng = np.random.default_rng(3)
    valid = valid_mask(left=left)
    raw = rng.uniform(0, 50, valid.shape)
    shift, log_scale = rng.uniform(-30, 30, 3), rng.uniform(-0.3, 0.3, 3)
    local = rng.uniform(-0.5, 0.5, valid.shape)
    padded = np.where(valid.numpy(), raw, np.nan)
    factor = {"text": 1.0, "audio": 30.0}[domain]
    expected = appendix_a.augment_positions_1d(padded, mean_normalize, shift, local, log_scale)
    embedding = appendix_a.sinusoids_1d(expected, 8, factor)

    def tensor(array, *shape):
        return torch.tensor(array, dtype=torch.float32).reshape(shape)

    coords = augment(
        tensor(raw, 3, 6, 1),
        valid,
        mean_normalize=mean_normalize,
        draw=Draw(tensor(shift, 3, 1, 1), tensor(np.exp(log_scale), 3, 1, 1)),
        local_shift=tensor(local, 3, 6, 1),
    )
    keep = valid.numpy()
    np.testing.assert_allclose(coords[..., 0].numpy()[keep], expected[keep], rtol=1e-5, atol=1e-5)
    actual = Sinusoid(8, domain)(coords).numpy()
    np.testing.assert_allclose(actual[keep], embedding[keep], atol=1e-3 if factor > 1 else 1e-4)


@pytest.mark.parametrize("size", [(3, 3), (2, 4), (4, 1), (1, 1)])
def test_two_dimensions_equal_the_code_of_the_appendix(size):
    """The appendix has angle k - 1 where Eq. 4 has k: a rotation of the plane by one radian; and
    its channels are all cosines, then all sines."""
    (height, width), channels, batch = size, 12, 3
    rng = np.random.default_rng(4)
    shift, log_scale = rng.uniform(-0.5, 0.5, (batch, 2)), rng.uniform(-0.3, 0.3, batch)
    local = rng.uniform(-0.2, 0.2, (batch, width, height, 2))
    expected = appendix_a.cape_2d(width, height, channels, shift, local, log_scale)
    expected = expected.transpose(0, 2, 1, 3).reshape(batch, height * width, channels)
    by_row = local.transpose(0, 2, 1, 3).reshape(batch, height * width, 2)
    coords = augment(
        patch_positions(height, width).coords,
        draw=Draw(
            torch.tensor(shift[:, None]).float(),
            torch.tensor(np.exp(log_scale)).float()[:, None, None],
        ),
        local_shift=torch.tensor(by_row).float(),
    )
    x, y = coords.unbind(-1)
    cos, sin = math.cos(1), math.sin(1)
    rotated = coordinate_positions(torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1))

    def in_the_order_of_the_appendix(embedding):
        return torch.cat((embedding[..., 0::2], embedding[..., 1::2]), dim=-1).numpy()

    encode = Sinusoid(channels, "image")
    unrotated = in_the_order_of_the_appendix(encode(coords))
    if max(size) > 1:
        assert np.abs(unrotated - expected).max() > 0.1
    actual = in_the_order_of_the_appendix(encode(rotated.coords))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_ranks_have_seeds_far_apart_that_follow_the_stream_they_share():
    seeds = []
    for rank in (0, 1, 2, 1):
        torch.manual_seed(3)
        seeds.append(rank_seed(rank))
    assert seeds[1] == seeds[3]
    first, second, third, _ = seeds
    assert min(abs(first - second), abs(second - third), abs(first - third)) > 2**40
    assert rank_seed(1) != second  # the stream has gone on
