"""Exports, their refusals, and an interpreter that has the engines and nothing else, which must do
for an exported folder."""

import re
import subprocess
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from cape_plugins.cli import main

ABSENT = ("torch", "fairseq", "transformers", "cape_plugins", "fairseq_user_dir", "hf_models")
ENGINES = ("ctranslate2", "faster-whisper", "onnxruntime", "sentencepiece", "tokenizers", "pillow")


def export(engine, source, out, *options):
    """The folder that ``cape-plugins export`` writes."""
    main(["export", engine, str(source), str(out), *map(str, options)])
    return out


def refusal(capsys, engine, source, out, *options):
    """The line with which an export ends, with nothing written."""
    place = next(folder for folder in out.parents if folder.exists())
    before = sorted(place.iterdir())
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        export(engine, source, out, *options)
    assert sorted(place.iterdir()) == before
    error = capsys.readouterr().err.splitlines()[-1]  # behind progress bars of transformers
    assert error.startswith("error: ")
    return error


def engine_python(folder):
    """The interpreter of a new virtual environment that has the engines and what they require,
    linked to the installed ones: made in a second and without a network."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = Path(folder).glob("lib/python*/site-packages")
    for known in _with_requirements(ENGINES):
        for top in {file.parts[0] for file in known.files or () if ".." not in file.parts}:
            place = Path(known.locate_file(top))
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(place)
    python = Path(folder, "bin", "python")
    look = f"from importlib.util import find_spec; print([*filter(find_spec, {ABSENT})])"
    assert run_program(python, look).strip() == "[]"
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
    return list(known.values())
