"""Reads the user's texts: only a line feed ends a line, and bytes that are no text are an error.
Also shortens error messages of libraries.

Python by default ends a line at a carriage return, ``str.splitlines`` also at U+2028, U+0085 and
some control characters; all of them occur within crawled sentences. No encoding is guessed: Latin-1
decodes any bytes, so one damaged byte would silently turn a whole text into wrong letters.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Byte-order marks, the longer marks first: the mark of UTF-32 begins with the mark of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_WIDE = ("utf-16", "utf-32")
_MARK, _SWAPPED_MARK = "\ufeff", "\ufffe"
# First bytes of compressed files, the program that wrote them, and how to decompress them.
_COMPRESSED = {
    rb"\x28\xb5\x2f\xfd": ("zstd", "decompress it first, for example with `zstd -d`"),
    rb"\xfd7zXZ\x00": ("xz", "decompress it first, for example with `xz -d`"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "decompress it first, for example with `bzip2 -d`"),
    rb"\x04\x22\x4d\x18": ("lz4", "decompress it first, for example with `lz4 -d`"),
    rb"7z\xbc\xaf\x27\x1c": ("7z", "unpack it first, for example with `7z x`"),
    rb"PK\x03\x04": ("zip", "unpack it first, for example with `unzip`"),
    rb"\x1f\x8b": ("gzip", "give it a name that ends in .gz"),
}


def text_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a text file, without ``\\n`` or ``\\r\\n`` at the end; nothing else ends a line.

    Args:
        path: Text in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark; ``.gz`` is decompressed.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the file is empty, damaged or compressed in another way, or if a line is no
            text; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; check the path.")
    with _open_bytes(path) as (file, encoding):
        wide = encoding in _WIDE
        lines = io.BytesIO(_decode(path, file.read(), encoding).encode()) if wide else file
        empty = True
        for number, line in enumerate(lines, 1):
            text = _decode(path, line, "utf-8" if wide or number > 1 else encoding, number)
            if text:  # otherwise the file has only a byte-order mark
                empty = False
                yield text.removesuffix("\n").removesuffix("\r")
    if empty:
        raise ValueError(f"{path} is empty; give a file with one entry a line.")


def read_text(path: str | os.PathLike[str]) -> str:
    """The whole text of a file, with its line ends; an empty file is an empty text.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: as from :func:`text_lines`.
    """
    path = Path(path)
    with _open_bytes(path) as (file, encoding):
        return _decode(path, file.read(), encoding)


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, without its full stop, because our messages
    continue after it; the name of the error if the message is empty."""
    line = str(error).strip().partition("\n")[0]
    return line.strip().rstrip(".") or type(error).__name__


def text_encoding(path: str | os.PathLike[str]) -> str:
    """The name of the encoding by the mark of a file: utf-8, utf-8-sig, utf-16 or utf-32."""
    with open(path, "rb") as file:
        return _encoding(file.read(4))


def _encoding(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "utf-8")


@contextlib.contextmanager
def _open_bytes(path: Path) -> Iterator[tuple[BinaryIO, str]]:
    """The bytes of a text file, and their encoding."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4)
            if compression := _compression(path):
                raise ValueError(f"{path} {compression}.")
            file.seek(0)
            yield file, _encoding(head)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(
            f"{path} is not a complete gzip file ({error}); compress it again."
        ) from None


def _compression(path: Path) -> str:
    """Text for an error on the compression of a file and on how to decompress it, such as "is
    compressed by xz; decompress it first". Empty for other files, and for files named .gz, which
    this module reads."""
    if path.suffix == ".gz":
        return ""
    with path.open("rb") as file:
        head = file.read(16)
    for start, (program, remedy) in _COMPRESSED.items():
        if re.match(start, head):
            return f"is compressed by {program}; {remedy}"
    return ""


def _decode(path: Path, data: bytes, encoding: str, line: int = 1) -> str:
    """The text of bytes that begin with this line, without byte-order marks."""
    wide = encoding in _WIDE
    try:
        text = data.decode(encoding)
        if "\0" in text:
            text_before, fault = text.partition("\0")[0], "holds a byte 0"
            remedy = "this is no text, or a text without a byte-order mark; convert it to UTF-8."
        elif _SWAPPED_MARK in text and wide:
            text_before = text.partition(_SWAPPED_MARK)[0]
            fault = "holds a byte-order mark the other way round"
            remedy = "convert each of the files that were joined to UTF-8."
        else:
            return text.replace(_MARK, "")  # marks within the text come from files that were joined
    except UnicodeDecodeError as error:
        # error.start counts from the end of the byte-order mark, which the decoder has taken off
        start = len(data) - len(error.object) + error.start
        text_before = data[:start].decode(encoding, errors="replace")
        fault = f"is not {encoding.upper().removesuffix('-SIG')} text ({error.reason})"
        remedy = "convert the file, for example with `iconv -f latin1 -t utf-8`, or repair it."
        if wide:
            remedy = "the file is damaged; write it again, in UTF-8."
    raise ValueError(f"{path}: line {line + text_before.count(chr(10))} {fault}; {remedy}")
