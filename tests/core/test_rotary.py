"""Settings of models that turn queries and keys by their positions."""

import pytest
import torch

from cape_plugins import TYPES, PositionConfig, Positions, build_position_encoder
from cape_plugins.settings.config import ARCHITECTURES
from cape_plugins.settings.registry import ROTARY, ROTARY_TYPES


@pytest.mark.parametrize("name", sorted(TYPES.keys() - ROTARY_TYPES.keys()))
def test_models_that_turn_queries_and_keys_refuse_types_without_a_rotary_form(name):
    with pytest.raises(ValueError, match=rf"{name}.*turns queries and keys.*nopos, rope, cape"):
        PositionConfig(name, "text", ROTARY)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != ROTARY])
def test_rope_needs_a_model_that_turns_queries_and_keys(architecture):
    with pytest.raises(ValueError, match=r"rope.*needs a model that turns.*nopos, sinpos"):
        PositionConfig("rope", "text", architecture)


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_global_shift", 5), ("relative_context", 4)],
)
def test_options_that_change_no_distance_are_refused_where_queries_are_turned(option, value):
    with pytest.raises(ValueError, match=rf"{option}=.*only distances of positions count"):
        PositionConfig("cape", "text", ROTARY, **{option: value})


def encoder(name, **settings):
    return build_position_encoder(PositionConfig(name, "text", ROTARY, **settings), 16)


RAW = Positions(torch.arange(9.0).view(1, 9, 1), in_steps=True)


@pytest.mark.parametrize("name", ROTARY_TYPES)
def test_coordinates_are_the_raw_positions_in_evaluation(name):
    module = encoder(name).eval()
    assert module(RAW) is None  # nothing is added
    assert module.draw(3) is None
    assert torch.equal(module.coordinates(RAW), RAW.rows)


def test_coordinates_are_scaled_per_sample_and_shifted_in_order():
    module = encoder("cape", max_global_scale=2.0).train()
    draw = module.draw(5)
    assert draw.shift is None
    coords = module.coordinates(RAW, draw, random=True)[..., 0]
    assert coords.shape == (5, 9)
    assert (coords.diff(dim=1) > 0).all()
    shift = coords / draw.scale[..., 0] - RAW.rows[..., 0]
    assert shift.abs().max() <= 0.5
    assert (draw.scale >= 0.5).all()
    assert (draw.scale <= 2).all()
