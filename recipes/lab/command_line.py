"""Options that several programs share: each has the same name and the same check in all
programs."""

import argparse
import glob
import os
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import torch

from cape_plugins import PRESETS, TYPES
from cape_plugins.settings import arguments, switching
from cape_plugins.settings.arguments import (
    PREFIX,
    TYPE_ARG,
    Distinct,
    Parser,
    int_at_least,
    positive,
    type_of_loose_options,
)
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.switching import Step
from cape_plugins.utils.files import missing_folder
from cape_plugins.utils.texts import first_line
from recipes.lab.steps import CommandError, started_as

Settings = Mapping[str, Any]  # of a position embedding


def number(low: float, high: float, below: bool = False) -> Any:
    """Argument type: a number from `low` to `high`, or below `high`."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not low <= value <= high or (below and value == high):
            end = "less than " if below else ""
            why = f"{text!r} is not allowed; allowed: {low:g} to {end}{high:g}"
            raise argparse.ArgumentTypeError(why)
        return value

    return parse_number


def check_increasing(numbers: Sequence[float], option: str) -> None:
    """Refuses upper ends of bins that do not increase, or are not above 0."""
    if list(numbers) != sorted(set(numbers)) or not all(0 < end < inf for end in numbers):
        raise CommandError(
            f"{option} {' '.join(f'{end:g}' for end in numbers)}: the numbers must increase;"
            " allowed: increasing numbers above 0, such as 10 15 20"
        )


def check_reach(tested: Sequence[float], trained: float) -> None:
    """Refuses test lengths that are all shorter than the training length."""
    if max(tested) < trained:
        lengths = " ".join(f"{length:g}" for length in tested)
        raise CommandError(
            f"--test-lengths {lengths}: all are shorter than --train-length {trained:g}, so no "
            f"test has the length of training or more; give a length of {trained:g} or more"
        )


def bins(edges: Sequence[int], option: str) -> list[tuple[str, int, float]]:
    """Label, lowest and highest number of each bin with these upper ends, and of a last bin for
    larger numbers.

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


def named_models(words: Sequence[str]) -> dict[str, list[str]]:
    """``{name: paths}`` of ``--model``. A model without a name gets the name of its folder, or the
    whole path where two folders have the same name."""
    named = []
    for word in words:
        name, equals, rest = word.partition("=")
        if not equals or Path(word).exists():  # a folder may have "=" in its name
            path = Path(word).absolute()
            name, rest = (path.parent if path.is_file() else path).name, word
        parts = [sorted(glob.glob(part)) if "*" in part else [part] for part in rest.split(",")]
        if not all(parts):
            raise CommandError(f"--model {word}: nothing matches; give the path of a checkpoint")
        paths = [path for part in parts for path in part]
        real_paths = list(map(os.path.realpath, paths))
        for path, real_path in zip(paths, real_paths, strict=True):
            if real_paths.count(real_path) > 1:  # the same model would count as two seeds
                raise CommandError(f"--model {word}: names {path} twice; give each path once")
        named.append((name, paths))
    short = [name for name, _ in named]
    models: dict[str, list[str]] = {}
    for word, (name, paths) in zip(words, named, strict=True):
        name = word if paths == [word] and short.count(name) > 1 else name
        if name in models or not name or not all(paths):
            raise CommandError(
                f"--model {word}: give each model once, as PATH or NAME=PATH,PATH with a "
                "unique name"
            )
        models[name] = paths
    return models


def usable_folder(path: Path, option: str) -> None:
    """Refuses, before any work, a folder that results cannot be written to; does not create the
    folder."""
    try:
        missing_folder(path, f"{option} {path}")
    except ValueError as error:
        raise CommandError(str(error)) from None


_COUNT, _FOLDER = {"type": positive, "metavar": "N"}, {"type": Path, "metavar": "FOLDER"}
# Arguments of add_argument for each shared option. A program adds its default to the help, and a
# note if there is more to say.
SHARED: dict[str, dict[str, Any]] = {
    "compare": {
        "nargs": "+",
        "metavar": "TYPE",
        "help": "position embeddings to train: types with their defaults, or with other options as "
        "in cape:max_global_scale=1",
    },
    "seeds": {
        **_COUNT,
        "nargs": "+",
        "action": Distinct,
        "help": "train each type with each of these seeds",
    },
    "seed": {
        "type": int_at_least,
        "metavar": "N",
        "help": "seed of the random numbers",
    },
    "model": {"metavar": "PATH", "help": "trained model: checkpoint or folder"},
    "models": {  # see named_models
        "flag": "--model",
        "nargs": "+",
        "action": "extend",
        "required": True,
        "metavar": "[NAME=]PATH[,PATH]",
        "help": (
            "trained model: checkpoint or folder; several paths of one NAME, or a path with *, "
            "are seeds of one model"
        ),
    },
    "limit": {**_COUNT, "help": "test with N samples only"},
    "device": {
        "metavar": "DEVICE",
        "help": "such as cpu or cuda:1",
        "shown": "cuda if there is a GPU",
    },
    "dtype": {"choices": ("float32", "bfloat16", "float16"), "help": "precision"},
    "jobs": {**_COUNT, "help": "number of trainings that run side by side"},
    "threads": {**_COUNT, "help": "CPU threads of each training and decoding"},
    "updates": {**_COUNT, "help": "training steps"},
    "hops": {
        "nargs": "+",
        "type": number(1, 100),
        "metavar": "MS",
        "default": (),
        "help": "also decode at these hops of the frames",
    },
    "beam": {**_COUNT, "help": "beam size of the beam search of a decoder"},
    "length-penalty": {
        "type": number(-100, 100),
        "metavar": "X",
        "help": "length penalty of the beam search",
    },
    "work": {**_FOLDER, "help": "folder of finished work, which is reused"},
    "output": {**_FOLDER, "help": "where results are written"},
}


def new_parser(description: str | None, **more: Any) -> Parser:
    """A parser for the program that was started, which accepts no abbreviated options; see
    :class:`Parser`."""
    return Parser(prog=started_as(), description=description, **more)


def parse_with_fairseq(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ``fairseq`` holds the flags after ``--``, which go to fairseq-train."""
    end = [*argv, "--"].index("--")
    args = parser.parse_args(argv[:end])
    args.fairseq = argv[end + 1 :]
    return args


def add_shared(parser: Any, name: str, note: str = "", **more: Any) -> None:
    """Adds an option of :data:`SHARED`. Its help ends with a `note` and the default; ``shown``
    describes a default that the program computes. Passes `more` to ``parser.add_argument``."""
    settings = {"flag": f"--{name}", **SHARED[name], **more}
    default, default_text = settings.get("default"), settings.pop("shown", "")
    if default not in (None, ()) and not default_text:
        values = default if isinstance(default, list | tuple) else [default]
        default_text = " ".join(map(str, values))
    text = "; ".join(filter(None, (settings["help"], note)))
    settings["help"] = f"{text} (default: {default_text})" if default_text else text
    parser.add_argument(settings.pop("flag"), **settings)


def add_compared(
    parser: Any,
    domain: str,
    default: Sequence[str] | str,
    rows: Sequence[str] = (),
    architecture: str | None = None,
) -> None:
    """Adds ``--compare`` and the options of one type; see :func:`settings_to_compare`.

    Args:
        default: Names, or a description of a default that depends on another option.
        rows: Names that this program accepts besides the types.
        architecture: Architecture of the models (default: the architecture of the domain).
    """
    architecture = architecture or DOMAINS[domain].architecture
    other_names = [name for name in rows if name not in TYPES]
    loose_type = default_text = default
    if not isinstance(default, str):
        loose_type, default_text = type_of_loose_options(default), " ".join(default)
    note = f"here also {', '.join(other_names)}" if other_names else ""
    add_shared(parser, "compare", note=note, shown=default_text)
    text = f"{loose_type} with other --position-... options, else see --compare"
    arguments.add_position_args(parser, domain, text, architecture)


def check_shared(args: argparse.Namespace) -> None:
    """Refuses folders and devices that cannot be used; converts ``args.device`` to a device of
    torch."""
    for name in ("work", "output"):
        if getattr(args, name, None):
            usable_folder(getattr(args, name), f"--{name}")
    if hasattr(args, "device"):
        name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            args.device = torch.device(name)
            torch.empty(1, device=args.device)
        except (RuntimeError, AssertionError) as error:
            why = f"--device {name}: not available here ({first_line(error)})"
            raise CommandError(f"{why}; give cpu, cuda or cuda:1") from None


def settings_to_compare(*args: Any, **more: Any) -> dict[str, dict[str, Any]]:
    """Returns the models to train, see :func:`cape_plugins.settings.arguments.settings_to_compare`.
    Errors of this function become errors of the command."""
    try:
        return arguments.settings_to_compare(*args, **more)
    except ValueError as error:
        raise CommandError(str(error)) from None


def plan_trainings(*args: Any) -> list[Step]:
    """Returns the trainings, see :func:`cape_plugins.settings.switching.plan_trainings`. Errors of
    this function become errors of the command."""
    try:
        return switching.plan_trainings(*args)
    except ValueError as error:
        raise CommandError(str(error)) from None


def position_flags(settings: Settings) -> str:
    """Flags of fairseq-train for a position embedding."""
    flags = []
    for name, value in settings.items():
        text = f"{value:g}" if isinstance(value, float) else str(value).lower()
        flags += [arguments.flag(TYPE_ARG if name == "type" else PREFIX + name), text]
    return " ".join(flags)


def of_papers(*presets: str) -> dict[str, dict[str, Any]]:
    """``{type: settings}`` of rows of :data:`cape_plugins.PRESETS`."""
    model_keys = ("domain", "architecture")
    rows = (PRESETS[name] for name in presets)
    return {row["type"]: {key: row[key] for key in row if key not in model_keys} for row in rows}
