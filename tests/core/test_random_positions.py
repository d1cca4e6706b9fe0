"""Positions that training draws and sorts (randpos, rfs): their distribution, padding, what source
and target share, tables, and what is refused."""

import itertools
import math

import pytest
import torch

from cape_plugins import PositionConfig, coordinate_positions, token_positions
from cape_plugins.mathematics.encoder import SIDES
from cape_plugins.settings.config import ARCHITECTURES
from cape_plugins.speech.subsampling import subsampled_positions
from tests.support.core import (
    BATCH,
    LENGTHS,
    SAMPLED_TYPES,
    make_encoder,
    make_positions,
    reading_coords,
    valid_mask,
)

MANY = 6000


def drawn(name, samples, length, limit):
    """``[samples, length]`` coordinates of one training forward."""
    encoder = reading_coords(make_encoder(name, max_position=limit))
    positions = token_positions(torch.ones(samples, length, dtype=torch.bool))
    return encoder(positions, encoder.draw(samples))[..., 0]


def test_subsets_are_uniform():
    """Ruoss et al., section 3: chi-square over all subsets of 3 of 6."""
    coords = drawn("randpos", MANY, 3, 6)
    subsets = list(itertools.combinations(range(6), 3))
    seen = [tuple(row) for row in coords.long().tolist()]
    assert torch.equal(coords, coords.round())
    assert set(seen) == set(subsets)
    expected = MANY / len(subsets)
    chi_square = sum((seen.count(subset) - expected) ** 2 / expected for subset in subsets)
    freedom = len(subsets) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_floats_are_the_order_statistics_of_uniform_numbers():
    """Mean (i + 1) L / (n + 1) and variance of a beta distribution."""
    coords = drawn("rfs", MANY, 4, 100) / 100
    rank = torch.arange(1.0, 5)
    torch.testing.assert_close(coords.mean(0), rank / 5, atol=0.01, rtol=0)
    variance = rank * (5 - rank) / (5**2 * 6)
    torch.testing.assert_close(coords.var(0), variance, atol=0.002, rtol=0)
    assert not torch.equal(coords, coords.round())
    assert coords.min() >= 0
    assert coords.max() <= 1


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_padding_takes_no_position(name):
    """The sample in its batch, on either side of the padding, and alone."""
    encoder = reading_coords(make_encoder(name, max_position=30))
    draw, right, left = encoder.draw(BATCH), valid_mask(), valid_mask(left=True)
    coords = encoder(token_positions(right), draw)
    assert torch.equal(encoder(token_positions(left), draw)[left], coords[right])
    for row, length in enumerate(LENGTHS):
        expected = draw.order[row, :length].sort().values
        assert torch.equal(coords[row, :length, 0], expected)


@pytest.mark.parametrize("name", SAMPLED_TYPES)
@pytest.mark.parametrize("alpha", ["1", "3/2", "0.4"])
def test_source_and_target_share_one_function_of_the_index(name, alpha):
    """Target token j is at f(j), source token i at f(alpha i), against a loop."""
    settings = {"architecture": "seq2seq", "source_scale": alpha, "max_position": 60}
    source, target = (reading_coords(make_encoder(name, side=side, **settings)) for side in SIDES)
    masks = valid_mask((7, 3, 1), 7), valid_mask((2, 5, 4), 5)
    draw = source.draw(BATCH)
    draw = draw.covering(source.num_positions(masks[0]), target.num_positions(masks[1]))
    spans = source.alpha, target.alpha
    results = [
        side(token_positions(mask), draw)[..., 0]
        for side, mask in zip((source, target), masks, strict=True)
    ]
    for row in range(BATCH):
        lengths = [int(mask[row].sum()) for mask in masks]
        ends = [scale * (n - 1) for scale, n in zip(spans, lengths, strict=True)]
        count = math.ceil(max(ends)) + 1
        taken = sorted(draw.order[row, :count].tolist())
        for coords, scale, length in zip(results, spans, lengths, strict=True):
            for i in range(length):
                low = math.floor(i * scale)
                high, rest = min(low + 1, count - 1), i * scale - low
                expected = taken[low] + rest * (taken[high] - taken[low])
                assert coords[row, i].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_evaluation_draws_where_that_is_asked_for(name):
    encoder, positions = make_encoder(name, random_evaluation=True).eval(), make_positions("text")
    first, second = (encoder(positions, encoder.draw(BATCH)) for _ in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="in training and evaluation needs a draw"):
        encoder(positions)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "encoder"])
def test_evaluation_draws_nothing_for_text_that_grows(architecture):
    with pytest.raises(ValueError, match=r"random_evaluation=True.*grows step by step.*Leave"):
        PositionConfig("randpos", "text", architecture, random_evaluation=True)


@pytest.mark.parametrize(
    ("name", "settings", "needed"),
    [
        *((name, {}, "max_local_shift") for name in ("rope", "alibi", "fire")),
        ("randpos", {"max_position": 0}, "max_position"),
        ("randpos", {"max_position": 0, "augment_probability": 0.5}, "max_position"),
        ("rfs", {"augment_probability": 0}, "augment_probability"),
    ],
)
def test_random_evaluation_needs_something_to_draw(name, settings, needed):
    with pytest.raises(ValueError, match=rf"=\S+ has no effect.*{needed} > 0\. Set"):
        PositionConfig(name, random_evaluation=True, **settings)


@pytest.mark.parametrize(("domain", "unit"), [("text", 1.0), ("audio", 0.5)])
def test_a_table_has_a_row_for_each_step(domain, unit):
    """Also if positions are in seconds and do not begin at 0; after the last row the table begins
    again."""
    settings = {"learned_table": True, "max_position": 4, "start": 2.0, "unit": unit}
    encoder = make_encoder("randpos", domain, **settings).eval()
    table, positions = encoder.encoding.weight.detach(), make_positions(domain)
    assert table.shape == (4, 8)
    expected = table[torch.arange(6) % 4].expand(BATCH, -1, -1) * positions.valid[..., None]
    torch.testing.assert_close(encoder(positions), expected, atol=1e-5, rtol=0)


def test_a_table_is_linear_between_its_rows():
    encoder = make_encoder("rfs", learned_table=True, max_position=9)
    table, draw = encoder.encoding.weight, encoder.draw(1)
    result = encoder(token_positions(torch.ones(1, 5, dtype=torch.bool)), draw)
    expected, uses = torch.zeros(5, 8), torch.zeros(9)
    for i, position in enumerate(draw.order[0, :5].sort().values.tolist()):
        low = math.floor(position)
        high = min(low + 1, 8)
        expected[i] = table[low] + (position - low) * (table[high] - table[low])
        uses[low] += 1 - (position - low)
        uses[high] += position - low
    torch.testing.assert_close(result[0], expected)
    result.sum().backward()
    torch.testing.assert_close(table.grad, uses[:, None].expand(9, 8))


@pytest.mark.parametrize("name", SAMPLED_TYPES)
def test_an_input_longer_than_the_range_is_refused_in_training(name):
    encoder, positions = make_encoder(name, max_position=5), make_positions("text")
    with pytest.raises(ValueError, match=r"max_position=5 .*an input of 6 positions.*>= 6\. Set"):
        encoder(positions, encoder.draw(BATCH))
    assert encoder.eval()(positions).shape == (BATCH, 6, 8)  # of any length
    settings = {"architecture": "seq2seq", "source_scale": 1.5, "synchronize": False}
    encoder = make_encoder(name, max_position=7, **settings)
    with pytest.raises(ValueError, match=r"6 positions, times the source scale 1.5.*>= 9"):
        encoder(positions, encoder.draw(BATCH))


def test_coordinates_that_are_not_counted_are_refused_in_training():
    encoder = make_encoder("randpos")
    positions = coordinate_positions(torch.rand(2, 3, 1))
    with pytest.raises(ValueError, match=r"'randpos' in training.*counted"):
        encoder(positions, encoder.draw(2))
    assert encoder.eval()(positions).shape == (2, 3, 8)


def test_frames_of_which_some_were_skipped_are_numbered_anew():
    encoder = reading_coords(make_encoder("randpos", "audio", max_position=9))
    times = torch.tensor([[0, 1, 3, 4, 7]]) * 10_000_000 + 12_500_000
    length, draw = torch.tensor([5]), encoder.draw(1)
    irregular, regular = (
        encoder(subsampled_positions(length, 5, 1, 0.01, measured), draw)
        for measured in (times, None)
    )
    assert torch.allclose(regular[..., 0], draw.order[:, :5].sort().values * 0.01)
    torch.testing.assert_close(irregular, regular)
