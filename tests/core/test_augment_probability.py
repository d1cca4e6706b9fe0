"""Samples that training leaves as they are (augment_probability): their share, that all parts of
the augmentation leave them out together, on source and target alike, and that probability 0 is no
augmentation and probability 1 what it was before there was this option, bit for bit."""

import itertools
import math

import pytest
import torch

from cape_plugins import Draw, PositionConfig, augment, draw_global, token_positions
from cape_plugins.augmentation import SAMPLINGS
from cape_plugins.encoder import SIDES
from cape_plugins.positions import timed_frame_positions
from cape_plugins.registry import ROTARY, ROTARY_TYPES
from tests.support.core import (
    BATCH,
    RANDOM,
    RANDOM_TYPES,
    SAMPLED_TYPES,
    ZERO_MAXIMA,
    default_dtype,
    make_encoder,
    make_positions,
    random_numbers_untouched,
    reading_coords,
    valid_mask,
)

MANY = 4000
ALL_MAXIMA = {"max_global_shift": 0.5, "max_global_scale": 1.4, "max_offset": 9}
NEUTRAL = {"shift": 0.0, "scale": 1.0, "offset": 0.0}


def tokens(samples, length=6):
    return token_positions(torch.ones(samples, length, dtype=torch.bool))


# ---- share ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 0.75, 0.9])
def test_the_share_of_augmented_samples_is_the_probability(probability):
    """Within four standard deviations of a binomial share, and samples are independent."""
    draw = draw_global(MANY, max_global_shift=5.0, augment_probability=probability)
    augmented = draw.augmented.flatten()
    deviation = math.sqrt(probability * (1 - probability) / MANY)
    assert augmented.float().mean().item() == pytest.approx(probability, abs=4 * deviation)
    assert torch.equal(augmented, draw.shift.flatten() != 0)
    both = (augmented[1:] & augmented[:-1]).float().mean().item()
    assert both == pytest.approx(probability**2, abs=8 * deviation)


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_every_type_leaves_its_share_where_evaluation_has_it(name, domain):
    """Read where positions are encoded; the others have moved."""
    encoder = reading_coords(make_encoder(name, domain, augment_probability=0.5))
    positions = make_positions(domain)
    valid = torch.ones(BATCH, 6, dtype=torch.bool) if positions.valid is None else positions.valid
    raw = encoder(positions, random=False).expand(BATCH, -1, -1)[valid]
    number = torch.arange(BATCH)[:, None].expand_as(valid)[valid]
    moved = []
    for seed in range(60):
        torch.manual_seed(seed)
        draw = encoder.draw(BATCH)
        coords = encoder(positions, draw)[valid]
        for row, augmented in enumerate(draw.augmented.flatten().tolist()):
            here = number == row
            moved.append(not torch.equal(coords[here], raw[here]))
            assert augmented or not moved[-1]
    share = sum(moved) / len(moved)
    # a sample of one position may be drawn where it is counted
    assert 0.5 - 4 * math.sqrt(0.25 / len(moved)) < share < 0.5 + 4 * math.sqrt(0.25 / len(moved))


# ---- all parts together --------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_all_parts_of_a_sample_are_drawn_or_none(sampling):
    """Augmented samples have the numbers that probability 1 gives them."""
    drawn = []
    for probability in (0.4, 1.0):
        generator = torch.Generator().manual_seed(7)
        settings = {**ALL_MAXIMA, "sampling": sampling, "max_position": 12}
        drawn.append(
            draw_global(200, 2, **settings, augment_probability=probability, generator=generator)
        )
    some, every = drawn
    augmented = some.augmented.flatten()
    assert 0 < augmented.sum() < 200
    assert every.augmented is None
    for part, neutral in NEUTRAL.items():
        ours, full = getattr(some, part), getattr(every, part)
        assert torch.equal(ours[augmented], full[augmented])
        assert (ours[~augmented] == neutral).all()
    assert (some.shift[augmented] != 0).all()
    assert torch.equal(some.order[augmented], every.order[augmented])
    assert torch.equal(some.order[~augmented], torch.arange(12.0).expand((~augmented).sum(), -1))


def test_local_shifts_follow_the_other_parts():
    encoder = reading_coords(
        make_encoder("cape", "image", augment_probability=0.5, max_global_scale=2.0)
    )
    positions, draw = make_positions("image"), encoder.draw(200)
    raw, coords = positions.coords, encoder(positions, draw)
    augmented = draw.augmented.flatten()
    assert torch.equal(coords[~augmented], raw.expand((~augmented).sum(), -1, -1))
    local = coords / draw.scale - draw.shift - raw
    assert (local[augmented].abs() > 1e-6).float().mean() > 0.99
    assert (local[augmented].abs() <= 0.5 * positions.step + 1e-5).all()


def test_local_shifts_alone_leave_samples_out_too():
    """As in models that turn queries and keys, where nothing else may be drawn."""
    encoder = make_encoder("cape", architecture=ROTARY, augment_probability=0.5)
    draw = encoder.draw(300)
    assert not draw.moves
    coords = encoder.coordinates(tokens(300), draw, random=True)
    moved = (coords != torch.arange(6.0)[None, :, None]).flatten(1).any(1)
    assert torch.equal(moved, draw.augmented.flatten())
    assert 100 < moved.sum() < 200


@pytest.mark.parametrize("name", [name for name in ROTARY_TYPES if ROTARY_TYPES[name].options])
def test_positions_that_turn_queries_and_keys_stay_as_they_are(name):
    settings = {"max_global_scale": 2.0} if name == "cape" else {"max_position": 40}
    encoder = make_encoder(name, architecture=ROTARY, augment_probability=0.5, **settings)
    draw = encoder.draw(100)
    coords = encoder.coordinates(tokens(100), draw, random=True)[..., 0]
    stay = (coords == torch.arange(6.0)).all(1)
    assert torch.equal(stay, ~draw.augmented.flatten())
    assert 20 < stay.sum() < 80


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_frames_that_were_skipped_keep_their_time(name):
    """Drawn positions number the frames that are left; those that are not drawn stand in time."""
    encoder = reading_coords(make_encoder(name, "audio", augment_probability=0.5))
    times = torch.tensor([[0.0, 0.03, 0.12, 0.15]]).expand(50, -1)
    positions = timed_frame_positions(times, torch.full((50,), 4), 0.03)
    draw = encoder.draw(50)
    coords = encoder(positions, draw)[..., 0]
    augmented = draw.augmented.flatten()
    assert torch.equal(coords[~augmented], times[~augmented])
    assert not (coords[augmented] == times[0]).all(1).any()


def test_an_injected_local_shift_is_taken_as_it_is():
    encoder = reading_coords(make_encoder("cape", augment_probability=0.5))
    draw = Draw(chance=torch.tensor([0.2, 1.0, 1.0]).view(3, 1, 1))
    shift = torch.full((3, 6, 1), 0.25)
    coords = encoder(tokens(3), draw, shift)
    assert torch.equal(coords, torch.arange(6.0)[None, :, None] + shift)


# ---- source and target ---------------------------------------------------------------------------


def pair(name, **settings):
    settings = {"architecture": "seq2seq", "source_scale": "1", **settings}
    return [reading_coords(make_encoder(name, side=side, **settings)) for side in SIDES]


@pytest.mark.parametrize("name", RANDOM_TYPES)
def test_source_and_target_of_a_pair_that_share_a_draw_are_augmented_alike(name):
    source, target = pair(name, synchronize=True, augment_probability=0.5)
    draw = source.draw(200)
    if draw.order is not None:
        draw = draw.covering(*(side.span(torch.ones(200, 6)) for side in (source, target)))
    moved = [
        (side(tokens(200), draw) != torch.arange(6.0)[None, :, None]).flatten(1).any(1)
        for side in (source, target)
    ]
    assert torch.equal(*moved)
    assert 60 < moved[0].sum() < 140


@pytest.mark.parametrize("name", RANDOM_TYPES)
def test_sides_that_draw_for_themselves_leave_the_same_samples_out(name):
    source, target = pair(name, synchronize=False, augment_probability=0.5)
    draw = source.draw(200)
    other, alone = target.draw(200, partner=draw), target.draw(200)
    assert torch.equal(draw.augmented, other.augmented)
    assert not torch.equal(draw.augmented, alone.augmented)
    coords = [side(tokens(200), own) for side, own in ((source, draw), (target, other))]
    same = (coords[0] == coords[1]).flatten(1).all(1)
    assert (same | draw.augmented.flatten()).all()  # the others are where evaluation has them
    assert same.sum() < 150  # numbers are their own


@pytest.mark.parametrize(("first", "second"), list(itertools.product([0.3, 0.6, 1.0], repeat=2)))
def test_sides_with_settings_of_their_own_augment_nested_sets(first, second):
    """A side with the default follows the other; each probability is exact."""
    draw = draw_global(MANY, max_global_shift=5.0, augment_probability=first)
    other = draw_global(MANY, max_offset=9, augment_probability=second, partner=draw)
    every = torch.ones(MANY, 1, 1, dtype=torch.bool)
    here, there = (every if d.augmented is None else d.augmented for d in (draw, other))
    least = min(first, second)
    assert (here & there).float().mean().item() == pytest.approx(least, abs=0.04)
    assert there.float().mean().item() == pytest.approx(least, abs=0.04)
    assert torch.equal(here | there, here)


# ---- probability 0 -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_probability_0_is_no_augmentation_bit_for_bit(name, domain):
    """Outputs, gradients of what is learned, and random numbers; sinpos, but for the mean."""
    encoder, positions = make_encoder(name, domain, augment_probability=0), make_positions(domain)
    maxima = {k: v for k, v in ZERO_MAXIMA[name].items() if k != "mean_normalize"}
    assert not encoder.config.random
    assert not encoder.draws
    with random_numbers_untouched():
        assert encoder.draw(BATCH) is None
        actual = encoder(positions)
    assert torch.equal(actual, make_encoder(name, domain, **maxima)(positions))
    if not encoder.config.mean_normalize:
        assert torch.equal(actual, make_encoder("sinpos", domain)(positions))


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_probability_0_trains_a_learned_table_at_counted_positions(name):
    gradients = []
    for settings in ({"augment_probability": 0, "random_evaluation": True}, {}):
        torch.manual_seed(2)
        encoder = make_encoder(name, learned_table=True, max_position=9, **settings)
        result = encoder.train(bool(settings))(make_positions("text"))
        (result * torch.arange(8.0)).sum().backward()
        gradients.append(encoder.encoding.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


# ---- probability 1 -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"augment_probability": 1}])
def test_probability_1_draws_as_before_the_option_bit_for_bit(given):
    """The numbers of CAPE by hand: shift, scale, then local shifts, and nothing after them."""
    encoder = reading_coords(make_encoder("cape", "image", **given))
    positions = make_positions("image")
    torch.manual_seed(4)
    draw = encoder.draw(BATCH)
    coords = encoder(positions, draw)
    state = torch.get_rng_state()

    torch.manual_seed(4)
    shift = 2 * 0.5 * torch.rand(BATCH, 1, 2) - 0.5
    scale = (2 * math.log(1.4) * torch.rand(BATCH, 1, 1) - math.log(1.4)).exp()
    local = (2 * 0.5 * torch.rand(BATCH, 6, 2) - 0.5) * positions.step
    assert torch.equal(state, torch.get_rng_state())
    assert draw.chance is None
    expected = augment(positions.coords, draw=Draw(shift, scale), local_shift=local)
    assert torch.equal(coords, expected)


@pytest.mark.parametrize("name", RANDOM_TYPES)
def test_probability_1_draws_nothing_more(name):
    """One random number more would move all that follow."""
    positions, states = make_positions("text"), []
    for settings in ({}, {"augment_probability": 1.0}, {"augment_probability": 0.999}):
        torch.manual_seed(4)
        encoder = make_encoder(name, **settings)
        encoder(positions, encoder.draw(BATCH))
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


# ---- precision, settings -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", RANDOM_TYPES)
def test_samples_left_out_stay_float32_whatever_the_default_or_autocast(name, dtype):
    encoder = reading_coords(make_encoder(name, augment_probability=0.5))
    positions = token_positions(torch.ones(40, 700, dtype=torch.bool))
    with default_dtype(dtype), torch.autocast("cpu", torch.bfloat16):
        draw = encoder.draw(40)
        coords = encoder(positions, draw)
    assert coords.dtype == torch.float32
    parts = (draw.shift, draw.scale, draw.offset, draw.order, draw.chance)
    assert all(part is None or part.dtype == torch.float32 for part in parts)
    stay = ~draw.augmented.flatten()
    assert torch.equal(coords[stay, :, 0], torch.arange(700.0).expand(stay.sum(), -1))


@pytest.mark.parametrize("value", [-0.1, 1.1, "nan", "half", True])
def test_what_is_no_probability_is_refused(value):
    with pytest.raises(
        ValueError, match=r"augment_probability=.* is not allowed; allowed: 0 to 1\. Meaning"
    ):
        PositionConfig("cape", augment_probability=value)


def test_where_a_draw_makes_no_sense_so_does_its_probability():
    with pytest.raises(ValueError, match=r"augment_probability=0.5 has no effect.*shape, cape, ra"):
        PositionConfig("sinpos", augment_probability=0.5)


def test_settings_without_the_option_are_those_of_the_papers():
    """As of models that were stored before there was the option."""
    stored = PositionConfig("cape").to_dict()
    assert stored.pop("augment_probability") == 1.0
    assert PositionConfig.from_dict(stored) == PositionConfig("cape")


def test_padding_is_as_ever():
    encoder = make_encoder("cape", augment_probability=0.5)
    embedding = encoder(token_positions(valid_mask()), encoder.draw(BATCH))
    assert not embedding[~valid_mask()].any()
