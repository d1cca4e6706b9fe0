"""Preparation of speech: digits, synthetic speech, folders, the command and what it refuses."""

import numpy as np
import pytest
import soundfile

from recipes.asr import prepare
from recipes.asr.manifest import read_manifest
from recipes.lab.steps import CommandError
from recipes.lab.subwords import WORD_START, SentencePiece
from tests.support.speech_data import (
    RATE,
    make_digits,
    make_librispeech,
    make_tedlium,
    run,
    texts,
    write,
    write_text,
)

COUNTS = ("--train-strings", 30, "--valid-strings", 20, "--test-strings", 6)


@pytest.fixture
def libri(tmp_path):
    return make_librispeech(tmp_path / "corpora")


@pytest.fixture
def ted(tmp_path):
    return make_tedlium(tmp_path)


@pytest.fixture
def single_digits(tmp_path):
    return make_digits(tmp_path / "digits")


# ---- digits --------------------------------------------------------------------------------------


def parts_of(path):
    """Values and durations in seconds of the constant parts, silences left out."""
    samples, rate = soundfile.read(path, dtype="int16")
    assert rate == 8000
    assert soundfile.info(path).subtype == "PCM_16"
    edges = np.flatnonzero(np.diff(samples)) + 1
    parts = np.split(samples, edges)
    gaps = [len(part) / rate for part in parts if part[0] == 0]
    return [int(part[0]) for part in parts if part[0]], gaps


def test_digits_are_joined_to_strings_of_takes_of_one_set(single_digits, tmp_path):
    out = tmp_path / "out"
    run("digits", single_digits, "--output", out, *COUNTS)
    names = prepare.DIGITS
    taken = {}
    for name, size in (("train", 30), ("valid", 20), ("test", 24)):
        entries = read_manifest(out / f"{name}.tsv")
        assert len(entries) == size
        taken[name] = set()
        for entry in entries:
            values, gaps = parts_of(entry.audio)
            assert [names[value // 100 % 10] for value in values] == entry.text.split()
            assert {value // 1000 for value in values} == {1 + entry.id.startswith("bo")}
            assert len(gaps) == len(values) - 1
            assert all(0.05 <= gap <= 0.2 for gap in gaps)
            assert entry.seconds == pytest.approx(soundfile.info(entry.audio).duration, abs=1e-4)
            taken[name] |= {value % 100 for value in values}
    assert taken == {"test": {*range(5)}, "valid": {*range(5, 10)}, "train": {10, 11}}
    lengths = {name: [len(t.split()) for t in texts(out, name).values()] for name in taken}
    assert set(lengths["train"]) == {*range(1, 7)}
    for n, (low, high) in enumerate(prepare.TEST_DIGITS):
        assert all(low <= length <= high for length in lengths["test"][6 * n : 6 * n + 6])
    assert {path.suffix for path in (out / "audio").rglob("*.*")} == {".wav"}


def test_digits_without_takes_for_training_are_refused(single_digits, tmp_path, capsys):
    (single_digits / "0_ann_0.wav").write_bytes(b"")
    soundfile.write(single_digits / "0_ann_1.wav", np.zeros(100), 8000)
    with pytest.raises(CommandError, match="no recording for train; looked for {digit}_{speaker}"):
        run("digits", single_digits, "--output", tmp_path / "out", "--valid-takes", 7)
    output = capsys.readouterr().out
    assert "digits data: 2 of 240 skipped" in output
    assert "0_ann_0.wav cannot be decoded" in output


def test_word_units_are_the_words_of_train(single_digits, tmp_path):
    """Each a piece, and one piece for every other word; not the same folder as with letters."""
    out = tmp_path / "out"
    run("digits", single_digits, "--output", out, *COUNTS, "--word-units")
    pieces = SentencePiece(out / "spm.model").processor
    said = {word for text in texts(out, "train").values() for word in text.split()}
    assert len(said) > 2
    assert {*pieces.encode(" ".join(said), out_type=str)} == {f"{WORD_START}{w}" for w in said}
    assert pieces.get_piece_size() == 1 + len(said)
    assert pieces.encode(f"other {min(said)}")[0] == pieces.unk_id()
    with pytest.raises(CommandError, match="made with other settings"):
        run("digits", single_digits, "--output", out, *COUNTS)


# ---- synthetic speech ----------------------------------------------------------------------------


def test_synthetic_speech_is_reproducible_and_says_the_given_words(tmp_path):
    pytest.importorskip("espeakng_loader")
    write_text(tmp_path / "words.txt", "Alpha beta", "Gamma")
    counts = ("--train-strings", 12, "--valid-strings", 3, "--test-strings", 1)
    for name in ("a", "b"):
        run("synthetic", "--output", tmp_path / name, *counts, "--words", tmp_path / "words.txt")
    lengths = [len(text.split()) for text in texts(tmp_path / "a", "test").values()]
    assert len(lengths) == 6
    assert lengths[0] <= 4
    assert 64 <= lengths[-1] <= 96
    words = " ".join(texts(tmp_path / "a", "train").values()).split()
    assert set(words) == {"alpha", "beta", "gamma"}
    assert max(len(text.split()) for text in texts(tmp_path / "a", "valid").values()) <= 6
    entry = read_manifest(tmp_path / "a/valid.tsv")[0]
    info = soundfile.info(entry.audio)
    assert (info.samplerate, info.subtype, info.format) == (16000, "PCM_16", "WAV")
    for split in ("train", "valid", "test"):
        tables = [(tmp_path / name / f"{split}.tsv").read_text() for name in "ab"]
        assert tables[0] == tables[1]
    train, valid = (list(texts(tmp_path / "a", split).values()) for split in ("train", "valid"))
    assert train[: len(valid)] != valid  # drawn by different seeds


# ---- folders -------------------------------------------------------------------------------------


def test_folder_of_recordings_and_texts(tmp_path):
    source = tmp_path / "mine"
    for n in range(30):
        write(source / "some one" / f"{n:02}.wav", 0.2 + 0.01 * n, rate=8000)
        write_text(source / "some one" / f"{n:02}.txt", f"Nummer {n}, größer!")
    run("folder", source, "--output", source / "prepared")
    sets = {name: texts(source / "prepared", name) for name in ("train", "valid", "test")}
    assert [len(part) for part in sets.values()] == [24, 3, 3]
    assert set(sets["valid"]) != {f"some_one-{n:02}" for n in range(3)}  # not the first ones
    together = {id: text for part in sets.values() for id, text in part.items()}
    assert together == {f"some_one-{n:02}": f"nummer {n} größer" for n in range(30)}
    entry = read_manifest(source / "prepared/train.tsv")[0]
    assert entry.audio == str(source / "some one" / f"{entry.id[-2:]}.wav")


def test_folder_with_splits_and_metadata(tmp_path, capsys):
    for split in ("train", "dev", "test"):
        lines = [f"{n}.wav,say {split} {n}" for n in range(3)]
        write_text(
            tmp_path / split / "metadata.csv", "file_name,text", *lines, "gone.wav,x", "0.wav"
        )
        for n in range(3):
            write(tmp_path / split / f"{n}.wav", 0.2)
    soundfile.write(tmp_path / "train" / "1.wav", np.zeros(0), RATE)
    run("folder", tmp_path, "--output", tmp_path / "out")
    assert texts(tmp_path / "out", "valid") == {str(n): f"say dev {n}" for n in range(3)}
    assert list(texts(tmp_path / "out", "train")) == ["0", "2"]
    output = capsys.readouterr().out
    reasons = "1 of no more than 0.025 s, 1 unreadable, 1 without a text"
    assert f"train data: 3 of 5 skipped ({reasons})" in output
    assert "gone.wav: no such file" in output


def damage(source):
    """Makes recordings of `source` unusable; returns their names."""
    (source / "01.txt").write_bytes(b"a byte \0 in it\n")
    write(source / "with a\ttab.wav", 0.3)
    write_text(source / "with a\ttab.txt", "text")
    (source / "03.wav").write_bytes(b"RIFF")
    (source / "04.wav").write_bytes(b"RIFF")
    write(source / "no text.wav", 0.3)
    return ("01.wav", "with a\\ttab.wav", "03.wav", "04.wav", "no text.wav")


def test_all_that_is_left_out_is_listed_and_one_bad_text_stops_nothing(tmp_path, capsys):
    source = tmp_path / "mine"
    for n in range(30):
        write(source / f"{n:02}.wav", 0.3)
        write_text(source / f"{n:02}.txt", f"text {n}")
    names = damage(source)
    run("folder", source, "--output", tmp_path / "out")
    prepared = {id for name in ("train", "valid", "test") for id in texts(tmp_path / "out", name)}
    assert prepared == {f"{n:02}" for n in range(30)} - {"01", "03", "04"}
    said = capsys.readouterr().out
    lines = (tmp_path / "out/left_out.txt").read_text("utf-8").splitlines()
    assert len(lines) == len(names)
    for name in names:
        assert sum(name in line for line in lines) == 1, name
        assert name in said, name
    assert "all of them and why: left_out.txt" in said


def test_one_bad_byte_in_a_table_leaves_out_one_recording(tmp_path, capsys):
    rows = [f"{n}.wav,say {n}\n" for n in range(12)]
    rows[5] = "5.wav,say \0 five\n"
    for n in range(12):
        write(tmp_path / "in" / f"{n}.wav", 0.3)
    (tmp_path / "in/metadata.csv").write_text("file_name,text\n" + "".join(rows))
    run("folder", tmp_path / "in", "--output", tmp_path / "out")
    prepared = {id for name in ("train", "valid", "test") for id in texts(tmp_path / "out", name)}
    assert prepared == {str(n) for n in range(12)} - {"5"}
    assert "1 with a damaged text" in capsys.readouterr().out


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("corpus", ["librispeech", "tedlium3", "wsj", "digits", "folder"])
def test_folder_that_is_not_the_corpus(corpus, tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(CommandError, match="no such folder"):
        run(corpus, tmp_path / "sorce", "--output", tmp_path / "out")
    expected = {
        "librispeech": "no LibriSpeech; looked for folders such as train-clean-100.*source",
        "tedlium3": "no TED-LIUM 3; looked for the folder legacy in .*source",
        "wsj": "no wsj0/si_tr_s; looked for wsj0/si_tr_s/SPEAKER",
        "digits": "no recording for train, valid, test; looked for {digit}_{speaker}_{index}.wav",
        "folder": "holds 0 recordings",
    }
    with pytest.raises(CommandError, match=expected[corpus]):
        run(corpus, tmp_path / "source", "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_folder_of_tests_without_train(tmp_path):
    (tmp_path / "test").mkdir()
    with pytest.raises(CommandError, match="no folder train beside test"):
        run("folder", tmp_path, "--output", tmp_path / "out")


def test_too_few_recordings_to_split(tmp_path):
    for n in range(2):
        write(tmp_path / "few" / f"{n}.wav")
        write_text(tmp_path / "few" / f"{n}.txt", "text")
    with pytest.raises(CommandError, match="2 recordings are too few to split off valid, test"):
        run("folder", tmp_path / "few", "--output", tmp_path / "out")


def test_output_with_other_files_is_left_alone(libri, tmp_path):
    write_text(tmp_path / "out" / "thesis.txt", "years of work")
    with pytest.raises(CommandError, match="--output .*out holds other files"):
        run("librispeech", libri, "--output", tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work\n"


def test_two_recordings_of_one_name(tmp_path):
    for suffix in ("wav", "flac"):
        write(tmp_path / "train" / f"one.{suffix}")
    write_text(tmp_path / "train" / "one.txt", "text")
    for split in ("valid", "test"):
        for n in range(2):
            write(tmp_path / split / f"{n}.wav")
            write_text(tmp_path / split / f"{n}.txt", "text")
    with pytest.raises(CommandError, match="train data: two recordings are named one"):
        run("folder", tmp_path, "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("librispeech", "x"), "--output"),
        (("timit", "x", "--output", "y"), "invalid choice: 'timit'"),
        (("synthetic", "--output", "y", "--words", "missing.txt"), "missing.txt cannot be read"),
    ],
)
def test_bad_arguments_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        run(*words)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


# ---- the commands --------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_prepare_and_stretch(ted, tmp_path, run_cli):
    words = ("tedlium3", ted, "--output", tmp_path / "out")
    done = run_cli("python", "-m", "recipes.asr.prepare", *words, fresh=True)
    assert "train data: 2 of 4 skipped" in done.stdout
    table = tmp_path / "out" / "valid.tsv"
    run_cli("python", "-m", "recipes.asr.stretch", table, "--seconds", 2, fresh=True)
    assert texts(tmp_path / "out", "valid_2s") == {
        "AlGore_2009-0000": "last year i don't know what's that"
    }


@pytest.mark.slow
def test_prepared_data_reach_the_training_recipe(single_digits, tmp_path, monkeypatch):
    """Manifests are tables that recipes/asr/finetune_hf.py reads."""
    pytest.importorskip("transformers")
    from recipes.asr import finetune_hf
    from recipes.asr.data import given

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    run("digits", single_digits, "--output", out, *COUNTS)
    words = ["--train-file", out / "train.tsv", "--test-file", out / "test.tsv"]
    words += ["--audio-column", "audio", "--text-column", "tgt_text"]
    splits = given(finetune_hf.make_options().parse_args([str(word) for word in words]))
    entries = read_manifest(out / "train.tsv")
    assert [item.text for item in splits["train"].items] == [entry.text for entry in entries]
    seconds = [entry.seconds for entry in entries]
    assert [item.seconds for item in splits["train"].items] == pytest.approx(seconds, abs=1e-3)
    assert len(splits["test"]) == 24
    assert len(splits["train"][0]) == pytest.approx(16000 * seconds[0], abs=4)
