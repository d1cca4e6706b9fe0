"""Settings that all tests share: one thread, a fixed seed, and a function that runs command
lines."""

import logging
import os

# before torch is imported; subprocesses inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# before huggingface_hub is: a name that is no folder is looked up on the hub, again and again
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from cape_plugins.pictures import command
from tests.support.command_lines import run_command

ROOT = Path(__file__).resolve().parent.parent
RunCli = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """Collects no garbage while tests are imported: see _fast_garbage_collection."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with the most slow tests first, so that no worker is left alone with such a file
    at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="module", autouse=True)
def _fast_garbage_collection() -> None:
    """Takes what exists before a file of tests from the garbage collector. Each collection would
    go through all tests and the modules of transformers, whose Trainer starts one at its end."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds setup.py."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """Gives back the log messages that benchmarks switch off for their process."""
    level = logging.root.manager.disable
    yield
    logging.disable(level)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restores the environment after each test: data loaders of fairseq set PYTHONWARNINGS
    permanently, and warm interpreters would not fit the changed environment."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def ended_loaders() -> Iterator[None]:
    """Ends the processes of data loaders after the test. Loaders that are left to the garbage
    collector have closed their queues before, and wait 5 s for each process."""
    yield
    for loader in gc.get_objects():
        if type(loader) is _MultiProcessingDataLoaderIter:
            loader._shutdown_workers()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that ``cape-plugins plot`` would save. They are not drawn, because drawing takes
    longest."""
    saved = []
    monkeypatch.setattr(command, "save", lambda figure, path: saved.append(figure))
    return saved


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    """Function ``run_cli("fairseq-train", DATA, ..., cwd=, env=, ...)``.

    Runs a command line as a user would and returns its CompletedProcess (text). The command
    "python" is the interpreter of the tests; other commands are taken from its environment first.
    The repository root is importable. With `check` (the default) a failing command fails the test
    and shows the command and the end of its output; a command that takes longer than `timeout`
    seconds always does. Its child processes are ended with it. Commands of a host run in forks of
    an interpreter that has imported it (tests/support/warm_python.py), with `fresh` in a new one;
    with `warm_children` the commands of fairseq that the command starts do, too.
    """
    return run_command
