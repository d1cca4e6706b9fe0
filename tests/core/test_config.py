"""The configuration: defaults follow the design, presets build, and dictionaries make the round
trip."""

import copy
import dataclasses
import itertools
import json
import pickle

import pytest
import torch

from cape_plugins import (
    ENCODINGS,
    PRESETS,
    TYPES,
    PositionConfig,
    Positions,
    build_position_encoder,
)
from cape_plugins.settings.config import ARCHITECTURES, applies, option_fields, parse_option
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.registry import ROTARY, ROTARY_TYPES, types_of
from tests.support.expected import DOMAIN_SAMPLES, EXPECTED

OPTIONS = {option.name: option.metadata for option in option_fields()}
COMBINATIONS = list(itertools.product(DOMAINS, ARCHITECTURES))


def test_the_tables_of_the_tests_have_the_rows_of_the_registry():
    """A new type or domain needs one line in tests/support/expected.py."""
    assert EXPECTED.keys() == TYPES.keys() | ROTARY_TYPES.keys()
    assert DOMAIN_SAMPLES.keys() == DOMAINS.keys()
    sinusoids = {name for name, row in TYPES.items() if row.encoding == "sinusoid"}
    assert sinusoids == {name for name, row in EXPECTED.items() if row.zero is not None}
    for name in sinusoids:  # so that no augmentation of a type is left out by its line
        drawn = {option for option in TYPES[name].options if OPTIONS[option].get("training")}
        assert EXPECTED[name].zero.keys() >= drawn - {"augment_probability", "synchronize"}, name


SHIFT = ("max_global_shift", "max_local_shift", "max_global_scale", "mean_normalize")
DEFAULTS = [
    # written by hand; docs/flags.md is generated
    ("cape", "text", "encoder", dict(zip(SHIFT, (5.0, 0.5, 1.0, False), strict=True))),
    ("cape", "audio", "encoder", dict(zip(SHIFT, (30.0, 0.5, 1.1, True), strict=True))),
    ("cape", "image", "encoder", dict(zip(SHIFT, (0.5, 0.5, 1.4, False), strict=True))),
    ("cape", "text", "seq2seq", {"source_bos": True, "synchronize": True, "source_scale": "auto"}),
    ("cape", "text", "encoder", {"source_bos": False, "synchronize": False, "source_scale": "1"}),
    ("cape", "text", "decoder", {"source_bos": False, "synchronize": False, "source_scale": "1"}),
    ("shape", "text", "seq2seq", {"max_offset": 500, "synchronize": False, "source_scale": "1"}),
    ("shape", "text", "seq2seq", {"source_bos": False}),
    ("randpos", "text", "seq2seq", {"synchronize": True, "source_scale": "auto"}),
    ("randpos", "text", "seq2seq", {"source_bos": False, "max_position": 2048}),
    ("rfs", "audio", "encoder", {"max_position": 4096, "random_evaluation": False}),
    ("sinpos", "text", "seq2seq", {"source_bos": False, "source_scale": "1"}),
    ("relpos", "text", "seq2seq", {"relative_context": 150, "relative_beyond": "clip"}),
    ("relpos", "audio", "encoder", {"relative_context": 919, "layers": "all"}),
    ("nopos", "text", "seq2seq", {"relative_context": 0, "source_bos": False}),
    ("abspos", "image", "encoder", {"relative_context": 0}),
    ("cape", "video", "encoder", {"seconds_per_frame": 4 / 30}),
    ("abspos", "video", "encoder", {"seconds_per_frame": 0}),
]


@pytest.mark.parametrize(("name", "domain", "architecture", "expected"), DEFAULTS)
def test_defaults_follow_the_design(name, domain, architecture, expected):
    config = PositionConfig(name, domain, architecture)
    assert {option: getattr(config, option) for option in expected} == expected


@pytest.mark.parametrize(("domain", "architecture"), COMBINATIONS)
def test_defaults_build_everywhere(domain, architecture):
    for name in types_of(architecture, domain):
        config = PositionConfig(name, domain, architecture)
        assert config.random == EXPECTED[name].random
        assert config.encoding is ENCODINGS[types_of(architecture)[name].encoding]
        assert config.encoding.adds == (EXPECTED[name].adds and architecture != ROTARY)
        for option in OPTIONS:
            value = getattr(config, option)
            assert parse_option(option, value) == value
            if not applies(option, name, architecture):
                assert value == OPTIONS[option]["off"]


def test_presets_are_the_papers_settings():
    def numbers(name):
        return dataclasses.astuple(PositionConfig.preset(name))[3:6]

    assert numbers("cape_wmt14") == (5.0, 0.5, 1.0)
    assert numbers("cape_wmt14_18l") == (10.0, 0.5, 1.0)
    assert numbers("cape_wmt14_wide") == (50.0, 0.5, 1.0)
    assert numbers("cape_wsj") == (30.0, 0.5, 1.1)  # "60 s" is the width
    assert numbers("cape_tedlium") == (30.0, 0.5, 2.0)
    assert numbers("cape_imagenet") == (0.5, 0.5, 1.4)
    assert numbers("cape_univit") == (0.5, 0.5, 1.0)
    assert numbers("dinov3") == (0.0, 0.0, 2.0)
    assert PositionConfig.preset("relpos_wsj").relative_context == 919
    assert PositionConfig.preset("relpos_first_wsj").layers == "first"
    assert PositionConfig.preset("shape_wmt16").max_offset == 500
    # published settings of a switch from sinusoids: nothing is moved, all layers have positions
    rope, alibi = map(PositionConfig.preset, ("rope_indictrans", "alibi_indictrans"))
    assert rope == PositionConfig("rope", "text", "seq2seq", rotary_base=10_000.0, layers="all")
    assert alibi == PositionConfig("alibi", "text", "seq2seq", directed=False, layers="all")
    assert not rope.random
    assert not alibi.random
    for name, row in PRESETS.items():
        assert PositionConfig.preset(name, augment_probability=1).type == row["type"]


def test_random_is_true_if_anything_is_drawn():
    off = {"max_global_shift": 0, "max_local_shift": 0, "max_global_scale": 1}
    assert not PositionConfig("cape", **off).random
    on = {"max_global_shift": 1, "max_local_shift": 0.1, "max_global_scale": 2}
    for option, value in on.items():
        assert PositionConfig("cape", **{**off, option: value}).random
    assert not PositionConfig("shape", max_offset=0).random
    for name in ("randpos", "rfs"):
        assert not PositionConfig(name, max_position=0).random
        assert PositionConfig(name, max_position=1).random


def test_alpha_is_the_ratio_as_given_and_raises_where_nobody_counted():
    def with_scale(value):
        return PositionConfig("cape", architecture="seq2seq", source_scale=value)

    assert with_scale("470049/454234").alpha == 470049 / 454234
    assert with_scale("470049/454234").source_scale == "470049/454234"  # two exact integers
    assert with_scale(1.05).alpha == 1.05
    assert PositionConfig("sinpos").alpha == 1.0
    for scale in (1, 1.0, "1.0", "7/7"):
        assert with_scale(scale).source_scale == "1"
    for scale in ("auto", "auto-no-eos"):
        message = rf"source_scale='{scale}'.*number > 0.*cape-plugins alpha"
        with pytest.raises(ValueError, match=message):
            _ = with_scale(scale).alpha


@pytest.mark.parametrize(("domain", "architecture"), COMBINATIONS)
def test_settings_survive_a_dict_json_and_copies(domain, architecture):
    for name in types_of(architecture, domain):
        config = PositionConfig(name, domain, architecture)
        settings = config.to_dict()
        assert list(settings) == ["type", *OPTIONS]
        through_json = json.loads(json.dumps(settings, allow_nan=False))
        assert through_json == settings
        assert PositionConfig.from_dict(through_json, domain, architecture) == config
        assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
        assert hash(config) == hash(copy.copy(config))


def test_from_dict_completes_and_refuses():
    assert PositionConfig.from_dict({}) == PositionConfig()
    with pytest.raises(ValueError, match="'max_shift'=5") as error:
        PositionConfig.from_dict({"type": "cape", "max_shift": 5})
    assert all(option in str(error.value) for option in OPTIONS)
    for key in ("domain", "architecture"):  # the model's, not the user's
        with pytest.raises(ValueError, match=key):
            PositionConfig.from_dict({key: "text"})


def test_replace_changes_what_it_names():
    config = PositionConfig("cape", "audio")
    changed = config.replace(max_global_shift=7)
    assert changed.max_global_shift == 7.0
    assert config.max_global_shift == 30.0
    assert changed.domain == "audio"
    assert config.replace(max_global_shift=None) == config  # the default again
    pair = PositionConfig("cape", architecture="seq2seq").replace(source_scale="21/20")
    assert (pair.architecture, pair.alpha) == ("seq2seq", 1.05)
    with pytest.raises(ValueError, match="max_shift"):
        config.replace(max_shift=1)


def test_changes_are_those_that_show_outside_of_training():
    config = PositionConfig("randpos")
    assert config.changes(config.replace(max_position=512, augment_probability=0.5)) == {}
    drawn = config.replace(random_evaluation=True)
    assert drawn.changes(drawn.replace(max_position=512)) == {"max_position": (2048, 512)}


@pytest.mark.parametrize("name", sorted(TYPES.keys() - ROTARY_TYPES.keys()))
def test_models_that_turn_queries_and_keys_refuse_types_without_a_rotary_form(name):
    with pytest.raises(ValueError, match=rf"{name}.*turns queries and keys.*nopos, rope, cape"):
        PositionConfig(name, "text", ROTARY)


@pytest.mark.parametrize("name", ROTARY_TYPES)
def test_coordinates_of_rotary_models_are_raw_in_evaluation_and_moved_in_training(name):
    settings = {"max_global_scale": 2.0} if name == "cape" else {}
    config = PositionConfig(name, "text", ROTARY, **settings)
    encoder = build_position_encoder(config, 16).eval()
    raw = Positions(torch.arange(9.0).view(1, 9, 1), in_steps=True)
    assert encoder(raw) is None  # nothing is added
    assert encoder.draw(3) is None
    assert torch.equal(encoder.coordinates(raw), raw.rows)
    if name == "cape":  # scaled for each sample, and shifted in order
        draw = encoder.train().draw(5)
        assert draw.shift is None
        coords = encoder.coordinates(raw, draw, random=True)[..., 0]
        assert coords.shape == (5, 9)
        assert (coords.diff(dim=1) > 0).all()
        shift = coords / draw.scale[..., 0] - raw.rows[..., 0]
        assert shift.abs().max() <= 0.5
        assert 0.5 <= draw.scale.min() <= draw.scale.max() <= 2
