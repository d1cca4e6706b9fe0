"""fairseq's checkpoints under ``torch.load(weights_only=True)``: in memory, and in its programs."""

import argparse
import collections
import io
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import OmegaConf

from cape_plugins.checkpoints.fairseq_files import NUMBERS
from fairseq_user_dir.host import compat
from fairseq_user_dir.host.compat import allow_fairseq_checkpoints

REPO = Path(__file__).resolve().parents[2]


# -------------------------------------------------------------------------------------- in memory


@pytest.fixture
def nothing_allowed():
    """The list of safe types emptied, and put back afterwards."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)
    # the user dir declares its types when it is imported, which may have been within the test
    allow_fairseq_checkpoints()


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save({"value": value}, buffer, **options)
    return buffer.getvalue()


def load(data):
    return torch.load(io.BytesIO(data), weights_only=True)["value"]


def as_broadcast(**cfg):
    """What rank 0 sends when several ranks resume."""
    return {"cfg": OmegaConf.create(cfg, flags={"allow_objects": True})}


PASSIVE = {
    "Namespace": argparse.Namespace(arch="transformer_tiny", lr=[0.1]),
    **{f"array {name}": np.array([1, 0], name) for name in NUMBERS},
    **{f"number {name}": np.array([1], name)[0] for name in NUMBERS},
    "OmegaConf": as_broadcast(model=argparse.Namespace(a=1), lr=[0.1], task={"data": None}),
    "placeholder": _TensorPlaceholder(3),
    "defaultdict": collections.defaultdict(dict),  # empty, as in OmegaConf: no others can be loaded
}


@pytest.mark.parametrize("value", PASSIVE.values(), ids=PASSIVE)
def test_passive_types_load_only_when_allowed(value, nothing_allowed):
    data = saved(value)
    with pytest.raises(pickle.UnpicklingError):
        load(data)
    allow_fairseq_checkpoints()
    loaded = load(data)
    assert type(loaded) is type(value)
    assert np.all(loaded == value)


def test_types_that_other_code_took_off_the_list_come_back(tmp_path):
    """The end of torch's own context manager also removes what was declared before it."""
    from fairseq import checkpoint_utils

    import fairseq_user_dir  # noqa: F401

    path = tmp_path / "checkpoint.pt"
    state = {"extra_state": {"counts": np.arange(4), "train_iterator": {"epoch": 1}}}
    state["optimizer_history"] = [{"num_updates": 0, "lr_scheduler_state": {}}]
    state |= {"args": None, "cfg": None, "model": {}}
    torch.save(state, path)
    with torch.serialization.safe_globals([np.ndarray]):
        pass
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert state["extra_state"]["counts"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [np.arange(4.0), np.int64(7)], ids=["array", "number"])
@pytest.mark.parametrize("home", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_files_written_under_either_numpy_load(value, home, nothing_allowed):
    # this format stores names as text, ended by a line break, so that they can be exchanged
    data = saved(value, _use_new_zipfile_serialization=False)
    data, count = re.subn(rb"numpy\._?core\.multiarray", home.encode(), data)
    assert count > 0
    with pytest.raises(pickle.UnpicklingError):
        load(data)
    allow_fairseq_checkpoints()
    assert np.array_equal(load(data), value)


def test_files_that_run_code_are_still_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    allow_fairseq_checkpoints()
    for value in (Attack(), argparse.Namespace(deep=Attack()), np.array([Attack()], dtype=object)):
        with pytest.raises(pickle.UnpicklingError):
            load(saved(value))
    assert not (tmp_path / "made").exists()


def test_second_call_changes_nothing_and_others_keep_theirs(nothing_allowed):
    torch.serialization.add_safe_globals([PurelyLocal])
    allow_fairseq_checkpoints()
    once = torch.serialization.get_safe_globals()
    allow_fairseq_checkpoints()
    assert set(torch.serialization.get_safe_globals()) == set(once)
    assert PurelyLocal in once


class PurelyLocal:
    """A type that someone else has allowed."""


def test_names_that_do_not_exist_are_passed_over(monkeypatch, nothing_allowed):
    changed = (("argparse", ("NoSuchName",)), ("no_such_module", ("X",)), *compat._CONTAINERS)
    monkeypatch.setattr(compat, "_CONTAINERS", changed)
    allow_fairseq_checkpoints()
    assert load(saved(argparse.Namespace(a=1))).a == 1
    assert load(saved(np.ones(2))).sum() == 2


def test_older_torch_is_left_alone(monkeypatch):
    def refuse(_):
        raise AssertionError("torch < 2.6 was told a type under two names")

    monkeypatch.setattr(torch.serialization, "add_safe_globals", refuse)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.5.1+cpu"))
    allow_fairseq_checkpoints()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.6.0+cpu"))
    with pytest.raises(AssertionError):
        allow_fairseq_checkpoints()


# -------------------------------------------------------------------------------- on command lines

ALLOW_ALL = """
from fairseq_user_dir.host.compat import allow_fairseq_checkpoints

allow_fairseq_checkpoints()
"""

# What a checkpoint file itself holds, but not what ranks send each other.
ALLOW_FILES_ONLY = """
from fairseq_user_dir.host import compat

compat._CONTAINERS = ()
compat.torch.serialization.clear_safe_globals()
compat.allow_fairseq_checkpoints()
"""

LOAD = """
import sys, torch
if sys.argv[2] == "allowed":
    from fairseq_user_dir.host.compat import allow_fairseq_checkpoints
    allow_fairseq_checkpoints()
state = torch.load(sys.argv[1], weights_only=True)
print(type(state["cfg"]["model"]).__name__)
"""

TRANSLATE = """
import sys
from fairseq.models.transformer import TransformerModel
folder, data, user_dir = sys.argv[1:]
hub = TransformerModel.from_pretrained(folder, "checkpoint_last.pt", data, user_dir=user_dir)
print("translated:", hub.translate("w1 w2", beam=1))
"""


class Workplace:
    """Binarised data, user dirs, and a way to run fairseq on them."""

    def __init__(self, folder, run_cli):
        self.folder, self.run_cli = folder, run_cli
        self.data = folder / "data"
        self.data.mkdir()
        dictionary = Dictionary()
        for index in range(20):
            dictionary.add_symbol(f"w{index}")
        for language in ("de", "en"):
            dictionary.save(str(self.data / f"dict.{language}.txt"))
            for split in ("train", "valid"):
                self._write(split, language, dictionary)
        dictionary.save(str(self.data / "dict.txt"))
        self.everything = self._user_dir("passive_types", ALLOW_ALL)
        self.files_only = self._user_dir("file_types", ALLOW_FILES_ONLY)

    def _write(self, split, language, dictionary):
        for name in (f"{split}.de-en.{language}", split):
            prefix = str(self.data / name)
            builder = indexed_dataset.make_builder(prefix + ".bin", "mmap", len(dictionary))
            for i in range(24):
                builder.add_item(torch.tensor([4 + i % 20] * (1 + i % 5) + [dictionary.eos()]))
            builder.finalize(prefix + ".idx")

    def _user_dir(self, name, code):
        (self.folder / name).mkdir()
        (self.folder / name / "__init__.py").write_text(code)
        return str(self.folder / name)

    def start(self, *command):
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *map(str, command)], cwd=self.folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command, typed=""):
        """Exit status and output."""
        done = self.run_cli("python", *command, cwd=self.folder, input=typed, check=False)
        return done.returncode, done.stdout + done.stderr

    def fairseq(self, program, *options, typed=""):
        return self.run("-m", f"fairseq_cli.{program}", *options, typed=typed)

    def training(self, save_dir, updates, user_dir=None):
        options = [
            self.data, "--task", "translation", "--arch", "transformer_tiny",
            "--encoder-embed-dim", 8, "--encoder-ffn-embed-dim", 8, "--optimizer", "adam",
            "--lr", 0.001, "--max-tokens", 60, "--max-update", updates, "--save-dir", save_dir,
            "--cpu", "--num-workers", 0, "--eval-bleu", "--eval-bleu-args", '{"beam": 1}',
            "--store-ema", "--no-epoch-checkpoints", "--no-progress-bar",
        ]  # fmt: skip
        return options + (["--user-dir", user_dir] if user_dir else [])


@pytest.fixture(scope="module")
def work(tmp_path_factory, run_cli):
    return Workplace(tmp_path_factory.mktemp("compat"), run_cli)


@pytest.fixture(scope="module")
def trained(work):
    """Folder of a stock model trained without any user dir, as everybody's existing ones."""
    status, output = work.fairseq("train", *work.training("stock", updates=3))
    assert status == 0, output
    return work.folder / "stock"


@pytest.mark.slow
def test_checkpoint_loads_after_and_not_before(work, trained):
    checkpoint = trained / "checkpoint_last.pt"
    status, output = work.run("-c", LOAD, checkpoint, "not allowed")
    assert status != 0
    assert "argparse.Namespace" in output
    assert work.run("-c", LOAD, checkpoint, "allowed") == (0, "Namespace\n")


@pytest.mark.slow
def test_training_resumes_with_the_user_dir_only(work, trained):
    (work.folder / "resumed").mkdir()
    (work.folder / "resumed" / "checkpoint_last.pt").write_bytes(
        (trained / "checkpoint_last.pt").read_bytes()
    )
    status, output = work.fairseq("train", *work.training("resumed", updates=5))
    assert status != 0
    assert "weights_only" in output
    command = work.training("resumed", updates=5, user_dir=work.everything)
    status, output = work.fairseq("train", *command)
    assert status == 0, output
    assert re.search(r"Loaded checkpoint .*@ 3 updates", output)
    assert re.search(r"Saved checkpoint .*@ 5 updates", output)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["generate", "interactive", "validate"])
def test_programs_load_a_checkpoint(work, trained, program):
    checkpoint = trained / "checkpoint_last.pt"
    options = [work.data, "--user-dir", work.everything, "--path", checkpoint, "--cpu"]
    if program == "validate":
        options += ["--task", "translation", "--max-sentences", 4]
    else:
        options += ["--beam", 1, "--max-len-b", 8]
    if program == "generate":
        options += ["--gen-subset", "valid"]
    status, output = work.fairseq(program, *options, typed="w1 w2\n")
    assert status == 0, output
    assert re.search({"validate": "loss"}.get(program, r"(?m)^H-0\t"), output), output


@pytest.mark.slow
def test_eval_lm_loads_a_checkpoint(work):
    status, output = work.fairseq(
        "train", work.data, "--task", "language_modeling", "--arch", "transformer_lm", "--cpu",
        "--decoder-layers", 1, "--decoder-embed-dim", 8, "--decoder-ffn-embed-dim", 8,
        "--decoder-attention-heads", 2, "--tokens-per-sample", 16, "--sample-break-mode", "none",
        "--max-tokens", 64, "--optimizer", "adam", "--max-update", 2, "--save-dir", "lm",
        "--num-workers", 0,
    )  # fmt: skip
    assert status == 0, output
    status, output = work.fairseq(
        "eval_lm", work.data, "--user-dir", work.everything, "--path", "lm/checkpoint_last.pt",
        "--gen-subset", "valid", "--tokens-per-sample", 16, "--cpu",
    )  # fmt: skip
    assert status == 0, output
    assert "Perplexity" in output


@pytest.mark.slow
def test_hub_interface_loads_a_checkpoint(work, trained):
    status, output = work.run("-c", TRANSLATE, trained, work.data, work.everything)
    assert status == 0, output
    assert "translated:" in output


@pytest.mark.slow
@pytest.mark.parametrize("sufficient", [False, True])
def test_two_ranks_resume(work, trained, sufficient):
    """Rank 1 gets its state from rank 0, not from the file, and that holds more types."""
    save_dir = work.folder / f"two_ranks_{sufficient}"
    save_dir.mkdir()
    (save_dir / "checkpoint_last.pt").write_bytes((trained / "checkpoint_last.pt").read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    user_dir = work.everything if sufficient else work.files_only
    ranks = [
        work.start(
            "-m", "fairseq_cli.train", *work.training(save_dir, updates=5, user_dir=user_dir),
            "--distributed-world-size", 2, "--distributed-rank", rank, "--distributed-no-spawn",
            "--distributed-init-method", address, "--distributed-backend", "gloo",
            "--ddp-backend", "legacy_ddp",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        # rank 1 first: if it fails, rank 0 waits for it in vain
        output = ranks[1].communicate(timeout=300)[0]
        if not sufficient:
            assert ranks[1].returncode != 0
            assert "Weights only load failed" in output
            return
        assert ranks[1].returncode == 0, output
        output = ranks[0].communicate(timeout=300)[0]
        assert ranks[0].returncode == 0, output
        assert re.search(r"Loaded checkpoint .*@ 3 updates", output)
        assert re.search(r"Saved checkpoint .*@ 5 updates", output)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
