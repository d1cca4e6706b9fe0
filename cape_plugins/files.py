"""Files that are written whole or not at all: a reader never sees half of one. And what files are
compressed by, for errors of readers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# How the files of a program begin, and what makes text of them
_COMPRESSED = {
    rb"\x28\xb5\x2f\xfd": ("zstd", "decompress it first, for example with `zstd -d`"),
    rb"\xfd7zXZ\x00": ("xz", "decompress it first, for example with `xz -d`"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "decompress it first, for example with `bzip2 -d`"),
    rb"\x04\x22\x4d\x18": ("lz4", "decompress it first, for example with `lz4 -d`"),
    rb"7z\xbc\xaf\x27\x1c": ("7z", "unpack it first, for example with `7z x`"),
    rb"PK\x03\x04": ("zip", "unpack it first, for example with `unzip`"),
    rb"\x1f\x8b": ("gzip", "give it a name that ends in .gz"),
}


def compression(path: str | os.PathLike[str]) -> str:
    """Says what a file is compressed by and how to make text of it, as in "is compressed by xz;
    decompress it first"; empty for other files, and for those named .gz, which readers take."""
    if Path(path).suffix == ".gz":
        return ""
    with open(path, "rb") as file:
        head = file.read(16)
    for start, (program, remedy) in _COMPRESSED.items():
        if re.match(start, head):
            return f"is compressed by {program}; {remedy}"
    return ""


@contextlib.contextmanager
def writing(path: Path, mode: str = "w") -> Iterator[Any]:
    """Opens a temporary file that takes the name ``path`` when the block ends without an error.

    Args:
        path: File to be made or replaced; its folder is made if there is none.
        mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
        OSError: if the folder cannot be written to or is full. Nothing is left behind, as after
            any error of the block.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same folder makes the last step a rename and not a copy between file systems.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what was written
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # it has its name, or could not be made
            partial.unlink()


@contextlib.contextmanager
def editing_json(path: Path) -> Iterator[dict[str, Any]]:
    """The object in a JSON file, for changes in place; one without changes is not written. Without
    the file it is empty.

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
            f"{path.name} holds no JSON object ({error}); repair it, or take it away."
        ) from error
    yield content
    if content != json.loads(before):
        write_json(path, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an object as transformers does: indented, keys in order."""
    with writing(path) as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
