"""Flags and dataclass fields of fairseq models, generated from PositionConfig, and back.

fairseq suppresses defaults in model groups, so that they are left to the architecture functions.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import nullcontext
from typing import Any, Optional

from omegaconf import OmegaConf, open_dict

from cape_plugins import arguments
from cape_plugins.arguments import PREFIX, TYPE_ARG, given_settings, option_help, type_help
from cape_plugins.config import PositionConfig, options
from cape_plugins.registry import DEFAULT_TYPE
from fairseq_user_dir.errors import named_by_flags

ALLOW_ARG = "allow_changed_settings"
ALLOW_FLAG = "--allow-changed-settings"
_ALLOW_HELP = (
    "resume although the position settings, or start although the dictionary, are not those of "
    "the checkpoint"
)


def add_position_args(
    parser: argparse._ActionsContainer, domain: str = "text", architecture: str = "seq2seq"
) -> None:
    """Adds the flags of the core and ``--allow-changed-settings``."""
    arguments.add_position_args(parser, domain, architecture=architecture)
    parser.add_argument(ALLOW_FLAG, action="store_true", help=_ALLOW_HELP)


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


def set_args(args: Any, **values: Any) -> None:
    """Sets attributes of a namespace or of a configuration with a fixed set of keys."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        for name, value in values.items():
            setattr(args, name, value)


def record(args: Any, config: PositionConfig) -> None:
    """Writes all settings, defaults included, into the arguments that a checkpoint stores: a
    default may change, a trained model may not."""
    settings = {PREFIX + o.name: getattr(config, o.name) for o in options("text")}
    set_args(args, **{TYPE_ARG: config.type, **settings})


def dataclass_with_positions(name: str, base: type) -> type:
    """`base`, a FairseqDataclass, extended by the fields of the flags of :func:`add_position_args`
    (for models that fairseq configures by dataclass)."""
    types = {"float": float, "int": int}
    extra: list[tuple[str, Any, Any]] = [
        (TYPE_ARG, str, _field(DEFAULT_TYPE, type_help())),
        (ALLOW_ARG, bool, _field(False, _ALLOW_HELP)),
        *(
            (
                PREFIX + option.name,
                # fairseq looks into typing.Optional only
                Optional[types.get(option.metadata["form"], str)],  # noqa: UP045
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
        SettingsError: naming the flag, its value, the allowed range and what to do.
    """
    with named_by_flags():
        return PositionConfig(
            getattr(args, TYPE_ARG), domain, architecture, **given_settings(args, domain)
        )


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})
