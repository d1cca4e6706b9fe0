"""The folder that an export writes: complete or not at all, with a README that says how to call
what is in it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Exported:
    """What a host says of a folder that it has written.

    Attributes:
        readme: Markdown for the README of the folder, from the title on: who adds BOS and EOS, how
            many positions there are, which options of the engine give the result of the host, and a
            program of ten lines that runs as it stands.
        report: Lines for the terminal: what was written, and what a check has compared.
    """

    readme: str
    report: str


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # disk, limit of files, quota


@contextmanager
def complete_folder(target: Path, argument: str = "OUT") -> Iterator[Path]:
    """An empty folder to write into, which becomes `target` when the block ends and is removed if
    it fails.

    Args:
        target: The new folder.
        argument: Its name on the command line.

    Raises:
        ValueError: if there is something at `target` already, or if it cannot be made.
        OSError: on a full disk.
    """
    if target.exists() or target.is_symlink():  # also one that leads nowhere
        raise ValueError(
            f"{argument} {target} exists already; give a new folder, or remove this one first."
        )
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(
            f"{argument} {target} cannot be made ({error.strerror}: {error.filename}); give a "
            "folder that can be written."
        ) from error
    try:
        yield partial
        # mkdtemp and safetensors let nobody else read what they make
        os.umask(umask := os.umask(0))
        partial.chmod(0o777 & ~umask)
        for path in partial.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # another process has put something there
                folder.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise OSError(
                f"{argument} {target} cannot be written ({error.strerror}); make room, or give a "
                "folder elsewhere."
            ) from error
        raise
