"""Every program of the repository explains itself, as a module and, where it is one, as a file."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("recipes", "hf_models", "fairseq_user_dir", "cape_plugins", "benchmarks")
START = 'if __name__ == "__main__":'
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if START in path.read_text(encoding="utf-8") or path.name == "__main__.py"
)


def test_programs_are_seen():
    assert {"recipes/mt/run.py", "hf_models/convert.py", "cape_plugins/__main__.py"} <= {*PROGRAMS}
    assert len(PROGRAMS) > 15


def help_of(run, target, monkeypatch):
    """What `run` prints as a new interpreter would with --help, and its exit status."""
    monkeypatch.setattr(sys, "argv", [target, "--help"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as ended:
        run(target, run_name="__main__")
    return output.getvalue(), ended.value.code or 0


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("path", PROGRAMS)
def test_program_explains_itself(path, monkeypatch):
    if path.startswith("hf_models") or "finetune_hf" in path or path == "recipes/vit/evaluate.py":
        pytest.importorskip("transformers")
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__main__")
    text, status = help_of(runpy.run_module, module, monkeypatch)
    assert status == 0
    assert text.startswith("usage: ")
    if path.startswith("recipes/"):
        # a file has its own folder first on the path, as `python recipes/mt/run.py` has
        monkeypatch.syspath_prepend(str((ROOT / path).parent))
        other, status = help_of(runpy.run_path, str(ROOT / path), monkeypatch)
        assert status == 0
        # all but the name of the program
        assert other.startswith("usage: ")
        assert other.partition("\n\n")[2] == text.partition("\n\n")[2] != ""
