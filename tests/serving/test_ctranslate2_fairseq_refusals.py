"""What of fairseq is not served by ctranslate2: refused with the reason, and nothing is written."""

import math

import pytest
import torch

from cape_plugins.cli import main
from tests.support.fairseq_models import build, load
from tests.support.served_fairseq import TYPE_FLAGS, write_dictionaries
from tests.support.translation_models import save_fairseq, save_language_model

pytest.importorskip("ctranslate2")
from fairseq_user_dir.serving import ctranslate2 as exporter
from fairseq_user_dir.serving.source_checkpoint import check_model

CAPE, RELPOS = TYPE_FLAGS["cape"], TYPE_FLAGS["relpos"]
PRE_LN = ("--encoder-normalize-before", "--decoder-normalize-before")


@pytest.fixture(scope="module")
def cape(models, tmp_path_factory):
    """A checkpoint that can be exported."""
    return save_fairseq(models.data, tmp_path_factory.mktemp("cape") / "model.pt", *CAPE)


def changed(checkpoint, folder, change):
    """A copy of a checkpoint whose parameters a function has changed."""
    state = torch.load(checkpoint, weights_only=True)
    change(state["model"])
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def refusal(capsys, checkpoint, out, *more, engine="ctranslate2"):
    """The one line that the command prints."""
    with pytest.raises(SystemExit, match="2"):
        main(["export", engine, str(checkpoint), str(out), *map(str, more)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert [path.name for path in out.parent.iterdir() if "out" in path.name] == []
    return error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((*RELPOS, "--position-relative-heads", "separate"), "--position-relative-heads separate"),
        ((*CAPE, "--position-relative-context", 3), "beside --position-embedding cape"),
        (("--arch", "transformer"), "is a stock model (transformer)"),
        ((*CAPE, "--quant-noise-pq", "0.1"), "the parameter quant_noise.weight"),
        ((*CAPE, "--cross-self-attention", "--no-cross-attention"), "--cross-self-attention"),
        ((*CAPE, "--activation-fn", "tanh"), "--activation-fn tanh is not in ctranslate2"),
        ((*CAPE, *PRE_LN, "--decoder-output-dim", "16"), "--decoder-output-dim differ"),
        (
            ("--arch", "cape_nonautoregressive_transformer", *TYPE_FLAGS["sinpos"]),
            "all tokens at once",
        ),
    ],
)
def test_parts_that_the_engine_does_not_have(flags, told, models, tmp_path, capsys):
    shared = not {"--decoder-output-dim", "cape_nonautoregressive_transformer"} & {*flags}
    checkpoint = save_fairseq(models.data, tmp_path / "model.pt", *flags, shared=shared)
    assert told in refusal(capsys, checkpoint, tmp_path / "out")


def test_adaptive_softmax(models, tmp_path, capsys):
    flags = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "8")
    checkpoint = save_language_model(
        models.lm_data, tmp_path / "lm.pt", *TYPE_FLAGS["sinpos"], *flags
    )
    assert "parameter adaptive_softmax." in refusal(capsys, checkpoint, tmp_path / "out")


def test_parameters_that_would_be_left_out():
    model = build()
    check_model(model)
    model.decoder.layers[1].w_resid = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match=r"decoder has the parameter layers\.1\.w_resid"):
        check_model(model)


@pytest.mark.parametrize(
    ("arch", "task", "told"),
    [
        ("cape_s2t_transformer_s", "speech_to_text", "no front end of it"),
        ("cape_bart_base", "denoising", "in the task denoising"),
    ],
)
def test_other_models_and_tasks(arch, task, told, tmp_path, capsys):
    cfg = {"model": {"arch": arch, "_name": arch}, "task": {"_name": task}}
    checkpoint = tmp_path / "model.pt"
    torch.save({"cfg": cfg, "model": {}}, checkpoint)
    assert told in refusal(capsys, checkpoint, tmp_path / "out")


def test_dictionaries_are_needed_and_are_those_of_the_training(models, cape, tmp_path, capsys):
    """The line has no number of the operating system."""
    checkpoint, out = tmp_path / "model.pt", tmp_path / "out"
    state = torch.load(cape, weights_only=True)
    _, task = load(cape, models.data / "binary")
    state["task_state"] = task.state_dict()
    torch.save(state, checkpoint)
    assert "give --data DIR" in refusal(capsys, checkpoint, out, "--data", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "give --data DIR" in refusal(capsys, cape, out, "--data", empty)
    for data, told in ((256 * "n", "File name too long"), (checkpoint, "Not a directory")):
        error = refusal(capsys, cape, out, "--data", data)
        assert f"needs the dictionaries of its training ({told}: {data}/dict" in error
    others = write_dictionaries(tmp_path / "others", "x", "x") / "binary"
    assert "other units" in refusal(capsys, checkpoint, out, "--data", others)
    main(["export", "ctranslate2", str(checkpoint), str(out)])  # where they were in training


@pytest.mark.parametrize(
    ("engine", "name", "change"),
    [
        ("ctranslate2", "decoder.layers.1.fc1.weight", lambda own, name: own.pop(name)),
        (
            "stock",
            "decoder.layers.7.fc1.weight",
            lambda own, name: own.update({name: torch.ones(2)}),
        ),
    ],
)
def test_weights_that_do_not_fit_the_settings(engine, name, change, cape, tmp_path, capsys):
    checkpoint = changed(cape, tmp_path, lambda own: change(own, name))
    error = refusal(capsys, checkpoint, tmp_path / "out", engine=engine)
    assert f"the weights of {checkpoint} do not fit its settings" in error
    assert name in error


@pytest.mark.parametrize("engine", ["ctranslate2", "stock"])
def test_weights_that_are_no_numbers(engine, cape, tmp_path, capsys):
    name = "decoder.layers.1.fc1.weight"
    checkpoint = changed(cape, tmp_path, lambda own: own[name][3].fill_(math.inf))
    error = refusal(capsys, checkpoint, tmp_path / "out", engine=engine)
    assert f"the weights of {checkpoint} are not all finite: {name}" in error


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("ctranslate2", "--max-source-tokens"),
        ("ctranslate2", "--max-target-tokens"),
        ("stock", "--max-tokens"),
    ],
)
def test_tables_that_no_memory_holds(engine, flag, cape, tmp_path, capsys):
    """They are refused before anything of their length is made."""
    error = refusal(capsys, cape, tmp_path / "out", flag, 10**12, engine=engine)
    assert f"{flag} asks for a table of 1{12 * '0'} positions; allowed: up to 8388608" in error


def test_damaged_checkpoint(tmp_path, capsys):
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(b"no checkpoint")
    assert "cannot be read" in refusal(capsys, checkpoint, tmp_path / "out")


def test_sentences_to_check_fit_the_table(cape, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("w1 w2\nw1 w2 w3 w4\n", encoding="utf-8")
    more = ("--check", text, "--max-source-tokens", 5)
    assert "a sentence has 6 tokens" in refusal(capsys, cape, tmp_path / "out", *more)
    text.write_text("w1 <blank>\n", encoding="utf-8")
    more = ("--check", text)
    assert "has the symbol <blank>" in refusal(capsys, cape, tmp_path / "out", *more)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_folder_that_computes_something_else(side, models, tmp_path, capsys, monkeypatch):
    right = exporter.folded

    def wrong(model, *rows):
        copied = right(model, *rows)
        table = getattr(copied, side).embed_positions.weight.data
        table[2:] = table[2:].roll(1, 0)
        return copied

    monkeypatch.setattr(exporter, "folded", wrong)
    checkpoint = models.save("shifted", "post-LN", *CAPE)
    more = ("--check", models.text, "--max-target-tokens", 48)
    error = refusal(capsys, checkpoint, tmp_path / "out", *more)
    assert "computes something else than the model" in error
    if side == "decoder":  # what is rounded cannot be told from what is wrong: it is reported
        main(["export", "ctranslate2", str(checkpoint), str(tmp_path / "out"), *map(str, more),
              "--quantization", "int8"])  # fmt: skip


def test_language_model_that_computes_something_else(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exporter, "start_of", lambda source: "w1")
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *TYPE_FLAGS["sinpos"])
    error = refusal(capsys, checkpoint, tmp_path / "out", "--check", models.text)
    assert "computes something else than the model" in error
    text = tmp_path / "text"
    text.write_text("w1 <blank>\n", encoding="utf-8")
    error = refusal(capsys, checkpoint, tmp_path / "out", "--check", text)
    assert "has the symbol <blank>" in error
