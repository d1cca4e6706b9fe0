"""The command ``cape-plugins export``: what it refuses, and a folder that is complete or not
there."""

from importlib.metadata import EntryPoint

import pytest

from cape_plugins.cli import main
from cape_plugins.serving.output import complete_folder
from tests.support.engines import engine_python, run_program


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ctranslate2", "missing.pt", "out"], "SOURCE missing.pt does not exist"),
        (["onnx", "folder", "out"], "SOURCE folder has no config.json"),
        (
            ["onnx", "model.pt", "out"],
            "takes no checkpoint of fairseq model.pt; allowed for it: export ctranslate2 or",
        ),
        (["ctranslate2", "model.pt:model.pt", "out"], "is an ensemble"),
        (["stock", "model.pt", "folder"], "OUT folder exists already"),
        (["stock", "model.pt", "dangling"], "OUT dangling exists already"),
        (["ctranslate2", "model.pt", "out", "--max-source-tokens", "1"], "--max-source-tokens"),
        (["ctranslate2", "model.pt", "model.pt/out"], "OUT model.pt/out cannot be made"),
        (["ctranslate2", "model.pt", "out", "--quantization", "int3"], "invalid choice: 'int3'"),
        (
            ["stock", "model.pt", "out", "--max-tokens", "5", "--image-size", "8", "8"],
            "not allowed",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.pt").write_bytes(b"no checkpoint")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(SystemExit, match="2"):
        main(["export", *arguments])
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "folder", "model.pt"]


def test_missing_engine_is_named_with_the_way_to_install_it(tmp_path, monkeypatch, capsys):
    def load(point):
        raise ImportError("No module named 'ctranslate2'")

    monkeypatch.setattr(EntryPoint, "load", load)
    (tmp_path / "model.pt").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["export", "ctranslate2", str(tmp_path / "model.pt"), str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert "(No module named 'ctranslate2'); install it: pip install 'cape-plugins[serve]'" in error
    assert error.count("\n") == 1


def test_folder_is_complete_or_not_there(tmp_path):
    target = tmp_path / "new" / "out"
    other = tmp_path / "new" / "of another process"

    def interrupted(*others):
        with complete_folder(target) as folder:
            (folder / "half").touch()
            for path in others:
                path.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []  # nor the folder above, which was not there
    with pytest.raises(KeyboardInterrupt):
        interrupted(other)
    assert list(target.parent.iterdir()) == [other]
    other.unlink()
    with complete_folder(target) as folder:
        (folder / "file").touch(mode=0o600)
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert target.stat().st_mode & 0o055 == 0o055  # a server may be another user
    assert (target / "file").stat().st_mode & 0o044 == 0o044
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ctranslate2", "onnxruntime"])
def test_an_engine_needs_neither_torch_nor_this_package(engine, tmp_path):
    pytest.importorskip(engine)
    python = engine_python(tmp_path, engine)
    text = f"import {engine}; print({engine}.__version__)"
    assert run_program(python, text).strip() == __import__(engine).__version__
