"""Settings that follow from a corpus: the rule in every domain, and inputs that are refused."""

import json
import math
import re
import shlex

import pytest

from cape_plugins import DOMAINS, PositionConfig, cli
from cape_plugins.cli import main
from cape_plugins.settings.arguments import Parser, add_position_args, given_settings

LENGTHS = ("--train-lengths", "lengths")
TRAINED = (*LENGTHS, "--trained")
ROTARY_CORPUS = (*LENGTHS, "--rotary")


@pytest.fixture
def advise(tmp_path, capsys, monkeypatch):
    """Function that gives a corpus of these lines to the command, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(domain, lines, longest, *words):
        (tmp_path / "lengths").write_text("".join(f"{line}\n" for line in lines))
        main(["advise", "--domain", domain, *(words or LENGTHS), "--longest", str(longest)])
        return capsys.readouterr().out

    return run


def all_settings(text):
    """The dictionaries that the command prints, to paste into a configuration."""
    pasted = re.findall(r"field: +position_embedding=(.*)$", text, re.MULTILINE)
    return [json.loads(settings) for settings in pasted]


def settings_of(text):
    return all_settings(text)[0]


def cape_of(text):
    """The last of several dictionaries, for tasks that are solved by positions alone."""
    *_, _, cape = all_settings(text)
    return cape


def types_of(text):
    return [settings["type"] for settings in all_settings(text)]


def test_shift_takes_counted_positions_to_the_longest_input(advise):
    # 19 in 20 inputs are shorter than 96 tokens, and a single one has 300
    settings = cape_of(text := advise("text", [*range(1, 100), 300], 250))
    assert settings["type"] == "cape"
    assert settings["max_global_shift"] == 250 - 95
    assert settings["max_global_scale"] == 1
    assert settings["augment_probability"] == 0.75
    assert settings_of(text) == {"type": "relpos"}
    assert 'longer than 95, take the settings after "or"' in text
    assert "take the settings" not in advise("text", [*range(1, 100), 300], 301)


def test_inputs_as_rarely_long_as_in_training_keep_the_type(advise):
    trained = advise("audio", [*range(1, 100)], 99, *TRAINED, "sinpos")
    assert types_of(trained) == ["sinpos", "rope", "cape"]
    assert "switch:" in trained  # to the types after "or"
    assert types_of(advise("audio", [*range(1, 100)], 99)) == ["rope", "rope", "cape"]
    assert settings_of(advise("text", [*range(1, 101)], 100, *ROTARY_CORPUS)) == {"type": "rope"}


def test_speech_with_a_decoder_is_told_its_type(advise):
    for longest, name in ((2, "nothing"), (8, "take rope for speech"), (64, "take alibi for")):
        lines = advise("audio", [2.5, 3, 4], longest)
        assert name in lines
        assert ("with a decoder of text takes fire or relpos" in lines) == (longest > 4)
        assert "decoder" not in advise("text", [2, 3, 4], longest)
    assert "relpos" not in advise("audio", [3, 4], 2, *TRAINED, "sinpos")


def test_shift_of_positions_around_zero_is_half_as_wide(advise):
    settings = cape_of(text := advise("audio", [2.5, 3, 4], 64))
    assert settings_of(text) == {"type": "alibi", "directed": True}
    assert "sees positions up to 64 s (" in text
    up_to_twice = {"type": "rope", "max_local_shift": 0.5, "max_global_scale": 2}
    assert settings_of(advise("audio", [2.5, 3, 4], 8)) == up_to_twice
    assert "--position-embedding alibi --position-directed true\n" in text
    assert settings["max_global_shift"] == (64 - 4) / 2
    assert settings["max_global_scale"] == 1.1
    assert "augment_probability" not in settings


def test_fine_grids_have_rope_or_the_settings_of_the_paper(advise):
    assert all_settings(one_size := advise("image", ["14"] * 3, 24)) == [
        {"type": "rope"},
        {"type": "cape", "max_global_shift": 0.5, "max_local_shift": 0.5, "max_global_scale": 1.4},
    ]
    assert "mixed sizes (UniViT); after training at one size, sinpos" in one_size
    assert "millions of training images take cape" in one_size
    mixed = advise("image", ["14x12", "16", "12"], "24x20")
    assert types_of(mixed) == ["rope", "cape"]
    assert cape_of(mixed)["max_global_scale"] == 1


def test_coarse_grids_have_a_table(advise):
    text = advise("image", [8], 16)
    assert all_settings(text) == [{"type": "abspos"}]
    assert settings_of(advise("image", [11], 16)) == {"type": "abspos"}
    assert settings_of(advise("image", [12], 16)) == {"type": "rope"}
    assert "41 % of the channels" in text
    rarely_larger = advise("image", [8] * 30 + [9], 9)
    assert all_settings(rarely_larger) == [{"type": "abspos"}]
    assert '"or"' not in rarely_larger
    # trained models, as measured on CIFAR-10
    for trained, name in (("sinpos", "rope"), ("abspos", "abspos")):
        assert settings_of(advise("image", [8], 16, *TRAINED, trained)) == {"type": name}


@pytest.mark.parametrize(
    ("domain", "sizes", "name"),
    [
        ("text", [9, 10], "relpos"),
        ("audio", [9, 10], "rope"),
        ("image", ["9x10", "10"], "abspos"),  # a coarse grid
        ("image", ["16", "12"], "rope"),
    ],
)
def test_nothing_is_augmented_where_no_position_is_new(advise, domain, sizes, name):
    text = advise(domain, sizes, sizes[-1])
    assert settings_of(text) == {"type": name}
    assert "nothing in use is longer" in text
    assert "or flags" not in text


def test_a_trained_model_keeps_its_type_or_is_told_how_to_switch(advise):
    fits = advise("text", [10, 20], 20, *TRAINED, "abspos")
    assert settings_of(fits) == {"type": "abspos"}
    assert "switch:" not in fits
    longer = advise("text", [10, 20], 60, *TRAINED, "abspos")
    assert settings_of(longer) == settings_of(advise("text", [10, 20], 60))
    assert re.search(r"^switch:.*--finetune-from-model.*position_embedding=", longer, re.MULTILINE)
    assert re.search(r"50 % of the updates.*cape at twice.*train abspos on for as long", longer)
    rotary = advise("text", [10, 20], 60, *ROTARY_CORPUS, "--trained", "rope")
    assert "hf_models.switch" in rotary
    assert "50 % of the updates" in rotary
    assert "at twice" not in rotary  # measured with sinusoids alone


def test_a_model_of_running_text_keeps_its_type_and_lists_get_cape(advise, tmp_path):
    (tmp_path / "text").write_text("a b c d\n")
    for corpus in (LENGTHS, ("--train-text", "text", "text")):
        text = advise("text", [4], 20, *corpus, "--trained", "sinpos")
        assert types_of(text) == ["sinpos", "cape"]
        assert "take sinpos for running text" in text
        assert "switch:" in text
    assert types_of(speech := advise("audio", [4], 20, *TRAINED, "sinpos")) == ["alibi", "cape"]
    assert "for 25 % of the updates of the first training (cape: 50 %)" in speech
    assert "lists of numbers, take" not in speech
    assert speech.startswith("training: 1 input, ")


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_switch_in_fairseq_is_shown_where_fairseq_has_models(advise, domain):
    text = advise(domain, [14], 30, *TRAINED, "nopos")
    assert "hf_models.switch" in text
    assert ("fairseq:" in text) == (domain in {"text", "audio"})
    if domain == "text":  # models of fairseq are not rotary
        assert "fairseq:" not in advise(domain, [14], 30, *TRAINED, "nopos", "--rotary")


def test_rotary_models_get_a_scale_and_no_shift(advise):
    """A shift of all positions changes no distance."""
    settings = settings_of(text := advise("text", [100] * 20, 250, *ROTARY_CORPUS))
    assert settings == {"type": "cape", "max_global_scale": 3}
    assert PositionConfig.from_dict(settings, "text", "rotary").max_global_scale == 3
    assert "up to 300 tokens" in text
    assert "compare" not in text
    longer = advise("text", [100] * 20, 450, *ROTARY_CORPUS)
    assert settings_of(longer) == {"type": "cape", "max_global_scale": 4}
    assert settings_of(advise("text", [100] * 20, 100, *ROTARY_CORPUS)) == {"type": "rope"}


def test_trained_types_that_no_such_model_has_are_refused(advise, capsys):
    for domain, name, words, allowed in (
        ("text", "sinpos", ["--rotary"], "turns queries and keys.*nopos.*rope.*cape.*rfs"),
        ("image", "randpos", [], "positions of a sequence.*shape.*cape"),
    ):
        with pytest.raises(SystemExit, match="2"):
            advise(domain, [3], 5, *ROTARY_CORPUS[:2], *words, "--trained", name)
        error = capsys.readouterr().err
        assert re.match(rf"error: --trained {name} .*; allowed: .*\. Give the type that the", error)
        assert re.search(rf"{allowed}.*\. Give", error)


@pytest.mark.parametrize("domain", DOMAINS)
def test_flags_and_dictionary_can_be_pasted_and_are_equal(advise, domain):
    text = advise(domain, [10, 12], 40)
    parser = Parser()
    add_position_args(parser, domain, architecture=DOMAINS[domain].architecture)
    lines = re.findall(r"flags: +(.*)$", text, re.MULTILINE)
    for flags, settings in zip(lines, all_settings(text), strict=True):
        args = parser.parse_args(shlex.split(flags))
        assert {"type": args.position_embedding, **given_settings(args, domain)} == settings
        PositionConfig.from_dict(settings, domain)  # is not refused
    assert lines


def test_text_is_counted_in_tokens(advise, tmp_path):
    (tmp_path / "text").write_text("a b c\n\na  b\tc d\n")
    text = advise("text", [], 10, "--train-text", "text")
    assert "training: 2 inputs, median 3.5, " in text
    assert "counted at white space" in text
    assert cape_of(text)["max_global_shift"] == 6


def test_translations_get_alpha_and_lengths_of_the_target(advise, tmp_path):
    (tmp_path / "source").write_text("a b\na b c d\n")
    (tmp_path / "target").write_text("a b c d e\na b c d e f g\n")
    text = advise("text", [], 20, "--train-text", "source", "target")
    settings = cape_of(text)
    assert settings["source_scale"] == "14/8"  # with the end of each sentence, as fairseq counts
    assert settings["max_global_shift"] == math.ceil(20 * 14 / 8) - 7


def test_translations_take_rope_up_to_twice_the_length(advise, tmp_path):
    (tmp_path / "text").write_text("a b c d\n")
    pairs = ("--train-text", "text", "text")
    assert types_of(advise("text", [], 8, *pairs)) == ["rope", "cape"]
    assert types_of(longer := advise("text", [], 9, *pairs)) == ["relpos", "fire", "cape"]
    assert "take relpos or fire for translation, beyond twice" in longer
    assert types_of(advise("text", [], 8, "--train-text", "text")) == ["relpos", "cape"]


TEXT = "--train-text"


@pytest.mark.parametrize(
    ("domain", "lines", "longest", "words", "message"),
    [
        ("text", ["3", "x"], 9, LENGTHS, "lengths, line 2: 'x'.*tokens such as 25, whole numbers"),
        ("text", ["0"], 9, LENGTHS, "line 1: '0'.*above 0"),
        ("text", [], 9, LENGTHS, "--train-lengths lengths is empty.*one entry a line"),
        ("text", ["", " "], 9, LENGTHS, "lengths has no lengths.*one a line"),
        ("text", ["3"], "far", LENGTHS, "--longest 'far'.*whole numbers above 0"),
        ("image", ["8x8x8"], 9, LENGTHS, "line 1: '8x8x8'.*14 or 10x14"),
        ("image", ["8"], "9.5", LENGTHS, "--longest '9.5'.*patches such as 14"),
        ("audio", ["3"], 9, (TEXT, "lengths"), "-text lengths.*'audio'.*--train-lengths FILE with"),
        ("text", ["a"], 9, (TEXT, *["lengths"] * 3), "3 files; allowed: one, or source and target"),
        ("text", ["a"], 9, (TEXT, "blank"), "--train-text blank has no tokens"),
        ("text", ["a", "b"], 9, (TEXT, "lengths", "short"), "lengths has 2.*short has 1"),
        ("text", ["3"], 9, (*LENGTHS, "--tokenizer", "y"), "--tokenizer y belongs to --train-text"),
        ("audio", ["3"], 5, ROTARY_CORPUS, "--rotary is for language models.*--domain audio"),
        ("text", ["a"], 5, (TEXT, "short", "short", "--rotary"), "here with source and target"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(
    advise, capsys, tmp_path, domain, lines, longest, words, message
):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "short").write_text("a\n")
    with pytest.raises(SystemExit, match="2"):
        advise(domain, lines, longest, *words)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", line)


def test_the_folder_of_a_tokenizer_tells_that_its_model_is_rotary(tmp_path):
    esm = '{"model_type": "esm", "position_embedding_type": "%s"}'
    for content, turns in (
        ('{"model_type": "mistral"}', True),
        ('{"model_type": "roberta"}', False),
        (esm % "absolute", False),
        (esm % "rotary", True),
        ("[]", False),
    ):
        (tmp_path / "config.json").write_text(content)
        assert cli._turns_queries(str(tmp_path)) == turns
    assert not cli._turns_queries("name/of-the-hub")
