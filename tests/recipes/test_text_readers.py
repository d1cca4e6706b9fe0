"""Texts of the user as recipes read them: what ends a line, and what is no text is named."""

import re

import pytest

from cape_plugins.speech.manifest import read_manifest
from fairseq_user_dir.asr.manifest import read_config
from recipes.asr import corpora
from recipes.lab.data import read_text
from recipes.lab.steps import CommandError, read_written, write_lines
from recipes.lm.data import read_texts
from recipes.mt.corpus import read_lines
from recipes.mt.reports import read_curve
from recipes.phones.data import LabelError, parse_phn, read_labels
from tests.support.speech_data import write

ODD = "a\u2028b\x85c\x0bd\x0ce\rf"  # where str.splitlines ends lines


@pytest.fixture
def recordings(tmp_path):
    """A folder of three recordings."""
    for name in "abc":
        write(tmp_path / f"{name}.wav")
    return tmp_path


def read_folder(path):
    return [item.text for item in corpora.utterances_in(path.parent)]


READERS = {  # a damaged file, what is said of it, reader, error
    "b.txt": ("gut\nschön\n", "line 2 is not UTF-8", read_folder, CommandError),
    "c.txt": ("\0\1\2", "line 1 holds a byte 0", read_folder, CommandError),
    "metadata.csv": ("file_name,text\na.wav,ä\n", "line 2 is not UTF-8", read_folder, CommandError),
    "train.tsv": ("audio\ttgt_text\na.wav\tä\n", "line 2 is not UTF-8", read_manifest, ValueError),
    "config.yaml": (
        "vocab_filename: dict.txt\naudio_root: ä\n",
        "line 2 is not UTF-8",
        lambda path: read_config(str(path.parent)),
        ValueError,
    ),
    "train.de": (
        "gut\nschön\n",
        "line 2 is not UTF-8",
        lambda path: list(read_lines(path, "--train")),
        CommandError,
    ),
    "book": (
        "gut\nschön\n",
        "line 2 is not UTF-8 text .*iconv",
        lambda path: read_texts({"train": [path], "test": None}),
        CommandError,
    ),
    "a.phn": (
        "0 100 a\n100 200 ö\n",
        "line 2 is not UTF-8",
        lambda path: read_labels(path, 16000),
        LabelError,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_a_line_that_is_no_text(recordings, name):
    content, message, read, error = READERS[name]
    (recordings / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(error, match=rf"{re.escape(name)}.* {message}"):
        read(recordings / name)


def test_metadata_in_json_is_read_and_a_line_that_is_none_named(recordings):
    table = recordings / "metadata.jsonl"
    rows = [f'{{"file_name": "{name}.wav", "text": "{name} x"}}\n' for name in "abc"]
    table.write_text("".join(rows))
    assert read_folder(table) == ["a x", "b x", "c x"]
    table.write_text(f'{rows[0]}{{"file')
    with pytest.raises(CommandError, match=r"metadata\.jsonl, line 2 is no JSON"):
        read_folder(table)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_metadata_keep_their_line_ends(recordings, end):
    rows = ["file_name,text", f'a.wav,"{ODD}{end}x"', "b.wav,null", f"c.wav,{ODD[:-2]}"]
    (recordings / "metadata.csv").write_bytes((end.join(rows) + end).encode())
    assert read_folder(recordings / "metadata.csv") == [f"{ODD}{end}x", "null", ODD[:-2]]


def test_a_carriage_return_in_a_bare_cell_of_metadata_is_named(recordings):
    (recordings / "metadata.csv").write_bytes(b"file_name,text\na.wav,one\rtwo\nb.wav,x\n")
    with pytest.raises(CommandError, match=r"metadata\.csv, line 2 is no csv .*put the cell"):
        read_folder(recordings / "metadata.csv")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_of_a_manifest_end_at_line_feeds_alone(recordings, encoding):
    table = f"audio\ttgt_text\r\na.wav\t{ODD}\r\nb.wav\tnull\r\n"
    (recordings / "train.tsv").write_bytes(table.encode(encoding))
    texts = [item.text for item in read_manifest(recordings / "train.tsv")]
    assert texts == ["a b c d e f", "null"], "all of these are white space"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_parallel_text_is_read_by_its_mark(tmp_path, encoding):
    (tmp_path / "train.de").write_bytes(f"grün\n{ODD}\r\n".encode(encoding))
    assert list(read_lines(tmp_path / "train.de", "--train")) == ["grün", ODD]


def test_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(f"{ODD}\r\nx\n".encode())
    assert read_text(tmp_path / "a.txt") == f"{ODD}\r\nx\n"


def test_lines_of_labels_end_at_line_feeds_alone():
    assert [phone.name for phone in parse_phn("0 100 a\x0c\r\n100 200 b\n", 16000)] == ["a", "b"]
    with pytest.raises(LabelError, match="line 2, "):
        parse_phn("0 100 a\x0c\nno label\n", 16000)


def test_written_lines_with_odd_characters_are_read_again(tmp_path):
    write_lines(tmp_path / "lines", [ODD, "", "x"])
    assert read_written(tmp_path / "lines") == [ODD, "", "x"]


def test_a_log_with_odd_characters_has_its_curve(tmp_path):
    words = '"valid_loss": "7", "valid_ppl": "90.5", "valid_num_updates": "50"'
    moment = "2026-01-02 10:00:00 | INFO |"
    lines = [f"{moment} fairseq_cli.train | Start iterating over samples"]
    lines += [f'{moment} valid | {{"name": "a\u2028b\x85c", {words}}}']
    (tmp_path / "train.log").write_text("\n".join(lines))
    (point,) = read_curve(tmp_path / "train.log").points
    assert (point.update, point.perplexity) == (50, 90.5)
