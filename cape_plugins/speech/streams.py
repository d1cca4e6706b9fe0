"""Streams of recordings, found by marks in the data. Headers give no length, or a wrong length, if
a program wrote into a pipe, and one file may hold several streams. libsndfile trusts headers and
reads only one of two joined Ogg files, and only a quarter of a variable-bit-rate mp3 that states no
number of frames and begins with loud sound.

Sources: RFC 3533 (Ogg: each chained stream begins with a page with the flag "beginning of stream",
and ends with a page with the flag "end of stream"), ISO 11172-3 and 13818-3 (frames of mp3), Xing's
header of an mp3.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from cape_plugins.speech import flac
from cape_plugins.speech.sizes import find_samples

_PAGE = re.compile(rb"OggS\0([\0-\x07])", re.DOTALL)
_BEGINS, _ENDS = 2, 4  # flags of an Ogg page

# Beginning of a frame of layer III: sync word, version and layer; bit rate, sampling rate, padding.
_FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]", re.DOTALL)
# The frame with Xing's header has no sound: its 9, 17 or 32 bytes of side information are zero.
_XING = re.compile(
    rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]..(?:..)?(?:\0{9}|\0{17}|\0{32})(?:Xing|Info)", re.DOTALL
)
_HAS_FRAMES = 1  # flag of Xing's header: the number of frames follows
_KBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),  # MPEG 1
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG 2 and 2.5
}
_RATES = (44100, 48000, 32000)
_WIDE = 0x90  # a bit rate with frames that have room for Xing's header


# largest number of frames per byte of the file; only silence in FLAC and Vorbis has more
_MOST_FRAMES = 10_000


class Stream(NamedTuple):
    """A stream that libsndfile reads to its end.

    Attributes:
        data: Bytes of a file.
        frames: Samples of each channel by the header; None to take the number of libsndfile.
    """

    data: bytes
    frames: int | None = None


class CutOffError(ValueError):
    """The last part of a stream is not whole; the message names the part."""


def streams(data: bytes) -> list[Stream]:
    """The streams of a file: more than one if files were joined.

    Args:
        data: Bytes of a recording of any format.

    Raises:
        CutOffError: if an Ogg file ends in the middle of a page or stream, or if an mp3 has fewer
            frames, or a file without compression fewer bytes, than the header states.
    """
    sound = data[_tag_bytes(data) :]
    readers: dict[bytes, Callable[[bytes], Iterator[Stream]]] = {b"fLaC": _flac, b"OggS": _ogg}
    tagged = len(sound) < len(data)  # after a tag there may be padding
    mp3 = _FRAME.match(sound) or (tagged and find_samples(io.BytesIO(sound)) is None)
    read = readers.get(sound[:4], _mp3 if mp3 else _uncompressed)
    return list(read(sound)) or [Stream(data)]


def is_absurd(frames: int, size: int) -> bool:
    """Whether a file of `size` bytes is too small for this number of samples of each channel."""
    return frames > _MOST_FRAMES * size


def tells_length(file: BinaryIO) -> bool:
    """Whether the length in the header of a file can be trusted, unless the length is 0. Reads a
    few bytes, not the whole file, and is therefore fast for a whole corpus."""
    file.seek(0)
    head = file.read(flac.HEAD_BYTES)
    if head.startswith(b"fLaC"):
        return flac.tells_length(file)
    if samples := find_samples(file):
        return samples.stated_size == samples.actual_size and samples.end == file.seek(0, 2)
    return not (head.startswith((b"ID3", b"OggS")) or _FRAME.match(head))


def _tag_bytes(data: bytes) -> int:
    """Size of the ID3 tags before the sound; a picture in a tag may look like frames."""
    offset = 0
    while data.startswith(b"ID3", offset) and len(data) >= offset + 10:
        size = 0
        for byte in data[offset + 6 : offset + 10]:
            size = size << 7 | byte & 0x7F
        offset += 10 + size
    return offset


def _flac(data: bytes) -> Iterator[Stream]:
    for part in flac.parts(data):
        yield Stream(flac.without_total(part), flac.total_samples(part))


def _ogg(data: bytes) -> Iterator[Stream]:
    starts, before, last = [], _ENDS, 0
    for match in _PAGE.finditer(data):
        flags = match[1][0]
        # several streams side by side begin with a page each
        if flags & _BEGINS and not before & _BEGINS:
            starts.append(match.start())
            if not before & _ENDS:
                raise CutOffError(f"stream {len(starts) - 1} has no last page")
        before, last = flags, match.start()
    segments = data[last + 27 : last + 27 + data[last + 26]] if len(data) > last + 26 else b""
    last_bytes, size = len(data) - last, 27 + len(segments) + sum(segments)
    if last_bytes < size or not segments:
        raise CutOffError(f"{last_bytes} bytes of its last page")
    # A captured broadcast may be whole without a last page, which `ffmpeg -c copy` adds. But only
    # the last page distinguishes a whole file from a file that was cut off between pages.
    if not before & _ENDS:
        raise CutOffError(f"stream {len(starts)} has no last page")
    yield from (Stream(data[start:end]) for start, end in pairwise([*starts, len(data)]))


def _uncompressed(data: bytes) -> Iterator[Stream]:
    """Each recording with a header that states the size of the samples."""
    while samples := find_samples(io.BytesIO(data)):
        if samples.cut_off:
            raise CutOffError(f"{samples.actual_size} of {samples.stated_size} bytes")
        yield Stream(samples.repaired(data))
        data = data[samples.end :]


def _mp3(data: bytes) -> Iterator[Stream]:
    """The file with a header of the right number of frames, if there is no header or it states
    fewer frames: libsndfile would compute the length from the size of the first frame."""
    starts = sorted({0, *(match.start() for match in _XING.finditer(data))})
    for start, end in pairwise([*starts, len(data)]):
        part = data[start:end]
        frames, stated_frames = _count_frames(part), _stated_frames(part)
        if frames and frames < 0.99 * stated_frames:
            raise CutOffError(f"{frames} of {stated_frames} frames")
        if frames and frames - 1 > stated_frames:
            part = _with_xing(part, frames)
        if frames:
            yield Stream(part)


def _count_frames(data: bytes) -> int:
    count = offset = 0
    while match := _FRAME.search(data, offset):
        start = match.start()
        size = _frame_bytes(data[start : start + 4])
        following = start + size
        # other bytes may look like a frame by chance, so a second frame must follow
        if size and (start == offset or data[following : following + 2] == data[start : start + 2]):
            count += following <= len(data)
            offset = following
        else:
            offset = start + 1
    return count


def _frame_bytes(header: bytes) -> int:
    """Size of a frame with this header; 0 if the header is not valid."""
    version, rate = header[1] >> 3 & 3, header[2] >> 2 & 3 if len(header) == 4 else 3
    if rate == 3:
        return 0
    first = version == 3
    hertz = _RATES[rate] >> (0 if first else 1 if version == 2 else 2)
    bits = 1000 * _KBITS[first][header[2] >> 4]
    return (144 if first else 72) * bits // hertz + (header[2] >> 1 & 1)


def _stated_frames(data: bytes) -> int:
    """Number of frames after Xing's frame, from Xing's header; 0 if the header has no number."""
    match = _XING.match(data)
    if match is None or len(data) < match.end() + 8:
        return 0
    flags, frames = struct.unpack_from(">II", data, match.end())
    return frames if flags & _HAS_FRAMES else 0


def _with_xing(data: bytes, frames: int) -> bytes:
    """An mp3 whose first frame is a Xing header that states the number of `frames`, then the frames
    of `data`."""
    start = _FRAME.search(data).start()
    # no checksum; without padding
    header = bytes([0xFF, data[start + 1] | 1, _WIDE | data[start + 2] & 0x0C, data[start + 3]])
    mono, first = data[start + 3] >> 6 == 3, data[start + 1] >> 3 & 3 == 3
    side = (17 if mono else 32) if first else (9 if mono else 17)
    xing = b"Xing" + struct.pack(">II", _HAS_FRAMES, frames)
    return (header + bytes(side) + xing).ljust(_frame_bytes(header), b"\0") + data[start:]
