"""Training augments the positions that an earlier version augmented (make_positions.py), bit for
bit. That version had no augment_probability: 1, the default, is what it did."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cape_plugins import build_position_encoder, frame_positions, patch_positions, token_positions
from cape_plugins.encoder import SIDES
from tests.earlier.make_positions import (
    BATCH,
    CASES,
    DIM,
    FIRST_FRAME,
    FRAMES,
    GRID,
    SEED,
    SOURCE,
    START,
    TARGET,
    configure,
    hops,
    mask,
)
from tests.support.core import reading_coords

STORED = load_file(Path(__file__).parent / "positions.safetensors")


def raw_positions(name):
    """Of each side, and the coordinate of the first of them."""
    domain = CASES[name][1]
    if domain == "text":
        return [token_positions(mask(lengths)) for lengths in (SOURCE, TARGET)], START
    if domain == "audio":
        return [frame_positions(torch.tensor(FRAMES), hops(name))], FIRST_FRAME
    return [patch_positions(*GRID)], 0.0


def augmented(name, **more):
    """Coordinates of each side in training, and the random numbers that follow."""
    config, (raw, start) = configure(name, **more), raw_positions(name)
    encoders = [
        reading_coords(build_position_encoder(config, DIM, side=side, start=start))
        for side in SIDES[: len(raw)]
    ]
    torch.manual_seed(SEED)
    draws = [encoders[0].draw(BATCH)]
    for encoder in encoders[1:]:
        partner = draws[0]
        draws.append(partner if config.synchronize else encoder.draw(BATCH, partner=partner))
    numbers = zip(SIDES, encoders, raw, draws, strict=False)
    coords = {side: encoder(positions, draw) for side, encoder, positions, draw in numbers}
    return {**coords, "next": torch.rand(2)}


@pytest.mark.parametrize("given", [{}, {"augment_probability": 1}], ids=["default", "1"])
@pytest.mark.parametrize("name", CASES)
def test_positions_in_training_are_those_of_an_earlier_version(name, given):
    """Probability 1 or none."""
    actual = augmented(name, **given)
    assert {f"{name}/{key}" for key in actual} == {key for key in STORED if f"{name}/" in key}
    for key, value in actual.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, STORED[f"{name}/{key}"]), key


@pytest.mark.parametrize("name", CASES)
def test_another_probability_is_seen(name):
    """Random numbers that follow are others, and samples that are left out have not moved."""
    actual = augmented(name, augment_probability=0.01)
    assert not any(torch.equal(value, STORED[f"{name}/{key}"]) for key, value in actual.items())


def test_every_case_moves_its_positions():
    """A record of positions as they are would hold for any augmentation."""
    for name in CASES:
        unmoved = augmented(name, augment_probability=0)
        for side in unmoved.keys() - {"next"}:
            stored = STORED[f"{name}/{side}"]
            assert (stored != unmoved[side]).flatten(1).any(1).all(), (name, side)
