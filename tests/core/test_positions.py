"""Positions of tokens, frames and patches, worked out by hand, whatever the padding, the other
samples of the batch and the default dtype."""

import math

import numpy as np
import pytest
import torch

from cape_plugins import frame_positions, patch_positions, token_position_at, token_positions
from cape_plugins.settings.domains import DOMAINS
from tests.reference.appendix_a import patch_grid
from tests.support.core import (
    FRAMES,
    LENGTHS,
    default_dtype,
    make_encoder,
    make_positions,
    valid_mask,
)
from tests.support.expected import DOMAIN_SAMPLES

CPU = torch.device("cpu")


def test_padding_in_the_middle_is_not_counted():
    valid = torch.tensor([[False, True, False, True, True, False]])
    coords = token_positions(valid).coords[valid]
    assert coords.flatten().tolist() == [0, 1, 2]


def test_source_scale_moves_the_index_not_the_origin():
    positions = token_positions(torch.ones(1, 4, dtype=torch.bool))
    settings = {"architecture": "seq2seq", "source_scale": 1.5, "start": 2.0}
    coords, step = make_encoder(**settings).rows_and_step(positions)
    assert coords.flatten().tolist() == [2.0, 3.5, 5.0, 6.5]
    assert step == 1.0
    coords, _ = make_encoder(**settings, side="target").rows_and_step(positions)
    assert coords.flatten().tolist() == [2.0, 3.0, 4.0, 5.0]


def test_frames_stand_at_the_hop_of_their_sample():
    hop = torch.tensor([0.03, 0.02, 0.04])
    positions = frame_positions(FRAMES, hop)
    assert positions.coords.shape == (3, 6, 1)
    for b in range(3):
        expected = [hop[b].item() * t for t in range(6)]
        torch.testing.assert_close(positions.coords[b, :, 0], torch.tensor(expected))
    assert torch.equal(positions.valid, valid_mask())
    assert torch.equal(positions.step.flatten(), hop)


def test_frames_at_the_unit_of_an_encoder_are_whole_numbers():
    """A stock model, which counts frames, thus has the same positions bit for bit."""
    encoder = make_encoder("cape", "audio", start=2.0, unit=0.04)
    rows, step = encoder.rows_and_step(frame_positions(torch.tensor([3000]), 0.01 * 4))
    assert torch.equal(rows.flatten(), 2.0 + torch.arange(3000.0))
    assert step == 1.0
    draws = encoder.draw(4000).shift
    assert 30 / 0.04 * 0.99 < draws.abs().max() <= 30 / 0.04


def test_frames_with_one_hop_for_all_have_the_given_length():
    positions = frame_positions(FRAMES, 0.03, max_frames=8)
    torch.testing.assert_close(positions.coords[0, :3, 0], torch.tensor([0.0, 0.03, 0.06]))
    assert positions.coords.shape[1] == positions.valid.shape[1] == 8
    assert positions.valid.sum(1).tolist() == list(LENGTHS)
    shorter = frame_positions(FRAMES, 0.03, max_frames=2)
    assert shorter.valid.sum(1).tolist() == [2, 2, 1]


@pytest.mark.parametrize("size", [(4, 4), (2, 5), (5, 2), (1, 1), (1, 4), (4, 1)])
def test_patch_grid_equals_the_appendix(size):
    """The first coordinate is x, which runs along a row; the appendix has x down the array."""
    height, width = size
    positions = patch_positions(height, width)
    x, y = patch_grid(width, height)
    expected = np.stack([x.T.ravel(), y.T.ravel()], axis=1)
    np.testing.assert_allclose(positions.coords[0].numpy(), expected, atol=1e-6)
    torch.testing.assert_close(positions.step, torch.tensor([2 / width, 2 / height]))


def test_tubelets_stand_at_their_seconds_from_the_middle_of_the_clip():
    positions = patch_positions(3, 1, 2, seconds=0.25)
    x, y, time = positions.coords[0].T
    assert time.tolist() == [-0.25, -0.25, 0.0, 0.0, 0.25, 0.25]
    assert x.tolist() == [-1.0, 1.0] * 3
    assert y.tolist() == [0.0] * 6
    assert positions.step.tolist() == [1.0, 2.0, 0.25]
    longer = patch_positions(5, 1, 2, seconds=0.25)
    assert longer.coords[0, ::2, 2].tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5]
    # where only distances count, cells span [-1, 1] and seconds stay seconds
    assert positions.at_centres().coords[0, :2].tolist() == [[-0.5, 0.0, -0.25], [0.5, 0.0, -0.25]]


def test_gamma_stretches_the_grid():
    positions = patch_positions(3, 3)
    (plain, step), (wide, wide_step) = (
        make_encoder("cape", "image", gamma=gamma).rows_and_step(positions) for gamma in (1.0, 2.0)
    )
    assert torch.equal(wide, 2 * plain)
    assert torch.equal(wide_step, 2 * step)


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_place_of_a_domain_has_another_embedding(domain):
    """Along each axis, too: places that differ in one coordinate only."""
    samples = DOMAIN_SAMPLES[domain]
    length = math.prod(samples.larger) if isinstance(samples.larger, tuple) else samples.larger
    valid = torch.ones(1, length, dtype=torch.bool)
    positions = samples.positions(valid, samples.larger)
    embedding = make_encoder("sinpos", domain).eval()(positions)[0]
    assert embedding.unique(dim=0).shape[0] == length
    size = samples.larger if isinstance(samples.larger, tuple) else (length,)
    coords = positions.coords[0].unflatten(0, size)
    for axis in range(len(size)):  # the slowest axis has the last coordinate
        others = [torch.tensor(0)] * len(size)
        others[axis] = torch.arange(size[axis])
        moved = coords[tuple(others)].diff(dim=0) != 0
        column = len(size) - 1 - axis
        assert moved[:, column].all()
        assert moved.sum() == len(moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("domain", DOMAINS)
def test_positions_are_float32_whatever_the_default(domain, dtype):
    expected = make_positions(domain)
    with default_dtype(dtype):
        positions = make_positions(domain)
        single = token_position_at(3, CPU)
    tensors = [positions.coords, positions.rows, positions.step, single.coords, single.rows]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            assert tensor.dtype == torch.float32
    torch.testing.assert_close(positions.coords, expected.coords, rtol=0, atol=0)
    torch.testing.assert_close(single.coords.item(), 3.0)
