"""What all tests share: one thread, a fixed seed, and a way to run command lines."""

import contextlib
import os

# before torch is imported; subprocesses inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RunCli = Callable[..., subprocess.CompletedProcess[str]]


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


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    """Function ``run_cli("fairseq-train", DATA, ..., cwd=, env=, input=, timeout=, check=)``.

    Runs a command line as a user would and returns its CompletedProcess (text). The command
    "python" is the interpreter of the tests; other commands are taken from its environment first.
    The repository root is importable. With `check` (the default) a failing command fails the test
    and shows the command and the end of its output; a command that takes longer than `timeout`
    seconds always does. Its child processes are ended with it.
    """
    return _run_cli


def _run_cli(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    timeout: float = 300,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [_executable(words[0]), *words[1:]],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **(env or {})},
        stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # so that a hanging command ends with all its workers
    ) as process:
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            out, err = process.communicate()
            pytest.fail(_report(words, f"still running after {timeout} s", out, err), False)
        except BaseException:
            _kill(process.pid)
            raise
    if check and process.returncode != 0:
        pytest.fail(_report(words, f"exit status {process.returncode}", out, err), pytrace=False)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _kill(pid: int) -> None:
    """A command with its child processes: those of torchrun are in sessions of their own, and would
    keep its output open for ever."""
    import psutil

    children = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _executable(name: str) -> str:
    if name == "python":
        return sys.executable
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _report(words: list[str], reason: str, out: str, err: str) -> str:
    return f"{shlex.join(words)}\n{reason}\n--- stdout\n{out[-3000:]}\n--- stderr\n{err[-6000:]}"
