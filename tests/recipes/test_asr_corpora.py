"""Corpora of speech: the recordings that are found in their folders, and the cleaning of their
texts."""

import doctest
import os
import re
import stat

import numpy as np
import pytest
import soundfile

from recipes.asr import corpora, manifest, stretch
from recipes.asr.corpora import tedlium_words, wsj_words
from recipes.asr.manifest import read_manifest
from recipes.lab.steps import CommandError
from tests.support import speech_data
from tests.support.speech_data import RATE, rows, run, texts, write, write_text


@pytest.mark.parametrize("module", [corpora, manifest, stretch])
def test_examples_in_docstrings_are_true(module):
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<unk> i had a dream", "i had a dream"),
        ("it 's what we 're told and don 't do", "it's what we're told and don't do"),
        ("they 'll say i 'm i 'd and you 've", "they'll say i'm i'd and you've"),
        ("get 'em 'cause rock 'n' roll", "get 'em 'cause rock 'n' roll"),  # words, not endings
        ("the(2) record {SMACK} <sil> [NOISE] plays(10)", "the record plays"),
        ("fully<unk> so", "fully so"),
        ("<unk>", ""),
    ],
)
def test_tedlium_words_are_cleaned(text, expected):
    assert tedlium_words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # spoken punctuation is words
        ('"DOUBLE-QUOTE YES ,COMMA " UNQUOTE .PERIOD', "double quote yes comma unquote period"),
        ("THE (LEFT-PAREN A )RIGHT-PAREN", "the left paren a right paren"),
        ("A --DASH B -HYPHEN C ;SEMI-COLON :COLON", "a dash b hyphen c semi colon colon"),
        ("ONE .POINT FIVE %PERCENT &AMPERSAND", "one point five percent ampersand"),
        # marks of what was heard
        ("[tongue_click] THE [<door_slam] BANK [phone_ring/] SAID [/phone_ring]", "the bank said"),
        ("<NOISE> <noise> <AND> *MISTAKE* re:cord !stress", "and mistake record stress"),
        ("ITS DOLLAR\\'S WORTH . OF STOCK\\;  ~", "its dollar's worth of stock"),
        ("COM(PUTER) TWENTY-ONE U. S. L`AUTRE", "computer twenty one u s l'autre"),
        ("[NOISE]", ""),
    ],
)
def test_wsj_words_are_cleaned(text, expected):
    assert wsj_words(text) == expected


@pytest.fixture
def libri(tmp_path):
    return speech_data.make_librispeech(tmp_path / "corpora")


def test_librispeech_is_prepared(libri, tmp_path, capsys):
    out = tmp_path / "out"
    run("librispeech", libri, "--output", out)
    tables = {f"{n}.tsv" for n in ("train", "valid", "dev_other", "test_clean", "test_other")}
    assert {path.name for path in out.iterdir()} == tables | {"settings.json"}
    header, first, *_ = rows(out / "valid.tsv")
    assert header == ["id", "audio", "seconds", "tgt_text"]
    audio = libri / "LibriSpeech/dev-clean/84/198/84-198-0000.flac"
    assert first == ["84-198-0000", str(audio), "0.3000", "chapter one it's"]
    chapters = ("19-198", "19-227", "20-198", "20-227")
    assert list(texts(out, "train")) == [f"{name}-{n:04}" for name in chapters for n in (0, 1)]
    assert re.search(r"^train +8 +24 ", capsys.readouterr().out, re.MULTILINE)


def test_librispeech_subsets_are_chosen_and_missing_ones_named(libri, tmp_path, capsys):
    source = libri / "LibriSpeech"  # the folder itself will do, too
    run("librispeech", source, "--output", tmp_path / "a", "--train", "train-other-500")
    assert {id.split("-")[0] for id in texts(tmp_path / "a", "train")} == {"20"}
    with pytest.raises(CommandError, match="lacks train-clean-360; it has .*train-clean-100"):
        run("librispeech", source, "--output", tmp_path / "b", "--train", "train-clean-360")
    for path in sorted((source / "test-other").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (source / "test-other").rmdir()
    run("librispeech", source, "--output", tmp_path / "c")
    assert "test-other does not exist, so test_other.tsv is not made" in capsys.readouterr().out
    assert not (tmp_path / "c" / "test_other.tsv").exists()


def test_decode_finds_recordings_that_are_damaged_within(libri, tmp_path, capsys):
    path = libri / "LibriSpeech/train-clean-100/19/198/19-198-0000.flac"
    write(path, 2.0)
    data = path.read_bytes()
    path.write_bytes(data[:20000] + bytes(20) + data[20020:])
    arguments = ("librispeech", libri, "--train", "train-clean-100", "--output")
    run(*arguments, tmp_path / "header")
    assert "19-198-0000" in texts(tmp_path / "header", "train")
    run(*arguments, tmp_path / "whole", "--decode")
    assert "19-198-0000" not in texts(tmp_path / "whole", "train")
    assert "train data: 1 of 4 skipped (1 unreadable)" in capsys.readouterr().out


@pytest.fixture
def ted(tmp_path):
    return speech_data.make_tedlium(tmp_path)


def test_tedlium_is_prepared(ted, tmp_path, capsys):
    out = tmp_path / "out"
    run("tedlium3", ted, "--output", out)
    expected = {"0002": "i'm here to talk", "0004": "without a label"}
    assert texts(out, "train") == {f"AaronHuey_2010X-{n}": text for n, text in expected.items()}
    assert list(texts(out, "valid").values()) == ["last year i don't know", "what's that"]
    _, (id, audio, seconds, text) = rows(out / "test.tsv")
    assert (id, seconds, text) == ("BillGates_2010-0001", "0.8000", "energy and climate")
    assert audio == "audio/test/BillGates_2010-0001.flac"  # relative, and there
    talk, _ = soundfile.read(ted / "legacy/test/sph/BillGates_2010.sph", dtype="int16")
    segment, rate = soundfile.read(out / audio, dtype="int16")
    assert rate == RATE
    assert np.array_equal(segment, talk[1600:14400])
    output = capsys.readouterr().out
    assert "train data: 2 of 4 skipped (1 without a text, 1 unreadable)" in output
    assert "no samples from 9.0 to 9.4 s" in output


def test_tedlium_training_talks_in_data(ted, tmp_path):
    """Unpacked without the links of legacy/train; talks of dev and test are held out."""
    (ted / "legacy/train").rename(ted / "data")
    for suffix in ("sph", "stm"):
        source = ted / "legacy/dev" / suffix / f"AlGore_2009.{suffix}"
        (ted / "data" / suffix / source.name).write_bytes(source.read_bytes())
    run("tedlium3", ted.parent, "--output", tmp_path / "out")
    assert {id.rpartition("-")[0] for id in texts(tmp_path / "out", "train")} == {"AaronHuey_2010X"}


def test_tedlium_with_bad_lines_or_without_tests_is_refused(ted, tmp_path):
    with open(ted / "legacy/dev/stm/AlGore_2009.stm", "a") as file:
        file.write("AlGore_2009 1 AlGore_2009 later 3.0 text\n")
    with pytest.raises(CommandError, match=r"AlGore_2009.stm: line 4 is not 'talk channel"):
        run("tedlium3", ted, "--output", tmp_path / "out")
    (ted / "legacy/test").rename(ted / "legacy/eval")
    with pytest.raises(CommandError, match=r"no test data; looked for sph and stm/\*.stm"):
        run("tedlium3", ted, "--output", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.fixture
def ldc(tmp_path):
    """Some of the discs, upper case as on some of them."""
    root = tmp_path / "ldc"
    for folder, ids in {
        "11-1.1/WSJ0/SI_TR_S/011": ("011C0201", "011C0202", "011O0301"),
        "11-2.1/WSJ0/SI_TR_S/401": ("401C0201",),
        "13-1.1/wsj1/si_tr_s/46a": ("46ac0201",),
        "13-16.1/wsj1/si_dt_20/4k0": ("4k0c0301", "4k0c0302"),
        "13-16.1/wsj1/si_dt_05/4k0": ("4k0c0201",),
        "11-6.1/wsj0/si_dt_20/050": ("050c0101",),  # WSJ0's own, not nov93dev
        "11-14.1/wsj0/si_et_20/440": ("440c0401", "440o0401"),
        "11-14.1/wsj0/si_et_05/440": ("440c0201",),
    }.items():
        for n, id in enumerate(ids):
            suffix = ".WV1" if id.isupper() else ".wv1"
            write(root / folder / f"{id}{suffix}", 0.4 + 0.1 * n, format="NIST", seed=n)
            write(root / folder / f"{id[:-1]}9.wv2", 0.4, format="NIST")
        corpus, subset, speaker = folder.lower().split("/")[1:]
        dot = root / "11-4.1" / corpus / "transcrp" / "dots" / subset / speaker
        said = f",COMMA [noise] *{subset[3:5]}* .PERIOD"
        lines = [f"THE {id[-1]} {said} ({id.lower()})" for id in ids]
        write_text(dot / f"{ids[0][:6].lower()}.dot", *lines)
    index = root / "11-13.1/wsj0/doc/indices"
    lines = [f"11_1_1:wsj0/si_tr_s/011/011c020{n}.wv1" for n in (1, 2)]
    lines.append("11_2_1:wsj0/si_tr_s/401/401c0201.wv1")
    write_text(index / "train/tr_s_wv1.ndx", "; SI-84", *lines)
    write_text(index / "test/nvp/si_et_20.ndx", "11_14_1:wsj0/si_et_20/440/440c0401")
    write_text(index / "test/vp/si_et_20.ndx", "11_14_1:wsj0/si_et_20/440/440o0401")
    h1 = "13-34.1/wsj1/doc/indices/h1_p0.ndx"
    write_text(root / h1, *(f"13_16_1: wsj1/si_dt_20/4k0/4k0c030{n}.wv1" for n in (1, 2)))
    evaluation = root / "13-32.1/wsj1/doc/indices/wsj1/eval/h1_p0.ndx"  # has the same name
    write_text(evaluation, "13_32_1: wsj1/si_et_h1/4oa/4oac0201.wv1")
    return root


def test_wsj_is_prepared(ldc, tmp_path, capsys):
    out = tmp_path / "out"
    run("wsj", ldc, "--output", out)
    train = ("011-011c0201", "011-011c0202", "46a-46ac0201")
    assert texts(out, "train") == dict.fromkeys(train, "the comma tr period")
    assert list(texts(out, "valid")) == ["4k0-4k0c0301", "4k0-4k0c0302"]
    assert texts(out, "test") == {"440-440c0401": "the comma et period"}  # not 440o0401
    _, (_, audio, seconds, _) = rows(out / "test.tsv")
    assert audio == str(ldc / "11-14.1/wsj0/si_et_20/440/440c0401.wv1")  # read without a conversion
    assert seconds == "0.4000"
    output = capsys.readouterr().out
    assert "si_tr_s.ndx does not exist: all recordings of wsj1/si_tr_s are used" in output
    assert output.count("does not exist") == 1
    assert "skipped" not in output
    run("wsj", ldc, "--output", tmp_path / "5k", "--vocabulary", "5k")
    assert list(texts(tmp_path / "5k", "valid")) == ["4k0-4k0c0201"]
    assert list(texts(tmp_path / "5k", "test")) == ["440-440c0201"]


def test_wsj_transcripts_say_what_was_said(ldc, tmp_path):
    """.dot, what was said, is preferred to .lsn, which stands in where there is no .dot."""
    folder = ldc / "13-16.1/wsj1/si_dt_20/4k0"
    write_text(folder / "4k0c03.lsn", "LSN ONE (4k0c0301)", "LSN TWO (4k0c0302)")
    dot = ldc / "11-4.1/wsj1/transcrp/dots/si_dt_20/4k0/4k0c03.dot"
    write_text(dot, "DOT ONE (4k0c0301)", "no id on this line")
    run("wsj", ldc, "--output", tmp_path / "out")
    assert list(texts(tmp_path / "out", "valid").values()) == ["dot one", "lsn two"]


def compress(path):
    """Writes the header of a recording compressed by shorten, and a wav file for the test."""
    samples, rate = soundfile.read(path, dtype="int16")
    wav = path.with_suffix(".tmp")
    soundfile.write(wav, samples, rate, format="WAV")
    header = b"NIST_1A\n   1024\nsample_count -i 6400\nsample_rate -i 16000\nchannel_count -i 1\n"
    header += b"sample_n_bytes -i 2\nsample_coding -s26 pcm,embedded-shorten-v2.00\nend_head\n"
    path.write_bytes(header.ljust(1024, b"\n") + wav.read_bytes())
    wav.unlink()
    return samples


@pytest.mark.parametrize(
    ("tool", "script"),
    [
        # sph2pipe -f wav -c 1 IN OUT
        ("sph2pipe", '[ "$1$2$3$4" = "-fwav-c1" ] && tail -c +1025 "$5" > "$6"'),
        # ffmpeg -nostdin -v error -y -i IN -c:a pcm_s16le OUT
        ("ffmpeg", '[ "$5$7$8" = "-i-c:apcm_s16le" ] && tail -c +1025 "$6" > "$9"'),
    ],
)
def test_wsj_recordings_are_uncompressed(ldc, tmp_path, monkeypatch, tool, script):
    path = ldc / "11-14.1/wsj0/si_et_20/440/440c0401.wv1"
    samples = compress(path)
    program = tmp_path / "bin" / tool
    write_text(program, "#!/bin/sh", script)
    program.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin{os.pathsep}/bin")
    run("wsj", ldc, "--output", tmp_path / "out")
    _, (_, audio, _, _) = rows(tmp_path / "out" / "test.tsv")
    assert audio == "audio/test/440-440c0401.flac"
    assert np.array_equal(soundfile.read(tmp_path / "out" / audio, dtype="int16")[0], samples)


def test_wsj_without_a_converter_is_refused_with_the_remedy(ldc, tmp_path, monkeypatch):
    path = ldc / "11-14.1/wsj0/si_et_20/440/440c0401.wv1"
    compress(path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"440c0401.wv1 is compressed .*needs sph2pipe.*ffmpeg"):
        run("wsj", ldc, "--output", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))  # also no half-made folder
    samples = write(path.with_suffix(".wav"), 0.7)  # the remedy that the message names
    run("wsj", ldc, "--output", tmp_path / "out")
    (entry,) = read_manifest(tmp_path / "out" / "test.tsv")
    assert entry.audio == str(path.with_suffix(".wav"))
    assert entry.seconds == len(samples) / RATE


def test_wsj_with_links_to_discs(ldc, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for disc in ldc.iterdir():
        (links / disc.name).symlink_to(disc)
    (links / "again").symlink_to(links)  # must not be followed for ever
    run("wsj", links, "--output", tmp_path / "out")
    entries = read_manifest(tmp_path / "out" / "train.tsv")
    assert len(entries) == 3
    assert not any("again" in entry.audio.split("/") for entry in entries)
