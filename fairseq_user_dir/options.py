"""Command-line flags and dataclass fields, generated from PositionConfig; and the way back."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, Optional

from cape_plugins.config import PositionConfig, options, parse_option
from cape_plugins.registry import DEFAULT_TYPE, TYPES

PREFIX = "position_"
TYPE_ARG = "position_embedding"
_TYPE_HELP = "position embedding: " + "; ".join(f"{k}: {row.summary}" for k, row in TYPES.items())


def add_position_args(parser: argparse._ActionsContainer) -> None:
    """Adds ``--position-embedding`` and one ``--position-...`` flag per option.

    Defaults are left to the architecture function: fairseq suppresses them in model groups.
    """
    parser.add_argument(
        _flag(TYPE_ARG), choices=tuple(TYPES), help=f"{_TYPE_HELP} (default: {DEFAULT_TYPE})"
    )
    for option in options("text"):
        parser.add_argument(
            _flag(PREFIX + option.name),
            type=_parser_of(option.name),
            metavar=_metavar(option.metadata),
            help=f"{_help(option.metadata)} (default: that of the type)",
        )


def add_admin_arg(parser: argparse._ActionsContainer) -> None:
    """Adds ``--admin-init``."""
    parser.add_argument(
        "--admin-init",
        action="store_true",
        help="ADMIN initialisation of a post-LN encoder-decoder (Liu et al. 2020), profiled on "
        "the first training sentences when the model is built",
    )


def set_missing(args: Any) -> None:
    """Gives every option that is absent from `args` the value "unset"; part of each architecture
    function, which fairseq also runs on the settings of loaded checkpoints."""
    if getattr(args, TYPE_ARG, None) is None:
        setattr(args, TYPE_ARG, DEFAULT_TYPE)
    for option in options("text"):
        name = PREFIX + option.name
        if getattr(args, name, None) is None:
            setattr(args, name, None)


def dataclass_with_positions(name: str, base: type) -> type:
    """`base`, a FairseqDataclass, extended by the fields of the flags of :func:`add_position_args`
    (for models that fairseq configures by dataclass)."""
    types = {"float": float, "int": int}
    extra: list[tuple[str, Any, Any]] = [
        (TYPE_ARG, str, _field(DEFAULT_TYPE, _TYPE_HELP)),
        *(
            (
                PREFIX + option.name,
                # fairseq looks into typing.Optional only
                Optional[types.get(option.metadata["kind"], str)],  # noqa: UP045
                _field(None, _help(option.metadata)),
            )
            for option in options("text")
        ),
    ]
    return dataclasses.make_dataclass(
        name, extra, bases=(base,), namespace={"__module__": __name__}
    )


def config_from_args(args: Any, architecture: str) -> PositionConfig:
    """The complete configuration of a model from its arguments.

    Args:
        args: Namespace, DictConfig or dataclass with the flags as attributes.
        architecture: "decoder" for language models, "seq2seq" for encoder-decoders.

    Raises:
        ValueError: naming the option, its value, the allowed range and what to do.
    """
    settings = {option.name: getattr(args, PREFIX + option.name) for option in options("text")}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return PositionConfig(getattr(args, TYPE_ARG), "text", architecture, **given)
    except ValueError as error:
        raise ValueError(f"position flags (--position-embedding, --position-*): {error}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser_of(name: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_option(name, text)
        except ValueError as error:
            # argparse hides the text of a ValueError
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _metavar(metadata: Any) -> str:
    if metadata["kind"] == "choice":
        return "{" + ",".join(metadata["choices"]) + "}"
    return {"bool": "{true,false}", "ratio": "{auto,X}", "int": "N", "float": "X"}[metadata["kind"]]


def _help(metadata: Any) -> str:
    unit = f", in {metadata['unit']}" if metadata["unit"] else ""
    return f"{metadata['help']}{unit}; allowed: {metadata['range']}".replace("%", "%%")


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})
