"""Source scale alpha: against fairseq-preprocess, index files written here, and bad inputs."""

import re
import struct

import numpy as np
import pytest

from cape_plugins.cli import main
from cape_plugins.corpus.alpha import (
    TokenCounts,
    count_binarized,
    count_text_files,
    count_token_lists,
    read_index_sizes,
)
from cape_plugins.settings.config import PositionConfig

# 5 sentences; one is empty, one has odd spaces and a no-break space, which fairseq splits at
SOURCE = "ein kleines Haus\n\nviele  Wörter\tmit\u00a0Lücken \nja\nnein , danke .\n"
TARGET = "a small house\nempty\nmany words with gaps\nyes indeed\nno , thank you .\n"
COUNTS = TokenCounts(source=3 + 0 + 4 + 1 + 4 + 5, target=3 + 1 + 4 + 2 + 5 + 5)


def write_text(folder, source=SOURCE, target=TARGET, stem="train"):
    folder.mkdir(exist_ok=True)
    paths = folder / f"{stem}.de", folder / f"{stem}.en"
    for path, text in zip(paths, (source, target), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def write_mmap(path, sizes, version=1):
    offsets = np.cumsum([0, *sizes])[:-1] * 2
    path.write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQ", version, 8, len(sizes))
        + np.array(sizes, dtype="<i4").tobytes()
        + offsets.astype("<i8").tobytes()
    )


def write_legacy(path, sizes, version=1):
    dimensions, offsets = range(len(sizes) + 1), np.cumsum([0, *sizes])
    path.write_bytes(
        b"TNTIDX\0\0"
        + struct.pack("<QQQQQ", version, 4, 4, len(sizes), len(sizes))
        + b"".join(np.array(part, dtype="<i8").tobytes() for part in (dimensions, offsets, sizes))
    )


def write_pair(folder, source, target, stem="train.de-en", write=write_mmap):
    folder.mkdir(exist_ok=True)
    write(folder / f"{stem}.de.idx", source)
    write(folder / f"{stem}.en.idx", target)


def test_alpha_is_target_over_source():
    counts = TokenCounts(source=454234, target=470049)
    assert counts.alpha == pytest.approx(1.03482, abs=1e-5)
    assert str(counts) == "470049/454234"
    config = PositionConfig("cape", architecture="seq2seq", source_scale=str(counts))
    assert config.alpha == counts.alpha


@pytest.mark.parametrize("count", [0, 2**63, 1.5, True])
def test_counts_are_positive_integers(count):
    with pytest.raises(ValueError, match=r"source token count .* 1 to 2\^63 - 1"):
        TokenCounts(source=count, target=1)


def test_token_lists_are_counted_as_they_are():
    source = ([1] * length for length in (3, 0, 2))
    assert count_token_lists(source, [("a", "b"), np.zeros(4), []]) == TokenCounts(5, 6)
    with pytest.raises(ValueError, match="target sentence 2 is plain text, 'two words'; pass"):
        count_token_lists([["a"], ["b"]], [["a"], "two words"])


def test_text_files_count_eos_as_fairseq_does(tmp_path):
    source, target = write_text(tmp_path)
    assert count_text_files(source, target) == COUNTS
    without = TokenCounts(COUNTS.source - 5, COUNTS.target - 5)
    assert count_text_files(str(source), str(target), eos=False) == without
    target.write_text("only one\n")
    with pytest.raises(ValueError, match=r"train.de has 5 sentences, .*train.en has 1; allowed"):
        count_text_files(source, target)


def test_subsets_folders_directions_and_formats_are_summed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_pair(first, [10, 20], [1, 2])
    write_pair(first, [100], [10], stem="train1.en-de", write=write_legacy)
    write_pair(first, [10**6], [10**6], stem="train3.de-en")  # there is no train2: never read
    write_pair(first, [7], [70], stem="valid.de-en")
    write_text(second, "a b\n", "c d e\n", "train.de-en")
    assert count_binarized(str(first), "en", "de") == TokenCounts(13, 130)
    assert count_binarized(first, "de", "en", split="valid") == TokenCounts(7, 70)
    both = TokenCounts(133, 17)
    assert count_binarized(f"{first}:{second}", "de", "en") == both
    assert count_binarized([first, str(second)], "de", "en") == both


@pytest.mark.parametrize("write", [write_mmap, write_legacy])
def test_eos_can_be_left_out_of_every_format(tmp_path, write):
    """As the CAPE paper's notebook counts; the ends of three sentences are missing."""
    write_pair(tmp_path, [4, 2, 1], [5, 3, 6], write=write)
    assert count_binarized(tmp_path, "de", "en") == TokenCounts(7, 14)
    assert count_binarized(tmp_path, "de", "en", eos=False) == TokenCounts(4, 11)
    write_text(tmp_path, "a b c\nd\n\n", "e f\ng\nh\n", "raw.de-en")
    assert count_binarized(tmp_path, "de", "en", "raw", eos=False) == TokenCounts(4, 4)


def test_ratio_of_the_paper_needs_its_way_to_count(tmp_path):
    """French: 31.7677 and 36.9522 tokens a sentence (notebook), alpha 1.1632 (appendix D.1)."""
    write_pair(tmp_path, [317677 + 10_000, *[0] * 9999], [369522 + 10_000, *[0] * 9999])
    assert round(count_binarized(tmp_path, "de", "en").alpha, 4) == 1.1582
    assert round(count_binarized(tmp_path, "de", "en", eos=False).alpha, 4) == 1.1632


REMEDY = "or give the ratio yourself, for example --position-source-scale"


@pytest.mark.parametrize(
    ("folder", "source", "split", "error", "message"),
    [
        (
            "gone",
            "de",
            "train",
            FileNotFoundError,
            f"folder .*gone does not exist; .*{REMEDY}",
        ),
        ("data", "fr", "train", FileNotFoundError, f"no .*train.fr-en.fr .*-source-lang.*{REMEDY}"),
        ("data", "de", "trian", FileNotFoundError, "the subset 'trian'"),
        ("data", "de", "alone", FileNotFoundError, r"alone.de-en.en\(.idx\) is missing beside"),
        ("data", "de", "short", ValueError, r"de.idx has 2 sentences, .*en.idx has 1; allowed"),
    ],
)
def test_missing_data_are_named_with_the_remedy(tmp_path, folder, source, split, error, message):
    for stem in ("train", "alone", "short"):
        write_pair(tmp_path / "data", [3, 4], [5] if stem == "short" else [5, 6], f"{stem}.de-en")
    (tmp_path / "data/alone.de-en.en.idx").unlink()
    with pytest.raises(error, match=message):
        count_binarized(tmp_path / folder, source, "en", split=split)
    with pytest.raises(ValueError, match="data folder '' is empty; give the folder"):
        count_binarized("", "de", "en")


@pytest.mark.parametrize("write", [write_mmap, write_legacy])
def test_damaged_index_files_are_refused(tmp_path, write):
    path = tmp_path / "x.idx"

    def assert_refused(message, error=ValueError):
        with pytest.raises(error, match=message):
            read_index_sizes(path)

    assert_refused("x.idx is not a file", FileNotFoundError)
    write(path, [3, 1, 2])
    whole = path.read_bytes()
    # the mark alone, inside the header, inside the lengths, one byte short, one byte too many
    for data in (whole[:9], whole[:20], whole[:-15], whole[:-1], whole + b"\0"):
        path.write_bytes(data)
        assert_refused(r"x.idx is damaged: .*Delete .*or give the ratio")
    write(path, [3, -1, 2])
    assert_refused("a sentence of length -1")
    write(path, [3], version=2)
    assert_refused("its version is 2, known is 1")
    path.write_bytes(b"HUFFIDX\0\0")
    assert_refused(r"x.idx begins with b'.*--dataset-impl mmap")
    if write is write_legacy:  # of images, which have two lengths each
        write(path, [3, 1])
        path.write_bytes(path.read_bytes()[:40] + struct.pack("<Q", 4) + path.read_bytes()[48:])
        assert_refused("it has 4 lengths for 2 sentences")


def test_command_prints_counts_and_flag(tmp_path, capsys):
    source, target = write_text(tmp_path)
    assert main(["alpha", "--text", str(source), str(target)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines() == [
        f"source tokens  {COUNTS.source}",
        f"target tokens  {COUNTS.target}",
        "alpha          1.17647",
        f"--position-source-scale {COUNTS}",
    ]
    write_pair(tmp_path, [COUNTS.source], [COUNTS.target], stem="learn.de-en")
    languages = ["--source-lang", "de", "--target-lang", "en", "--split", "learn"]
    assert main(["alpha", "--binarized", str(tmp_path), *languages]) == 0
    assert capsys.readouterr().out == text


def test_command_leaves_out_ends_of_sentences(tmp_path, capsys):
    """Files need no option."""
    paths, sentences = list(map(str, write_text(tmp_path))), len(SOURCE.splitlines())
    expected = f"--position-source-scale {COUNTS.target - sentences}/{COUNTS.source - sentences}"
    empty = [0] * (sentences - 1)
    write_pair(tmp_path, [COUNTS.source, *empty], [COUNTS.target, *empty])
    languages = ["--source-lang", "de", "--target-lang", "en"]
    for words in (paths, ["--text", *paths], ["--binarized", str(tmp_path), *languages]):
        assert main(["alpha", "--no-eos", *words]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == expected


@pytest.mark.parametrize(("words", "warned"), [(2, True), (3, False), (12, False), (13, True)])
def test_a_ratio_that_no_languages_have_is_warned_of(tmp_path, capsys, words, warned):
    """6 source tokens a line with their end; Chinese without spaces gives 20 and more."""
    paths = write_text(tmp_path, "a b c d e\n", "x " * (words - 1) + "\n")
    assert main(["alpha", *map(str, paths)]) == 0
    captured = capsys.readouterr()
    assert f"alpha          {words / 6:.6g}\n" in captured.out
    start = f"warning: alpha {words / 6:.3g} is outside of 0.5 to 2; check"
    assert captured.err.startswith(start) if warned else captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a", "b"], "a is not a file"),
        (["--binarized", "a"], "--source-lang is missing"),
        (["--text", "a", "b", "--split", "train"], "--split train belongs to --binarized"),
        ([], "one of the arguments SOURCE TARGET --text --binarized is required"),
        (["a"], "SOURCE TARGET a: give two files"),
        (["a", "b", "--text", "a", "b"], "SOURCE TARGET a b: give them once, without --text"),
    ],
)
def test_command_refuses_bad_input(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["alpha", *arguments])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(f"^error: ([^;]*: )?{message}", captured.err)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["mmap", "lazy"])
def test_counts_equal_fairseq_preprocess(tmp_path, run_cli, implementation):
    write_text(tmp_path, SOURCE * 20, TARGET * 20)
    data = tmp_path / "data-bin"
    run_cli(
        *("fairseq-preprocess", "--source-lang", "de", "--target-lang", "en"),
        *("--trainpref", tmp_path / "train", "--destdir", data, "--workers", 2),
        *("--dataset-impl", implementation),
    )
    expected = TokenCounts(20 * COUNTS.source, 20 * COUNTS.target)
    assert count_binarized(data, "de", "en") == expected
    assert count_text_files(tmp_path / "train.de", tmp_path / "train.en") == expected
    log = (data / "preprocess.log").read_text(encoding="utf-8")
    logged = dict(re.findall(r"\[(de|en)\] .*: 100 sents, (\d+) tokens", log))
    assert logged == {"de": str(expected.source), "en": str(expected.target)}
