"""Runs one function on many names, each in a forked process with a time limit: an error in the code
of one model, a crash or an endless loop does not stop the others, and nothing that a model changes
in the host reaches the next."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

_MEMORY = 8 << 30  # bytes of a child: a default configuration may ask for a model of 100 GB
_FORK = multiprocessing.get_context("fork")


class Died(Exception):
    """Raised for a process that ended without a result, or ran too long."""


class _Child(NamedTuple):
    name: str
    process: Any
    pipe: Connection
    start: float


def in_children(
    function: Callable[[str], Any], names: Sequence[str], jobs: int, seconds: float
) -> Iterator[tuple[str, Any, float]]:
    """Calls a function for each name.

    Args:
        function: Its result has to be something that pickles.
        names: Arguments.
        jobs: Processes at a time.
        seconds: Limit for each.

    Returns:
        name, result or the error that stopped it, and seconds, in the order in which they end.
    """
    waiting, running = list(reversed(names)), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(function, waiting.pop()))
            first_end = min(child.start for child in running) + seconds
            wait([child.pipe for child in running], max(0.0, first_end - time.monotonic()))
            for child in list(running):
                age = time.monotonic() - child.start
                if child.pipe.poll() or age > seconds:
                    running.remove(child)
                    yield child.name, _result(child, seconds), age
    finally:
        for child in running:
            _end(child)


def _start(function: Callable[[str], Any], name: str) -> _Child:
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(function, name, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Child(name, process, ours, time.monotonic())


def _run(function: Callable[[str], Any], name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        for stream in (1, 2):  # also of code that is not Python's
            os.dup2(nothing.fileno(), stream)
        try:
            with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
                result = function(name)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            result = Died(f"{type(error).__name__}: {error} ({where})")
        pipe.send(result)


def _result(child: _Child, seconds: float) -> Any:
    result: Any = Died(f"no result after {seconds:g} s")
    if child.pipe.poll():
        try:
            result = child.pipe.recv()
        except EOFError:
            child.process.join()
            result = Died(f"the process ended with status {child.process.exitcode}")
    _end(child)
    return result


def _end(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.kill()
    child.process.join()
    child.pipe.close()
