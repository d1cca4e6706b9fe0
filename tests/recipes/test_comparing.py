"""Options that the command lines of all recipes share: --compare, --seeds, --model and --device."""

import argparse
import re
from pathlib import Path

import pytest
import torch

from recipes.lab import command_line, runs
from recipes.lab.steps import CommandError

ROWS = {"shape": {"max_offset": 60}, "cape-still": {"type": "cape", "max_global_shift": 0}}


def compared(*words, default=("sinpos", "cape")):
    parser = argparse.ArgumentParser()
    command_line.add_compared(parser, "text", default, rows=list(ROWS))
    return command_line.settings_to_compare(parser.parse_args(words), "text", default, ROWS)


def test_rows_and_types_have_one_grammar():
    expected = {
        "shape": {"type": "shape", "max_offset": 60},
        "shape:max_offset=3": {"type": "shape", "max_offset": 3},
        "cape-still": ROWS["cape-still"],
        "cape-still:max_local_shift=0": {**ROWS["cape-still"], "max_local_shift": 0.0},
        "nopos": {"type": "nopos"},
    }
    assert compared("--compare", *expected) == expected


def test_what_is_compared_without_being_named():
    assert list(compared()) == ["sinpos", "cape"]
    alone = ("--position-max-global-shift", "2")
    assert compared(*alone) == {"cape": {"type": "cape", "max_global_shift": 2.0}}
    for type_words in ((), ("--position-embedding", "shape")):
        offset = compared(*type_words, "--position-max-offset", "2", default=["shape"])
        assert offset == {"shape": {"type": "shape", "max_offset": 2}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rotary",), "--compare rotary is unknown; allowed: nopos, .*, cape-still; choose one"),
        (("cape", "cape"), "--compare cape is given twice"),
        (("cape:max_offset=1,max_offset=2",), "=1,max_offset=2: 'max_offset' is given twice"),
        (("cape-still:colour",), "'colour' is no option=value"),
        (("cape-still:colour=1",), "'colour' is unknown; options: max_global_shift, "),
        (("cape-still:max_offset=1",), "position embedding cape-still.*has no effect"),
    ],
)
def test_names_that_are_not_understood(words, message):
    with pytest.raises(CommandError, match=message):
        compared("--compare", *words)


def test_models_are_named_by_their_folder(tmp_path, monkeypatch):
    for name in ("a/last.pt", "b/last.pt", "c-1/last.pt", "c-2/last.pt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "a")
    names = command_line.named_models(["last.pt", "../b/last.pt", "hub/name"])
    assert list(names) == ["a", "b", "name"]
    seeds = ["../c-1/last.pt", "../c-2/last.pt"]
    assert command_line.named_models(["c=../c-*/last.pt"]) == {"c": seeds}
    for word in ("c=last.pt,../a/last.pt", "../*/last.pt,last.pt"):  # no second seed
        message = f"--model {re.escape(word)}: .*last.pt twice; give each"
        with pytest.raises(CommandError, match=message):
            command_line.named_models([word])


def test_fairseq_cannot_choose_a_gpu():
    assert runs.device_flags(torch.device("cpu")) == ["--cpu"]
    assert runs.device_flags(torch.device("cuda")) == []
    with pytest.raises(CommandError, match="--device cuda:1: .* CUDA_VISIBLE_DEVICES=1 before"):
        runs.device_flags(torch.device("cuda:1"))


FOLDER = Path(__file__).parents[2] / "recipes/accelerate"
FILES = {path.stem: path for path in FOLDER.glob("*.yaml")}
LAUNCHES = {
    "cpu_two_processes": {"multi_gpu": True, "use_cpu": True, "num_processes": 2},
    "one_machine": {"multi_gpu": True, "num_processes": 8, "mixed_precision": "bf16"},
    "several_machines": {"multi_gpu": True, "num_machines": 2, "num_processes": 16},
    "fsdp": {"use_fsdp": True, "fsdp_version": 2, "mixed_precision": "bf16"},
    "deepspeed": {"use_deepspeed": True, "zero_stage": 2, "mixed_precision": "bf16"},
}


@pytest.mark.parametrize("name", FILES)
def test_configuration_launches_what_its_name_says(name, monkeypatch):
    """As `accelerate launch` reads it, which refuses unknown keys."""
    commands = pytest.importorskip("accelerate.commands.launch")
    monkeypatch.setattr(commands, "is_deepspeed_available", lambda: True, raising=False)
    words = ["--config_file", str(FILES[name]), "script.py"]
    args = commands.launch_command_parser().parse_args(words)
    args, expected = commands._validate_launch_command(args)[0], LAUNCHES[name]
    assert {key: getattr(args, key) for key in expected} == expected


@pytest.mark.parametrize(("words", "on_cpu"), [(["--use_cpu"], True), ([], False)])
def test_use_cpu_holds_for_all_arguments_where_there_is_an_accelerator(words, on_cpu, monkeypatch):
    """Arguments share one state of devices, which those that hold the defaults would change."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    hf_training = pytest.importorskip("recipes.lab.hf_training", exc_type=ImportError)
    parser = hf_training.make_parser("", "image", (), "out")
    args, training = hf_training.parse(parser, (), words)
    assert training.use_cpu == args.defaults["use_cpu"] == on_cpu
