"""Runs the tests that transformers has for all its models on the cape models.

    python -m tests.hf_common.run [--position-embedding TYPE] [--source URL] [arguments of pytest]

The tests are not in the installed package. The installed version's are fetched once to
``build/hf_common``, and nothing of them is kept in the project: from the repository of transformers
if it can be reached (all of them), else from the source distribution, which lacks some. The last
line says what was run and what was left out.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import zlib
from importlib.metadata import version
from pathlib import Path

from cape_plugins import TYPES

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "hf_common"
REPOSITORY = "https://github.com/huggingface/transformers"
# Mixins in files that the source distribution lacks.
MIXINS = {
    "generation": ("generation/test_utils.py", "GenerationTesterMixin"),
    "exporters": ("exporters/test_export.py", "ExportTesterMixin"),
}


def fetch(source: str) -> Path:
    """Folder with the ``tests`` of the installed version."""
    number = version("transformers")
    unpacked = BUILD / f"transformers-{number}"
    clone = BUILD / f"repository-{number}-{zlib.crc32(source.encode()):08x}"
    BUILD.mkdir(parents=True, exist_ok=True)
    if clone.exists() or _clone(source, f"v{number}", clone):
        return clone
    if not unpacked.exists():
        _download(number, unpacked)
    return unpacked


def _clone(source: str, tag: str, folder: Path) -> bool:
    partial = BUILD / f"partial-{os.getpid()}"
    options = ["--quiet", "--depth", "1", "--branch", tag, "--filter=blob:none", "--sparse"]
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    git = ["git", "-c", "advice.detachedHead=false"]
    try:
        for command in (["clone", *options, source, str(partial)],
                        ["-C", str(partial), "sparse-checkout", "set", "tests"]):  # fmt: skip
            subprocess.run([*git, *command], check=True, env=env, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{source} at {tag}: not fetched ({error})", file=sys.stderr)
        return False
    partial.rename(folder)
    return True


def _download(number: str, folder: Path) -> None:
    command = ["download", f"transformers=={number}", "--no-deps", "--no-binary", ":all:"]
    subprocess.run(
        [sys.executable, "-m", "pip", *command, "--no-build-isolation", "-d", str(BUILD)],
        check=True,
    )
    with tarfile.open(BUILD / f"{folder.name}.tar.gz") as archive:
        archive.extractall(BUILD / "partial", filter="data")
    (BUILD / "partial" / folder.name).rename(folder)


def prepare(folder: Path) -> tuple[Path, list[str]]:
    """Puts our models beside the tests of transformers, and empty classes where mixins are lacking.

    Returns:
        the file to run, and the names of the mixins that are lacking.
    """
    tests = folder / "tests"
    target = tests / "models" / "cape" / "test_modeling_cape.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    lacking = []
    for name, (path, mixin) in MIXINS.items():
        module = tests / path
        module.parent.mkdir(exist_ok=True)
        if not module.exists() or "def test_" not in module.read_text(encoding="utf-8"):
            module.write_text(f"class {mixin}:\n    is_stub = True\n")
            lacking.append(name)
        (module.parent / "__init__.py").touch()
    for package in (tests, tests / "models", target.parent):
        (package / "__init__.py").touch()
    for file_name, copy in (("models.py", target), ("summary.py", target.with_name("conftest.py"))):
        copy.write_text((Path(__file__).parent / file_name).read_text(encoding="utf-8"))
    return target, lacking


def main() -> int:
    """Fetches, prepares and runs; returns the status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--position-embedding", choices=TYPES, default="cape")
    parser.add_argument("--source", default=REPOSITORY, help=f"repository (default: {REPOSITORY})")
    args, rest = parser.parse_known_args()
    folder = fetch(args.source)
    target, lacking = prepare(folder)
    command = [sys.executable, "-m", "pytest", str(target), "-q", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "--rootdir", str(folder), "-c", "/dev/null", *rest]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "POSITION_EMBEDDING": args.position_embedding,
        "RAN": ", ".join(("modelling", *(name for name in MIXINS if name not in lacking))),
        "LACKING": " and ".join(lacking),
    }
    return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
