"""The runner of transformers' own tests, on a small repository in its place."""

import subprocess
from importlib.metadata import version

import pytest

from tests.hf_common import run
from tests.support.hf import FAMILIES, OF_FAMILY, left_out

COMMON = """
import torch

def floats_tensor(shape):
    return torch.rand(shape)

def ids_tensor(shape, size):
    return torch.randint(size, shape)

class ModelTesterMixin:
    def test_sizes(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        assert config.position_config.type == "{type}"

    def test_accelerator(self):
        self.skipTest("test requires accelerator")

    def test_training(self):
        assert "ViT" not in type(self).__name__

    def check_training_gradient_checkpointing(self):
        pass
"""
GENERATION = """
class GenerationTesterMixin:
    def test_generate(self):
        pass
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Makes a repository that has the tests of the installed version."""
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")

    def make(position_embedding, generation):
        tests = tmp_path / "repository" / "tests"
        tests.mkdir(parents=True)
        (tests / "test_modeling_common.py").write_text(COMMON.format(type=position_embedding))
        if generation:
            (tests / "generation").mkdir()
            (tests / "generation" / "test_utils.py").write_text(GENERATION)
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", tests.parent]
        for command in (
            "init -q",
            "add .",
            "commit -q -m tests",
            f"tag v{version('transformers')}",
        ):
            subprocess.run([*git, *command.split()], check=True)
        return tests.parent.as_uri()

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("name", "generation"), [("cape", False), ("relpos", True)])
def test_last_line_says_what_was_run_and_left_out(name, generation, repository, monkeypatch, capfd):
    arguments = ["--source", repository(name, generation), "--position-embedding", name]
    monkeypatch.setattr("sys.argv", ["run", *arguments])
    assert run.main() == 1
    line = capfd.readouterr().out.strip().splitlines()[-1]
    ran = "modelling, generation" if generation else "modelling"
    assert f"position embedding {name}: ran the common tests of {ran}: " in line
    families = [
        row
        for family, row in FAMILIES.items()
        if name in OF_FAMILY[family] and not left_out(family, "common")
    ]
    if name in OF_FAMILY["speech_to_text"]:  # Whisper, which is not in the table
        families.append(FAMILIES["speech_to_text"])
    generating = sum(row.model.can_generate() for row in families) if generation else 0
    passed = 2 * len(families) - 1 + generating  # sizes and, but for ViT, training
    assert f" {passed} passed, 1 failed, {len(families)} skipped by themselves" in line
    assert ("gradients at states and attentions" in line) == (name == "cape")
    lacking = "exporters" if generation else "generation and exporters"
    assert f"all tests of {lacking}, which" in line


def test_source_distribution_where_the_repository_is_out_of_reach(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "BUILD", tmp_path)
    unpacked = tmp_path / f"transformers-{version('transformers')}"
    unpacked.mkdir()
    assert run.fetch((tmp_path / "nowhere").as_uri()) == unpacked
    assert "nowhere" in capsys.readouterr().err
    target, lacking = run.prepare(unpacked)
    assert target.exists()
    assert lacking == ["generation", "exporters"]
    assert run.prepare(unpacked)[1] == lacking  # what stands in for them is not taken for tests
