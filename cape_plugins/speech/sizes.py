"""Sizes that the headers of formats without compression say, against the bytes that are there: a
program that wrote into a pipe or was stopped left a wrong one, and files were joined or cut.

Sources: the descriptions of RIFF and RIFX (wav), RF64 (EBU Tech 3306), W64, AIFF, 8SVX, CAF, Sun's
au, NIST SPHERE and VOC.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_HEADER_BYTES = 44  # header of a wav file; some writers count it as samples
_UNKNOWN_BYTES = 0x7FFFF000  # least size that programs write into a pipe, where they do not know it
_CHUNK_NAME = re.compile(rb"[A-Za-z0-9 _()-]{4}")


class Samples(NamedTuple):
    """Where the samples of the first recording of a file are.

    Attributes:
        told: Bytes of the samples by the header; None if it means "unknown".
        held: Bytes that there are, up to the end of the file, or of this recording.
        end: Where this recording ends in the file; another one follows, or nothing.
        place: Where the header says their size.
        form: How it says it, for :mod:`struct`; empty where libsndfile does not look at it.
        counted: Bytes of the header that this size counts, too.
    """

    told: int | None
    held: int
    end: int
    place: int = 0
    form: str = ""
    counted: int = 0

    @property
    def cut_off(self) -> bool:
        """Whether there are fewer bytes than the header says, by more than a header."""
        return self.told is not None and self.held + _HEADER_BYTES < self.told

    def repaired(self, data: bytes) -> bytes:
        """The bytes of this recording, whose header says the size that there is."""
        if not self.form or self.told == self.held:
            return data[: self.end]
        largest = 256 ** struct.calcsize(self.form) - 1
        size = struct.pack(self.form, min(self.held + self.counted, largest))
        return data[: self.place] + size + data[self.place + len(size) : self.end]


class _Layout(NamedTuple):
    """How a format of chunks is built.

    Attributes:
        first: Where the first chunk begins.
        name: Bytes of the name of a chunk.
        form: Its size, for :mod:`struct`.
        multiple: Chunks begin at multiples of it.
        counted: Bytes of its header that the size counts, too.
        samples: Name of the chunk of samples.
    """

    first: int
    name: int
    form: str
    multiple: int
    counted: int
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
_VOICE_BLOCKS = (1, 9)  # types of those with samples


def find_samples(file: BinaryIO) -> Samples | None:
    """The samples of a wav (also RF64 and W64), aiff, 8svx, caf, au, NIST or voc file; None for
    another one, or if it has none.

    Args:
        file: From the beginning of a recording to the end of the file; a few bytes are read.
    """
    size = file.seek(0, 2)
    head = _read(file, 0, 1024)
    if head.startswith(b".snd") and len(head) >= 12:
        start, told = struct.unpack_from(">II", head, 4)
        return _flat(file, size, start, told, 8, ">I", head[:4])
    if head.startswith(b"NIST_1A\n"):
        return _nist(file, size, head)
    if head.startswith(_VOICE) and len(head) >= 22:
        return _voice(file, size, head)
    layout = _LAYOUTS.get(head[8:12] if head.startswith(b"FORM") else head[:4])
    return layout and _chunked(file, size, head, layout)


def _read(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _flat(
    file: BinaryIO, size: int, start: int, told: int, place: int, form: str, magic: bytes
) -> Samples | None:
    """Of a format in which nothing follows the samples."""
    if not start < size:
        return None
    end = start + told
    joined = told > 0 and _read(file, end, len(magic)) == magic
    end = end if joined else size
    unknown = not told or (form and told >= _UNKNOWN_BYTES and start + told > size)
    return Samples(None if unknown else told, end - start, end, place, form)


def _nist(file: BinaryIO, size: int, head: bytes) -> Samples | None:
    numbers = {name: int(number) for name, number in _NIST.findall(head)}
    start = head[8:16].strip()
    if b"embedded" in head or b"sample_count" not in numbers or not start.isdigit():
        return None
    told = numbers[b"sample_count"]
    told *= numbers.get(b"channel_count", 1) * numbers.get(b"sample_n_bytes", 2)
    return _flat(file, size, int(start), told, 0, "", head[:8])


def _voice(file: BinaryIO, size: int, head: bytes) -> Samples | None:
    (place,) = struct.unpack_from("<H", head, 20)
    while len(block := _read(file, place, 4)) == 4:
        told = int.from_bytes(block[1:], "little")
        end = place + 4 + told
        if block[0] in _VOICE_BLOCKS:
            # a byte 0 ends the blocks
            joined = _read(file, end, 1 + len(_VOICE)) == b"\0" + _VOICE
            return Samples(told, min(end, size) - place - 4, end + 1 if joined else size)
        place = end
    return None


def _chunked(file: BinaryIO, size: int, head: bytes, layout: _Layout) -> Samples | None:
    for name, place, start, told in _chunks(file, size, layout.first, layout):
        if not name.startswith(layout.samples):
            continue
        form, counted = layout.form, layout.counted
        if head.startswith(b"RF64") and told == 0xFFFFFFFF and head[12:16] == b"ds64":
            place, form = 28, "<Q"
            (told,) = struct.unpack_from(form, head, place)
        end = start + told
        if told and end <= size and (_are_chunks(file, size, end, layout) or told == size - start):
            following = _chunks(file, size, _padded(end, layout), layout)
            magic = head[: layout.name]
            joined = (p - layout.name for name, p, *_ in following if name == magic)
            return Samples(told, told, next(joined, size), place, form, counted)
        if not told and start < size and _are_whole_chunks(file, size, start, layout):
            return Samples(0, 0, size, place, form, counted)
        wide = struct.calcsize(form) == 8
        unknown = not told or (end > size and told >= (1 << 62 if wide else _UNKNOWN_BYTES))
        return Samples(None if unknown else told, size - start, size, place, form, counted)
    return None


def _padded(place: int, layout: _Layout) -> int:
    return place + -place % layout.multiple


def _chunks(
    file: BinaryIO, size: int, place: int, layout: _Layout
) -> Iterator[tuple[bytes, int, int, int]]:
    """Name, place of the size, beginning and size of what each chunk holds."""
    length = layout.name + struct.calcsize(layout.form)
    while place + length <= size:
        header = _read(file, place, length)
        if not _CHUNK_NAME.match(header):
            return
        (told,) = struct.unpack_from(layout.form, header, layout.name)
        told = max(0, told - layout.counted)
        start = place + length
        yield header[: layout.name], place + layout.name, start, told
        place = _padded(start + told, layout)


def _are_chunks(file: BinaryIO, size: int, place: int, layout: _Layout) -> bool:
    """Whether what follows begins as a chunk does, or is too short for one; not samples."""
    places = {place, _padded(place, layout)}  # some writers forget to pad
    names = (_read(file, start, 4) for start in places)
    return size - place < 8 or any(_CHUNK_NAME.match(name) for name in names)


def _are_whole_chunks(file: BinaryIO, size: int, place: int, layout: _Layout) -> bool:
    """Whether nothing but whole chunks follows."""
    end = place
    for _, _, start, told in _chunks(file, size, place, layout):
        end = _padded(start + told, layout)
    return place < end and size <= end <= size + 1  # the last one may lack its padding
