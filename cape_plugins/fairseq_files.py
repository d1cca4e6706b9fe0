"""Checkpoint files of fairseq, read without fairseq: contents, arguments, position settings."""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cape_plugins.arguments import PREFIX, TYPE_ARG
from cape_plugins.config import PositionConfig, options
from cape_plugins.families import FAIRSEQ_FAMILIES, find_fairseq_family

DICTIONARIES = "dictionaries"  # among "task_state": size and digest of each
NUMBERS = ("bool", "int32", "int64", "float32", "float64")  # numpy types that metrics may hold


def load_fairseq(path: str | Path) -> dict[str, Any]:
    """Contents of a checkpoint file of fairseq; tensors stay in the file until they are used, where
    its format (of torch 1.6 and later) allows that.

    Raises:
        Exception: of many kinds, for a damaged file; see :func:`reason`.
    """
    allow_checkpoint_files()
    where = {"map_location": "cpu", "weights_only": True}
    return torch.load(path, mmap=zipfile.is_zipfile(path), **where)


def reason(error: Exception) -> str:
    """Why a checkpoint could not be read, in one line for people."""
    # the rest of torch's text is not for users: advice to load anything, "miniz"
    if isinstance(error, pickle.UnpicklingError | LookupError):
        return "not a file of torch, or with objects that fairseq does not save"
    if isinstance(error, EOFError):
        return "it ends too early"
    return str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__


def fairseq_arguments(state: Mapping[str, Any], section: str = "model") -> dict[str, Any]:
    """One section of the configuration in a checkpoint of fairseq; all arguments in files older
    than configurations."""
    cfg = state.get("cfg")
    arguments = cfg.get(section) if isinstance(cfg, Mapping) else state.get("args")
    if isinstance(arguments, argparse.Namespace):
        return dict(vars(arguments))
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def fairseq_config(
    arguments: Mapping[str, Any], names: Iterable[str], side: str | None = None
) -> PositionConfig:
    """Position settings of a fairseq model, also of a stock one.

    Args:
        arguments: Arguments of the model; an option that is None has the default of the type.
        names: Names of its parameters.
        side: One of :data:`SIDES`; default the encoder if there is one.

    Raises:
        ValueError: for values that are not allowed.
    """
    family = find_fairseq_family(names) or FAIRSEQ_FAMILIES[-1]
    side = side or next(iter(family.sides))
    row = family.sides[side]
    given = {option.name: arguments.get(PREFIX + option.name) for option in options("text")}
    given = given if row.field is None else dict(arguments.get(row.field) or {})
    own = given.pop("type", None)  # of a decoder that is not of the type of its encoder
    type_name = own or arguments.get(TYPE_ARG) or family.stock_type(arguments, side)
    return PositionConfig(type_name, row.domain, row.architecture, **given)


def fairseq_configs(
    arguments: Mapping[str, Any], names: Iterable[str]
) -> dict[str, PositionConfig]:
    """:func:`fairseq_config` of each side that the model has."""
    names = list(names)
    family = find_fairseq_family(names)
    return {
        side: fairseq_config(arguments, names, side) for side in (family.sides if family else ())
    }


def allow_checkpoint_files() -> None:
    """Declares to ``torch.load(weights_only=True)`` what fairseq stores beside tensors: settings
    as a Namespace, and metrics as numpy numbers. They hold data and run nothing from the file.

    Each builder of numpy is declared under its names in numpy 1 and 2, because a file says the
    one of the version that wrote it. Calling it again changes nothing. (torch's context manager
    would, at its end, also forget what others have declared.)
    """
    builders = np.zeros(1).__reduce__()[0], np.float64().__reduce__()[0]
    torch.serialization.add_safe_globals(
        [
            *(argparse.Namespace, np.ndarray, np.dtype),
            *(type(np.dtype(name)) for name in NUMBERS),
            *(
                (builder, f"numpy.{core}.multiarray.{builder.__name__}")
                for builder in builders
                for core in ("core", "_core")
            ),
        ]
    )
