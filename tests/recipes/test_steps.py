"""How programs of the recipes end."""

import shlex
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.lab.command_line import usable_folder
from recipes.lab.runs import run_all
from recipes.lab.steps import ChildError, CommandError, run_main, run_module, started_as, step
from recipes.lab.tables import shown_command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CommandError("--epochs 0: allowed: at least 1"), 2, "error: --epochs 0: allowed"),
        (NotADirectoryError(20, "Not a directory", "work/data"), 2, "work/data: a file is where"),
        (ChildError("fairseq-train failed"), 1, "error: fairseq-train failed"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_no_traceback_for_what_the_caller_did(error, status, message, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == status
    assert message in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 / 0)


def test_a_job_between_two_commands_starts_none_that_stays(tmp_path, monkeypatch):
    """What a job starts after another has failed is ended, too, and not waited for."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed, ended = threading.Event(), []

    def fail():
        failed.set()
        raise ChildError("training failed")

    def start_late():
        failed.wait()
        time.sleep(0.5)  # the commands that ran have been ended by now
        try:
            run_module("sleeper", log=tmp_path / "log")
        except ChildError as error:
            ended.append(str(error))
            raise

    begin = time.monotonic()
    with pytest.raises(ChildError, match="training failed"):
        run_all([start_late, fail], 2)
    assert time.monotonic() - begin < 30
    assert "exit status -9" in ended[0]


def test_folders_are_made_below_existing_ones_only(tmp_path, monkeypatch):
    """Folders are made anywhere but at the root of the file system, where a typing error is
    likelier, and not under a file."""
    monkeypatch.chdir(tmp_path)
    for path in (Path("results/vit"), tmp_path / "a/b", tmp_path, Path()):
        usable_folder(path, "--output")
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match="file is no folder that can be written to"):
        usable_folder(tmp_path / "file/x", "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


PARSERS = {
    "phones.run": lambda program, words: program.parse_arguments(words),
    "mt.quickstart": lambda program, words: program.parse_arguments(words),
    "vit.evaluate": lambda program, words: program.parse(["--model", "x", *words]),
    "lab.hf_training": lambda program, words: program.parse(
        program.make_parser("", "image", ("cape",), "out"), (), words
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_recipes_look_at_their_folders_before_they_begin(name):
    program = pytest.importorskip(f"recipes.{name}", exc_type=ImportError)
    with pytest.raises(CommandError, match="--output /nowhere/such: /nowhere does not exist"):
        PARSERS[name](program, ["--output", "/nowhere/such"])


@pytest.mark.parametrize("module", ["tools.told", "tools", None])
def test_shown_commands_can_be_pasted(module, monkeypatch):
    """With words that a shell would change. Python calls the program of a package __main__."""
    name = "tools.__main__" if module == "tools" else module
    spec = name and ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    words = ["tools/tell it.py", "--model", "a=/some/place/last.pt,b*", "--output", "my results"]
    monkeypatch.setattr(sys, "argv", words)
    program = ["-m", module] if module else words[:1]
    shown = shown_command(started_as(), sys.argv[1:])
    assert shlex.split(shown) == ["python", *program, *words[1:]]


@pytest.mark.parametrize("error", [CommandError("bad"), KeyboardInterrupt(), OSError(28, "full")])
def test_a_step_that_fails_leaves_no_folder(tmp_path, error):
    def make(folder):
        (folder / "half").touch()
        raise error

    with pytest.raises(type(error)):
        step(tmp_path / "work/data/text", {}, make)
    assert list(tmp_path.iterdir()) == []


def test_a_step_whose_command_failed_keeps_the_log_that_the_error_names(tmp_path):
    def make(folder):
        run_module("nothing.of.this.name", log=folder / "log")

    with pytest.raises(ChildError, match=r"full log in .*text.partial/log"):
        step(tmp_path / "text", {}, make)
    assert "nothing" in (tmp_path / "text.partial/log").read_text()
