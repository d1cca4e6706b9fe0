"""The runner of transformers' own tests, on a small repository in its place."""

import subprocess
from importlib.metadata import version

import pytest

from tests.hf_common import run
from tests.support.hf import FAMILIES, left_out

COMMON = """
import torch

def floats_tensor(shape):
    return torch.rand(shape)

def ids_tensor(shape, size):
    return torch.randint(size, shape)

class ModelTesterMixin:
    def test_sizes(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        assert config.position_config.type == "cape"

    def test_accelerator(self):
        self.skipTest("test requires accelerator")

    def test_training(self):
        assert "Vit" not in type(self).__name__

    def check_training_gradient_checkpointing(self):
        pass
"""
GENERATION = """
class GenerationTesterMixin:
    def test_generate(self):
        pass
"""


def make_repository(folder):
    """Makes a repository that has the tests of the installed version."""
    tests = folder / "tests"
    (tests / "generation").mkdir(parents=True)
    (tests / "test_modeling_common.py").write_text(COMMON)
    (tests / "generation" / "test_utils.py").write_text(GENERATION)
    tag = f"tag v{version('transformers')}"
    for command in ("init -q", "add .", "commit -q -m tests", tag):
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", folder]
        subprocess.run([*git, *command.split()], check=True)
    return folder.as_uri()


@pytest.mark.slow
def test_last_line_says_what_was_run_and_left_out(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")
    source = make_repository(tmp_path / "repository")
    monkeypatch.setattr("sys.argv", ["run", "--source", source, "--position-embedding", "cape"])
    assert run.main() == 1
    line = capfd.readouterr().out.strip().splitlines()[-1]
    assert "position embedding cape: ran the common tests of modelling, generation: " in line
    families = [row for name, row in FAMILIES.items() if not left_out(name, "common")]
    families.append(FAMILIES["speech_to_text"])  # Whisper, which is not in the table
    passed = 2 * len(families) - 1  # sizes and, but for ViT, training
    passed += sum(row.model.can_generate() for row in families)
    assert f" {passed} passed, 1 failed, {len(families)} skipped by themselves" in line
    assert "gradients at states and attentions" in line
    assert "all tests of exporters, which" in line


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
