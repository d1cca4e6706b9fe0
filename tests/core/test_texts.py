"""The user's texts: ends of lines, encodings, and bytes that are no text."""

import bz2
import gzip
import lzma

import pytest

from cape_plugins.utils.texts import first_line, read_text, text_lines

ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"  # where str.splitlines ends lines


@pytest.mark.parametrize(
    ("suffix", "last", "end"), [("txt", True, "\n"), ("gz", False, "\r\n")], ids=["plain", "gzip"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_lines_end_at_line_feeds_alone(tmp_path, suffix, encoding, last, end):
    lines = ["\u010a\u0a0a größe", "", ODD, "  x  "]  # two characters with a byte 10 in UTF-16
    data = (end.join(lines) + end * last).encode(encoding)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == "gz" else data)
    assert list(text_lines(path)) == lines
    assert read_text(path) == end.join(lines) + end * last


BAD = {
    "latin-1": ("gut\n\nschön\n".encode("latin-1"), "line 3 is not UTF-8 text .*iconv"),
    "half a character": ("gut\n\nschö".encode()[:-1], "line 3 is not UTF-8 text"),
    "half of UTF-16": ("gut\n\nschön".encode("utf-16")[:-1], "line 3 is not UTF-16 text .*damaged"),
    "UTF-16 without a mark": ("gut".encode("utf-16-le"), "line 1 holds a byte 0"),
    "a byte 0": (b"gut\nsch\0n\n", "line 2 holds a byte 0"),
    "joined of two byte orders": (
        "\ufeffgut\n".encode("utf-16-le") + "\ufeffschön\n".encode("utf-16-be"),
        "line 2 holds a byte-order mark the other way round",
    ),
}


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD)
def test_what_is_no_text_is_named_by_its_line(tmp_path, data, message):
    (tmp_path / "a").write_bytes(data)
    for read in (read_text, lambda path: list(text_lines(path))):
        with pytest.raises(ValueError, match=f"a:? {message}"):
            read(tmp_path / "a")


@pytest.mark.parametrize("read", [read_text, lambda path: list(text_lines(path))])
def test_files_that_are_missing_or_damaged_are_named(tmp_path, read):
    with pytest.raises(FileNotFoundError, match="gone"):
        read(tmp_path / "gone")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"gut\n" * 9)[:-9])
    with pytest.raises(ValueError, match="a.gz is not a complete gzip file"):
        read(tmp_path / "a.gz")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("parts", [["gut\n", "schön\n"], ["gut\n", "schön\n", ""]])
def test_marks_of_joined_files_are_no_text(tmp_path, parts, encoding):
    (tmp_path / "a").write_bytes(b"".join(part.encode(encoding) for part in parts))
    assert list(text_lines(tmp_path / "a")) == ["gut", "schön"]
    assert read_text(tmp_path / "a") == "gut\nschön\n"
    (tmp_path / "a").write_bytes("\ufeffgrün\nx".encode("utf-16-be"))
    assert list(text_lines(tmp_path / "a")) == ["grün", "x"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_empty_file_has_no_lines_and_an_empty_text(tmp_path, encoding):
    (tmp_path / "a").write_bytes("".encode(encoding))
    assert read_text(tmp_path / "a") == ""
    with pytest.raises(ValueError, match="a is empty; give"):
        list(text_lines(tmp_path / "a"))


TEXT = b"one two\nthree\n"
ZSTD = bytes.fromhex("28b52ffd200e710000") + TEXT  # a frame with one raw block


FORMATS = {
    "train.zst": (ZSTD, "zstd", "zstd -d"),
    "train.xz": (lzma.compress(TEXT), "xz", "xz -d"),
    "train.bz2": (bz2.compress(TEXT), "bzip2", "bzip2 -d"),
    "train.zip": (b"PK\3\4" + TEXT, "zip", "unzip"),
    "train": (gzip.compress(TEXT), "gzip", "ends in .gz"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_compressed_text_is_named_with_its_remedy(tmp_path, name):
    data, program, remedy = FORMATS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is compressed by {program}; .*{remedy}"):
        list(text_lines(tmp_path / name))


def test_the_first_line_of_an_error_goes_into_a_message():
    assert first_line(ValueError("no such file. \nDetails: none.")) == "no such file"
    assert first_line(OSError(" \n")) == "OSError"
    assert first_line(KeyError()) == "KeyError"
