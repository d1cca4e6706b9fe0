"""Finished preparations of speech: reused, made again where sources have changed, or decoded."""

from pathlib import Path

import pytest

from recipes.asr.manifest import read_manifest
from recipes.lab.steps import CommandError
from tests.support.speech_data import make_librispeech, make_tedlium, run, write, write_text


@pytest.fixture
def libri(tmp_path):
    return make_librispeech(tmp_path / "corpora")


@pytest.fixture
def ted(tmp_path):
    return make_tedlium(tmp_path)


def test_finished_folder_is_reused(libri, tmp_path, capsys):
    arguments = ("librispeech", libri, "--output", tmp_path / "out", "--train")
    run(*arguments, "train-clean-100")
    table = tmp_path / "out" / "train.tsv"
    before, made = capsys.readouterr().out, table.stat().st_mtime_ns
    run(*arguments, "train-clean-100")
    reused = f"reused: {tmp_path / 'out'} is finished, and {libri} "
    assert capsys.readouterr().out == f"{reused}has not changed\n{before}"
    libri.rename(tmp_path / "gone")  # not needed any more
    run(*arguments, "train-clean-100")
    assert table.stat().st_mtime_ns == made
    assert capsys.readouterr().out == f"{reused}is not there any more\n{before}"
    with pytest.raises(CommandError, match=r"other settings \(train .*another --output folder"):
        run(*arguments, "train-other-500")
    assert table.stat().st_mtime_ns == made


def recordings(folder, numbers, split=""):
    for n in numbers:
        write(folder / split / f"{n:02}.wav", 0.2 + 0.01 * n)
        write_text(folder / split / f"{n:02}.txt", f"number {n}")


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


def test_a_deleted_set_is_listed_no_more(libri, tmp_path, capsys):
    run("librispeech", libri, "--output", tmp_path / "out")
    for path in sorted((libri / "LibriSpeech/test-other").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (libri / "LibriSpeech/test-other").rmdir()
    capsys.readouterr()
    run("librispeech", libri, "--output", tmp_path / "out")
    assert "test_other  " not in capsys.readouterr().out
    assert not (tmp_path / "out/test_other.tsv").exists()


def test_recordings_that_are_made_again(ted, tmp_path):
    """Those of talks that are gone go; those of others are cut anew."""
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


def test_decoding_believes_the_samples_and_not_the_header(tmp_path):
    for split in ("train", "valid", "test"):
        write(tmp_path / split / "a.flac", 1.0, format="FLAC")
        write_text(tmp_path / split / "a.txt", "say it")
        write(tmp_path / split / "b.wav", 1.0)
        write_text(tmp_path / split / "b.txt", "say it")
        flac = bytearray((tmp_path / split / "a.flac").read_bytes())
        flac[22:26] = (9000).to_bytes(4, "big")  # samples
        (tmp_path / split / "a.flac").write_bytes(flac)
    for words, seconds in (((), [1.0, 1.0]), (("--decode",), [1.0, 1.0])):
        out = tmp_path / f"out{len(words)}"
        run("folder", tmp_path, "--output", out, *words)
        assert [entry.seconds for entry in read_manifest(out / "train.tsv")] == seconds
