"""Command-line flags of a position embedding, generated from PositionConfig: the same names in
fairseq, in the commands for Hugging Face models and in the recipes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from cape_plugins.settings.config import PositionConfig, option_fields, parse_option
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.options import FORMER_NAMES, OptionError, unit_of
from cape_plugins.settings.registry import DEFAULT_TYPE, TYPES, PositionType, types_of

PREFIX = "position_"
TYPE_ARG = "position_embedding"
FAIRSEQ, HUGGING_FACE = "fairseq", "hugging_face"  # hosts, in names of entry points


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options, and reports a mistake in one line that names
    the help command."""

    def __init__(self, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "formatter_class": formatter, **settings})

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and one line."""
        self.exit(2, f"error: {' '.join(message.split())}; see {self.prog} --help\n")


def int_at_least(text: str, minimum: int = 0) -> int:
    """Argument type: a whole number of at least `minimum`."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


positive = partial(int_at_least, minimum=1)


class Distinct(argparse.Action):
    """Stores a list of values and refuses repetitions: a seed that is given twice would count as
    two seeds."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        """See argparse."""
        if len(set(values)) < len(values):
            raise argparse.ArgumentError(
                self, f"{' '.join(map(str, values))}: give each value once"
            )
        setattr(namespace, self.dest, values)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds ``--data``."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="for a fairseq checkpoint: folder with its dictionaries (default: the data folder of "
        "its training)",
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
    of any domain), except the options in `without`, which the caller adds. The help names `default`
    as the default type, and leaves out options that only models of another `architecture` take.
    Without `types`, the flags take the types of the domain.

    All flags are None by default; None stands for the default of the type.
    """
    if types is None:
        types = types_of(architecture, domain)
    parser.add_argument(
        flag(TYPE_ARG), choices=tuple(types), help=f"{type_help(types)} (default: {default})"
    )
    for option in option_fields(domain):
        if option.name in without:
            continue
        has_option = option.metadata.get("architecture") in (None, architecture)
        help_text = f"{option_help(option.metadata)} (default: depends on the type)"
        parser.add_argument(
            flag(PREFIX + option.name),
            type=_parser_of(option.name),
            metavar=_metavar(option.metadata),
            help=help_text if has_option else argparse.SUPPRESS,
        )


def given_settings(args: Any, domain: str | None = "text") -> dict[str, Any]:
    """``{option: value}`` of the flags on the command line, without the type. A parser may lack
    some of the flags.

    Args:
        args: Namespace, DictConfig or dataclass with the flags as attributes.
        domain: The domain given to :func:`add_position_args`.
    """
    names = {option.name: option.name for option in option_fields(domain)}
    settings = {}
    # Stored settings may have an option under its former name; the current name wins.
    for former_or_name, name in {**FORMER_NAMES, **names}.items():
        value = getattr(args, PREFIX + former_or_name, None)
        if name in names and value is not None:
            settings[name] = value
    return settings


def settings_to_compare(
    args: argparse.Namespace,
    domain: str,
    default: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]] | None = None,
    architecture: str | None = None,
    flag: str = "--compare",
) -> dict[str, dict[str, Any]]:
    """Returns ``{name: position_embedding}`` of the models to train, from ``--compare`` or from the
    options of one type. A name is ``ROW`` or ``ROW:option=value,...``. ROW is a type, with its
    defaults, or a key of `rows`.

    Args:
        args: Parsed flags.
        domain: Domain of the models.
        default: Names that are compared if ``--compare`` is not given.
        rows: Settings by name; a row that is named after a type may leave out the type.
        architecture: Architecture of the models; default the domain's.
        flag: The flag that gives the names, for messages.

    Raises:
        ValueError: names the flag, the value, what is allowed and what to do.
    """
    architecture = architecture or DOMAINS[domain].architecture
    loose_options, type_name = given_settings(args, None), getattr(args, TYPE_ARG)
    if args.compare and (type_name or loose_options):
        raise ValueError(
            "--compare trains the types with their defaults, or with options behind a colon such "
            "as cape:max_global_scale=1; leave --compare out to train one type with "
            "--position-... options"
        )
    names = args.compare or default
    if type_name or loose_options:
        names = [type_name or type_of_loose_options(default)]
    rows = {**{name: {} for name in types_of(architecture, domain)}, **(rows or {})}
    settings = {}
    for name in names:
        if name in settings:
            raise ValueError(f"{flag} {name} is given twice; give each name once")
        row, row_options = _parse_row(flag, name, domain, rows)
        settings[name] = {"type": row, **rows[row], **row_options, **loose_options}
        try:
            PositionConfig.from_dict(settings[name], domain, architecture)
        except ValueError as error:
            raise ValueError(f"position embedding {name}: {text_in_flags(error)}") from None
    return settings


def _parse_row(
    flag: str, text: str, domain: str, rows: Mapping[str, Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    row, colon, options_text = text.partition(":")
    if row not in rows:
        raise ValueError(f"{flag} {row} is unknown; allowed: {', '.join(rows)}; choose one")
    option_names = [option.name for option in option_fields(domain)]
    settings = {}
    for part in options_text.split(",") if colon else ():
        name, equals, value = part.partition("=")
        problem = ""
        if not equals:
            problem = f"{part!r} is no option=value"
        elif name not in option_names:
            problem = f"{name!r} is unknown"
        elif name in settings:
            problem = f"{name!r} is given twice"
        if problem:
            raise ValueError(f"{flag} {text}: {problem}; options: {', '.join(option_names)}")
        try:
            settings[name] = parse_option(name, value)
        except ValueError as error:
            raise ValueError(f"{flag} {text}: {error}") from None
    return row, settings


def type_of_loose_options(compared: Sequence[str]) -> str:
    """The type to which ``--position-...`` options without a type apply, in a program that compares
    the types `compared` by default."""
    return compared[0] if len(compared) == 1 else DEFAULT_TYPE


def type_help(types: Mapping[str, PositionType] = TYPES) -> str:
    """Help text for argparse: the meaning of each type."""
    meanings = (f"{name}: {row.summary}" for name, row in types.items())
    return f"position embedding: {'; '.join(meanings)}"


def option_help(metadata: Any) -> str:
    """Help text for argparse: meaning, unit and range of an option."""
    unit = f", in {name}" if (name := unit_of(metadata)) else ""
    return f"{metadata['help']}{unit}; allowed: {metadata['range']}".replace("%", "%%")


def text_in_flags(error: Exception, prefix: str = PREFIX) -> str:
    """Text of an error. An :class:`OptionError` names options as flags, such as
    ``--position-mean-normalize true`` for ``mean_normalize=True``."""

    def setting(option: str, value: Any) -> str:
        value_text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{option_flag(option, prefix)} {value_text or repr(value_text)}"

    if not isinstance(error, OptionError):
        return str(error)
    return error.text(partial(option_flag, prefix=prefix), setting)


def option_flag(option: str, prefix: str = PREFIX) -> str:
    """The flag of an option, or of the type, which is named :data:`TYPE_ARG`."""
    return flag(prefix + option.removeprefix(PREFIX))


def flag(name: str) -> str:
    """``position_source_bos`` as ``--position-source-bos``."""
    return "--" + name.replace("_", "-")


def _parser_of(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_option(name, text)
        except OptionError as error:
            # argparse hides the text of a ValueError, and names the flag itself
            message = error.text(flag, lambda _, value: repr(value))
            raise argparse.ArgumentTypeError(message) from None

    return parse


def _metavar(metadata: Any) -> str:
    if metadata["form"] == "choice":
        return "{" + ",".join(metadata["choices"]) + "}"
    forms = {"bool": "{true,false}", "ratio": "{auto,X}", "int": "N", "float": "X"}
    return {**forms, "layers": "LAYERS"}[metadata["form"]]
