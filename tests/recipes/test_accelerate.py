"""The configurations of accelerate."""

from pathlib import Path

import pytest
import torch
import yaml

from recipes.lab import hf_training

commands = pytest.importorskip("accelerate.commands.launch")
FOLDER = Path(__file__).parents[2] / "recipes/accelerate"
FILES = {path.stem: path for path in FOLDER.glob("*.yaml")}
LAUNCHES = {
    "cpu_two_processes": {"multi_gpu": True, "use_cpu": True, "num_processes": 2},
    "one_machine": {"multi_gpu": True, "num_processes": 8, "mixed_precision": "bf16"},
    "several_machines": {"multi_gpu": True, "num_machines": 2, "num_processes": 16},
    "fsdp": {"use_fsdp": True, "fsdp_version": 2, "mixed_precision": "bf16"},
    "deepspeed": {"use_deepspeed": True, "zero_stage": 2, "mixed_precision": "bf16"},
}


def parse(path, monkeypatch):
    """What `accelerate launch` makes of a file; with the packages that it looks for."""
    monkeypatch.setattr(commands, "is_deepspeed_available", lambda: True, raising=False)
    words = ["--config_file", str(path), "script.py"]
    args = commands.launch_command_parser().parse_args(words)
    return commands._validate_launch_command(args)[0]


@pytest.mark.parametrize("name", FILES)
def test_configuration_launches_what_its_name_says(name, monkeypatch):
    args = parse(FILES[name], monkeypatch)
    expected = LAUNCHES[name]
    assert {key: getattr(args, key) for key in expected} == expected


def test_unknown_key_would_be_refused(tmp_path, monkeypatch):
    settings = yaml.safe_load(FILES["fsdp"].read_text(encoding="utf-8"))
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump({**settings, "num_proceses": 8}))
    with pytest.raises(ValueError, match="num_proceses"):
        parse(tmp_path / "wrong.yaml", monkeypatch)


@pytest.mark.parametrize(("words", "on_cpu"), [(["--use_cpu"], True), ([], False)])
def test_use_cpu_holds_for_all_arguments_where_there_is_an_accelerator(words, on_cpu, monkeypatch):
    """Arguments share one state of devices, which those that hold the defaults would change."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    parser = hf_training.make_parser("", "image", (), "out")
    args, training = hf_training.parse(parser, (), words)
    assert training.use_cpu == args.defaults["use_cpu"] == on_cpu
