"""The command ``cape-plugins doctor``: reports which of fairseq and transformers are installed, and
whether models compute what they should with these versions."""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from itertools import groupby
from operator import itemgetter
from typing import Any

from cape_plugins.doctor.check import FAILED, NOTE, OK, SKIPPED, Check
from cape_plugins.settings.arguments import (
    FAIRSEQ,
    HUGGING_FACE,
    TYPE_ARG,
    add_data,
    add_position_args,
    given_settings,
)
from cape_plugins.settings.registry import DEFAULT_TYPE, ROTARY_TYPES, TYPES

GROUP = "cape_plugins.doctor"  # entry points, named after the host
PACKAGES = (
    "cape-plugins",
    "torch",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "accelerate",
    "peft",
    "fairseq",
    "fairseq-fixed",
)
# A function that yields the checks of args.model, or of built-in models if args.model is None, each
# with the name of the model. The second argument has the settings to train with, None for defaults.
Doctor = Callable[[argparse.Namespace, Mapping[str, Any] | None], Iterator[tuple[str, Check]]]


def add_doctor_args(parser: argparse.ArgumentParser) -> None:
    """Adds the model, its position embedding in training, and the form of the report."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder or hub name of a Hugging Face model, a model type of transformers such as "
        "mistral, or checkpoint file of fairseq (default: a tiny model of each family)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for reports of errors"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="print each check of the tiny models; without it, the passed checks of a family are "
        "counted in one line",
    )
    add_data(parser)
    default = f"{DEFAULT_TYPE}, then a type with relative attention where the model has one"
    add_position_args(parser, None, default, types={**ROTARY_TYPES, **TYPES})
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> str:
    """Prints the versions and one line for each check; for the built-in models, one line for each
    family and each difference.

    Returns:
        A sentence for a report without failures.

    Raises:
        SystemExit: with status 1 if a check failed.
        ValueError: if the model has no known family, cannot be read, or cannot have the settings.
        ImportError: if the host of the model is not installed.
    """
    versions, rows = installed_versions(), []
    if not args.json:
        print("\n".join(f"{name} {number}" for name, number in versions.items()), flush=True)
    every_line = args.all or args.model is not None
    for model, checks in groupby(_checks(args, _settings(args)), key=itemgetter(0)):
        passed: list[Check] = []
        for _, row in checks:
            rows.append((model, row))
            if not args.json and (every_line or row.status in (FAILED, NOTE)):
                _print_row(model, row)
            elif row.status in (OK, SKIPPED):
                passed.append(row)
        if not args.json and not every_line:
            _print_passed(model, passed)
    compared = [row for _, row in rows if row.status in (OK, FAILED)]
    failed = sum(row.failed for row in compared)
    report = _summary(len(compared), failed)
    if args.json:
        checks = [{"model": model, **row._asdict()} for model, row in rows]
        report = json.dumps({"versions": versions, "checks": checks}, indent=2)
    if failed:
        print(report, flush=True)
        raise SystemExit(1)
    return report


def _print_row(model: str, row: Check) -> None:
    print(f"{row.status:5}{model}: {row.name}: {row.text}", flush=True)


def _print_passed(model: str, rows: Sequence[Check]) -> None:
    """Prints one line for the passed checks of a family; if all checks were skipped, the reason of
    each."""
    passed = sum(row.status == OK for row in rows)
    if passed:
        print(f"{OK:5}{model}: {passed} checks", flush=True)
        return
    for row in rows:
        _print_row(model, row)


def _summary(checks: int, failed: int) -> str:
    if not checks:
        return (
            "nothing was compared, for the reasons above; docs/families.md lists the model types "
            "that can have another position embedding"
        )
    if not failed:
        return (
            f"no difference in {checks} checks: the models compute what they should with these "
            "versions"
        )
    return (
        f"{failed} of {checks} checks failed: do not trust these models with these versions. "
        "Install tested versions, or report the lines above."
    )


def installed_versions() -> dict[str, str]:
    """Versions of Python, this package and the installed hosts."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _settings(args: argparse.Namespace) -> dict[str, Any] | None:
    options, type_name = given_settings(args, None), getattr(args, TYPE_ARG)
    return {"type": type_name or DEFAULT_TYPE, **options} if type_name or options else None


def _checks(
    args: argparse.Namespace, settings: Mapping[str, Any] | None
) -> Iterator[tuple[str, Check]]:
    """Checks of the model's host; without a model, of all installed hosts."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if not points:
        raise ImportError("the package cape-plugins is not installed: pip install .")
    if args.model is not None:
        host = FAIRSEQ if os.path.isfile(args.model) else HUGGING_FACE
        points = {host: points[host]}
    refusals = [_MISSING[name] for name in sorted(points) if not _is_installed(name)]
    if len(refusals) == len(points):
        raise ImportError("; ".join(refusals))
    for name, point in sorted(points.items()):
        if not _is_installed(name):
            yield name, Check("host", SKIPPED, _MISSING[name])
            continue
        try:
            doctor = _doctor(point)
        except Exception as error:  # a release can stop the import with any error
            yield name, Check("host", FAILED, _import_error(name, error))
            continue
        yield from doctor(args, settings)


def _doctor(point: EntryPoint) -> Doctor:
    # silences the warning about an untested host version: the report lists all versions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return point.load()


def _is_installed(host: str) -> bool:
    """Whether a host is installed, by its metadata. Importing the host is no test: a release that
    has removed a name raises the same ImportError as a missing package."""
    for package in _HOST_PACKAGES[host]:
        try:
            version(package)
        except PackageNotFoundError:
            continue
        return True
    return False


def _import_error(host: str, error: Exception) -> str:
    message = " ".join(str(error).split()) or "no message"
    return (
        f"{_HOST_PACKAGES[host][0]} is installed, but our models for it cannot be imported "
        f"({type(error).__name__}: {message}); install tested versions: {_INSTALL[host]}"
    )


_HOST_PACKAGES = {FAIRSEQ: ("fairseq", "fairseq-fixed"), HUGGING_FACE: ("transformers",)}
_INSTALL = {
    FAIRSEQ: "pip install 'cape-plugins[fairseq]'",
    HUGGING_FACE: "pip install 'cape-plugins[hf]'",
}
_MISSING = {
    host: f"{packages[0]} is not installed; install it: {_INSTALL[host]}"
    for host, packages in _HOST_PACKAGES.items()
}
