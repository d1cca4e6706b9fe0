"""Samples that training does not augment: their share, and that all parts of the augmentation leave
the same samples out. test_options.py has the values that are no probability."""

import math
from functools import partial

import pytest
import torch

from cape_plugins import PositionConfig, draw_global
from cape_plugins.mathematics.augmentation import SAMPLINGS
from cape_plugins.mathematics.encoder import SIDES
from cape_plugins.mathematics.positions import timed_frame_positions
from cape_plugins.settings.registry import ROTARY, ROTARY_TYPES
from tests.support.core import (
    BATCH,
    RANDOM,
    RANDOM_TYPES,
    SAMPLED_TYPES,
    embed,
    make_encoder,
    make_positions,
    random_numbers_untouched,
    reading_coords,
    whole_positions,
)
from tests.support.expected import EXPECTED, MOVED

MANY = 4000
NUMBERS = torch.arange(6.0)[None, :, None]  # where evaluation has the tokens
FEW, MANY_OF_200 = 60, 140  # bounds on the augmented samples of 200, six standard deviations


def half_encoder(name, domain="text", **settings):
    return reading_coords(make_encoder(name, domain, augment_probability=0.5, **settings))


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_every_type_leaves_its_share_where_evaluation_has_it(name, domain):
    """Coordinates are read when they are encoded. Positions of all other samples have moved.
    Padding stays zero."""
    encoder, positions = half_encoder(name, domain), make_positions(domain)
    valid = torch.ones(BATCH, 6, dtype=torch.bool) if positions.valid is None else positions.valid
    raw = embed(encoder, positions, random=False).expand(BATCH, -1, -1)
    moved = []
    for seed in range(60):
        torch.manual_seed(seed)
        draw = encoder.draw(BATCH)
        coords = embed(encoder, positions, draw)
        assert not coords[~valid].any()
        moved.append((coords != raw).flatten(1).any(1))
        assert not (moved[-1] & ~draw.augmented.flatten()).any()
    share = torch.cat(moved).float().mean().item()
    # a sample of one position may be drawn where it is counted
    assert share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / (60 * BATCH)))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_parts_of_a_sample_are_drawn_or_none(sampling):
    """Augmented samples have the numbers that probability 1 gives them."""
    settings = {"max_global_shift": 0.5, "max_global_scale": 1.4, "max_offset": 9}
    settings |= {"sampling": sampling, "max_position": 12}
    generator = partial(torch.Generator().manual_seed, 7)
    some, every = (
        draw_global(200, 2, **settings, augment_probability=p, generator=generator())
        for p in (0.4, 1.0)
    )
    augmented = some.augmented.flatten()
    assert 0 < augmented.sum() < 200
    assert every.augmented is None
    for part, neutral in {"shift": 0.0, "scale": 1.0, "offset": 0.0}.items():
        ours, full = getattr(some, part), getattr(every, part)
        assert torch.equal(ours[augmented], full[augmented])
        assert (ours[~augmented] == neutral).all()
    assert (some.shift[augmented] != 0).all()
    assert torch.equal(some.order[augmented], every.order[augmented])
    assert torch.equal(some.order[~augmented], torch.arange(12.0).expand((~augmented).sum(), -1))


@pytest.mark.parametrize("settings", [{}, {"max_global_scale": 2.0}])
@pytest.mark.parametrize("name", [name for name in ROTARY_TYPES if EXPECTED[name].random])
def test_positions_that_turn_queries_and_keys_stay_too(name, settings):
    """Also if only local shifts are drawn: by default these types have no scale."""
    settings = {"max_position": 40} if ROTARY_TYPES[name].sampling else settings
    encoder = half_encoder(name, architecture=ROTARY, **settings)
    draw = encoder.draw(200)
    coords = encoder.coordinates(whole_positions("text", 200), draw, random=True)
    moved = (coords != NUMBERS).flatten(1).any(1)
    assert torch.equal(moved, draw.augmented.flatten())
    assert FEW < moved.sum() < MANY_OF_200


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_frames_that_were_skipped_keep_their_time(name):
    """Drawn positions are for the frames that are left; without a draw, frames have their times."""
    encoder = half_encoder(name, "audio")
    times = torch.tensor([[0.0, 0.03, 0.12, 0.15]]).expand(50, -1)
    positions = timed_frame_positions(times, torch.full((50,), 4), 0.03)
    draw = encoder.draw(50)
    coords = encoder(positions, draw)[..., 0]
    augmented = draw.augmented.flatten()
    assert torch.equal(coords[~augmented], times[~augmented])
    assert not (coords[augmented] == times[0]).all(1).any()


@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("name", RANDOM_TYPES)
def test_source_and_target_of_a_pair_are_augmented_alike(name, synchronize):
    """With a shared draw, and with a separate draw for each side."""
    settings = {"architecture": "seq2seq", "source_scale": "1", "synchronize": synchronize}
    source, target = (half_encoder(name, side=side, **settings) for side in SIDES)
    counts = [side.num_positions(torch.ones(200, 6)) for side in (source, target)]
    draw = source.draw(200).covering(*counts)
    other = draw if synchronize else target.draw(200, partner=draw)
    assert torch.equal(draw.augmented, other.augmented)
    assert not torch.equal(draw.augmented, target.draw(200).augmented)
    positions = whole_positions("text", 200)
    coords = source(positions, draw), target(positions, other)
    for moved in ((side != NUMBERS).flatten(1).any(1) for side in coords):
        assert not (moved & ~draw.augmented.flatten()).any()
        assert FEW < moved.sum() < MANY_OF_200
    same = (coords[0] == coords[1]).flatten(1).all(1)
    assert synchronize or same.sum() < 150  # each side draws other numbers


@pytest.mark.parametrize(
    ("first", "second"), [(0.3, 0.6), (0.6, 0.3), (0.6, 0.6), (1.0, 0.3), (0.3, 1.0)]
)
def test_sides_with_different_probabilities_augment_nested_sets(first, second):
    """A side with the default follows the other; each probability is exact."""
    draw = draw_global(MANY, max_global_shift=5.0, augment_probability=first)
    other = draw_global(MANY, max_offset=9, augment_probability=second, partner=draw)
    every = torch.ones(MANY, 1, 1, dtype=torch.bool)
    here, there = (every if d.augmented is None else d.augmented for d in (draw, other))
    least = min(first, second)
    assert (here & there).float().mean().item() == pytest.approx(least, abs=0.04)
    assert there.float().mean().item() == pytest.approx(least, abs=0.04)
    assert torch.equal(here | there, here)


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_probability_0_is_no_augmentation_bit_for_bit(name, domain):
    """Outputs and random numbers; sinpos, but for the mean, or the type that nothing moves."""
    encoder, positions = make_encoder(name, domain, augment_probability=0), make_positions(domain)
    plain = MOVED[name]["type"] if name in MOVED else "sinpos"
    zero = {"max_local_shift": 0, "max_global_scale": 1}
    if name not in MOVED:
        zero = {k: v for k, v in EXPECTED[name].zero.items() if k != "mean_normalize"}
    assert not encoder.config.random
    assert not encoder.draws
    with random_numbers_untouched():
        assert encoder.draw(BATCH) is None
        actual = embed(encoder, positions)
    assert torch.equal(actual, embed(make_encoder(name, domain, **zero), positions))
    if not encoder.config.mean_normalize:
        assert torch.equal(actual, embed(make_encoder(plain, domain), positions))


@pytest.mark.parametrize("name", [*RANDOM_TYPES, *MOVED])
def test_probability_1_is_the_default_and_draws_nothing_more(name):
    """One random number more would move all that follow; stored settings may lack the option."""
    states = []
    for probability in (1.0, 0.999):
        torch.manual_seed(4)
        encoder = make_encoder(name, augment_probability=probability)
        draw = encoder.draw(BATCH)
        embed(encoder, make_positions("text"), draw)
        states.append(torch.get_rng_state())
        assert (draw.chance is None) == (probability == 1)
    assert not torch.equal(*states)
    config = make_encoder(name, augment_probability=1).config
    stored = config.to_dict()
    assert stored.pop("augment_probability") == 1.0
    assert PositionConfig.from_dict(stored) == config
