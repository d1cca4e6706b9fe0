"""How programs of the recipes end."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.steps import ChildError, CommandError, run_main
from tests.conftest import ROOT


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
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(main)


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True])
def test_shown_commands_can_be_pasted(module, tmp_path):
    """From another folder than that of the program, with words that a shell would change."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/tell it.py").write_text(
        "import sys\n"
        "from recipes.steps import shown_command, started_as\n"
        "print(shown_command(started_as(), sys.argv[1:]))\n"
    )
    (tmp_path / "tools/told.py").write_text((tmp_path / "tools/tell it.py").read_text())
    program = "python -m tools.told" if module else "python 'tools/tell it.py'"
    words = "--model 'a=/some/place/last.pt,b*' --data data/cifar10 --work w --output 'my results'"
    bin_first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": bin_first, "PYTHONPATH": f"{ROOT}{os.pathsep}."}
    shell = {"shell": True, "cwd": tmp_path, "env": env, "text": True}
    shown = subprocess.check_output(f"{program} {words}", **shell)
    assert shlex.split(shown) == shlex.split(f"{program} {words}")
    assert subprocess.check_output(shown, **shell) == shown
