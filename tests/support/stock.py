"""Exported folders in a process in which this package cannot be imported."""

import json
import subprocess
import sys

_WITHOUT = """
import io, json, os, sys, contextlib

class Refuses:
    def find_spec(self, name, *more):
        if name.split(".")[0] in ("cape_plugins", "fairseq_user_dir", "hf_models"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuses())
results = []
for folder, program, text in json.load(sys.stdin):
    os.chdir(folder)
    printed, sys.stdin = io.StringIO(), io.StringIO(text)
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {"__name__": "__main__"})
        results.append(printed.getvalue())
    except Exception as error:
        results.append(f"{type(error).__name__}: {error}")
assert not {"cape_plugins", "fairseq_user_dir", "hf_models"} & set(sys.modules)
print(json.dumps(results))
"""


def run_without_package(programs, cwd):
    """What programs print, run one after the other in one new interpreter.

    Args:
        programs: Each a folder to run in, the Python program, and its standard input.
        cwd: Folder of the interpreter, outside of the repository.
    """
    jobs = json.dumps([[str(folder), *rest] for folder, *rest in programs])
    done = subprocess.run(
        [sys.executable, "-I", "-c", _WITHOUT],
        input=jobs,
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
