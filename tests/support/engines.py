"""Exports, their refusals, and an interpreter that has the engines alone, which must do for an
exported folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cape_plugins.cli import main

_ALONE = """
import sys

class Refuses:
    def find_spec(self, name, *more):
        if name.split(".")[0] in (
            *("torch", "fairseq", "transformers", "safetensors"),
            *("cape_plugins", "fairseq_user_dir", "hf_models", "recipes"),
        ):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refuses())
"""


def export(engine, source, out, *options):
    """The folder that ``cape-plugins export`` writes."""
    main(["export", engine, str(source), str(out), *map(str, options)])
    return out


def refusal(capsys, engine, source, out, *options):
    """The line with which an export ends, with nothing written."""
    parent = next(folder for folder in out.parents if folder.exists())
    before = sorted(parent.iterdir())
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        export(engine, source, out, *options)
    assert sorted(parent.iterdir()) == before
    error = capsys.readouterr().err.splitlines()[-1]  # behind progress bars of transformers
    assert error.startswith("error: ")
    return error


def program_of(folder):
    """The Python program in the README of an exported folder."""
    return program_in(Path(folder, "README.md").read_text(encoding="utf-8"))


def program_in(readme):
    """The Python program in the text of a README."""
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return program


def run_program(text, *args, cwd=None):
    """What a Python program prints where nothing but the engines can be imported."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _ALONE + text, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        # threads of OpenMP that wait must not take the core on which another test runs
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
