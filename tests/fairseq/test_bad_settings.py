"""Proves that bad settings stop a run before it begins, with an error that names the flag, its
value and what to do."""

import re
import struct

import pytest
from fairseq import options
from fairseq.models import build_model

from tests.support.fairseq_models import NO_DATA, Task, arguments, build, build_lm, configure


def test_every_flag_names_itself_and_its_range(capsys):
    """Which values an option refuses is tested in tests/core/test_options.py."""
    parser = options.get_training_parser()
    command = [NO_DATA, "--arch", "cape_transformer_tiny", "--max-tokens", "100"]
    args = options.parse_args_and_arch(parser, command)
    names = [name for name in vars(args) if name.startswith("position_")]
    assert names
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([*command, f"{flag}=no such value"])
        message = capsys.readouterr().err.splitlines()[-1]
        assert re.search(f"argument {flag}: .*'no such value'.*(allowed: |choose from)", message)


GIVEN = "--position-source-scale 1.1"  # there are no training data to count
NOT_BUILT = {
    f"{GIVEN} --position-mean-normalize true": (
        r"--position-mean-normalize true is impossible .*'seq2seq'.*Leave it out"
    ),
    f"{GIVEN} --position-relative-context 4 --cross-self-attention": (
        r"--position-relative-context=4 cannot be combined with --cross-self-attention; switch"
    ),
    f"{GIVEN} --no-token-positional-embeddings": (
        r"--no-token-positional-embeddings contradicts --position-embedding cape; leave the flag"
    ),
    "--position-embedding alibi --position-layers every:9": (
        r"--position-layers every:9 names no layer of a stack of \d+ layers.*Choose other layers"
    ),
    "": r"--position-source-scale auto .*no-such-folder.*--position-source-scale 1.03",
    f"{GIVEN} --admin-init": r"--admin-init .*'no-such-folder'.*give the folder of the binarised",
    f"{GIVEN} --admin-init --encoder-normalize-before": (
        r"--admin-init: encoder.layers.0 is pre-LN \(--encoder-normalize-before is True.*drop"
    ),
    "--position-embedding rope --encoder-embed-dim 30 --decoder-embed-dim 30": (
        r"15 channels.*Change the width"
    ),
    f"{GIVEN} --encoder-embed-dim 33 --encoder-attention-heads 3 --decoder-embed-dim 33 "
    "--decoder-attention-heads 3": r"embedding dimension 33 .*allowed: even.*Change the model's",
}


@pytest.mark.parametrize("words", NOT_BUILT)
def test_model_is_not_built(words):
    args = arguments(*words.split())
    with pytest.raises(ValueError, match=NOT_BUILT[words]):
        build_model(args, Task())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--position-embedding capee", "--position-embedding capee is unknown; allowed: nopos,"),
        ("--position-source-bos true", "--position-source-bos true needs .*Leave it out"),
        ("--no-token-positional-embeddings", "--no-token-positional-embeddings contradicts .*cape"),
    ],
)
def test_language_model_is_not_built(words, message):
    with pytest.raises(ValueError, match=message):
        build_lm(*words.split())


def mmap_index(lengths):
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 4, len(lengths))
    return head + struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *range(len(lengths)))


def test_alpha_is_counted_from_sound_data(tmp_path):
    for language, lengths in (("en", [4, 4]), ("de", [5, 5])):
        (tmp_path / f"train.en-de.{language}.idx").write_bytes(mmap_index(lengths))
    for choice, counted in ("auto-no-eos", "8/6"), ("auto", "10/8"):
        cfg = configure("--position-source-scale", choice)
        model = build_model(cfg.model, Task(tmp_path))
        assert model.position_config.source_scale == cfg.model.position_source_scale == counted
    assert model.encoder.embed_positions.encoder.alpha == 1.25
    assert model.decoder.embed_positions.encoder.alpha == 1.0


SINPOS, ABSPOS, RELPOS = ({"position_embedding": name} for name in ("sinpos", "abspos", "relpos"))
STEPS = {"position_embedding": "randpos", "position_learned_table": True}
STEPS["position_source_scale"] = "1"
FIFTY, SIXTY = ({**STEPS, "position_max_position": rows} for rows in (50, 60))
MISMATCHED = [
    ({}, STEPS, "--position-learned-table"),
    (FIFTY, SIXTY, "--position-learned-table and --position-max-position"),
    (RELPOS, {}, "--position-relative-context"),
    (SINPOS, ABSPOS, "--position-embedding"),
]


@pytest.mark.parametrize(("saved", "current", "flag"), MISMATCHED)
def test_checkpoint_of_other_positions_is_refused(saved, current, flag):
    model, state = build(**current), build(**saved).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s)different settings of {flag}.*This model has --pos"):
        model.load_state_dict(state)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
