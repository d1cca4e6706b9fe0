"""Positions: padding on either side and batch mates do not matter, alpha moves the index and not
the origin, frames are at their times and patches on the paper's grid, float32 always."""

import numpy as np
import pytest
import torch

from cape_plugins import (
    coordinate_positions,
    frame_positions,
    patch_positions,
    token_position_at,
    token_positions,
)
from cape_plugins.config import DOMAINS
from tests.reference.appendix_a import patch_grid
from tests.support.core import FRAMES, LENGTHS, default_dtype, make_positions, valid_mask

CPU = torch.device("cpu")


# ---- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "start"), [(1.0, 0.0), (1.05, 0.0), (0.9, 2.0)])
def test_left_and_right_padding_are_equal(scale, start):
    right = valid_mask()
    left = valid_mask(left=True)
    naive = torch.arange(left.shape[1]).expand_as(left)
    assert not torch.equal(naive[left], naive[right])  # counting columns would differ
    a = token_positions(left, scale, start).coords[left]
    b = token_positions(right, scale, start).coords[right]
    assert torch.equal(a, b)


def test_padding_in_the_middle_is_not_counted():
    valid = torch.tensor([[False, True, False, True, True, False]])
    coords = token_positions(valid).coords[valid]
    assert coords.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("left", [False, True])
def test_a_sentence_alone_is_the_same_in_a_batch(left):
    batch = token_positions(valid_mask(left=left), 1.1, 2.0)
    for row, length in enumerate(LENGTHS):
        alone = token_positions(torch.ones(1, length, dtype=torch.bool), 1.1, 2.0)
        assert torch.equal(alone.coords[0], batch.coords[row][batch.valid[row]])
        assert torch.equal(alone.grid, batch.grid[:length])


def test_source_scale_moves_the_index_not_the_origin():
    valid = torch.ones(1, 4, dtype=torch.bool)
    coords = token_positions(valid, source_scale=1.5, start=2.0).coords.flatten()
    assert coords.tolist() == [2.0, 3.5, 5.0, 6.5]
    assert coords.tolist() != [3.0, 4.5, 6.0, 7.5]  # alpha times (start + index)


def test_grid_and_index_describe_the_same_coordinates():
    for left in (False, True):
        positions = token_positions(valid_mask(left=left), 0.7, 2.0)
        index = positions.index
        assert torch.equal(index.ne(0), positions.valid)
        assert torch.equal(positions.grid[index - 1][positions.valid], positions.coords[index > 0])


@pytest.mark.parametrize(("scale", "start"), [(1.0, 0.0), (1.05, 2.0), (470049 / 454234, 2.0)])
def test_one_step_equals_its_column_of_the_whole(scale, start):
    whole = token_positions(torch.ones(2, 300, dtype=torch.bool), scale, start)
    for index in (0, 1, 7, 299):
        step = token_position_at(index, CPU, scale, start)
        assert step.coords.shape == (1, 1, 1)
        assert torch.equal(step.coords[0, 0], whole.coords[1, index])
        assert torch.equal(step.grid[0], whole.grid[index])


def test_one_token_and_only_padding():
    one = token_positions(torch.ones(1, 1, dtype=torch.bool))
    assert one.coords.tolist() == [[[0.0]]]
    none = token_positions(torch.zeros(2, 3, dtype=torch.bool))
    assert none.coords.isfinite().all()
    assert none.index.eq(0).all()
    assert token_positions(torch.zeros(2, 0, dtype=torch.bool)).coords.shape == (2, 0, 1)


# ---- audio ---------------------------------------------------------------------------------------


def test_frames_with_a_hop_and_a_first_centre_for_each_sample():
    hop, first = torch.tensor([0.03, 0.02, 0.04]), torch.tensor([0.0125, 0.01, 0.0])
    positions = frame_positions(FRAMES, hop, first)
    assert positions.coords.shape == (3, 6, 1)
    for b in range(3):
        expected = [first[b].item() + hop[b].item() * t for t in range(6)]
        torch.testing.assert_close(positions.coords[b, :, 0], torch.tensor(expected))
    assert torch.equal(positions.valid, valid_mask())
    assert torch.equal(positions.step.flatten(), hop)


def test_frames_with_one_hop_for_all_and_a_given_length():
    positions = frame_positions(FRAMES, 0.03, 0.0125, max_frames=8)
    torch.testing.assert_close(positions.coords[0, :3, 0], torch.tensor([0.0125, 0.0425, 0.0725]))
    assert positions.coords.shape[1] == positions.valid.shape[1] == 8
    assert positions.valid.sum(1).tolist() == list(LENGTHS)
    shorter = frame_positions(FRAMES, 0.03, max_frames=2)
    assert shorter.valid.sum(1).tolist() == [2, 2, 1]


def test_a_sample_of_frames_alone_is_the_same_in_a_batch():
    hop = torch.tensor([0.03, 0.02, 0.04])
    batch = frame_positions(FRAMES, hop, 0.01)
    for row, length in enumerate(LENGTHS):
        alone = frame_positions(torch.tensor([length]), hop[row].item(), 0.01)
        torch.testing.assert_close(alone.coords[0], batch.coords[row, :length], rtol=0, atol=0)


def test_one_frame_and_no_frame():
    assert frame_positions(torch.tensor([1]), 0.03).coords.tolist() == [[[0.0]]]
    assert not frame_positions(torch.tensor([0, 0]), 0.03, max_frames=2).valid.any()


# ---- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4, 4), (2, 5), (5, 2), (1, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("gamma", [1.0, 0.8, 1.4])
def test_patch_grid_is_that_of_the_appendix(size, gamma):
    height, width = size
    positions = patch_positions(height, width, gamma)
    # the appendix has x down the first array axis, images have it along a row
    x, y = patch_grid(width, height)
    expected = gamma * np.stack([x.T.ravel(), y.T.ravel()], axis=1)
    np.testing.assert_allclose(positions.coords[0].numpy(), expected, atol=1e-6)
    assert torch.equal(positions.grid, positions.coords[0])
    assert positions.coords.isfinite().all()
    steps = torch.tensor([2 * gamma / width, 2 * gamma / height])
    torch.testing.assert_close(positions.step, steps)


def test_patches_run_along_rows_and_x_comes_first():
    coords = patch_positions(2, 3).coords[0]
    assert coords[0].tolist() == [-1, -1]
    assert coords[1].tolist() == [0, -1]  # one to the right: x has changed
    assert coords[3].tolist() == [-1, 1]  # one down: y has changed


def test_gamma_stretches_the_grid():
    plain, wide = patch_positions(3, 3).coords, patch_positions(3, 3, 2.0).coords
    assert torch.equal(wide, 2 * plain)


# ---- anything ------------------------------------------------------------------------------------


def test_arbitrary_coordinates_are_taken_as_they_are():
    coords = torch.tensor([[[0.0, 0.5], [-0.3, 1.0]]], dtype=torch.float64)
    valid = torch.tensor([[True, False]])
    positions = coordinate_positions(coords, valid, step=0.25)
    assert positions.coords.dtype == torch.float32
    assert torch.equal(positions.coords[valid], coords.float()[valid])
    assert positions.valid is valid
    assert positions.step == 0.25
    assert positions.grid is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("domain", DOMAINS)
def test_positions_are_float32_whatever_the_default(domain, dtype):
    expected = make_positions(domain)
    with default_dtype(dtype):
        positions = make_positions(domain)
        single = token_position_at(3, CPU, 1.05, 2.0)
    tensors = [positions.coords, positions.grid, positions.step, single.coords, single.grid]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            assert tensor.dtype == torch.float32
    torch.testing.assert_close(positions.coords, expected.coords, rtol=0, atol=0)
    torch.testing.assert_close(single.coords.item(), 2.0 + 1.05 * 3)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_frame_arguments_of_another_dtype_give_float32(kind):
    positions = frame_positions(FRAMES.int(), torch.tensor([0.5, 0.25, 1.0], dtype=kind))
    assert positions.coords.dtype == positions.step.dtype == torch.float32
    assert positions.coords[0, :3, 0].tolist() == [0, 0.5, 1]


def test_positions_beyond_half_precision_are_exact():
    assert torch.tensor(257.0).bfloat16().item() != 257.0  # what would go wrong
    coords = token_positions(torch.ones(1, 5000, dtype=torch.bool)).coords
    assert coords[0, 257].item() == 257.0
    assert coords[0, -1].item() == 4999.0


def test_autocast_leaves_positions_alone():
    expected = [make_positions(domain).coords for domain in DOMAINS]
    with torch.autocast("cpu", torch.bfloat16):
        actual = [make_positions(domain).coords for domain in DOMAINS]
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
