"""Flags and dataclass fields of fairseq models, generated from PositionConfig; and the way back.

fairseq suppresses defaults in model groups, so that they are left to the architecture functions.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Optional

from cape_plugins.arguments import (
    PREFIX,
    TYPE_ARG,
    TYPE_HELP,
    add_position_args,
    given_settings,
    option_help,
)
from cape_plugins.config import PositionConfig, options
from cape_plugins.registry import DEFAULT_TYPE

__all__ = [
    "add_admin_arg",
    "add_position_args",
    "config_from_args",
    "dataclass_with_positions",
    "set_missing",
]


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
        (TYPE_ARG, str, _field(DEFAULT_TYPE, TYPE_HELP)),
        *(
            (
                PREFIX + option.name,
                # fairseq looks into typing.Optional only
                Optional[types.get(option.metadata["kind"], str)],  # noqa: UP045
                _field(None, option_help(option.metadata)),
            )
            for option in options("text")
        ),
    ]
    return dataclasses.make_dataclass(
        name, extra, bases=(base,), namespace={"__module__": __name__}
    )


def config_from_args(args: Any, architecture: str, domain: str = "text") -> PositionConfig:
    """The complete configuration of a model from its arguments.

    Args:
        args: Namespace, DictConfig or dataclass with the flags as attributes.
        architecture: "decoder" for language models, "seq2seq" for encoder-decoders, "encoder".
        domain: "text" or "audio".

    Raises:
        ValueError: naming the option, its value, the allowed range and what to do.
    """
    try:
        return PositionConfig(
            getattr(args, TYPE_ARG), domain, architecture, **given_settings(args, domain)
        )
    except ValueError as error:
        raise ValueError(f"position flags (--position-embedding, --position-*): {error}") from None


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})
