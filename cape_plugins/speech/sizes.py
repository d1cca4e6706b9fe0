"""Compares sizes in the headers of formats without compression with the bytes in the file. A size
is wrong if a program wrote into a pipe or was stopped, or if files were joined or cut. libsndfile
does not report this reliably: libsndfile reads RF64, W64, NIST and VOC to the end, or only as far
as a size in the header that is too small.

Sources: the descriptions of RIFF and RIFX (wav), RF64 (EBU Tech 3306), W64, AIFF, 8SVX, CAF, Sun's
au, NIST SPHERE and VOC.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_HEADER_BYTES = 44  # bytes of the header of a wav file, which some writers count as samples
# Sizes near 2 or 4 GiB are not trusted: programs that write into pipes set such sizes, or 0.
_UNKNOWN_BYTES = 0x7FFFF000
_CHUNK_NAME = re.compile(rb"[A-Za-z0-9 _()-]{4}")


class Samples(NamedTuple):
    """Place of the samples of the first recording of a file.

    Attributes:
        stated_size: Bytes of the samples by the header; None if the header leaves the size open.
        actual_size: Bytes of the samples in the file, up to the end of this recording.
        end: Byte at which this recording ends; another recording follows, or the file ends.
        offset: Place of the size in the header.
        packing: Format of the size, for :mod:`struct`; empty if libsndfile ignores the size.
        counted_bytes: Bytes of the header that the stated size counts, too.
    """

    stated_size: int | None
    actual_size: int
    end: int
    offset: int = 0
    packing: str = ""
    counted_bytes: int = 0

    @property
    def cut_off(self) -> bool:
        """Whether the stated size exceeds the bytes in the file by more than a header."""
        return self.stated_size is not None and self.actual_size + _HEADER_BYTES < self.stated_size

    def repaired(self, data: bytes) -> bytes:
        """The bytes of this recording, with the actual size in the header."""
        if not self.packing or self.stated_size == self.actual_size:
            return data[: self.end]
        largest = 256 ** struct.calcsize(self.packing) - 1
        size = struct.pack(self.packing, min(self.actual_size + self.counted_bytes, largest))
        return data[: self.offset] + size + data[self.offset + len(size) : self.end]


class _Layout(NamedTuple):
    """Layout of a file format that consists of chunks, such as WAV.

    Attributes:
        first: Byte at which the first chunk begins.
        name: Number of bytes of the name of a chunk.
        packing: Format of the size of a chunk, for :mod:`struct`.
        multiple: Chunks begin at multiples of this number.
        counted_bytes: Bytes of the chunk's header that the size counts, too.
        samples: Name of the chunk that holds the samples.
    """

    first: int
    name: int
    packing: str
    multiple: int
    counted_bytes: int
    samples: bytes


_LAYOUTS = {
    b"RIFF": _Layout(12, 4, "<I", 2, 0, b"data"),
    b"RIFX": _Layout(12, 4, ">I", 2, 0, b"data"),
    b"RF64": _Layout(12, 4, "<I", 2, 0, b"data"),
    b"AIFF": _Layout(12, 4, ">I", 2, 0, b"SSND"),
    b"AIFC": _Layout(12, 4, ">I", 2, 0, b"SSND"),
    b"8SVX": _Layout(12, 4, ">I", 2, 0, b"BODY"),
    b"16SV": _Layout(12, 4, ">I", 2, 0, b"BODY"),
    b"riff": _Layout(40, 16, "<Q", 8, 24, b"data"),
    b"caff": _Layout(8, 4, ">Q", 1, 0, b"data"),
}
_NIST = re.compile(rb"^(channel_count|sample_count|sample_n_bytes) -i (\d+)", re.MULTILINE)
_VOICE = b"Creative Voice File\x1a"
_VOICE_BLOCKS = (1, 9)  # types of blocks with samples


def find_samples(file: BinaryIO) -> Samples | None:
    """The samples of a wav (also RF64 and W64), aiff, 8svx, caf, au, NIST or voc file; None for
    another file, or a file without samples.

    Args:
        file: From the beginning of a recording to the end of the file; a few bytes are read.
    """
    size = file.seek(0, 2)
    head = _read(file, 0, 1024)
    if head.startswith(b".snd") and len(head) >= 12:
        start, stated_size = struct.unpack_from(">II", head, 4)
        return _flat(file, size, start, stated_size, 8, ">I", head[:4])
    if head.startswith(b"NIST_1A\n"):
        return _nist(file, size, head)
    if head.startswith(_VOICE) and len(head) >= 22:
        return _voice(file, size, head)
    layout = _LAYOUTS.get(head[8:12] if head.startswith(b"FORM") else head[:4])
    return layout and _chunked(file, size, head, layout)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _flat(
    file: BinaryIO, size: int, start: int, stated_size: int, offset: int, packing: str, magic: bytes
) -> Samples | None:
    """The samples of a format in which nothing follows the samples."""
    if not start < size:
        return None
    end = start + stated_size
    joined = stated_size > 0 and _read(file, end, len(magic)) == magic
    end = end if joined else size
    unknown = not stated_size or (
        packing and stated_size >= _UNKNOWN_BYTES and start + stated_size > size
    )
    return Samples(None if unknown else stated_size, end - start, end, offset, packing)


def _nist(file: BinaryIO, size: int, head: bytes) -> Samples | None:
    numbers = {name: int(number) for name, number in _NIST.findall(head)}
    start = head[8:16].strip()
    if b"embedded" in head or b"sample_count" not in numbers or not start.isdigit():
        return None
    stated_size = numbers[b"sample_count"]
    stated_size *= numbers.get(b"channel_count", 1) * numbers.get(b"sample_n_bytes", 2)
    return _flat(file, size, int(start), stated_size, 0, "", head[:8])


def _voice(file: BinaryIO, size: int, head: bytes) -> Samples | None:
    (offset,) = struct.unpack_from("<H", head, 20)
    while len(block := _read(file, offset, 4)) == 4:
        stated_size = int.from_bytes(block[1:], "little")
        end = offset + 4 + stated_size
        if block[0] in _VOICE_BLOCKS:
            # a byte 0 ends the blocks of a recording; the next recording begins with the mark
            joined = _read(file, end, 1 + len(_VOICE)) == b"\0" + _VOICE
            return Samples(stated_size, min(end, size) - offset - 4, end + 1 if joined else size)
        offset = end
    return None


def _chunked(file: BinaryIO, size: int, head: bytes, layout: _Layout) -> Samples | None:
    for name, offset, start, stated_size in _chunks(file, size, layout.first, layout):
        if not name.startswith(layout.samples):
            continue
        packing, counted_bytes = layout.packing, layout.counted_bytes
        if head.startswith(b"RF64") and stated_size == 0xFFFFFFFF and head[12:16] == b"ds64":
            offset, packing = 28, "<Q"
            (stated_size,) = struct.unpack_from(packing, head, offset)
        end = start + stated_size
        if (
            stated_size
            and end <= size
            and (_are_chunks(file, size, end, layout) or stated_size == size - start)
        ):
            following = _chunks(file, size, _padded(end, layout), layout)
            magic = head[: layout.name]
            joined = (p - layout.name for name, p, *_ in following if name == magic)
            return Samples(
                stated_size, stated_size, next(joined, size), offset, packing, counted_bytes
            )
        if not stated_size and start < size and _are_whole_chunks(file, size, start, layout):
            return Samples(0, 0, size, offset, packing, counted_bytes)
        wide = struct.calcsize(packing) == 8
        unknown = not stated_size or (
            end > size and stated_size >= (1 << 62 if wide else _UNKNOWN_BYTES)
        )
        return Samples(
            None if unknown else stated_size, size - start, size, offset, packing, counted_bytes
        )
    return None


def _padded(offset: int, layout: _Layout) -> int:
    return offset + -offset % layout.multiple


def _chunks(
    file: BinaryIO, size: int, offset: int, layout: _Layout
) -> Iterator[tuple[bytes, int, int, int]]:
    """Name of each chunk, offset of the chunk's size, and beginning and size of the content."""
    length = layout.name + struct.calcsize(layout.packing)
    while offset + length <= size:
        header = _read(file, offset, length)
        if not _CHUNK_NAME.match(header):
            return
        (stated_size,) = struct.unpack_from(layout.packing, header, layout.name)
        stated_size = max(0, stated_size - layout.counted_bytes)
        start = offset + length
        yield header[: layout.name], offset + layout.name, start, stated_size
        offset = _padded(start + stated_size, layout)


def _are_chunks(file: BinaryIO, size: int, offset: int, layout: _Layout) -> bool:
    """Whether the bytes from `offset` on begin like a chunk, whole or broken, or are too few for a
    chunk; other bytes are samples."""
    places = {offset, _padded(offset, layout)}  # some writers forget to pad
    names = (_read(file, start, 4) for start in places)
    return size - offset < 8 or any(_CHUNK_NAME.match(name) for name in names)


def _are_whole_chunks(file: BinaryIO, size: int, offset: int, layout: _Layout) -> bool:
    """Whether only whole chunks follow."""
    end = offset
    for _, _, start, stated_size in _chunks(file, size, offset, layout):
        end = _padded(start + stated_size, layout)
    return offset < end and size <= end <= size + 1  # the last chunk may lack its padding
