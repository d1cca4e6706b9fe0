"""Biases of the distance, ALiBi and FIRE, against slow computations."""

import math
from functools import partial

import pytest
import torch

from cape_plugins import (
    DOMAINS,
    PositionConfig,
    Positions,
    build_layer_bias,
    build_position_encoder,
    build_stack_positions,
    frame_positions,
    patch_positions,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.biases import STEEPER, FireBias, alibi_slopes

HEAD_DIM, HEADS = 12, 3


def coordinates(domain, samples=2, length=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, length, DOMAINS[domain].num_coords, generator=generator)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12])
def test_slopes_are_the_geometric_sequence_of_the_paper(heads):
    slopes = alibi_slopes(heads).tolist()
    assert len(slopes) == heads
    power = 2 ** int(math.log2(heads))
    assert slopes[:power] == [2 ** (-8 * (h + 1) / power) for h in range(power)]
    assert slopes[power:] == alibi_slopes(2 * power)[0::2][: heads - power].tolist()


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("directed", [False, True])
def test_alibi_is_minus_slope_times_distance(domain, directed):
    if directed and DOMAINS[domain].grid:
        with pytest.raises(ValueError, match=r"directed=True.*grid has no before"):
            PositionConfig("alibi", domain, directed=True)
        return
    config = PositionConfig("alibi", domain, directed=directed)
    stack = build_stack_positions(config, HEAD_DIM, HEADS, unit=0.5)
    query, key = coordinates(domain), coordinates(domain, length=4, seed=1)
    unit = DOMAINS[domain].bias_unit / 0.5
    actual = stack.bias(query, key)
    assert actual.shape == (2, HEADS, 6, 4)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, actual.shape)).tolist():
        distance = math.dist(query[b, i].tolist(), key[b, j].tolist()) / unit
        slope = alibi_slopes(HEADS)[h].item()
        if directed and (key[b, j, 0] < query[b, i, 0]) == (h % 2 == 0):
            slope *= STEEPER
        assert actual[b, h, i, j].item() == pytest.approx(-slope * distance, rel=1e-4, abs=1e-6)


def slow_fire(module, query, key):
    """FIRE as in the paper's equation, in float64, the net run on each pair."""
    double = FireBias(HEADS, query.shape[-1], module.unit, module.causal).double()
    double.load_state_dict(module.state_dict())

    def squash(x):
        return x.sign() * torch.log(1 + double.sharpness.abs() * x.abs())

    query, key = query.double() / module.unit, key.double() / module.unit
    limit = (double.threshold * 512).abs()
    if module.causal:
        limit = torch.maximum(limit, query[:, :, None])
    ratio = squash(key[:, None] - query[:, :, None]) / (squash(limit) + 1e-6)
    return double, double.output(double.hidden(ratio).relu()).permute(0, 3, 1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_coords", [1, 2])
@pytest.mark.parametrize("reach", [5.0, 2000.0])
def test_fire_is_the_net_of_the_paper(num_coords, causal, reach):
    """Outputs and gradients, within and beyond the threshold."""
    torch.manual_seed(3)
    module = FireBias(HEADS, num_coords, 1.0, causal)
    with torch.no_grad():
        module.hidden.weight[0] = 0.0  # a unit without a knot
        module.sharpness.fill_(-0.3)  # an optimizer may go below zero
    query, key = (reach * torch.rand(2, length, num_coords) for length in (7, 5))
    actual = module(query, key)
    double, expected = slow_fire(module, query, key)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)
    weights = torch.randn(actual.shape)
    (actual * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    for ours, theirs in zip(module.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("moves", [{}, {"max_global_scale": 2.0}, {"max_local_shift": 0.5}])
def test_fire_of_evenly_spaced_positions_is_fire_of_each_pair(domain, causal, moves):
    """Outputs and gradients: grids, frames, and tokens with and without padding; with a scale for
    each sample, which keeps the spaces even, and with local shifts, which do not."""
    row = DOMAINS[domain]
    encoder = build_position_encoder(PositionConfig("fire", domain, **moves), 8)
    stack = build_stack_positions(encoder.config, HEAD_DIM, HEADS)
    draw = encoder.train().draw(3)
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]]).bool()
    batches = [
        token_position_at(0, length=5),
        token_positions(valid),
        frame_positions(valid.sum(1), 0.5, 5),
        # of the caller, such as of two texts in one sample: not even
        Positions(torch.tensor([0.0, 1, 0, 1, 2]).view(1, -1, 1), in_steps=True),
    ]
    if row.grid:
        sizes = range(2, 2 + row.num_coords), [1] * row.num_coords
        batches = [patch_positions(*size) for size in sizes]
    for positions in batches:
        attention, coords = (
            place(positions, draw, random=encoder.draws, generator=torch.Generator().manual_seed(4))
            for place in (partial(stack, encoder), encoder.coordinates)
        )
        coords = coords.expand(3, -1, -1)
        module = build_layer_bias(encoder.config, HEADS, causal=causal)
        double, expected = slow_fire(module, coords, coords)
        x = torch.zeros(3, HEADS, coords.shape[1], HEAD_DIM)
        actual = attention.bias_of(module, x, x).expand_as(expected)
        shown = torch.ones(3, coords.shape[1]) if positions.valid is None else positions.valid
        weights = torch.randn(expected.shape) * (shown[:, :, None] * shown[:, None])[:, None]
        (actual * weights).sum().backward()
        (expected * weights.double()).sum().backward()
        torch.testing.assert_close(
            actual * weights, (expected * weights).float(), rtol=1e-4, atol=1e-5
        )
        for ours, theirs in zip(module.parameters(), double.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-3, atol=1e-4)
