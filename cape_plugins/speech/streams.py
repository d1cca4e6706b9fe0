"""Streams of compressed recordings, found by their own marks: headers tell no length, or a wrong
one, where a program wrote into a pipe, and one file may hold several streams, of which libsndfile
reads the first.

Sources: RFC 9639 (FLAC), RFC 3533 (Ogg: each chained stream begins with a page that has the flag
"beginning of stream"), ISO 11172-3 and 13818-3 (frames of mp3), Xing's header of an mp3.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

_FLAC = re.compile(rb"fLaC[\0\x80]\0\0\x22")  # with the header of its first block, of 34 bytes
_PAGE = re.compile(rb"OggS\0([\0-\x07])", re.DOTALL)
_BEGINS = 2  # flag of an Ogg page

# A frame of layer III: sync word, version, layer; bit rate; sampling rate and padding.
_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]", re.DOTALL)
# Xing's frame has no sound: its side information, of 9, 17 or 32 bytes, is zero.
_XING = re.compile(
    rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]..(?:..)?(?:\0{9}|\0{17}|\0{32})(?:Xing|Info)", re.DOTALL
)
_HAS_FRAMES = 1  # flag of Xing's header: the number of frames follows
_KBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG 1
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG 2 and 2.5
}
_RATES = (44100, 48000, 32000)
_WIDE = 0x90  # a bit rate whose frames have room for Xing's header


HEAD_BYTES = 32  # at the beginning of a file, enough for :func:`tells_length`
_MOST_FRAMES = 10_000  # in a byte of the file; FLAC and Vorbis need less for silence only


class Stream(NamedTuple):
    """A stream that libsndfile reads to its end.

    Attributes:
        data: Bytes of a file.
        frames: Samples of each channel by the header; None: what libsndfile says.
    """

    data: bytes
    frames: int | None = None


class CutOffError(ValueError):
    """The last part of a stream is not whole; the message says which."""


def streams(data: bytes) -> list[Stream]:
    """The streams of a file, of which there is more than one if files were joined.

    Args:
        data: Bytes of a recording of any format. FLAC, Ogg, mp3, wav and au are looked into, any
            other is one stream.

    Raises:
        CutOffError: if an Ogg file ends in the middle of a page.
    """
    sound = data[_tag_bytes(data) :]
    readers: dict[bytes, Callable[[bytes], Iterator[Stream]]] = {
        b"fLaC": _flac,
        b"OggS": _ogg,
        b"RIFF": _wav,
        b".snd": _au,
    }
    tagged = len(sound) < len(data)  # after a tag there may be padding
    read = readers.get(sound[:4], _mp3 if tagged or _FRAME.match(sound) else None)
    return (list(read(sound)) if read else []) or [Stream(data)]


def is_absurd(frames: int, size: int) -> bool:
    """Whether so many samples of each channel fit in no file of `size` bytes."""
    return frames > _MOST_FRAMES * size


def tells_length(head: bytes, size: int) -> bool:
    """Whether the length in the header of a file can be trusted, if it is not 0.

    Args:
        head: The first :data:`HEAD_BYTES` of the file.
        size: Bytes of the file.
    """
    if head.startswith(b"fLaC"):
        frames = _flac_frames(head)
        return frames > 0 and not is_absurd(frames, size)
    return not (head.startswith((b"ID3", b"OggS")) or _FRAME.match(head))


def _flac_frames(head: bytes) -> int:
    """Samples of each channel: the lower 36 bits of a word; 0 is unknown."""
    return int.from_bytes(head[18:26], "big") & (1 << 36) - 1


def _tag_bytes(data: bytes) -> int:
    """Size of the ID3 tags before the sound; a picture in one may look like frames."""
    place = 0
    while data.startswith(b"ID3", place) and len(data) >= place + 10:
        size = 0
        for byte in data[place + 6 : place + 10]:
            size = size << 7 | byte & 0x7F
        place += 10 + size
    return place


def _flac(data: bytes) -> Iterator[Stream]:
    starts = [match.start() for match in _FLAC.finditer(data)]
    for start, end in pairwise([*starts, len(data)]):
        part = bytearray(data[start:end])
        frames = _flac_frames(part)
        part.extend(bytes(max(0, 26 - len(part))))  # of half a header
        # without a total libsndfile reads what is there
        part[21] &= 0xF0
        part[22:26] = bytes(4)
        yield Stream(bytes(part), frames)


def _ogg(data: bytes) -> Iterator[Stream]:
    starts, before, last = [], 0, 0
    for match in _PAGE.finditer(data):
        flags, last = match[1][0], match.start()
        # several streams side by side begin with a page each
        if flags & _BEGINS and not before & _BEGINS:
            starts.append(last)
        before = flags
    segments = data[last + 27 : last + 27 + data[last + 26]] if len(data) > last + 26 else b""
    held, size = len(data) - last, 27 + len(segments) + sum(segments)
    if held < size or not segments:
        raise CutOffError(f"{held} bytes of its last page")
    yield from (Stream(data[start:end]) for start, end in pairwise([*starts, len(data)]))


def _wav(data: bytes) -> Iterator[Stream]:
    """With the size of the samples that means "unknown", where the header says 0 and there are."""
    place = 12
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"data" and not size and not _ends_with_chunks(data, place + 8):
            yield Stream(data[: place + 4] + b"\xff" * 4 + data[place + 8 :])
            return
        place += 8 + size + size % 2


def _ends_with_chunks(data: bytes, place: int) -> bool:
    """Whether nothing but whole chunks follows."""
    while place + 8 <= len(data):
        (size,) = struct.unpack_from("<I", data, place + 4)
        place += 8 + size + size % 2
    return place == len(data)


def _au(data: bytes) -> Iterator[Stream]:
    start, size = struct.unpack_from(">II", data.ljust(12, b"\0"), 4)
    if not size and start < len(data):
        yield Stream(data[:8] + b"\xff" * 4 + data[12:])


def _mp3(data: bytes) -> Iterator[Stream]:
    """With a header of the right number of frames, where there is none or it says fewer: else
    libsndfile takes the first frame for the mean one."""
    starts = sorted({0, *(match.start() for match in _XING.finditer(data))})
    for start, end in pairwise([*starts, len(data)]):
        part = data[start:end]
        frames = _count_frames(part)
        if frames and frames - 1 > _told_frames(part):
            part = _with_xing(part, frames)
        if frames:
            yield Stream(part)


def _count_frames(data: bytes) -> int:
    count = place = 0
    while match := _FRAME.search(data, place):
        start = match.start()
        size = _frame_bytes(data[start : start + 4])
        following = start + size
        # behind other bytes, which may look like a frame by chance, a second one must follow
        if size and (start == place or data[following : following + 2] == data[start : start + 2]):
            count += following <= len(data)
            place = following
        else:
            place = start + 1
    return count


def _frame_bytes(header: bytes) -> int:
    """Size of a frame with this header; 0 if there is none such."""
    version, rate = header[1] >> 3 & 3, header[2] >> 2 & 3 if len(header) == 4 else 3
    if rate == 3:
        return 0
    first = version == 3
    hertz = _RATES[rate] >> (0 if first else 1 if version == 2 else 2)
    bits = 1000 * _KBITS[first][header[2] >> 4]
    return (144 if first else 72) * bits // hertz + (header[2] >> 1 & 1)


def _told_frames(data: bytes) -> int:
    """The frames after that of Xing's header, as this says; 0 if it does not."""
    match = _XING.match(data)
    if match is None or len(data) < match.end() + 8:
        return 0
    flags, frames = struct.unpack_from(">II", data, match.end())
    return frames if flags & _HAS_FRAMES else 0


def _with_xing(data: bytes, frames: int) -> bytes:
    """The frames of `data` behind one with Xing's header."""
    start = _FRAME.search(data).start()
    # no checksum; without padding
    header = bytes([0xFF, data[start + 1] | 1, _WIDE | data[start + 2] & 0x0C, data[start + 3]])
    mono, first = data[start + 3] >> 6 == 3, data[start + 1] >> 3 & 3 == 3
    side = (17 if mono else 32) if first else (9 if mono else 17)
    told = b"Xing" + struct.pack(">II", _HAS_FRAMES, frames)
    return (header + bytes(side) + told).ljust(_frame_bytes(header), b"\0") + data[start:]
