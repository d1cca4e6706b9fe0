"""Text in and out: reading with checks, tokens, subwords, filters, scores, stacked sentences."""

import gzip
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cape_plugins.speech.manifest import read_manifest
from fairseq_user_dir.asr.manifest import read_config
from recipes.asr import corpora
from recipes.lab.steps import CommandError, matches, read_written, record, write_lines
from recipes.lab.subwords import SentencePiece, SubwordNMT
from recipes.lm.data import read_texts
from recipes.mt import scoring
from recipes.mt.analysis.length import stack_all
from recipes.mt.analysis.stack import estimate, position_rows, stack_for, stack_sentences
from recipes.mt.corpus import Moses, map_columns, read_lines, read_pairs, split_pairs
from recipes.mt.scoring import score, token_accuracy
from recipes.phones.data import LabelError, parse_phn, read_labels
from tests.support.speech_data import write


def test_plain_and_gzip_read_alike(tmp_path):
    text = "erste Zeile\n  zweite\u2028Zeile  \r\n\ndritte"
    (tmp_path / "a").write_bytes(text.encode())
    (tmp_path / "a.gz").write_bytes(gzip.compress(text.encode()))
    expected = ["erste Zeile", "zweite\u2028Zeile", "", "dritte"]
    for name in ("a", "a.gz"):
        assert list(read_lines(tmp_path / name, "--data")) == expected


def test_bad_pairs_of_files_are_named(tmp_path):
    for name, text in (("long", "a\nb\nc\n"), ("short", "a\nb\n"), ("nothing", "")):
        (tmp_path / name).write_text(text)
    for other, message in (
        ("gone", rf"^--train {tmp_path}/gone: no such file"),
        ("nothing", rf"^--train {tmp_path}/nothing is empty"),
        ("short", "short ends after 2 lines, and .*long is longer"),
    ):
        with pytest.raises(CommandError, match=message):
            list(read_pairs(tmp_path / "long", tmp_path / other, "--train"))


def test_split_off_pairs_do_not_stay_in_training():
    pairs = [(str(n // 2), str(n // 2)) for n in range(100)]  # each comes twice
    splits = split_pairs(pairs, {"valid": 10, "test": 20})
    assert (len(splits["valid"]), len(splits["test"])) == (10, 20)
    assert not set(splits["train"]) & {*splits["valid"], *splits["test"]}
    assert {p for s in splits.values() for p in s} == set(pairs)
    assert split_pairs(pairs, {"valid": 10, "test": 20}) == splits


def test_other_settings_are_an_error_that_says_which(tmp_path):
    record(tmp_path, {"vocab_size": 140, "seed": 1})
    assert matches(tmp_path, {"vocab_size": 140, "seed": 1})
    with pytest.raises(CommandError, match=r"vocab_size 140, now 200.*--work") as error:
        matches(tmp_path, {"vocab_size": 200, "seed": 1})
    assert "seed" not in str(error.value)


FLAGS = ["--seed", "1", "--lr", "0.1", "--cpu"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*FLAGS, "--seed", "7"], "(flags: now also --seed 7)"),
        (["--seed", "0.1", *FLAGS[2:]], "(flags --seed 1, now --seed 0.1)"),
        ([*FLAGS[2:], "--seed", "1"], "(flags --seed 1 --lr 0.1 --cpu, now --lr 0.1 --cpu --seed"),
    ],
)
def test_changed_flags_are_shown_with_their_values(tmp_path, flags, message):
    record(tmp_path, {"flags": FLAGS})
    with pytest.raises(CommandError, match=re.escape(message)):
        matches(tmp_path, {"flags": flags})


def test_moses_tokens_become_the_text_again():
    moses = Moses("en", aggressive_hyphens=True, lowercase=False)
    tokens = moses.tokenise("A well-known “test” isn't it? 50% & [more] | <end>")
    for words in ("well @-@ known", "isn &apos;t it ?", "&#91; more &#93; &#124;"):
        assert words in tokens
    assert moses.detokenise(tokens).startswith('A well-known "test" isn\'t it? 50% & [more] |')


@pytest.mark.slow
def test_map_columns_in_processes_equals_map():
    moses = [Moses(language, True, False) for language in ("en", "de")]
    functions = [side.tokenise for side in moses]
    rows = [(f"It's {n}.", f"Das ist so: {n}!") for n in range(600)]
    alone = list(map_columns(functions, rows, 1))
    assert alone[3] == ("It &apos;s 3 .", "Das ist so : 3 !")
    assert list(map_columns(functions, iter(rows), 2)) == alone


@pytest.mark.parametrize("algorithm", [SentencePiece, SubwordNMT])
def test_subwords_are_invertible_and_joint(tmp_path, algorithm):
    texts = {"en": "the cat sat on the mat", "de": "die Katze saß auf der Matte"}
    for language, text in texts.items():
        (tmp_path / language).write_text(f"{text}\n" * 20)
    model = algorithm.train([tmp_path / "en", tmp_path / "de"], tmp_path / "model", 40)
    for text in (*texts.values(), "the Matte sat"):
        pieces = model.encode(text)
        assert model.decode(pieces) == text
        assert len(pieces.split()) >= len(text.split())
    assert algorithm(tmp_path / "model").encode("the mat") == model.encode("the mat")


def test_impossible_vocabulary_is_named(tmp_path):
    (tmp_path / "text").write_text("abcdefghijklmnopqrstuvwxyz\n" * 5)
    with pytest.raises(CommandError, match="--vocab-size 5"):
        SentencePiece.train([tmp_path / "text"], tmp_path / "model", 5)
    assert not (tmp_path / "model").exists()


def test_token_accuracy_counts_missing_and_extra_tokens():
    assert token_accuracy(["a", "b", "c"], ["a", "b", "c"]) == 1
    assert token_accuracy(["a", "b"], ["a", "b", "c"]) == pytest.approx(2 / 3)
    assert token_accuracy(["a", "b", "c", "d"], ["a", "b"]) == 0.5
    assert token_accuracy(["b", "a"], ["a", "b"]) == 0


def test_bleu_of_chinese_counts_characters():
    """By words a line without spaces is right or wrong as a whole."""
    words = ["今天天气很好"], ["今天天气很好吗"]
    tokens = [["a"]], [["a"]]
    assert score(*words, *tokens, language="zh")["bleu"] > 50
    assert score(*words, *tokens)["bleu"] < 1


def test_bleu_names_the_package_that_a_language_needs(monkeypatch):
    def lacking(**settings):
        raise RuntimeError("Please install `pip install sacrebleu[ja]`")

    monkeypatch.setattr(scoring, "BLEU", lacking)
    with pytest.raises(CommandError, match=r"sacreBLEU cannot split ja .*sacrebleu\[ja\]"):
        scoring.sacrebleu("ja")


ODD = "a\u2028b\x85c\x0bd\x0ce\rf"  # where str.splitlines ends lines


@pytest.fixture
def recordings(tmp_path):
    """A folder of three recordings."""
    for name in "abc":
        write(tmp_path / f"{name}.wav")
    return tmp_path


def read_folder(path):
    return [item.text for item in corpora.utterances_in(path.parent)]


def read_book(path):
    return read_texts({"train": [path], "test": None})


READERS = {  # a damaged file, its reader, the error
    "b.txt": ("gut\nschön\n", read_folder, CommandError),
    "metadata.csv": ("file_name,text\na.wav,ä\n", read_folder, CommandError),
    "train.tsv": ("audio\ttgt_text\na.wav\tä\n", read_manifest, ValueError),
    "config.yaml": ("x: y\nz: ä\n", lambda path: read_config(str(path.parent)), ValueError),
    "train.de": ("gut\nschön\n", lambda path: list(read_lines(path, "--train")), CommandError),
    "book": ("gut\nschön\n", read_book, CommandError),
    "a.phn": ("0 100 a\n100 200 ö\n", lambda path: read_labels(path, 16000), LabelError),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_names_a_line_that_is_no_text(recordings, name):
    content, read, error = READERS[name]
    (recordings / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(error, match=rf"{re.escape(name)}.* line 2 is not UTF-8"):
        read(recordings / name)


def test_metadata_in_json_is_read_and_a_line_that_is_none_named(recordings):
    table = recordings / "metadata.jsonl"
    rows = [f'{{"file_name": "{name}.wav", "text": "{name} x"}}\n' for name in "abc"]
    table.write_text("".join(rows))
    assert read_folder(table) == ["a x", "b x", "c x"]
    table.write_text(f'{rows[0]}{{"file')
    with pytest.raises(CommandError, match="metadata.jsonl, line 2 is not JSON"):
        read_folder(table)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_metadata_keep_their_line_ends(recordings, end):
    rows = ["file_name,text", f'a.wav,"{ODD}{end}x"', "b.wav,null", f"c.wav,{ODD[:-2]}"]
    (recordings / "metadata.csv").write_bytes((end.join(rows) + end).encode())
    assert read_folder(recordings / "metadata.csv") == [f"{ODD}{end}x", "null", ODD[:-2]]
    (recordings / "metadata.csv").write_bytes(b"file_name,text\na.wav,one\rtwo\nb.wav,x\n")
    with pytest.raises(CommandError, match="metadata.csv, line 2 is not csv .*put the cell"):
        read_folder(recordings / "metadata.csv")


def test_lines_of_labels_end_at_line_feeds_alone():
    assert [phone.name for phone in parse_phn("0 100 a\x0c\r\n100 200 b\n", 16000)] == ["a", "b"]
    with pytest.raises(LabelError, match="line 2, "):
        parse_phn("0 100 a\x0c\nno label\n", 16000)


def test_written_lines_with_odd_characters_are_read_again(tmp_path):
    write_lines(tmp_path / "lines", [ODD, "", "x"])
    assert read_written(tmp_path / "lines") == [ODD, "", "x"]


def test_junctions_get_a_comma_and_lower_case():
    stacked = stack_sentences(["Das ist gut .", "Er kommt !", "Wer ?"])
    assert stacked == "Das ist gut , er kommt ! wer ?"
    assert stack_sentences(["Plain text.", "Next one."]) == "Plain text, next one."
    pieces = stack_sentences(["\u2581Ja .", "\u2581Das \u2581geht"])  # of sentencepiece
    assert pieces == "\u2581Ja , \u2581das \u2581geht"
    assert stack_sentences(["", "A .", ""]).split() == ["a", ","]


def test_stacks_of_each_number_hold_all_of_the_text():
    """But for a rest that is too short for one more."""
    pairs = [(f"S{n} .", f"T{n} .") for n in range(5)]
    stacked, groups = stack_all(pairs, [1, 2])
    assert groups == ["1"] * 5 + ["2"] * 2
    assert stacked == [*pairs, ("S0 , s1 .", "T0 , t1 ."), ("S2 , s3 .", "T2 , t3 .")]
    for counts in ([2, 1], [1, 1], [1, 6]):
        with pytest.raises(CommandError, match="--stack .* increasing numbers up to 5"):
            stack_all(pairs, counts)


def test_loss_is_averaged_over_the_sentences_that_reach_a_position():
    rows = position_rows([np.array([1.0, 2.0, 3.0]), np.array([3.0])], 2)
    assert [tuple(row.values()) for row in rows] == [(0, 2.0, 2, 0), (1, 2.0, 1, 0), (2, 3.0, 1, 1)]


def test_standard_errors_equal_resampled_sentences():
    """Sentences differ in length; the bootstrap needs no formula."""
    rng = np.random.default_rng(2)
    losses = [rng.normal(4, 1) + rng.normal(0, 0.5, rng.integers(5, 30)) for _ in range(300)]
    _, (spread,) = estimate([losses], 40)
    draws = rng.integers(0, 300, (1000, 300))
    means = [np.concatenate([losses[row] for row in draw]).mean() for draw in draws]
    assert spread == pytest.approx(np.std(means), rel=0.1)


def test_bands_of_several_seeds_are_over_seeds():
    """Means 1, 2, 3."""
    bands = estimate([[np.full(4, value), np.full(4, value)] for value in (1, 2, 3.0)], 4)
    assert np.ravel(bands) == pytest.approx([2.0, 1.0])


def test_stacks_reach_their_length_in_the_subwords_of_every_model():
    lengths = (len, lambda text: len(text.split()))
    models = [SimpleNamespace(target_length=length) for length in lengths]
    pairs = [(f"s{n} .", f"t{n} .") for n in range(9)]
    (first, second) = stack_for(models, pairs, 8)
    assert first[1] == "t0 , t1 , t2 , t3 ."  # the words, of which there are fewer than letters
    assert second[0] == "s4 , s5 , s6 , s7 ."
    assert stack_for(models[:1], pairs, 8)[0][1] == "t0 , t1 ."
