"""Writes files in one step, so that no reader sees an incomplete file; checks folders before
anything is written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def writing(path: Path, mode: str = "w") -> Iterator[Any]:
    """Opens a temporary file that takes the name ``path`` when the block ends without an error.

    Args:
        path: File to be made or replaced; a missing folder is made.
        mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
        OSError: if the folder cannot be written to, or the disk is full. After this error, as after
            any error of the block, no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder the last step is a rename, not a copy between file systems.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise the rename may reach the disk before the content
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # the file was renamed, or could not be made
            partial.unlink()


@contextlib.contextmanager
def editing_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the object in a JSON file, to be changed in place. The file is written only if the
    object changes. If there is no file, the object is empty.

    Raises:
        ValueError: if the file holds no JSON object.
        OSError: as from :func:`writing`.
    """
    before = path.read_bytes() if path.is_file() else b"{}"
    try:
        content = json.loads(before)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
    except ValueError as error:
        raise ValueError(
            f"{path.name} holds no JSON object ({error}); repair or remove the file."
        ) from error
    yield content
    if content != json.loads(before):
        write_json(path, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as in transformers: indented, with sorted keys."""
    with writing(path) as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")


def missing_folder(folder: Path, named: str) -> Path | None:
    """Returns the folder if it has to be made, None if the folder exists. Makes nothing.

    Args:
        folder: Folder for files.
        named: The option that asks for the folder, such as "--output results/plot.png", for errors.

    Raises:
        ValueError: if folders would have to be made in a file, in a folder that cannot be written
            to, or at the root of the file system, where the path is more likely a typing error.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if folder.is_absolute() and folder != existing == Path(folder.anchor):
        raise ValueError(
            f"{named}: {Path(*folder.parts[:2])} does not exist, and this program makes no folder "
            "at the root of the file system; check the path, or make the folder first"
        )
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"{named}: {existing} is no folder that can be written to; give another folder"
        )
    return None if folder == existing else folder
