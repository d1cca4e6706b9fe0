"""Options: each accepts its range, belongs to its types, and refuses everything else with a text
that names option, value and range; over all types and options, exceptions listed."""

import argparse
import math
import os
import sys

import pytest

from cape_plugins import ENCODINGS, TYPES, PositionConfig
from cape_plugins.cli import main
from cape_plugins.settings.arguments import Parser, add_position_args, given_settings
from cape_plugins.settings.config import ARCHITECTURES, applies, option_fields, parse_option
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.registry import types_of

OPTIONS = {option.name: option.metadata for option in option_fields()}
DOMAIN_WITH = {"timed": "video", "grid": "image"}  # by a word in the metadata of an option
SEQ2SEQ_ONLY = {"source_scale", "source_bos", "synchronize"}


def setting(option):
    """A type, domain and architecture in which `option` can take any value of its range."""
    having = [name for name in TYPES if option in TYPES[name].options]
    if option == "relative_context":
        name = "nopos"  # relpos refuses 0, its only position
    elif option.startswith("relative_") or option == "layers":
        name = "relpos"
    elif option in ("max_position", "random_evaluation"):  # the others need draws beside it
        name = next(name for name in having if TYPES[name].sampling)
    else:
        name = "cape" if "cape" in having or not having else having[0]
    domains = (domain for kind, domain in DOMAIN_WITH.items() if kind in OPTIONS[option])
    architecture = "seq2seq" if option in SEQ2SEQ_ONLY else "encoder"
    return {"type": name, "domain": next(domains, "text"), "architecture": architecture}


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
    "layers": lambda meta: ["all", "first", "every:1", "every:4", "not:2", "not:10"],
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
    "ratio": lambda meta: [0, -0.5, "1e400", "1e-400", "5/0", "-1/2", "1/2/3", *NO_NUMBERS],
    "layers": lambda meta: ["other", "not:1", "every:0", "every:-1", "not:x", "", 4, True, [], {}],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_accept_their_range(option):
    meta = OPTIONS[option]
    plain = {"float": float, "int": int, "bool": bool}
    for value in GOOD[meta["form"]](meta):
        actual = getattr(PositionConfig(**setting(option), **{option: value}), option)
        assert type(actual) is plain.get(meta["form"], str), value
        if not isinstance(value, str):
            assert actual == (str(value) if meta["form"] == "ratio" else value)
        assert parse_option(option, value) == actual


@pytest.mark.parametrize("option", OPTIONS)
def test_options_refuse_everything_else(option):
    meta = OPTIONS[option]
    for value in BAD[meta["form"]](meta):
        with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below)
            PositionConfig(**setting(option), **{option: value})
        text = str(error.value)
        assert text.startswith(f"{option}={value!r} ")
        assert f"allowed: {meta['range']}" in text
        assert " factor." not in text  # a factor has no unit
        assert meta["help"] in text


def other_than_off(option):
    meta = OPTIONS[option]
    return {
        "float": 0.5 if meta.get("high") == meta["off"] else meta.get("high", 2.0),
        "int": 7,
        "bool": True,
        "choice": meta.get("choices", (None,))[-1],
        "ratio": "1.25",
        "layers": "not:4",
    }[meta["form"]]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_belong_to_their_types(option):
    assert other_than_off(option) != OPTIONS[option]["off"]
    for name in TYPES:
        check_option_of_type(option, name)


def check_option_of_type(option, name):
    settings = {**setting(option), "type": name}
    if name not in types_of("encoder", settings["domain"]):
        return  # a type of sequences, and an option of grids
    off, value = OPTIONS[option]["off"], other_than_off(option)
    if applies(option, name):
        needs_context = option.startswith("relative_") and option != "relative_context"
        is_relative = not ENCODINGS[TYPES[name].encoding].in_attention
        if needs_context or (option == "layers" and is_relative):
            settings["relative_context"] = 4
        if option in ("augment_probability", "random_evaluation"):  # where samples are augmented
            moves = {"max_offset": 5, "max_local_shift": 0.5}
            settings |= {move: size for move, size in moves.items() if applies(move, name)}
        if option == "max_position" and not TYPES[name].sampling:
            settings["draw_positions"] = "subset"
        assert getattr(PositionConfig(**settings, **{option: value}), option) == value
        return
    assert getattr(PositionConfig(**settings), option) == off
    assert getattr(PositionConfig(**settings, **{option: off}), option) == off  # harmless
    with pytest.raises(ValueError, match="has no effect") as error:
        PositionConfig(**settings, **{option: value})
    text = str(error.value)
    assert f"{option}={value!r}" in text
    assert repr(name) in text
    assert ("are the type randpos or rfs." in text) == (option == "draw_positions")
    having = text.partition("belongs to ")[2].partition(".")[0].split(", ")
    assert having == [other for other in TYPES if applies(option, other)]


def test_the_common_origin_is_marked_where_positions_are_added():
    for name, row in TYPES.items():
        assert applies("source_bos", name) == ENCODINGS[row.encoding].adds
    with pytest.raises(ValueError, match=r"source_bos=True.*'rope'.*sinpos.*Leave it out"):
        PositionConfig("rope", "text", "seq2seq", source_bos=True)


@pytest.mark.parametrize("option", sorted(SEQ2SEQ_ONLY))
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_options_of_pairs_need_an_encoder_and_a_decoder(option, architecture):
    for name in TYPES:  # also where the type lacks the option: no other type has it here
        with pytest.raises(ValueError, match=rf"{option}=.*'seq2seq'.*{architecture}"):
            PositionConfig(name, "text", architecture, **{option: other_than_off(option)})


@pytest.mark.parametrize(
    ("domain", "architecture", "settings"),
    [
        ("image", "encoder", {"draw_positions": "subset"}),
        ("image", "encoder", {"directed": True}),
        ("text", "decoder", {"mean_normalize": True}),
        ("text", "encoder", {"gamma": 2}),
    ],
)
def test_an_option_that_no_type_has_is_refused_without_naming_types(domain, architecture, settings):
    for name in ("sinpos", "relpos", "alibi"):
        with pytest.raises(ValueError, match=r"\. Leave it out\.$"):
            PositionConfig(name, domain, architecture, **settings)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("architecture", ["decoder", "seq2seq"])
def test_mean_normalisation_of_a_causal_side_is_refused(domain, architecture):
    with pytest.raises(ValueError, match=rf"mean_normalize=True.*{architecture}.*Leave it out"):
        PositionConfig("cape", domain, architecture, mean_normalize=True)
    PositionConfig("cape", domain, architecture, mean_normalize=False)


@pytest.mark.parametrize("option", [name for name in OPTIONS if name.startswith("relative_")][1:])
def test_details_of_relative_attention_need_a_context(option):
    with pytest.raises(ValueError, match=rf"{option}=.*relative_context"):
        PositionConfig("nopos", **{option: other_than_off(option)})


def test_flags_of_false_and_zero_are_settings():
    parser = Parser()
    add_position_args(parser, None)
    flags = ["--position-mean-normalize", "false", "--position-max-global-shift", "0"]
    settings = given_settings(parser.parse_args(flags))
    assert settings == {"mean_normalize": False, "max_global_shift": 0.0}


def test_a_bad_flag_is_named_once_and_as_it_was_typed(capsys):
    parser = Parser()
    add_position_args(parser, None)
    for option in OPTIONS:
        flag = f"--position-{option.replace('_', '-')}"
        with pytest.raises(SystemExit):
            parser.parse_args([flag, "owl"])
        error = capsys.readouterr().err
        assert f"argument {flag}: 'owl' is not allowed; allowed: " in error
        assert not [name for name in OPTIONS if name in error and "_" in name]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_unknown_type_is_answered_with_the_types_of_the_model(architecture):
    for domain in DOMAINS:
        allowed = ", ".join(types_of(architecture, domain))
        message = f"position_embedding='cap' is unknown.*allowed: {allowed}. Choose one"
        with pytest.raises(ValueError, match=message):
            PositionConfig("cap", domain, architecture)


@pytest.mark.parametrize("architecture", ["encoder", "decoder", "seq2seq"])
def test_help_is_silent_on_options_that_the_architecture_refuses(architecture):
    parser = argparse.ArgumentParser()
    add_position_args(parser, "text", architecture=architecture)
    shown = parser.format_help()
    for option in option_fields("text"):
        needed = option.metadata.get("architecture", architecture)
        assert (f"--position-{option.name.replace('_', '-')} " in shown) == (needed == architecture)


def test_a_reader_that_has_enough_is_no_error(monkeypatch):
    """``cape-plugins flags | head -1``"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["flags"]) == 0
        pipe.write("the rest, which Python flushes at exit")
