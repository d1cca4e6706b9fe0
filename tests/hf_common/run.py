"""Runs the tests that transformers has for all its models on the cape models.

    python -m tests.hf_common.run [arguments of pytest]

The tests are in the source distribution of transformers, not in the installed package. That of the
installed version is downloaded to ``build/hf_common`` once; nothing of it is kept in the project.
"""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "hf_common"
# Mixins for what the source distribution leaves out: text generation and exporters.
STUBS = {
    "generation/test_utils.py": "GenerationTesterMixin",
    "exporters/test_export.py": "ExportTesterMixin",
}


def download() -> Path:
    """The unpacked source distribution of the installed version."""
    name = f"transformers-{version('transformers')}"
    folder = BUILD / name
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = ["download", name.replace("-", "=="), "--no-deps", "--no-binary", ":all:"]
        subprocess.run(
            [sys.executable, "-m", "pip", *command, "--no-build-isolation", "-d", str(BUILD)],
            check=True,
        )
        with tarfile.open(BUILD / f"{name}.tar.gz") as archive:
            archive.extractall(BUILD / "partial", filter="data")
        (BUILD / "partial" / name).rename(folder)
    return folder


def prepare(folder: Path) -> Path:
    """Puts our models beside the tests of transformers; returns the file to run."""
    tests = folder / "tests"
    for path, mixin in STUBS.items():
        stub = tests / path
        if not stub.exists():
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(f"class {mixin}:\n    pass\n")
    target = tests / "models" / "cape" / "test_modeling_cape.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    stubs = (tests.joinpath(path).parent for path in STUBS)
    for package in (tests, tests / "models", target.parent, *stubs):
        (package / "__init__.py").touch()
    target.write_text((Path(__file__).parent / "models.py").read_text(encoding="utf-8"))
    return target


def main() -> int:
    """Downloads, prepares and runs; returns the status of pytest."""
    folder = download()
    target = prepare(folder)
    command = [sys.executable, "-m", "pytest", str(target), "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "--rootdir", str(folder), "-c", "/dev/null", *sys.argv[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
