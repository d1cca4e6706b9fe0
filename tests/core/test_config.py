"""The configuration: every option accepts its range and refuses everything else, with a text that
names option, value and range; generated over all types and options, exceptions listed. Defaults are
those of the design, presets build, and dictionaries make the round trip."""

import argparse
import copy
import dataclasses
import itertools
import json
import math
import pickle

import numpy as np
import pytest

from cape_plugins import ENCODINGS, PRESETS, TYPES, PositionConfig
from cape_plugins.arguments import Parser, add_position_args, given_settings
from cape_plugins.config import ARCHITECTURES, applies, options, parse_option
from cape_plugins.domains import DOMAINS
from cape_plugins.registry import types_of

OPTIONS = {option.name: option.metadata for option in options()}
PAIRS = [(name, option) for name in TYPES for option in OPTIONS]
COMBINATIONS = [
    (name, domain, architecture)
    for domain, architecture in itertools.product(DOMAINS, ARCHITECTURES)
    for name in types_of(architecture, domain)
]

SEQ2SEQ_ONLY = {"source_scale", "source_bos", "synchronize"}
RANDOM_TYPES = ("shape", "cape", "randpos", "rfs")


def setting(option):
    """A type, domain and architecture in which `option` can take any value of its range."""
    if option == "relative_context":
        name = "nopos"  # relpos refuses 0, its only position
    elif option.startswith("relative_"):
        name = "relpos"
    else:
        having = [name for name in TYPES if option in TYPES[name].options]
        name = "cape" if "cape" in having or not having else having[0]
    return {
        "type": name,
        "domain": "image" if OPTIONS[option].get("grid") else "text",
        "architecture": "seq2seq" if option in SEQ2SEQ_ONLY else "encoder",
    }


GOOD = {
    "float": lambda meta: [
        meta.get("low", 0),
        meta.get("high", 1e6),
        str(meta.get("high", 1e6)),
        math.ceil(meta.get("low", 0)),
    ],
    "int": lambda meta: [meta.get("low", 0), meta.get("high", 10**6), "3", 3.0],
    "bool": lambda meta: [True, False, "true", "false", "True"],
    "choice": lambda meta: list(meta["choices"]),
    "ratio": lambda meta: ["auto", "auto-no-eos", 1.05, 2, "0.5", "470049/454234", "1e-3"],
}
NO_NUMBERS = [math.nan, math.inf, -math.inf, "nan", "inf", "abc", "", [], {}, range(3), True, 1j]
BAD = {
    "float": lambda meta: (
        [meta.get("low", 0) - 1e-3, meta.get("high", 0) + 0.001, *NO_NUMBERS]
        if "high" in meta
        else [meta.get("low", 0) - 1e-3, -1e9, *NO_NUMBERS]
    ),
    "int": lambda meta: [meta.get("low", 0) - 1, 1.5, "1.5", *NO_NUMBERS],
    "bool": lambda meta: [1, 0, "yes", "on", "", 0.0, [], range(3)],
    "choice": lambda meta: ["other", "", meta["choices"][0].upper(), 1, True, [], range(3)],
    "ratio": lambda meta: [0, -1, -0.5, "0", "0/5", "5/0", "-1/2", "1/2/3", "Auto", *NO_NUMBERS],
}


def values(table):
    return [
        pytest.param(option, value, id=f"{option}-{value!r:.20}".replace(" ", ""))
        for option, meta in OPTIONS.items()
        for value in table[meta["form"]](meta)
    ]


# ---- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), values(GOOD))
def test_options_accept_their_range(option, value):
    config = PositionConfig(**setting(option), **{option: value})
    plain = {"float": float, "int": int, "bool": bool, "choice": str, "ratio": str}
    actual = getattr(config, option)
    assert type(actual) is plain[OPTIONS[option]["form"]]
    if not isinstance(value, str):
        assert actual == (str(value) if OPTIONS[option]["form"] == "ratio" else value)
    assert parse_option(option, value) == actual


@pytest.mark.parametrize(("option", "value"), values(BAD))
def test_options_refuse_everything_else(option, value):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below)
        PositionConfig(**setting(option), **{option: value})
    text = str(error.value)
    assert text.startswith(f"{option}={value!r} ")
    assert f"allowed: {OPTIONS[option]['range']}" in text
    assert OPTIONS[option]["help"] in text


def test_ranges_as_texts_are_those_enforced():
    """What people read is what is enforced."""
    ranges = {option: meta["range"] for option, meta in OPTIONS.items()}
    assert ranges["max_local_shift"] == "0 to 0.5"
    assert ranges["max_global_scale"] == ">= 1"
    assert ranges["max_offset"] == ">= 0"
    assert ranges["relative_layers"] == "all or first"
    assert ranges["synchronize"] == "true or false"
    assert "auto" in ranges["source_scale"]


def test_numbers_of_numpy_become_plain():
    config = PositionConfig("cape", max_global_shift=np.float32(2.5), mean_normalize=np.bool_(True))
    assert type(config.max_global_shift) is float
    assert config.mean_normalize is True


# ---- what belongs to what ------------------------------------------------------------------------


def other_than_off(option):
    meta = OPTIONS[option]
    return {
        "float": meta.get("high", 2.0),
        "int": 7,
        "bool": True,
        "choice": meta.get("choices", (None,))[-1],
        "ratio": "1.25",
    }[meta["form"]]


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_options_belong_to_their_types(name, option):
    place = {**setting(option), "type": name}
    if place["domain"] == "image" and name not in types_of("encoder", "image"):
        place["domain"] = "text"
    off, value = OPTIONS[option]["off"], other_than_off(option)
    assert value != off
    if applies(option, name):
        if option.startswith("relative_") and option != "relative_context":
            place["relative_context"] = 4
        assert getattr(PositionConfig(**place, **{option: value}), option) == value
        return
    assert getattr(PositionConfig(**place), option) == off
    assert getattr(PositionConfig(**place, **{option: off}), option) == off  # harmless
    with pytest.raises(ValueError, match="has no effect") as error:
        PositionConfig(**place, **{option: value})
    text = str(error.value)
    assert f"{option}={value!r}" in text
    assert repr(name) in text
    having = text.partition("belongs to ")[2].partition(".")[0].split(", ")
    assert having == [other for other in TYPES if applies(option, other)]


@pytest.mark.parametrize("option", sorted(SEQ2SEQ_ONLY))
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_options_of_pairs_need_an_encoder_and_a_decoder(option, architecture):
    with pytest.raises(ValueError, match=rf"{option}=.*'seq2seq'.*{architecture}"):
        PositionConfig(architecture=architecture, **{option: other_than_off(option)})


@pytest.mark.parametrize("name", [name for name in TYPES if applies("mean_normalize", name)])
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("architecture", ["decoder", "seq2seq"])
def test_mean_normalisation_of_a_causal_side_is_refused(name, domain, architecture):
    with pytest.raises(
        ValueError, match=rf"mean_normalize=True.*{architecture}.*mean_normalize=Fa"
    ):
        PositionConfig(name, domain, architecture, mean_normalize=True)
    PositionConfig(name, domain, architecture, mean_normalize=False)


@pytest.mark.parametrize("option", [name for name in OPTIONS if name.startswith("relative_")][1:])
def test_details_of_relative_attention_need_a_context(option):
    with pytest.raises(ValueError, match=rf"{option}=.*relative_context"):
        PositionConfig("nopos", **{option: other_than_off(option)})


def test_relative_attention_is_in_all_layers_or_the_first():
    depths = [PositionConfig("relpos", relative_layers=layers) for layers in ("all", "first")]
    assert [config.relative_depth(6) for config in depths] == [6, 1]
    assert [config.relative_depth(0) for config in depths] == [0, 0]
    assert PositionConfig("cape").relative_depth(6) == 0


def test_gamma_is_the_only_option_of_images_alone():
    assert {o.name for o in options()} - {o.name for o in options("text")} == {"gamma"}
    assert options("image") == options()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_bad_flag_is_named_once_and_as_it_was_typed(option, capsys):
    parser = Parser()
    add_position_args(parser, None)
    flag = f"--position-{option.replace('_', '-')}"
    with pytest.raises(SystemExit):
        parser.parse_args([flag, "owl"])
    error = capsys.readouterr().err
    assert f"argument {flag}: 'owl' is not allowed; allowed: " in error
    assert not [name for name in OPTIONS if name in error and "_" in name]


@pytest.mark.parametrize(("domain", "architecture"), itertools.product(DOMAINS, ARCHITECTURES))
def test_an_unknown_type_is_answered_with_those_of_the_model(domain, architecture):
    with pytest.raises(ValueError, match="position_embedding='cap' is unknown") as refused:
        PositionConfig("cap", domain, architecture)
    allowed = str(refused.value).partition("allowed: ")[2].removesuffix(". Choose one.")
    assert allowed.split(", ") == list(types_of(architecture, domain))


# ---- defaults ------------------------------------------------------------------------------------

SHIFT = ("max_global_shift", "max_local_shift", "max_global_scale", "mean_normalize")
DEFAULTS = [
    # DESIGN.md section 6
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
    ("relpos", "audio", "encoder", {"relative_context": 919, "relative_layers": "all"}),
    ("nopos", "text", "seq2seq", {"relative_context": 0, "source_bos": False}),
    ("abspos", "image", "encoder", {"relative_context": 0}),
]


@pytest.mark.parametrize(("name", "domain", "architecture", "expected"), DEFAULTS)
def test_defaults_are_those_of_the_design(name, domain, architecture, expected):
    config = PositionConfig(name, domain, architecture)
    assert {option: getattr(config, option) for option in expected} == expected


@pytest.mark.parametrize(("name", "domain", "architecture"), COMBINATIONS)
def test_defaults_build_everywhere(name, domain, architecture):
    config = PositionConfig(name, domain, architecture)
    assert config.random == (name in RANDOM_TYPES)
    assert config.encoding is ENCODINGS[types_of(architecture)[name].encoding]
    for option in OPTIONS:
        value = getattr(config, option)
        assert value is not None
        assert parse_option(option, value) == value
        if not applies(option, name, architecture):
            assert value == OPTIONS[option]["off"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_changed(name):
    config = PositionConfig.preset(name)
    assert config.type == PRESETS[name]["type"]
    assert PositionConfig.preset(name, relative_context=7).relative_context == 7


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
    assert PositionConfig.preset("relpos_first_wsj").relative_layers == "first"
    assert PositionConfig.preset("shape_wmt16").max_offset == 500


def test_random_is_true_if_anything_is_drawn():
    off = {"max_global_shift": 0, "max_local_shift": 0, "max_global_scale": 1}
    assert not PositionConfig("cape", **off).random
    for option, value in (
        ("max_global_shift", 1),
        ("max_local_shift", 0.1),
        ("max_global_scale", 2),
    ):
        assert PositionConfig("cape", **{**off, option: value}).random
    assert not PositionConfig("shape", max_offset=0).random
    for name in ("randpos", "rfs"):
        assert not PositionConfig(name, max_position=0).random
        assert PositionConfig(name, max_position=1).random


# ---- source scale --------------------------------------------------------------------------------


def with_scale(value):
    return PositionConfig("cape", architecture="seq2seq", source_scale=value)


def test_alpha_is_the_ratio_as_given():
    assert with_scale("470049/454234").alpha == 470049 / 454234
    assert with_scale("470049/454234").source_scale == "470049/454234"  # two exact integers
    assert with_scale(1.05).alpha == 1.05
    assert PositionConfig("sinpos").alpha == 1.0
    for scale in (1, 1.0, "1.0", "7/7"):
        assert with_scale(scale).source_scale == "1"


def test_alpha_that_nobody_counted_raises():
    with pytest.raises(ValueError, match=r"source_scale='auto'.*number > 0.*cape-plugins alpha"):
        _ = PositionConfig("cape", architecture="seq2seq").alpha


@pytest.mark.parametrize("value", ["1e300", "1e-300", "1e400", "1e-400"])
def test_every_accepted_scale_is_a_finite_positive_number(value):
    try:
        config = with_scale(value)
    except ValueError as error:
        refusal = str(error)
        config = None
    if config is None:
        assert f"source_scale={value!r}" in refusal
    else:
        assert 0 < config.alpha < math.inf


# ---- as data -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "domain", "architecture"), COMBINATIONS)
def test_settings_survive_a_dict_json_and_copies(name, domain, architecture):
    causal = architecture != "encoder" and applies("mean_normalize", name, architecture)
    changes = {"mean_normalize": False} if causal else {}
    config = PositionConfig(name, domain, architecture, **changes)
    settings = config.to_dict()
    assert list(settings) == ["type", *OPTIONS]
    through_json = json.loads(json.dumps(settings, allow_nan=False))
    assert through_json == settings
    assert PositionConfig.from_dict(through_json, domain, architecture) == config
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert hash(config) == hash(copy.copy(config))


def test_from_dict_completes_and_refuses():
    assert PositionConfig.from_dict({}) == PositionConfig()
    assert PositionConfig.from_dict({"type": "shape"}, "audio") == PositionConfig("shape", "audio")
    given = {"type": "cape", "max_shift": 5}
    with pytest.raises(ValueError, match="'max_shift'=5") as error:
        PositionConfig.from_dict(given)
    assert all(option in str(error.value) for option in OPTIONS)
    assert given == {"type": "cape", "max_shift": 5}  # left alone
    for key in ("domain", "architecture"):  # the model's, not the user's
        with pytest.raises(ValueError, match=key):
            PositionConfig.from_dict({key: "text"})


def test_configuration_is_frozen():
    config = PositionConfig("cape")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_global_shift = 7.0
    assert config == PositionConfig()


def test_replace_changes_what_it_names():
    config = PositionConfig("cape", "audio")
    changed = config.replace(max_global_shift=7)
    assert changed.max_global_shift == 7.0
    assert config.max_global_shift == 30.0
    assert changed.domain == "audio"
    assert changed.replace(max_global_shift=30) == config
    assert config.replace(max_global_shift=None) == config  # the default again
    pair = PositionConfig("cape", architecture="seq2seq").replace(source_scale="21/20")
    assert (pair.architecture, pair.alpha) == ("seq2seq", 1.05)
    with pytest.raises(ValueError, match="max_shift"):
        config.replace(max_shift=1)
    with pytest.raises(ValueError, match="max_local_shift=0.7"):
        config.replace(max_local_shift=0.7)


@pytest.mark.parametrize("architecture", ["encoder", "decoder", "seq2seq"])
def test_help_is_silent_on_options_that_the_architecture_refuses(architecture):
    parser = argparse.ArgumentParser()
    add_position_args(parser, "text", architecture=architecture)
    shown = parser.format_help()
    for option in options("text"):
        needed = option.metadata.get("architecture", architecture)
        assert (f"--position-{option.name.replace('_', '-')} " in shown) == (needed == architecture)
    settings = given_settings(parser.parse_args(["--position-source-scale", "2"]))
    if architecture == "seq2seq":
        assert PositionConfig("cape", "text", architecture, **settings).alpha == 2
    else:
        with pytest.raises(ValueError, match=r"source_scale='2' needs a source and a target"):
            PositionConfig("cape", "text", architecture, **settings)
