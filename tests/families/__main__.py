"""Proves model families with tiny models of all model types, and writes docs/families.md.

    python -m tests.families [TYPE ...] [--jobs 2] [--sample N --date D] [--fresh] [--release R]

Without types all that the installed transformers has are tried, and the page is written. Results
are added to build/families/RELEASE.jsonl; a type that has a result there is not run again, unless
it is named or --fresh is given. The page has all releases of build/families.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import date
from typing import NoReturn

import torch
import transformers
from tqdm import tqdm

import hf_models  # noqa: F401, once for all children
from hf_models.checks.proof import prove
from hf_models.checks.stock_models import stock_types
from tests.families import report
from tests.families.children import in_children
from tests.families.results import FAILS, ROOT, Row, append, path_of, read, row_of, sample
from tests.versions import install

SECONDS = 60.0  # limit for a model type


def main() -> int:
    """Runs the probe; returns 1 if a named or drawn family fails."""
    parser = _parser()
    args = parser.parse_args()
    if args.types and args.sample is not None:
        parser.error("--sample draws model types; leave the names out, or leave --sample out")
    if args.release not in (None, transformers.__version__):
        _run_on(args.release)
    installed, release = stock_types(), transformers.__version__
    if unknown := sorted({*args.types} - {*installed}):
        raise SystemExit(
            f"error: {unknown[0]!r} is no model type of transformers {release}; allowed: the keys "
            "of transformers.CONFIG_MAPPING, such as 'mistral'."
        )
    is_sample = args.sample is not None
    names = sample(args.sample, args.date, installed) if is_sample else args.types or installed
    path = path_of(release)
    if args.fresh and not args.types and not is_sample:
        path.unlink(missing_ok=True)
    done = {} if args.types or is_sample else read(path)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results: list[Row] = []
    waiting = [name for name in names if name not in done]
    ended = in_children(prove, waiting, args.jobs, SECONDS)
    for name, proof, seconds in tqdm(ended, total=len(waiting), unit="type"):
        row = row_of(proof, name, release, seconds)
        append(path, row)
        results.append(row)
        if len(names) < len(installed):
            tqdm.write(f"{name}: {row['result']} {row['seam']} {row['reason']}".rstrip())
    print(*(f"{number} {text}" for text, number in _counts(results).items()), sep=", ")
    if not args.types and not is_sample:
        report.write(_machine(args.jobs, read(path).values()))
        return 0
    return int(any(row["result"] == FAILS for row in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.families", description=__doc__.split("\n")[0]
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types, such as mistral")
    parser.add_argument("--jobs", type=_count, default=2, help="processes at a time (default: 2)")
    parser.add_argument(
        "--sample",
        type=_count,
        metavar="N",
        help="N families of the table, all with an odd row, and one for each seam",
    )
    parser.add_argument(
        "--date", default=date.today().isoformat(), help="what draws the sample (default: today)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--release", metavar="R", help="of transformers (default: the installed)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: 1 and more")
    return int(text)


def _run_on(release: str) -> NoReturn:
    """Starts this command anew with another release of transformers in front on the path."""
    paths = (str(install(release)), str(ROOT), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "tests.families", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


def _counts(rows: list[Row]) -> Counter[str]:
    return Counter(row["result"] for row in rows)


def _machine(jobs: int, rows: Iterable[Row]) -> str:
    """The command, the machine and the versions, for the page. The time covers all types,
    also types that an earlier run has done."""
    minutes = sum(row["seconds"] for row in rows) / jobs / 60
    return (
        f"Made by `python -m tests.families --jobs {jobs}` on {os.cpu_count()} cores "
        f"({platform.machine()}, {platform.system()}), {minutes:.0f} minutes; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {date.today().isoformat()}."
    )


if __name__ == "__main__":
    sys.exit(main())
