"""Runs the fast tests of Hugging Face models on several releases of transformers.

    python -m tests.versions [RELEASE ...] [--pytest "-n 2"] [--choose "-k packed"]

By default these are the oldest release that hf_models/tested.json names and the newest on the
package index. Each is installed once into a folder of build/releases, which lies in front of the
environment on the path. A release on which all tests pass gets its row in hf_models/tested.json,
from which setup.py takes the range that it allows; one with a failure loses its row. With --choose
nothing is written, because a part of the tests does not prove that a release works.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version

from cape_plugins.utils.files import writing
from hf_models.releases import TESTED, tested_releases

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "releases"
PACKAGE = "transformers"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def newest_release() -> str:
    """The newest release on the package index that this Python can have."""
    asked = subprocess.run([*PIP, "index", "versions", PACKAGE], capture_output=True, text=True)
    listed = re.match(rf"{PACKAGE} \(([\w.]+)\)", asked.stdout)
    if listed is None:
        raise SystemExit(f"error: the package index names no {PACKAGE}: {asked.stderr.strip()}")
    return listed.group(1)


def install(release: str) -> Path:
    """Folder with a release, and with those packages that it needs in other versions than the
    environment has; only a folder with all of them has this name."""
    folder = BUILD / release
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as partial:
            site = Path(partial) / "site"
            _add(site, f"{PACKAGE}=={release}")
            for requirement in unmet(site):
                _add(site, requirement)
            with contextlib.suppress(OSError):  # another run has made it meanwhile
                site.rename(folder)
    return folder


def _add(site: Path, requirement: str) -> None:
    target = ("--target", str(site), "--no-deps", "--quiet")
    subprocess.run([*PIP, "install", *target, requirement], check=True)


def unmet(site: Path) -> Iterator[str]:
    """What the release in `site` requires, where the environment has another version or none."""
    (release,) = distributions(name=PACKAGE, path=[str(site)])
    for line in release.requires or ():
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = None
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}"


def run(release: str, options: list[str]) -> dict[str, Any]:
    """Runs the tests on a release.

    Returns:
        the row of `hf_models/tested.json`.
    """
    paths = (str(install(release)), str(ROOT), os.environ.get("PYTHONPATH"))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/hf", "-m", "not slow"]
        subprocess.run(
            [*command, f"--junit-xml={report}", *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=False,
        )
        suite = ElementTree.parse(report).getroot().find("testsuite").attrib
    tests, skipped = int(suite["tests"]), int(suite["skipped"])
    failed = int(suite["failures"]) + int(suite["errors"])
    return {
        PACKAGE: release,
        "torch": version("torch"),
        "python": sys.version.split()[0],
        "date": date.today().isoformat(),
        "passed": tests - skipped - failed,
        "skipped": skipped,
        "failed": failed,
    }


def record(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` with the row of a release that passed, or without the row of one that failed; one row
    for each minor release, in order. The last row stays: setup.py needs a range."""

    def minor(row: dict[str, Any]) -> tuple[int, ...]:
        return Version(row[PACKAGE]).release[:2]

    others = [other for other in rows if minor(other) != minor(row)]
    if row["passed"] and not row["failed"]:
        others.append(row)
    return sorted(others, key=minor) or rows


def main() -> int:
    """Runs the tests on each release; returns 1 if one fails on any."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="options of pytest")
    parser.add_argument("--choose", default="", metavar="OPTIONS", help="those that choose tests")
    args = parser.parse_args()
    releases = args.releases or [tested_releases()[0][PACKAGE], newest_release()]
    results = []
    for release in releases:
        print(f"tests/hf on {PACKAGE} {release}", flush=True)
        row = run(release, shlex.split(f"{args.pytest} {args.choose}"))
        results.append(row)
        if not args.choose:
            with writing(TESTED) as file:
                lines = (json.dumps(row) for row in record(row, tested_releases()))
                file.write("[\n  " + ",\n  ".join(lines) + "\n]\n")
    for row in results:
        print(f"{PACKAGE} {row[PACKAGE]}: {row['passed']} passed, {row['failed']} failed")
    return int(any(row["failed"] or not row["passed"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
