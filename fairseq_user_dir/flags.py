"""Generates flags and dataclass fields of fairseq models from PositionConfig, and reads their
values.

fairseq adds the flags of a model with ``argparse.SUPPRESS``, so a flag that is not given is missing
from the parsed arguments. The architecture functions call :func:`set_missing`, which adds the
default type, and None for each missing option.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import nullcontext
from typing import Any, Optional

from omegaconf import OmegaConf, open_dict

from cape_plugins.checkpoints.families import DECODER_FIELD
from cape_plugins.settings import arguments
from cape_plugins.settings.arguments import (
    PREFIX,
    TYPE_ARG,
    flag,
    given_settings,
    option_help,
    type_help,
)
from cape_plugins.settings.config import PositionConfig, option_fields
from cape_plugins.settings.options import AUGMENT_PROBABILITY, applies
from cape_plugins.settings.registry import DEFAULT_TYPE
from fairseq_user_dir.host.errors import named_by_flags

ALLOW_ARG = "allow_changed_settings"
ALLOW_FLAG = "--allow-changed-settings"
DECODER_PREFIX = f"{DECODER_FIELD}_"
_ALLOW_HELP = (
    "resume a training although its position settings differ from the checkpoint, or use a "
    "checkpoint although the dictionary differs"
)


def add_position_args(
    parser: argparse._ActionsContainer, domain: str = "text", architecture: str = "seq2seq"
) -> None:
    """Adds the position flags of :mod:`cape_plugins` and ``--allow-changed-settings``."""
    arguments.add_position_args(parser, domain, architecture=architecture)
    parser.add_argument(ALLOW_FLAG, action="store_true", help=_ALLOW_HELP)


def add_decoder_args(parser: argparse._ActionsContainer) -> None:
    """Adds the flags of a text decoder that may have another type than the encoder: the position
    flags with ``--position-decoder-`` in place of ``--position-``."""
    encoder_parser = argparse.ArgumentParser(add_help=False)
    arguments.add_position_args(encoder_parser, "text", "the type of the encoder", "decoder")
    for action in encoder_parser._actions:
        if action.help is not argparse.SUPPRESS:
            parser.add_argument(
                flag(_decoder_arg(action.dest)),
                type=action.type,
                choices=action.choices,
                metavar=action.metavar,
                help=f"of the decoder: {action.help}",
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
    """Gives the default type if there is no type, and None to every option that `args` lacks. Each
    architecture function calls this function. fairseq also runs architecture functions on the
    settings of loaded checkpoints, which may be older than an option."""
    if getattr(args, TYPE_ARG, None) is None:
        setattr(args, TYPE_ARG, DEFAULT_TYPE)
    for option in option_fields("text"):
        name = PREFIX + option.name
        if getattr(args, name, None) is None:
            setattr(args, name, None)


def set_args(args: Any, **values: Any) -> None:
    """Sets attributes of a namespace, or of a configuration with a fixed set of keys."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        for name, value in values.items():
            setattr(args, name, value)


def record(args: Any, config: PositionConfig) -> None:
    """Writes all settings, defaults included, into the arguments that a checkpoint stores: a later
    release may have other defaults, which must not change a trained model."""
    settings = {PREFIX + o.name: getattr(config, o.name) for o in option_fields("text")}
    set_args(args, **{TYPE_ARG: config.type, **settings})


def dataclass_with_positions(name: str, base: type) -> type:
    """Returns a subclass of `base`, a FairseqDataclass, with a field for each flag of
    :func:`add_position_args`. The subclass serves models that fairseq configures with a dataclass.
    """
    types = {"float": float, "int": int}
    extra: list[tuple[str, Any, Any]] = [
        (TYPE_ARG, str, _field(DEFAULT_TYPE, type_help())),
        (ALLOW_ARG, bool, _field(False, _ALLOW_HELP)),
        *(
            (
                PREFIX + option.name,
                # fairseq understands typing.Optional, but not `X | None`
                Optional[types.get(option.metadata["form"], str)],  # noqa: UP045
                _field(None, option_help(option.metadata)),
            )
            for option in option_fields("text")
        ),
    ]
    return dataclasses.make_dataclass(
        name, extra, bases=(base,), namespace={"__module__": __name__}
    )


def config_from_args(args: Any, architecture: str, domain: str = "text") -> PositionConfig:
    """The complete configuration of a model, from the model's arguments.

    Args:
        args: Namespace, DictConfig or dataclass with the flags as attributes.
        architecture: "decoder" for language models, "seq2seq" for encoder-decoders, "encoder".
        domain: "text" or "audio".

    Raises:
        SettingsError: names the flag, the value, the allowed range and what to do.
    """
    with named_by_flags():
        return PositionConfig(
            getattr(args, TYPE_ARG), domain, architecture, **given_settings(args, domain)
        )


def decoder_config_from_args(args: Any) -> PositionConfig:
    """The complete configuration of a text decoder. By default the decoder has the type and the
    augment_probability of the encoder. Settings of a checkpoint stay unless a flag changes them.
    All settings are written into `args`, which fairseq stores; the type is written only if a flag
    or a checkpoint has named it.

    Args:
        args: Namespace with the flags of :func:`add_decoder_args` as attributes.

    Raises:
        SettingsError: names the flag, the value, the allowed range and what to do.
    """
    encoder_type = getattr(args, TYPE_ARG)
    stored = dict(getattr(args, DECODER_FIELD, None) or {})
    stored_type = stored.pop("type", None)
    named_type = getattr(args, _decoder_arg(TYPE_ARG), None) or stored_type
    decoder_type = named_type or encoder_type
    if decoder_type != (stored_type or encoder_type):
        stored = {}  # settings of another type
    names = [option.name for option in option_fields("text")]
    flags = {name: getattr(args, _decoder_arg(PREFIX + name), None) for name in names}
    flags = {name: value for name, value in flags.items() if value is not None}
    if applies(AUGMENT_PROBABILITY, decoder_type, "decoder"):
        encoder_probability = getattr(args, PREFIX + AUGMENT_PROBABILITY, None)
        if encoder_probability is not None:
            stored.setdefault(AUGMENT_PROBABILITY, encoder_probability)
    with named_by_flags(prefix=DECODER_PREFIX):
        config = PositionConfig(decoder_type, "text", "decoder", **{**stored, **flags})
    to_store = {"type": named_type} if named_type else {}
    to_store |= {name: getattr(config, name) for name in names}
    set_args(args, **{DECODER_FIELD: to_store})
    return config


def _decoder_arg(name: str) -> str:
    return DECODER_PREFIX + name.removeprefix(PREFIX)


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})
