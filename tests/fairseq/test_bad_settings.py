"""Proves that bad settings stop a run before it begins, with an error that names the flag, its
value and what to do: on the command line, when the model is built, and when a checkpoint does not
fit."""

import re
import struct

import pytest
from fairseq import options
from fairseq.models import build_model

from tests.support.fairseq_models import (
    CLI_VARIANTS,
    NO_DATA,
    Task,
    arguments,
    build,
    build_lm,
    configure,
    flags,
    generate_words,
    train_words,
)

REAL = ("nan", "inf", "-inf", "abc", "", "-1")
# flag: values that its parser refuses, with the range that the message shows
REFUSED = {
    "--position-embedding": (("capee", "CAPE", ""), "'cape'"),
    "--position-max-global-shift": (REAL, ">= 0 tokens"),
    "--position-max-local-shift": ((*REAL, "0.6"), "0 to 0.5 grid steps"),
    "--position-max-global-scale": ((*REAL, "0", "0.9"), ">= 1"),
    "--position-max-offset": ((*REAL, "2.5"), ">= 0 tokens"),
    "--position-max-position": ((*REAL, "2.5", "1000001"), "0 to 1000000 grid steps"),
    "--position-augment-probability": ((*REAL, "1.1"), "0 to 1"),
    "--position-random-evaluation": (("on",), "true or false"),
    "--position-learned-table": (("2048",), "true or false"),
    "--position-mean-normalize": (("yes", "1", ""), "true or false"),
    "--position-synchronize": (("on", "0"), "true or false"),
    "--position-source-bos": (("on", "0"), "true or false"),
    "--position-source-scale": (
        (*REAL, "0", "1/0", "-1/2", "1,05", "1e400", "1e-400", "1/2/3"),
        "auto, auto-no-eos, a number > 0 or TARGET/SOURCE",
    ),
    "--position-relative-context": ((*REAL, "1.5", "100001", "1e8"), "0 to 100000"),
    "--position-relative-layers": (("last", "1"), "all or first"),
    "--position-relative-values": (("2",), "true or false"),
    "--position-relative-beyond": (("cut",), "clip or zero"),
    "--position-relative-heads": (("all",), "shared or separate"),
}
CASES = [(flag, value) for flag, (values, _) in REFUSED.items() for value in values]


@pytest.fixture(scope="module")
def parse():
    """Function that parses words with the parser of ``fairseq-train``, complete with the options of
    the architecture, which it gets when it first parses."""
    parser = options.get_training_parser()
    command = [NO_DATA, "--arch", "cape_transformer_tiny", "--max-tokens", "100"]
    options.parse_args_and_arch(parser, command)
    return lambda *words: parser.parse_args([*command, *words])


@pytest.mark.parametrize(("flag", "value"), CASES)
def test_command_line_refuses_value(flag, value, parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(f"{flag}={value}")
    assert stopped.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: " in message
    assert repr(value) in message
    assert REFUSED[flag][1] in message


def test_every_flag_has_bad_values():
    names = {name for name in vars(configure().model) if name.startswith("position_")}
    assert {f"--{name.replace('_', '-')}" for name in names} == set(REFUSED)


@pytest.mark.parametrize("words", [("--position-max-shift", "3"), ("--position-max-global", "3")])
def test_unknown_flags_are_refused(words, parse, capsys):
    with pytest.raises(SystemExit):
        parse(*words)
    assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err


# ------------------------------------------------------------------------------ building a model

GIVEN = "--position-source-scale 1.1"  # there are no training data to count
NOT_BUILT = {
    "--position-embedding shape --position-max-global-shift 3": (
        r"--position-max-global-shift 3.0 has no effect on .*'shape'.* cape.*Leave it out"
    ),
    "--position-embedding sinpos --position-max-offset 5": (
        r"--position-max-offset 5 has no effect on .*'sinpos'.* shape.*Leave it out"
    ),
    "--position-embedding nopos --position-source-scale 1.1": (
        r"--position-source-scale 1.1 has no effect on .*'nopos'.*sinpos, shape, cape.*Leave it out"
    ),
    "--position-embedding abspos --position-synchronize true": (
        r"--position-synchronize true has no effect on .*'abspos'.*Leave it out"
    ),
    "--position-embedding relpos --position-relative-context 0": (
        r"--position-relative-context 0 leaves .*'relpos' without .*; allowed: >= 1.*'nopos'"
    ),
    "--position-embedding sinpos --position-relative-values true": (
        r"--position-relative-values true has no effect .*--position-relative-context >= 1. Set"
    ),
    "--position-embedding sinpos --position-mean-normalize true": r"--position-mean-normalize true",
    f"{GIVEN} --position-mean-normalize true": (
        r"--position-mean-normalize true is impossible .*'seq2seq'.*Leave it out"
    ),
    f"{GIVEN} --position-relative-context 4 --cross-self-attention": (
        r"--position-relative-context=4 cannot be combined with --cross-self-attention; switch"
    ),
    f"{GIVEN} --no-token-positional-embeddings": (
        r"--no-token-positional-embeddings contradicts --position-embedding cape; leave it out"
    ),
    "": r"--position-source-scale auto .*no-such-folder.*--position-source-scale 1.03",
    "--position-source-scale auto": r"--position-source-scale auto .*cape-plugins alpha",
    f"{GIVEN} --admin-init": r"--admin-init .*'no-such-folder'.*give the binarised data folder",
    f"{GIVEN} --admin-init --encoder-normalize-before": (
        r"--admin-init: encoder.layers.0 is pre-LN \(--encoder-normalize-before is True.*drop"
    ),
    f"{GIVEN} --admin-init --decoder-normalize-before": (
        r"--admin-init: decoder.layers.0 is pre-LN \(--decoder-normalize-before is True.*drop"
    ),
    f"{GIVEN} --encoder-embed-dim 33 --encoder-attention-heads 3 --decoder-embed-dim 33 "
    "--decoder-attention-heads 3": r"embedding dimension 33 .*allowed: even.*Change the model's",
}


@pytest.mark.parametrize("words", NOT_BUILT)
def test_model_is_not_built(words):
    args = arguments(*words.split())
    with pytest.raises(ValueError, match=NOT_BUILT[words]):
        build_model(args, Task())


def test_models_are_built_without_these_faults():
    build_model(configure(*GIVEN.split()).model, Task())


LANGUAGE_MODEL = {
    "--position-embedding capee": r"--position-embedding capee is unknown; allowed: nopos,",
    "--position-max-global-shift nan": r"--position-max-global-shift nan is not allowed; .* >= 0",
    "--position-max-global-shift=-1": r"--position-max-global-shift -1.0 is not allowed; .* >= 0",
    "--position-max-offset 2": r"--position-max-offset 2 has no effect on .*'cape'.*Leave it",
    "--position-source-bos true": r"--position-source-bos true needs .*Leave it out",
    "--position-source-scale 1.1": r"--position-source-scale 1.1 needs .*Leave it out",
    "--position-source-scale auto": r"--position-source-scale auto needs .*Leave it out",
    "--position-synchronize true": r"--position-synchronize true needs .*Leave it out",
    "--position-mean-normalize true": r"--position-mean-normalize true is impossible .*'decoder'",
    "--position-mean-normalize yes": r"--position-mean-normalize yes is not allowed; .* true or",
    "--no-token-positional-embeddings": r"--no-token-positional-embeddings contradicts .* cape",
}


@pytest.mark.parametrize("words", LANGUAGE_MODEL)
def test_language_model_is_not_built(words):
    with pytest.raises(ValueError, match=LANGUAGE_MODEL[words]):
        build_lm(*words.split())


# ------------------------------------------------------------------------- counting damaged data


def mmap_index(lengths):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 4, len(lengths))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *range(len(lengths)))


GOOD = mmap_index([4, 5, 6])
DAMAGED = {
    "truncated": (
        GOOD[:-3],
        GOOD,
        r"train.en-de.en.idx is damaged.*bytes.*fairseq-preprocess again",
    ),
    "other format": (b"PK\x03\x04" * 20, GOOD, r"train.en-de.en.idx begins with .*--dataset-impl"),
    "empty file": (b"", GOOD, r"train.en-de.en.idx"),
    "negative length": (mmap_index([4, -5, 6]), GOOD, r"en.idx is damaged.*length -5"),
    "no sentences": (mmap_index([]), mmap_index([]), r"token count 0.*not empty"),
    "sides differ": (GOOD, mmap_index([1, 2]), r"3 sentences.* 2; they must be equal"),
    "one side only": (GOOD, None, r"train.en-de.de\(.idx\) is missing.*both languages"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_alpha_is_not_counted_from_damaged_data(fault, tmp_path):
    *sides, message = DAMAGED[fault]
    args = arguments()
    for language, content in zip(("en", "de"), sides, strict=True):
        if content is not None:
            (tmp_path / f"train.en-de.{language}.idx").write_bytes(content)
    match = rf"(?s)--position-source-scale auto.*{message}.*give the ratio"
    with pytest.raises(ValueError, match=re.compile(match, re.IGNORECASE)) as error:
        build_model(args, Task(tmp_path))
    assert ".. " not in str(error.value)


def test_alpha_is_counted_from_sound_data(tmp_path):
    for language, lengths in (("en", [4, 4]), ("de", [5, 5])):
        (tmp_path / f"train.en-de.{language}.idx").write_bytes(mmap_index(lengths))
    without_ends = configure("--position-source-scale", "auto-no-eos")
    model = build_model(without_ends.model, Task(tmp_path))
    assert model.position_config.source_scale == without_ends.model.position_source_scale == "8/6"
    cfg = configure()
    model = build_model(cfg.model, Task(tmp_path))
    assert model.position_config.source_scale == cfg.model.position_source_scale == "10/8"
    assert model.encoder.embed_positions.encoder.alpha == 1.25
    assert model.decoder.embed_positions.encoder.alpha == 1.0


# --------------------------------------------------------------------------------- checkpoints

LEARNED = {"position_embedding": "abspos"}
STEPS = {"position_embedding": "randpos", "position_learned_table": True}
STEPS |= {"position_source_scale": "1"}
MISMATCHED = {
    "sinusoids into a table of steps": ({}, STEPS, "--position-learned-table"),
    "table of other steps": (
        *({**STEPS, "position_max_position": rows} for rows in (50, 60)),
        "--position-learned-table and --position-max-position",
    ),
    "relpos into cape": ({"position_embedding": "relpos"}, {}, "--position-relative-context"),
    "cape into relpos": ({}, {"position_embedding": "relpos"}, "--position-relative-context"),
    "abspos into cape": (LEARNED, {}, "--position-embedding"),
    "sinpos into abspos": ({"position_embedding": "sinpos"}, LEARNED, "--position-embedding"),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_checkpoint_of_other_positions_is_refused(case):
    saved, own, flag = MISMATCHED[case]
    model, state = build(**own), build(**saved).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=rf"(?s)different settings of {flag}.*This model has --pos"
    ):
        model.load_state_dict(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_checkpoint_of_stock_learned_positions_is_refused():
    stock = build("transformer_tiny", encoder_learned_pos=True, decoder_learned_pos=True)
    with pytest.raises(ValueError, match="different settings of --position-embedding"):
        build().load_state_dict(stock.state_dict())
    build(**LEARNED).load_state_dict(stock.state_dict())


# ------------------------------------------------------------------------ the commands themselves


@pytest.mark.slow
def test_train_command_stops_at_a_bad_value(run_cli, corpus, tmp_path):
    words = train_words(corpus.binary, tmp_path / "run", "--position-max-local-shift", "0.7")
    result = run_cli(*words, check=False)
    assert result.returncode == 2
    assert (
        "argument --position-max-local-shift: '0.7' is not allowed; allowed: 0 to 0.5"
        in result.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_finetuning_stops_at_a_checkpoint_of_other_positions(run_cli, corpus, trained, tmp_path):
    before = trained("relpos").read_bytes()
    extra = ("--finetune-from-model", trained("relpos"))
    result = run_cli(*train_words(corpus.binary, tmp_path, *extra), check=False)
    assert result.returncode == 1
    assert "different settings of --position-relative-context" in result.stderr
    assert list(tmp_path.glob("*.pt")) == []
    assert trained("relpos").read_bytes() == before


@pytest.mark.slow
def test_generation_stops_at_overrides_that_do_not_fit(run_cli, corpus, trained):
    overrides = str({"position_embedding": "abspos"})
    words = generate_words(corpus.binary, trained("cape"), "--model-overrides", overrides)
    result = run_cli(*words, check=False)
    assert result.returncode == 1
    assert "different settings of --position-embedding" in result.stderr


def test_command_line_words_of_variants_are_good(parse):
    """The flags that the parser refuses above, with good values."""
    for words in CLI_VARIANTS.values():
        parse(*words)
    parse(*flags({"position_max_local_shift": 0.5}))
