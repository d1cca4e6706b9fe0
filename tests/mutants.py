"""Breaks the library in the places of tests/mutants.txt, one after another, and prints which test
finds each fault. This proves that a changed test suite still finds the faults that it found before.

    python -m tests.mutants                                     all of them: an hour or two
    python -m tests.mutants wrong-base cache-overlooked --table kills.csv
    python -m tests.mutants --compare tests/mutants_killed.csv
    python -m tests.mutants --list

The tracked files are copied once; the copy is broken, tested and repaired. Before that, each set of
tests has to pass there unbroken. The exit status is 1 if a fault was not found; with --compare it
is 1 if a fault that the stored table calls killed was not found now.
"""

import argparse
import contextlib
import csv
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from cape_plugins.utils.machine import describe_processor

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".txt")
STORED = TABLE.with_name("mutants_killed.csv")  # results of an earlier run
SECONDS = 1800  # a fault may make a test wait for ever
COLUMNS = ("name", "file", "result", "test", "seconds")
KILLED, SURVIVED, ERROR = "killed", "SURVIVED", "ERROR"
NOT_RUN = "NOT RUN"


class Mutant(NamedTuple):
    """A row of the table: `text`, which is in the file once, becomes `replacement`."""

    name: str
    file: str
    tests: str  # name of a set of tests
    text: str
    replacement: str

    def broken(self, source: str) -> str:
        """The file with the fault."""
        count = source.count(self.text)
        if count != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {self.text!r} {count} times; it must be there once. "
                f"Correct its row in {TABLE.name}."
            )
        return source.replace(self.text, self.replacement)


def read_table(text: str) -> tuple[list[Mutant], dict[str, str]]:
    """The rows, and the options of pytest of each set of tests by its name."""
    sets: dict[str, str] = {}
    rows: list[tuple[list[str], list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("@"):
            name, _, options = line[1:].partition(" ")
            sets[name] = options
        elif line[:2] in ("- ", "+ "):
            rows[-1][1 if line[0] == "-" else 2].append(line[2:])
        elif line and not line.startswith("#"):
            rows.append((line.split(), [], []))
    mutants = [Mutant(*head, "\n".join(old), "\n".join(new)) for head, old, new in rows]
    return mutants, sets


def options_of(tests: str, root: Path) -> list[str]:
    """Options of pytest, with the files that patterns stand for."""
    words = []
    for word in shlex.split(tests):
        is_pattern = word.startswith("tests/") and "*" in word
        files = (
            sorted(str(path.relative_to(root)) for path in root.glob(word)) if is_pattern else []
        )
        words += files if is_pattern else [word]
    return words


def copy_of_tracked_files(folder: Path) -> None:
    """Copies the files that git knows, with the changes since the last commit."""
    file_names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    )
    for name in filter(None, file_names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


class Outcome(NamedTuple):
    """How a run of tests ended, with the first test that failed."""

    status: int
    test: str
    output: str
    seconds: float


def run_tests(folder: Path, tests: str) -> Outcome:
    """Runs a set of tests in the copy, up to the first that fails."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        [*words, *options_of(tests, folder)],
        cwd=folder,
        env={**os.environ, **threads, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # to end what the tests have started, too
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(1, f"none within {SECONDS} s", "", time.monotonic() - begin)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed_tests = (
        line.partition(" ")[2].partition(" - ")[0]  # names of cases may have spaces
        for line in output.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    )
    return Outcome(process.returncode, next(failed_tests, ""), output, time.monotonic() - begin)


@contextlib.contextmanager
def applied(mutant: Mutant, folder: Path) -> Iterator[None]:
    """The copy with a fault, for the body of a ``with`` statement."""
    path = folder / mutant.file
    source = path.read_bytes()
    broken_source = mutant.broken(source.decode())
    # compiled code also counts for another source of the same size and second
    bytecode = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(broken_source, encoding="utf-8")
        bytecode.unlink(missing_ok=True)
        yield
    finally:
        path.write_bytes(source)
        bytecode.unlink(missing_ok=True)


def check_sets(folder: Path, mutants: Sequence[Mutant], sets: Mapping[str, str]) -> None:
    """Ends the program if a set of tests fails without a fault."""
    failing = []
    names = list(dict.fromkeys(mutant.tests for mutant in mutants))
    for name in tqdm(names, "without a fault", unit="set", disable=None):
        outcome = run_tests(folder, sets[name])
        if outcome.status:
            failing.append(name)
            tqdm.write(outcome.output)
        tqdm.write(
            f"{name:36} {'FAILS' if outcome.status else 'passes':8} {outcome.seconds:4.0f} s"
        )
        sys.stdout.flush()
    if failing:
        sys.exit(f"error: tests fail without a fault: {', '.join(failing)}")


def kill(mutant: Mutant, folder: Path, sets: Mapping[str, str]) -> dict[str, object]:
    """The row of a mutant in the table of results."""
    with applied(mutant, folder):
        outcome = run_tests(folder, sets[mutant.tests])
    result = KILLED if outcome.test else ERROR if outcome.status else SURVIVED
    if result == ERROR:  # no test has run: the row is at fault
        tqdm.write(outcome.output)
    values = (mutant.name, mutant.file, result, outcome.test, round(outcome.seconds))
    return dict(zip(COLUMNS, values, strict=True))


def describe_run() -> str:
    """The commit, the day and the machine, for the head of a stored table."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    return (
        f"commit {commit.strip() or 'unknown'}, {date.today().isoformat()}, "
        f"{describe_processor()}, Python {platform.python_version()}"
    )


def write_results(path: Path, head: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Stores a table of results as CSV below a comment."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {head}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_results(path: Path) -> dict[str, str]:
    """Results of a stored table, by name of the mutant."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("#")]
    return {row["name"]: row["result"] for row in csv.DictReader(lines)}


def lost_kills(
    before: Mapping[str, str], now: Mapping[str, str], names: Collection[str]
) -> dict[str, str]:
    """What became of the mutants that were killed before and are not now; `names`, if there are
    any, are all that had to run now."""
    return {
        name: now.get(name, NOT_RUN)
        for name, result in before.items()
        if result == KILLED != now.get(name, NOT_RUN) and (not names or name in names)
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "mutants (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    parser.add_argument("--list", action="store_true", help="only list them")
    text = "do not test the unbroken copy before: a test that fails anyway counts as a kill"
    parser.add_argument("--skip-baseline", action="store_true", help=text)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the results as CSV")
    text = "print what was killed in this table of --table and is not killed now"
    parser.add_argument("--compare", type=Path, metavar="FILE", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    mutants, sets = read_table(TABLE.read_text(encoding="utf-8"))
    parser = make_parser()
    args = parser.parse_args(argv)
    if unknown := set(args.names) - {mutant.name for mutant in mutants}:
        parser.error(f"{', '.join(sorted(unknown))} is not in {TABLE.name}; --list shows the names")
    mutants_to_run = [mutant for mutant in mutants if not args.names or mutant.name in args.names]
    if args.list:
        print(
            "\n".join(
                f"{mutant.name:36} {mutant.file:44} {mutant.tests}" for mutant in mutants_to_run
            )
        )
        return 0
    before = read_results(args.compare) if args.compare else None
    head, rows = describe_run(), []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_of_tracked_files(folder)
        for mutant in mutants_to_run:
            mutant.broken((folder / mutant.file).read_text(encoding="utf-8"))
        if not args.skip_baseline:
            check_sets(folder, mutants_to_run, sets)
        for mutant in tqdm(mutants_to_run, "mutants", disable=None):
            rows.append(kill(mutant, folder, sets))
            tqdm.write("{name:36} {result:8} {seconds:4} s  {test}".format_map(rows[-1]))
            sys.stdout.flush()
            if args.table:  # after each: the whole takes long
                write_results(args.table, head, rows)
    not_killed = [f"{row['result']} {row['name']}" for row in rows if row["result"] != KILLED]
    print(f"{len(rows) - len(not_killed)} of {len(rows)} killed", *not_killed, sep="\n")
    if before is None:
        return int(bool(not_killed))
    lost = lost_kills(before, {row["name"]: row["result"] for row in rows}, args.names)
    lines = [f"{result} {name}" for name, result in lost.items()]
    print(f"{len(lines)} killed in {args.compare} and not now", *lines, sep="\n")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
