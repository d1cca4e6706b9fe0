"""Command-line flags of a position embedding, generated from PositionConfig: the same names in
fairseq, in the commands for Hugging Face models and in the recipes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from cape_plugins.config import PositionConfig, options, parse_option
from cape_plugins.domains import DOMAINS
from cape_plugins.options import unit_of
from cape_plugins.registry import DEFAULT_TYPE, TYPES, PositionType, types_of

PREFIX = "position_"
TYPE_ARG = "position_embedding"
FAIRSEQ, HUGGING_FACE = "fairseq", "hugging_face"  # hosts, in names of entry points


class Parser(argparse.ArgumentParser):
    """A parser that knows no abbreviations, and tells a mistake in one line that names its help."""

    def __init__(self, **settings: Any) -> None:
        shown = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": shown, **settings})

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and the line."""
        self.exit(2, f"error: {' '.join(message.split())}; see {self.prog} --help\n")


def whole(text: str, least: int = 0) -> int:
    """Argument type: a whole number of at least 0."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


positive = partial(whole, least=1)


class Distinct(argparse.Action):
    """Stores a list whose values all differ. A seed that is given twice would count as two."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """See argparse."""
        if len(set(values)) < len(values):
            shown = " ".join(map(str, values))
            raise argparse.ArgumentError(self, f"{shown}: give each once")
        setattr(namespace, self.dest, values)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds ``--data``."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="of a fairseq checkpoint: folder with its dictionaries (default: the one that it was "
        "trained on)",
    )


def add_position_args(
    parser: argparse._ActionsContainer,
    domain: str | None = "text",
    default: str = DEFAULT_TYPE,
    architecture: str = "seq2seq",
    without: Container[str] = (),
    types: Mapping[str, PositionType] | None = None,
) -> None:
    """Adds ``--position-embedding`` and one ``--position-...`` flag per option of `domain` (None:
    of any domain), but for those in `without`, which the caller adds. Help says that `default` is
    the type where none is given, and is silent on options that models of another `architecture`
    refuse; `types` are by default those of `domain`.

    No flag has a default of its own: what is not given is None, the default of the type.
    """
    if types is None:
        types = types_of(architecture, domain)
    parser.add_argument(
        flag(TYPE_ARG), choices=tuple(types), help=f"{type_help(types)} (default: {default})"
    )
    for option in options(domain):
        if option.name in without:
            continue
        shown = option.metadata.get("architecture") in (None, architecture)
        text = f"{option_help(option.metadata)} (default: depends on the type)"
        parser.add_argument(
            flag(PREFIX + option.name),
            type=_parser_of(option.name),
            metavar=_metavar(option.metadata),
            help=text if shown else argparse.SUPPRESS,
        )


def given_settings(args: Any, domain: str | None = "text") -> dict[str, Any]:
    """``{option: value}`` of the flags that were given, without the type; flags that a parser does
    not have are not given.

    Args:
        args: Namespace, DictConfig or dataclass with the flags as attributes.
        domain: The domain given to :func:`add_position_args`.
    """
    settings = {o.name: getattr(args, PREFIX + o.name, None) for o in options(domain)}
    return {name: value for name, value in settings.items() if value is not None}


def settings_to_compare(
    args: argparse.Namespace,
    domain: str,
    default: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]] | None = None,
    architecture: str | None = None,
) -> dict[str, dict[str, Any]]:
    """``{name: position_embedding}`` of what is to be trained, by ``--compare`` or by the options
    of one type. A name is ``ROW`` or ``ROW:option=value,...``; the rows are all types, with their
    defaults, and those of the program.

    Args:
        default: Names that are compared where the caller gives none.
        rows: Settings by name; those of a type may leave out which it is.
        architecture: That of the models; default that of the domain.

    Raises:
        ValueError: naming the flag, its value, what is allowed and what to do.
    """
    architecture = architecture or DOMAINS[domain].architecture
    given, chosen = given_settings(args, None), getattr(args, TYPE_ARG)
    if args.compare and (chosen or given):
        raise ValueError(
            "--compare trains the types with their defaults, or with options of their own such as "
            "cape:max_global_scale=1; leave it out to train one type with --position-... options"
        )
    names = [chosen or sole(default)] if chosen or given else args.compare or default
    rows = {**{name: {} for name in types_of(architecture, domain)}, **(rows or {})}
    settings = {}
    for name in names:
        if name in settings:
            raise ValueError(f"--compare {name} is given twice; give each once")
        row, own = _parse_row(name, domain, rows)
        settings[name] = {"type": row, **rows[row], **own, **given}
        try:
            PositionConfig.from_dict(settings[name], domain, architecture)
        except ValueError as error:
            why = in_flags(str(error))
            raise ValueError(f"position embedding {name}: {why}") from None
    return settings


def _parse_row(
    text: str, domain: str, rows: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    row, colon, rest = text.partition(":")
    if row not in rows:
        raise ValueError(f"--compare {row} is unknown; allowed: {', '.join(rows)}; choose one")
    known = [option.name for option in options(domain)]
    settings = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = part.partition("=")
        wrong = f"{part!r} is no option=value" if not equals else ""
        wrong = wrong or (f"{name!r} is unknown" if name not in known else "")
        wrong = wrong or (f"{name!r} is given twice" if name in settings else "")
        if wrong:
            raise ValueError(f"--compare {text}: {wrong}; options: {', '.join(known)}")
        try:
            settings[name] = parse_option(name, value)
        except ValueError as error:
            raise ValueError(f"--compare {text}: {error}") from None
    return row, settings


def sole(default: Sequence[str]) -> str:
    """The type that ``--position-...`` options alone belong to."""
    return default[0] if len(default) == 1 else DEFAULT_TYPE


def type_help(types: Mapping[str, PositionType] = TYPES) -> str:
    """Help text for argparse: the meaning of each type."""
    return "position embedding: " + "; ".join(f"{k}: {row.summary}" for k, row in types.items())


def option_help(metadata: Any) -> str:
    """Help text for argparse: meaning, unit and range of an option."""
    unit = f", in {name}" if (name := unit_of(metadata)) else ""
    return f"{metadata['help']}{unit}; allowed: {metadata['range']}".replace("%", "%%")


def in_flags(message: str) -> str:
    """An error text of :class:`PositionConfig` with flags for the names of options:
    ``mean_normalize=True is impossible`` becomes ``--position-mean-normalize true is ...``."""
    return _NAMES.sub(_as_flag, message)


_NAMES = re.compile(
    # no part of a path, such as /data/gamma/train.de or gamma.txt
    rf"(?<![\w./-])({TYPE_ARG}|{'|'.join(option.name for option in options())})\b(?!/|\.\w)"
    r"(?:=('[^']*'|[\w.+-]*\w))?"
)


def _as_flag(match: re.Match[str]) -> str:
    name, value = match.groups()
    named = flag(name if name == TYPE_ARG else PREFIX + name)
    if value is None:
        return named
    return (
        f"{named} {value.lower() if value in ('True', 'False') else value.strip(chr(39)) or value}"
    )


def flag(name: str) -> str:
    """``position_source_bos`` as ``--position-source-bos``."""
    return "--" + name.replace("_", "-")


def _parser_of(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_option(name, text)
        except ValueError as error:
            # argparse hides the text of a ValueError, and names the flag itself
            text = in_flags(str(error).removeprefix(f"{name}="))
            raise argparse.ArgumentTypeError(text) from None

    return parse


def _metavar(metadata: Any) -> str:
    if metadata["form"] == "choice":
        return "{" + ",".join(metadata["choices"]) + "}"
    return {"bool": "{true,false}", "ratio": "{auto,X}", "int": "N", "float": "X"}[metadata["form"]]
