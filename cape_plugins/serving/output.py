"""The folder that an export writes: complete or not at all, with a README that shows how to call
the model in it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Exported:
    """Description of a folder that a host has written.

    Attributes:
        readme: Markdown for the README of the folder, from the title on: who adds BOS and EOS, the
            number of positions, the options of the engine that give the result of the host, and a
            program of ten lines that runs unchanged.
        report: Lines for the terminal: the files, and the result of a check.
    """

    readme: str
    report: str


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # disk, limit of files, quota
# The number of an error of the operating system, as Python and Rust print it.
_NUMBER = re.compile(r"(?:\[Errno |os error )(\d+)")
_OF_TORCH = "enforce fail at inline_container"  # torch's file writer gives no error number


@contextmanager
def complete_folder(target: Path, argument: str = "OUT") -> Iterator[Path]:
    """An empty folder to write into. The folder becomes `target` when the block ends, and is
    removed if the block fails or the process gets a signal to end.

    Args:
        target: The new folder.
        argument: Name of `target` on the command line.

    Raises:
        ValueError: if something exists at `target`, or `target` cannot be made.
        OSError: on a full disk.
    """
    with _ending_by_error():
        missing, partial = _begin(target, argument)
        try:
            yield partial
            # mkdtemp and safetensors allow only the owner to read their files
            os.umask(umask := os.umask(0))
            partial.chmod(0o777 & ~umask)
            for path in partial.rglob("*"):
                path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
            _give_name(partial, target, argument)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in missing:
                with suppress(OSError):  # another process has put something there
                    folder.rmdir()
            if isinstance(error, Exception) and (reason := _full_disk(error)):
                raise OSError(
                    f"{argument} {target} cannot be written ({reason}); make room, or give a "
                    "folder elsewhere."
                ) from error
            raise


def _begin(target: Path, argument: str) -> tuple[list[Path], Path]:
    """Makes and returns the missing folders above `target`, and a hidden folder beside `target`."""
    try:
        if _is_taken(target):
            raise ValueError(
                f"{argument} {target} exists already; give a new folder, or remove this one first."
            )
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        # Only a part of the name: the whole name may already have the greatest length of a name.
        prefix = f".{target.name[:40]}."
        return missing, Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    except OSError as error:
        raise ValueError(
            f"{argument} {target} cannot be made ({error.strerror}: {error.filename}); give a "
            "folder that can be written."
        ) from error


def _is_taken(target: Path) -> bool:
    """Whether something exists at `target`, even a link whose target is missing."""
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _give_name(partial: Path, target: Path, argument: str) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if not _is_taken(target):
            raise
        raise ValueError(
            f"{argument} {target} now exists, because another process has written it. Give a new "
            "folder, or remove this one first."
        ) from error


def _full_disk(error: Exception) -> str | None:
    """The reason in words if the disk was full, whichever library raised the error; None for other
    errors."""
    if _OF_TORCH in str(error):
        return "disk full?"
    number = getattr(error, "errno", None)
    if number is None and (printed := _NUMBER.search(str(error))):
        number = int(printed[1])
    return os.strerror(number) if number in _FULL else None


@contextmanager
def _ending_by_error() -> Iterator[None]:
    """Turns SIGTERM and a closed terminal (SIGHUP) into SystemExit, with the exit status that
    shells expect, so that unfinished files are removed. By default Python ends at once.

    Handlers that a caller has set stay, and ignored signals (nohup) stay ignored. Python allows
    only the main thread to set handlers.
    """
    numbers = []
    if threading.current_thread() is threading.main_thread():
        # Windows has no SIGHUP
        available = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))
        numbers = [n for n in available if n and signal.getsignal(n) is signal.SIG_DFL]

    def end(number: int, _: Any) -> NoReturn:
        for other in numbers:  # another signal would interrupt the cleaning
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
