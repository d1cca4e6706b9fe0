"""Loading a checkpoint runs no code from it, although fairseq hands texts of its settings to
``eval``: each checkpoint below would create a file if its code ran."""

import argparse
import ast
import collections
import functools
import importlib
import os
import re
import sys
import tarfile
import tempfile
import warnings
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, file_utils
from fairseq.data import codedataset
from fairseq.data.fasta_dataset import FastaDataset
from omegaconf import DictConfig, OmegaConf

from cape_plugins.checkpoints.fairseq_files import UnsafeSettingError, literal, read_checkpoint
from cape_plugins.checkpoints.stack import read_stack
from cape_plugins.cli import main as cape_plugins
from cape_plugins.serving.command import GROUP
from cape_plugins.settings.arguments import FAIRSEQ
from fairseq_user_dir.average import average_checkpoints
from fairseq_user_dir.host.errors import SettingsError
from tests.support.fairseq_models import build


@pytest.fixture
def created(tmp_path):
    """The file that the code below would create."""
    return tmp_path / "created"


def code(created, value="[12]"):
    """An expression with a value that fairseq can use, which creates a file."""
    return f"[__import__('pathlib').Path({str(created)!r}).touch()] and {value}"


def save(path, **sections):
    torch.save({"args": None, "cfg": None, "model": {}, **sections}, path)
    return path


DATA = {
    "10000,50000": (10000, 50000),
    " (0.9, 0.98)": (0.9, 0.98),
    "True": True,
    "[(512, 3)] * 2 + [(1024, 3)] * 1": [(512, 3), (512, 3), (1024, 3)],
    "('lm.bin', 'words.txt', 2, -1)": ("lm.bin", "words.txt", 2, -1),
    "{'name': 'scaled', 'dropout': 0.1}": {"name": "scaled", "dropout": 0.1},
}


@pytest.mark.parametrize("text", DATA)
def test_data_in_a_text_are_read(text):
    assert literal(text) == DATA[text]


RUNNING = ["print(1)", "[1] + print(1)", "{'name': print(1)}", "print", "(1).real", "[1][0]", ""]
RUNNING += ["f'{print(1)}'", "2 ** 99", "[0] * 10 ** 9", "[1] * [2]", "(" * 500]


@pytest.mark.parametrize("text", RUNNING)
def test_all_other_texts_are_refused(text, capsys):
    with pytest.raises(ValueError, match="is not allowed, because fairseq would run it as Python"):
        literal(text)
    assert capsys.readouterr().out == ""


@functools.cache
def evaluations():
    """Module, function and argument of every call of eval, exec and fairseq's eval_... functions
    in fairseq."""
    root = Path(fairseq.__file__).parent
    calls = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        if "examples" in parts:  # programs of research projects, which the package never imports
            continue
        module = ".".join(parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its escape sequences
            nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for node in nodes:
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if re.fullmatch(r"eval|exec|__import__|((utils|options)\.)?eval_(str_\w+|bool)", name):
                calls.append((module, name, ast.unparse(node.args[0])))
    return calls


def test_no_module_of_fairseq_has_pythons_eval():
    callers = {(module, name) for module, name, _ in evaluations() if "eval_" not in name}
    assert {name for _, name in callers} == {"eval"}
    assert len(callers) > 15
    for module, _ in callers:
        assert importlib.import_module(module).eval is literal, module


def test_a_module_that_is_imported_later_runs_nothing_at_its_import(tmp_path, monkeypatch, created):
    monkeypatch.setattr(fairseq, "__path__", [*fairseq.__path__, str(tmp_path)])
    (tmp_path / "imported_later.py").write_text(f"value = eval({code(created)!r})\n")
    with pytest.raises(ValueError, match="is not allowed, because fairseq would run it"):
        importlib.import_module("fairseq.imported_later")
    assert not created.exists()


SETTING = re.compile(r"(?:self\.)?(?:args|cfg)\.(\w+)")


def test_every_setting_that_fairseq_evaluates_is_checked(tmp_path, created):
    matches = [SETTING.fullmatch(argument) for *_, argument in evaluations()]
    names = {match[1] for match in matches if match}
    assert {"adaptive_softmax_cutoff", "wer_args", "conv_feature_layers", "left_pad_source"} < names
    others = {argument for *_, argument in evaluations() if not SETTING.fullmatch(argument)}
    handed_on = {"xformers_att_config", "feature_encoder_spec"}  # settings, too, by their names
    # x is of these functions themselves; x and uf are of command lines; a line is of a manifest
    assert others == {"x", "uf", "line.strip()"} | handed_on
    for name in names | handed_on:
        path = save(tmp_path / "checkpoint.pt", cfg={"model": {name: code(created)}})
        with pytest.raises(UnsafeSettingError, match=rf"cfg\.model\.{name} is "):
            read_checkpoint(path)


def test_code_is_not_run_even_by_a_model_that_is_built(created):
    with pytest.raises(ValueError, match="would run it as Python"):
        build(adaptive_softmax_cutoff=code(created))
    assert not created.exists()


def test_a_manifest_of_units_is_data(tmp_path, monkeypatch, created):
    manifest = tmp_path / "train.txt"
    manifest.write_text(code(created, "{'audio': 'a.wav', 'hubert': '1 2', 'duration': 1}") + "\n")
    with pytest.raises(ValueError, match="would run it as Python"):
        codedataset.parse_manifest(manifest, None)
    assert not created.exists()
    manifest.write_text("{'audio': 'a.wav', 'hubert_km100': '4 5', 'duration': 1.5}\n")
    monkeypatch.setattr(codedataset, "parse_code", lambda code, *_, **__: (code, None))
    assert codedataset.parse_manifest(manifest, None)[:2] == (["a.wav"], ["4 5"])


def test_the_name_of_a_protein_file_is_no_shell_command(tmp_path, monkeypatch, created):
    # fairseq's command has tqdm in it, a program of the environment
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    prefix = f"proteins;touch {created.name};"
    (tmp_path / f"{prefix}.fasta").write_text(">first\nMKV\n>second\nAL\nA\n")
    dataset = FastaDataset(prefix)
    assert not created.exists()
    np.testing.assert_array_equal(dataset.sizes, [3, 3])
    assert dataset[1] == (">second", "ALA")


@pytest.mark.parametrize("name", ["model/../../created", "model/dict.txt"])
def test_an_archive_writes_into_its_own_folder_only(name, tmp_path, monkeypatch, created):
    (tmp_path / "text").write_text("a 1\n")
    archive = tmp_path / "model.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "text", "model/first")
        file.add(tmp_path / "text", name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outside = "../" in name
    with pytest.raises(tarfile.OutsideDestinationError) if outside else nullcontext():
        folder = Path(file_utils.load_archive_file(str(archive)))
    assert not created.exists()
    assert outside or (folder / "dict.txt").read_text() == "a 1\n"


def with_attributes(text):
    settings = collections.OrderedDict(adaptive_softmax_cutoff="10")
    settings.adaptive_softmax_cutoff = text
    return settings


PLACES = {
    "arguments": lambda text: {"args": argparse.Namespace(adaptive_softmax_cutoff=text)},
    "model": lambda text: {"cfg": {"model": argparse.Namespace(adaptive_softmax_cutoff=text)}},
    "criterion": lambda text: {"cfg": {"criterion": {"wer_args": text}}},
    "side in front": lambda text: {"cfg": {"model": {"encoder.xformers_att_config": text}}},
    "side above": lambda text: {"cfg": {"model": {"decoder": {"xformers_att_config": text}}}},
    "old side": lambda text: {"cfg": {"model": {"decoder_xformers_att_config": text}}},
    "nested": lambda text: {"args": argparse.Namespace(w2v={"model": [{"wer_args": text}]})},
    "attributes": lambda text: {"args": with_attributes(text)},
    "omegaconf": lambda text: {"cfg": OmegaConf.create({"model": {"conv_feature_layers": text}})},
}


@pytest.mark.parametrize("part", PLACES)
def test_a_checkpoint_with_code_is_refused(part, tmp_path, created):
    path = save(tmp_path / "checkpoint.pt", **PLACES[part](code(created)))
    value = re.escape(repr(code(created))[:40])
    message = rf"checkpoint\.pt: the setting (args|cfg)\.[\w.]+ is {value}.*; allowed: numbers"
    with pytest.raises(SettingsError, match=message):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    with pytest.raises(ValueError, match=message):
        average_checkpoints([path])
    with pytest.raises(ValueError, match=f"--model .*{message}"):
        read_stack(path)
    assert not created.exists()


def test_settings_with_data_are_loaded(tmp_path):
    """A list of numbers holds only numbers."""
    for text in ("print", "1.real", "'numbers'", "[[1, print]]"):
        path = save(tmp_path / "checkpoint.pt", cfg={"model": {"adaptive_softmax_cutoff": text}})
        with pytest.raises(UnsafeSettingError, match="adaptive_softmax_cutoff"):
            read_checkpoint(path)
    settings = {
        "adaptive_softmax_cutoff": [10, 20],
        "adaptive_input_cutoff": "10,20",
        "conv_feature_layers": "[(512, 10, 5)] + [(512, 3, 2)] * 4",  # as of wav2vec 2.0
        "encoder_layers": 6,
        "decoder_attention": "True",
        "left_pad_source": True,
        "pipeline_balance": None,
        "character_filters": "",
        "xformers_att_config": {"name": "scaled_dot_product"},
        "encoder.xformers_att_config": "{'name': 'scaled_dot_product'}",
        "wer_args": "('lm.bin', 'words.txt', 2, -1)",
        "data": "${common.folder}/binary",
    }
    for model in (settings, argparse.Namespace(**settings), OmegaConf.create(settings)):
        path = save(tmp_path / "checkpoint.pt", cfg={"model": model})
        assert read_checkpoint(path)["cfg"]["model"] == model


@pytest.mark.parametrize("text", ["${create:}", "a/${create:}/b", "${${task.name}:}"])
def test_a_checkpoint_calls_no_function_of_omegaconf(text, tmp_path, created):
    OmegaConf.register_new_resolver("create", lambda: created.touch())
    try:
        task = {"name": "create", "data": text}
        places = [{"task": task}, OmegaConf.create({"task": task})]
        if text.endswith("e:}"):  # instead of a whole section
            places.append({"task": {"data": DictConfig(text)}})
        message = r"cfg\.task\.data is '.*', which calls a function of omegaconf; allowed: texts"
        for cfg in places:
            path = save(tmp_path / "checkpoint.pt", cfg=cfg)
            with pytest.raises(SettingsError, match=message):
                checkpoint_utils.load_checkpoint_to_cpu(str(path))
        assert not created.exists()
    finally:
        OmegaConf.clear_resolver("create")


ENGINES = [entry.name.split("-") for entry in entry_points(group=GROUP)]


@pytest.mark.parametrize("engine", [engine for host, engine in ENGINES if host == FAIRSEQ])
def test_export_refuses_a_checkpoint_with_code(engine, tmp_path, created, capsys):
    path = save(tmp_path / "checkpoint.pt", **PLACES["model"](code(created)))
    words = ["export", engine, str(path), str(tmp_path / "exported"), "--data", str(tmp_path)]
    with pytest.raises((SettingsError, SystemExit)) as stopped:
        cape_plugins(words)
    told = f"{capsys.readouterr().err}{stopped.value}"
    assert f"{path}: the setting cfg.model.adaptive_softmax_cutoff is " in told
    assert "which fairseq would run as Python; allowed: numbers" in told
    assert list(tmp_path.iterdir()) == [path]
