"""Runs the command lines of the tests, in new interpreters or in forks of warm ones."""

import atexit
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from tests.support.warm_python import FAIRSEQ, WarmPython, imports_of

ROOT = Path(__file__).resolve().parents[2]


def run_command(
    *command: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    timeout: float = 300,
    check: bool = True,
    fresh: bool = False,
    warm_children: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user would; see the fixture ``run_cli``."""
    words = [str(word) for word in command]
    env = {**environment(), **(env or {})}
    if warm_children:
        path = os.pathsep.join([str(ROOT / "tests/support/warm_children"), env["PYTHONPATH"]])
        env |= {"WARM_PYTHON": warm_fairseq(), "PYTHONPATH": path}
    python = None if fresh else _warm_python(imports_of(words), env)
    if python:
        status, out, err, late = python.run(words, cwd, env, input, timeout, kill)
    else:
        status, out, err, late = _run_in_new_interpreter(words, cwd, env, input, timeout)
    if late:
        pytest.fail(_report(words, f"still running after {timeout} s", out, err), False)
    if check and status != 0:
        pytest.fail(_report(words, f"exit status {status}", out, err), pytrace=False)
    return subprocess.CompletedProcess(words, status, out, err)


def environment() -> dict[str, str]:
    """The environment of the tests with the repository root importable, for the commands."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**ours, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}


_warm: dict[tuple[str, ...], WarmPython] = {}


def _warm_python(modules: tuple[str, ...], env: Mapping[str, str]) -> WarmPython | None:
    """The interpreter that has imported `modules`, started when it is first needed. None without
    modules, or where variables that imports may depend on have other values by now."""
    if not modules:
        return None
    if modules not in _warm:
        _warm[modules] = WarmPython(modules, environment())
        atexit.register(_warm[modules].close)
    return _warm[modules] if _warm[modules].suits(env) else None


def warm_fairseq() -> str:
    """What to take for `sys.executable` where a test runs a recipe in its own process."""
    python = _warm_python(FAIRSEQ, environment())
    assert python, "a test left a variable behind that imports read, such as PYTHONWARNINGS"
    return str(python.client())


def _run_in_new_interpreter(
    words: list[str], cwd: Path | None, env: Mapping[str, str], input: str | None, timeout: float
) -> tuple[int, str, str, bool]:
    """Exit status, stdout, stderr, and whether the time was over."""
    with subprocess.Popen(
        [_executable(words[0]), *words[1:]],
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # so that a hanging command ends with all its workers
    ) as process:
        try:
            out, err = process.communicate(input, timeout)
            return process.returncode, out, err, False
        except subprocess.TimeoutExpired:
            kill(process.pid)
            out, err = process.communicate()
            return process.returncode, out, err, True
        except BaseException:
            kill(process.pid)
            raise


def kill(pid: int) -> None:
    """Ends a command with its child processes: torchrun starts its own in other sessions, where
    they would keep its output open for ever."""
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
