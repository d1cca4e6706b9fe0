"""Interpreters that have one engine and nothing else, which must do for an exported folder."""

import re
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ABSENT = ("torch", "fairseq", "transformers", "cape_plugins", "fairseq_user_dir", "hf_models")


def engine_python(folder, *names):
    """The interpreter of a new virtual environment that has the distributions with these names and
    what they require, linked to those of this one: made in a second and without a network."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = Path(folder).glob("lib/python*/site-packages")
    for known in _with_requirements(names):
        for top in {file.parts[0] for file in known.files or () if ".." not in file.parts}:
            place = Path(known.locate_file(top))
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(place)
    python = Path(folder, "bin", "python")
    for absent in ABSENT:
        check = subprocess.run([python, "-I", "-c", f"import {absent}"], capture_output=True)
        assert b"ModuleNotFoundError" in check.stderr, absent
    return python


def program_of(folder):
    """The Python program in the README of an exported folder."""
    return program_in(Path(folder, "README.md").read_text(encoding="utf-8"))


def program_in(readme):
    """The Python program in the text of a README."""
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return program


def run_program(python, text, *args, cwd=None):
    """What a Python program prints, in an interpreter of :func:`engine_python`."""
    done = subprocess.run(
        [python, "-I", "-c", text, *map(str, args)], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _with_requirements(names) -> list[Distribution]:
    known, waiting = {}, list(names)
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        try:
            known[name] = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        for required in known[name].requires or ():
            if "extra ==" not in required:
                waiting.append(re.match(r"[\w.-]+", required).group().lower())
    assert ABSENT[0] not in known, f"{names} require torch"
    return list(known.values())


if __name__ == "__main__":
    print(engine_python(*sys.argv[1:]))
