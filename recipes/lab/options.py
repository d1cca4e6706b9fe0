"""The options that command lines share, each with a single name and a single check."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import torch

from cape_plugins import PRESETS, PositionConfig
from cape_plugins.arguments import PREFIX, TYPE_ARG, flag, given_settings, in_flags
from cape_plugins.config import options, parse_option
from cape_plugins.registry import types_of
from recipes.lab.steps import CommandError, reason

ARCHITECTURES = {"text": "seq2seq", "audio": "encoder", "image": "encoder"}


def whole(text: str, least: int = 0) -> int:
    """Argument type: a whole number of at least 0."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


positive = partial(whole, least=1)


def number(low: float, high: float, below: bool = False) -> Any:
    """Argument type: a number from `low` to `high`, or below `high`."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not low <= value <= high or (below and value == high):
            end = "less than " if below else ""
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed: {low:g} to {end}{high:g}"
            )
        return value

    return parse_number


def check_increasing(numbers: Sequence[float], option: str) -> None:
    """Refuses upper ends of bins that do not increase, or are not above 0."""
    if list(numbers) != sorted(set(numbers)) or not all(0 < end < inf for end in numbers):
        raise CommandError(
            f"{option} {' '.join(f'{end:g}' for end in numbers)}: the numbers must increase;"
            " allowed: increasing numbers above 0, such as 10 15 20"
        )


def bins(edges: Sequence[int], option: str) -> list[tuple[str, int, float]]:
    """Label, lowest and highest number of the bins with these upper ends, and of what is beyond.

    >>> bins([5, 10], "--bins")
    [('0-5', 0, 5), ('6-10', 6, 10), ('over 10', 11, inf)]
    """
    check_increasing(edges, option)
    *lows, beyond = (0, *(edge + 1 for edge in edges))
    closed = [(f"{low}-{edge}", low, edge) for low, edge in zip(lows, edges, strict=True)]
    return [*closed, (f"over {edges[-1]}", beyond, inf)]


def bin_of(value: float, labelled: Sequence[tuple[str, int, float]]) -> str:
    """The label of the bin that has this number."""
    return next(label for label, low, high in labelled if low <= value <= high)


def check_model(path: str) -> None:
    """Refuses a folder that does not exist. Names on the hub have at most one slash."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).is_dir():
        raise CommandError(f"--model {path}: no such folder")


def usable_folder(path: Path, option: str) -> None:
    """Refuses a folder that results cannot be written to, before there are any; makes nothing."""
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if path.is_absolute() and path != above == Path(path.anchor):
        raise CommandError(
            f"{option} {path}: {Path(*path.parts[:2])} does not exist, and no folder is made at the"
            " root of the file system; check the path, or make that folder first"
        )
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise CommandError(
            f"{option} {path}: {above} is no folder that can be written to; give another"
        )


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_COUNT, _FOLDER = {"type": positive, "metavar": "N"}, {"type": Path, "metavar": "FOLDER"}
_DEVICE = "such as cpu or cuda:1 (default: cuda if there is one)"
# What argparse is told of each shared option
SHARED: dict[str, dict[str, Any]] = {
    "compare": {"nargs": "+", "metavar": "NAME"},  # position types, or rows of a catalogue
    "seeds": {**_COUNT, "nargs": "+", "help": "of the trainings"},
    "limit": {**_COUNT, "help": "so many samples of the test"},
    "device": {"metavar": "DEVICE", "help": _DEVICE},
    "jobs": {**_COUNT, "help": "trainings side by side"},
    "threads": {**_COUNT, "help": "threads of each"},
    "work": {**_FOLDER, "help": "what is kept and reused"},
    "output": {**_FOLDER, "help": "tables and figures"},
}


def new_parser(description: str | None, program: str | None = None, **more: Any) -> Any:
    """A parser of the module `program`, default what was started, without abbreviations."""
    return argparse.ArgumentParser(
        prog=program and f"python -m {program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **more,
    )


def add_shared(parser: Any, name: str, *earlier: str, **more: Any) -> None:
    """Adds an option of :data:`SHARED`, which still takes its `earlier` names; the help shows the
    default. `more` goes to ``add_argument``."""
    settings = {**SHARED[name], **more}
    default = settings.get("default")
    if default is not None:
        words = default if isinstance(default, list | tuple) else [default]
        shown = f"(default: {' '.join(map(str, words))})"
        settings["help"] = f"{settings.get('help', '')} {shown}".strip()
    parser.add_argument(f"--{name}", *earlier, dest=name, **settings)


def check_shared(args: argparse.Namespace) -> None:
    """Refuses folders and devices that cannot be used; makes ``args.device`` one of torch."""
    for name in ("work", "output"):
        if getattr(args, name, None):
            usable_folder(getattr(args, name), f"--{name}")
    if hasattr(args, "device"):
        name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            args.device = torch.device(name)
            torch.empty(1, device=args.device)
        except (RuntimeError, AssertionError) as error:
            raise CommandError(
                f"--device {name}: not available here ({reason(error)}); give cpu, cuda or cuda:1"
            ) from None


def settings_to_compare(
    args: argparse.Namespace,
    domain: str,
    default: Sequence[str],
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
    architecture: str | None = None,
) -> dict[str, dict[str, Any]]:
    """``{name: position_embedding}`` of what is to be trained, by ``--compare`` (types, with their
    defaults or as ``TYPE:option=value,...``) or by the options of one type.

    Args:
        default: Types that are compared where the caller names none.
        defaults: Settings by type that hold where the caller gives none, such as a source scale.
        architecture: That of the models; default that of the domain.
    """
    architecture = architecture or ARCHITECTURES[domain]
    given, chosen = given_settings(args, domain), getattr(args, TYPE_ARG)
    if args.compare and (chosen or given):
        raise CommandError(
            "--compare trains the types with their defaults, or with options of their own such as "
            "cape:max_global_scale=1; leave it out to train one type with --position-... options"
        )
    names = [chosen or "cape"] if chosen or given else args.compare or default
    settings = {}
    for name in names:
        if name in settings:
            raise CommandError(f"--compare {name} is given twice; give each type once")
        type_name, own = _parse_type(name, domain, architecture)
        settings[name] = {"type": type_name, **(defaults or {}).get(type_name, {}), **own, **given}
        try:
            PositionConfig.from_dict(settings[name], domain, architecture)
        except ValueError as error:
            raise CommandError(f"position embedding {name}: {in_flags(str(error))}") from None
    return settings


def _parse_type(text: str, domain: str, architecture: str) -> tuple[str, dict[str, Any]]:
    type_name, colon, rest = text.partition(":")
    if type_name not in (types := types_of(architecture)):
        raise CommandError(f"--compare {type_name} is unknown; allowed: {', '.join(types)}")
    known = [option.name for option in options(domain)]
    settings = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise CommandError(
                f"--compare {text}: {part!r} is no option=value; options: {', '.join(known)}"
            )
        try:
            settings[name] = parse_option(name, value)
        except ValueError as error:
            raise CommandError(f"--compare {text}: {error}") from None
    return type_name, settings


def preset_flags(*names: str) -> dict[str, str]:
    """``{type: flags}`` of settings of the papers, see :data:`cape_plugins.PRESETS`."""

    def word(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value).lower()

    return {
        PRESETS[name]["type"]: " ".join(
            f"{flag(PREFIX + option)} {word(value)}"
            for option, value in PRESETS[name].items()
            if option not in ("type", "domain", "architecture")
        )
        for name in names
    }
