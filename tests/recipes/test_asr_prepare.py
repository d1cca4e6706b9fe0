"""Preparation of speech: digits, synthetic speech, folders, what is refused, and what is reused."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from recipes.asr import prepare
from recipes.asr.manifest import read_manifest
from recipes.lab.steps import CommandError
from recipes.lab.subwords import WORD_START, SentencePiece
from tests.support import speech_data
from tests.support.speech_data import run, texts, write, write_text


@pytest.fixture
def libri(tmp_path):
    return speech_data.make_librispeech(tmp_path / "corpora")


def recordings(folder, numbers, split=""):
    for n in numbers:
        write(folder / split / f"{n:02}.wav", 0.2 + 0.01 * n)
        write_text(folder / split / f"{n:02}.txt", f"number {n}")


def parts_of(path):
    """Values and durations in seconds of the constant parts, silences left out."""
    samples, rate = soundfile.read(path, dtype="int16")
    assert rate == 8000
    assert soundfile.info(path).subtype == "PCM_16"
    edges = np.flatnonzero(np.diff(samples)) + 1
    parts = np.split(samples, edges)
    gaps = [len(part) / rate for part in parts if part[0] == 0]
    return [int(part[0]) for part in parts if part[0]], gaps


def prepare_digits(tmp_path, *words):
    """The folder in which strings of digits are prepared; makes the single digits first."""
    if not (tmp_path / "digits").exists():
        speech_data.make_digits(tmp_path / "digits")
    counts = ("--train-strings", 30, "--valid-strings", 20, "--test-strings", 6)
    run("digits", tmp_path / "digits", "--output", tmp_path / "out", *counts, *words)
    return tmp_path / "out"


def test_digits_are_joined_to_strings_of_takes_of_one_set(tmp_path):
    out = prepare_digits(tmp_path)
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


def test_word_units_are_the_words_of_train(tmp_path):
    """Each a piece, and one piece for every other word; not the same folder as with letters."""
    out = prepare_digits(tmp_path, "--word-units")
    pieces = SentencePiece(out / "spm.model").processor
    said = {word for text in texts(out, "train").values() for word in text.split()}
    assert len(said) > 2
    assert {*pieces.encode(" ".join(said), out_type=str)} == {f"{WORD_START}{w}" for w in said}
    assert pieces.get_piece_size() == 1 + len(said)
    assert pieces.encode(f"other {min(said)}")[0] == pieces.unk_id()
    with pytest.raises(CommandError, match="made with other settings"):
        prepare_digits(tmp_path)


def test_synthetic_speech_says_the_given_words(tmp_path):
    pytest.importorskip("espeakng_loader")
    write_text(tmp_path / "words.txt", "Alpha beta", "Gamma")
    counts = ("--train-strings", 12, "--valid-strings", 3, "--test-strings", 1)
    run("synthetic", "--output", tmp_path / "a", *counts, "--words", tmp_path / "words.txt")
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
    train, valid = (list(texts(tmp_path / "a", split).values()) for split in ("train", "valid"))
    assert train[: len(valid)] != valid  # drawn by different seeds


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


def test_all_that_is_left_out_is_listed_and_one_bad_text_stops_nothing(tmp_path, capsys):
    source = tmp_path / "mine"
    for name in (*(f"{n:02}" for n in range(30)), "with a\ttab"):
        write(source / f"{name}.wav", 0.3)
        write_text(source / f"{name}.txt", "text")
    (source / "01.txt").write_bytes(b"a byte \0 in it\n")
    for name in ("03.wav", "04.wav"):
        (source / name).write_bytes(b"RIFF")
    write(source / "no text.wav", 0.3)
    run("folder", source, "--output", tmp_path / "out")
    prepared = {id for name in ("train", "valid", "test") for id in texts(tmp_path / "out", name)}
    assert prepared == {f"{n:02}" for n in range(30)} - {"01", "03", "04"}
    said = capsys.readouterr().out
    lines = (tmp_path / "out/left_out.txt").read_text("utf-8").splitlines()
    names = ("01.wav", "with a\\ttab.wav", "03.wav", "04.wav", "no text.wav")
    assert len(lines) == len(names)
    for name in names:
        assert sum(name in line for line in lines) == 1, name
        assert name in said, name
    assert "left_out.txt in the folder of the data lists all" in said


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


def test_output_with_other_files_is_left_alone(libri, tmp_path):
    write_text(tmp_path / "out" / "thesis.txt", "years of work")
    with pytest.raises(CommandError, match="--output .*out holds other files"):
        run("librispeech", libri, "--output", tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work\n"


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "tests/test").mkdir(parents=True)
    with pytest.raises(CommandError, match="no folder train beside test"):
        run("folder", tmp_path / "tests", "--output", tmp_path / "out")
    recordings(tmp_path / "few", range(2))
    with pytest.raises(CommandError, match="2 recordings are too few to split off valid, test"):
        run("folder", tmp_path / "few", "--output", tmp_path / "out")
    for split in ("train", "valid", "test"):
        recordings(tmp_path / "twice", range(2), split)
    write(tmp_path / "twice/train/01.flac")
    with pytest.raises(CommandError, match="train data: two recordings are named 01"):
        run("folder", tmp_path / "twice", "--output", tmp_path / "out")


def test_words_that_cannot_be_read_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("synthetic", "--output", tmp_path / "out", "--words", "missing.txt")
    assert "missing.txt cannot be read" in capsys.readouterr().err


def test_finished_folder_is_reused(libri, tmp_path, capsys):
    arguments = ("librispeech", libri, "--output", tmp_path / "out", "--train")
    run(*arguments, "train-clean-100")
    table = tmp_path / "out" / "train.tsv"
    before, modified = capsys.readouterr().out, table.stat().st_mtime_ns
    run(*arguments, "train-clean-100")
    reused = f"reused: {tmp_path / 'out'} is finished, and {libri} "
    assert capsys.readouterr().out == f"{reused}has not changed\n{before}"
    libri.rename(tmp_path / "gone")  # not needed any more
    run(*arguments, "train-clean-100")
    assert table.stat().st_mtime_ns == modified
    assert capsys.readouterr().out == f"{reused}does not exist any more\n{before}"
    with pytest.raises(CommandError, match=r"other settings \(train .*another --output folder"):
        run(*arguments, "train-other-500")
    assert table.stat().st_mtime_ns == modified


CHANGES = {
    "a recording deleted": (lambda folder: (folder / "test/02.wav").unlink(), "number 2"),
    "a recording changed": (lambda folder: write(folder / "test/02.wav", 0.9), "0.9000"),
    "a recording added": (lambda folder: recordings(folder, [7], "test"), "number 7"),
    "a text changed": (lambda folder: write_text(folder / "test/02.txt", "other"), "other"),
}


@pytest.mark.parametrize(("change", "sign"), CHANGES.values(), ids=CHANGES)
def test_changed_sources_are_prepared_again(tmp_path, capsys, change, sign):
    source = tmp_path / "mine"
    for split in ("train", "dev", "test"):
        recordings(source, range(4), split)
    out = source / "prepared"  # whatever is made there is no source
    run("folder", source, "--output", out)
    (out / "dict.txt").write_text("a 1\n")
    old = (out / "test.tsv").read_text()
    run("folder", source, "--output", out)
    assert (out / "test.tsv").read_text() == old
    capsys.readouterr()
    change(source)
    run("folder", source, "--output", out)
    output, new = capsys.readouterr().out, (out / "test.tsv").read_text()
    assert f"{source} has changed" in output
    assert f"{out} is made again" in output
    assert (sign in old, sign in new) == ((True, False) if sign == "number 2" else (False, True))
    assert (out / "dict.txt").read_text() == "a 1\n", "checkpoints go with it"
    run("folder", source, "--output", out)
    assert "reused" in capsys.readouterr().out
    assert sorted(path.name for path in source.iterdir()) == ["dev", "prepared", "test", "train"]


def test_recordings_that_are_made_again(tmp_path):
    """Recordings of deleted talks are deleted; recordings of all other talks are cut again."""
    ted = speech_data.make_tedlium(tmp_path)
    run("tedlium3", ted, "--output", tmp_path / "out")
    segments = {path.name for path in (tmp_path / "out/audio/valid").iterdir()}
    talk = ted / "legacy/dev/stm/AlGore_2009.stm"
    talk.write_text("\n".join(talk.read_text().splitlines()[:-1]) + "\n")
    run("tedlium3", ted, "--output", tmp_path / "out")
    left = {path.name for path in (tmp_path / "out/audio/valid").iterdir()}
    assert left < segments
    assert {Path(entry.audio).name for entry in read_manifest(tmp_path / "out/valid.tsv")} == left


def test_preparing_again_that_fails_leaves_what_there_was(libri, tmp_path):
    run("librispeech", libri, "--output", tmp_path / "out")
    content = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for path in (libri / "LibriSpeech/dev-clean").rglob("*.flac"):
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CommandError, match="valid data: none of 4"):
            run("librispeech", libri, "--output", tmp_path / "out")
        assert content == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.slow
def test_command_prepares(tmp_path, run_cli):
    words = ("tedlium3", speech_data.make_tedlium(tmp_path), "--output", tmp_path / "out")
    done = run_cli("python", "-m", "recipes.asr.prepare", *words, fresh=True)
    assert "train data: 2 of 4 skipped" in done.stdout
    assert len(texts(tmp_path / "out", "valid")) == 2
