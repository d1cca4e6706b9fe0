"""FLAC: the number of samples, from the header and from the numbers of the frames.

Source: RFC 9639.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

_MARK = re.compile(rb"fLaC[\0\x80]\0\0\x22")  # with the header of the first block of 34 bytes
HEAD_BYTES = 42  # mark and first block
_FRAME = re.compile(rb"\xff[\xf8\xf9][\x10-\xfe][\0-\xaf]", re.DOTALL)
# Number of intervals between evenly spaced places where frames are read: scanning whole files would
# take too long.
_PROBES = 8
_PROBE_BYTES = 2**15  # holds a whole frame: usual frames of 4096 samples have 8 to 16 KiB
_LAST_BYTES = 2**17  # larger than a frame
_TAG_BYTES = 128  # a tag ID3v1 behind the frames


def total_samples(head: bytes) -> int:
    """Number of samples of each channel, from the header (the lower 36 bits of a word); 0 if
    unknown."""
    return int.from_bytes(head[18:26], "big") & (1 << 36) - 1


def without_total(flac: bytes) -> bytes:
    """The file with a header without a total, so that libsndfile reads the file to its end."""
    part = bytearray(flac)
    part.extend(bytes(max(0, 26 - len(part))))  # completes half a header
    part[21] &= 0xF0
    part[22:26] = bytes(4)
    return bytes(part)


def parts(data: bytes) -> Iterator[bytes]:
    """Yields the bytes of each of the files that were joined, without the tag after the last
    file."""
    if data[-_TAG_BYTES:].startswith(b"TAG"):
        data = data[:-_TAG_BYTES]
    starts = [match.start() for match in _MARK.finditer(data)]
    yield from (data[start:end] for start, end in pairwise([*starts, len(data)]))


def tells_length(file: BinaryIO) -> bool:
    """Whether the length in the header can be trusted: the total must be the number of the last
    sample, and frames at a few places of the file must have rising numbers. In joined files the
    numbers begin again, even if both files have the same duration."""
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(HEAD_BYTES)
    total = total_samples(head)
    if not total or len(head) < HEAD_BYTES:
        return False
    offsets = {size * probe // _PROBES for probe in range(1, _PROBES)}
    # also at places ever nearer to both ends: one of two joined files may be small, such as silence
    for shift in range(1, size.bit_length()):
        offsets |= {size >> shift, size - (size >> shift)}
    firsts = []
    for offset in sorted(offsets):
        file.seek(max(HEAD_BYTES, offset))
        frame = next(_frames(file.read(_PROBE_BYTES), head), None)
        firsts += [] if frame is None else [frame.first]
    file.seek(max(HEAD_BYTES, size - _LAST_BYTES))
    frames = list(_frames(file.read(), head))
    rising = all(frame.last == following.first for frame, following in pairwise(frames))
    return bool(frames) and rising and firsts == sorted(firsts) and frames[-1].last == total


class _Frame(NamedTuple):
    """Samples of each channel up to the beginning of a frame, and up to its end."""

    first: int
    last: int


def _frames(data: bytes, head: bytes) -> Iterator[_Frame]:
    """The frames with headers in `data`; a checksum tells headers from other bytes."""
    for match in _FRAME.finditer(data):
        frame = _frame(data[match.start() : match.start() + 16], head)
        if frame is not None:
            yield frame


def _frame(header: bytes, head: bytes) -> _Frame | None:
    ones = 8 - (header[4] ^ 0xFF).bit_length() if len(header) > 4 else 1
    # a number of several bytes is written like a letter in UTF-8
    length = max(1, ones)
    number_end = 4 + length
    code, rate = header[2] >> 4, header[2] & 15
    extra_bytes = {6: 1, 7: 2}.get(code, 0)
    end = number_end + extra_bytes + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    reserved = header[3] & 1 or ones in (1, 8)
    if reserved or len(header) <= end or _checksum(header[:end]) != header[end]:
        return None
    number = header[4] & (1 << max(0, 7 - length)) - 1 if ones else header[4]
    for byte in header[5:number_end]:
        number = number << 6 | byte & 0x3F
    if extra_bytes:
        samples = int.from_bytes(header[number_end : number_end + extra_bytes], "big") + 1
    else:
        samples = 192 if code == 1 else 576 << code - 2 if code < 6 else 256 << code - 8
    varies = header[1] & 1  # sizes of frames differ, so samples are counted, not frames
    first = number if varies else number * int.from_bytes(head[10:12], "big")
    return _Frame(first, first + samples)


def _checksum(data: bytes) -> int:
    """CRC-8 with the polynomial x^8 + x^2 + x + 1."""
    result = 0
    for byte in data:
        result ^= byte
        for _ in range(8):
            result = (result << 1 ^ 7 * (result >> 7)) & 0xFF
    return result
