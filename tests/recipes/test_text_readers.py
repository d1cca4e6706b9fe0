"""Texts of the user as recipes read them: encodings, line ends, what is no text is named."""

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
LATIN = "gut\nschön\n".encode("latin-1")


@pytest.fixture
def recordings(tmp_path):
    """A folder of three recordings."""
    for name in "abc":
        write(tmp_path / f"{name}.wav")
    return tmp_path


def test_texts_beside_recordings_are_read_by_their_mark(recordings):
    for name, encoding in zip("abc", ("utf-8-sig", "utf-8", "utf-16"), strict=True):
        (recordings / f"{name}.txt").write_bytes("café\n".encode(encoding))
    assert [item.text for item in corpora.utterances_in(recordings)] == ["café"] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\0\1\2", "line 1 holds a byte 0"), (LATIN, "line 2 is not UTF-8 text")],
)
def test_a_text_beside_a_recording_that_is_none_is_named(recordings, content, message):
    for name in "abc":
        (recordings / f"{name}.txt").write_text("one")
    (recordings / "b.txt").write_bytes(content)
    with pytest.raises(CommandError, match=f"b.txt: {message}"):
        corpora.utterances_in(recordings)


def test_a_byte_of_metadata_that_is_no_text_is_named_by_its_line(recordings):
    table = recordings / "metadata.csv"
    table.write_bytes("file_name,text\na.wav,eins\nb.wav,schön\n".encode("latin-1"))
    with pytest.raises(CommandError, match=r"metadata\.csv: line 3 is not UTF-8 text"):
        corpora.utterances_in(recordings)


def test_a_line_of_metadata_that_is_no_json_is_named(recordings):
    (recordings / "metadata.jsonl").write_text('{"file_name": "a.wav", "text": "a"}\n{"file')
    with pytest.raises(CommandError, match=r"metadata\.jsonl, line 2 is no JSON"):
        corpora.utterances_in(recordings)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_metadata_keep_their_line_ends(recordings, end):
    rows = ["file_name,text", f'a.wav,"{ODD}{end}x"', "b.wav,null", f"c.wav,{ODD[:-2]}"]
    (recordings / "metadata.csv").write_bytes((end.join(rows) + end).encode())
    texts = [item.text for item in corpora.utterances_in(recordings)]
    assert texts == [f"{ODD}{end}x", "null", ODD[:-2]]


def test_a_carriage_return_in_a_bare_cell_of_metadata_is_named(recordings):
    (recordings / "metadata.csv").write_bytes(b"file_name,text\na.wav,one\rtwo\nb.wav,x\n")
    with pytest.raises(CommandError, match=r"metadata\.csv, line 2 is no csv .*put the cell"):
        corpora.utterances_in(recordings)


def test_lines_of_a_manifest_end_at_line_feeds_alone(recordings):
    (recordings / "train.tsv").write_bytes(
        f"audio\ttgt_text\r\na.wav\t{ODD}\r\nb.wav\tnull\r\n".encode()
    )
    texts = [item.text for item in read_manifest(recordings / "train.tsv")]
    assert texts == ["a b c d e f", "null"], "all of these are white space"


def test_a_byte_of_a_manifest_that_is_no_text_is_named_by_its_line(recordings):
    (recordings / "train.tsv").write_bytes(b"audio\ttgt_text\na.wav\tx\nb.wav\tsch\xf6n\n")
    with pytest.raises(ValueError, match=r"train\.tsv: line 3 is not UTF-8 text"):
        read_manifest(recordings / "train.tsv")


def test_a_manifest_in_utf_16_is_read_by_its_mark(recordings):
    (recordings / "train.tsv").write_bytes("audio\ttgt_text\na.wav\tgrün\n".encode("utf-16"))
    assert [item.text for item in read_manifest(recordings / "train.tsv")] == ["grün"]


def test_a_configuration_of_fairseq_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"vocab_filename: dict.txt\naudio_root: sch\xf6n\n")
    with pytest.raises(ValueError, match=r"config\.yaml: line 2 is not UTF-8 text"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_parallel_text_is_read_by_its_mark(tmp_path, encoding):
    (tmp_path / "train.de").write_bytes(f"grün\n{ODD}\r\n".encode(encoding))
    assert list(read_lines(tmp_path / "train.de", "--train")) == ["grün", ODD]


def test_text_of_a_language_model_that_is_none_is_named_by_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(LATIN)
    with pytest.raises(CommandError, match=r"a\.txt: line 2 is not UTF-8 text .*iconv"):
        read_texts({"train": [tmp_path / "a.txt"], "test": None})


def test_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(f"{ODD}\r\nx\n".encode())
    assert read_text(tmp_path / "a.txt") == f"{ODD}\r\nx\n"


def test_labels_that_are_no_text_are_named_by_their_line(tmp_path):
    (tmp_path / "a.phn").write_bytes(b"0 100 a\n100 200 \xf6\n")
    with pytest.raises(LabelError, match=r"a\.phn: line 2 is not UTF-8 text"):
        read_labels(tmp_path / "a.phn", 16000)


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
