"""Checkpoint files of fairseq, read without fairseq: contents, arguments, position settings.

Reading a file runs no code from the file: torch refuses everything that is not data
(``weights_only``), and this module refuses settings that fairseq would run as Python to build the
task or the model.
"""

from __future__ import annotations

import argparse
import ast
import errno
import pickle
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sized
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cape_plugins.checkpoints.families import FAIRSEQ_FAMILIES, find_fairseq_family
from cape_plugins.settings.arguments import PREFIX, TYPE_ARG
from cape_plugins.settings.config import PositionConfig, option_fields
from cape_plugins.utils.texts import first_line

DICTIONARIES = "dictionaries"  # key in "task_state": size and digest of each dictionary
NUMBERS = ("bool", "int32", "int64", "float32", "float64")  # numpy types that metrics may hold

# Settings whose text fairseq 0.12 passes to Python's eval(): first, settings that hold numbers only
# (also True, False) ...
_NUMBERS_IN_TEXT = (
    "adaptive_input_cutoff",
    "adaptive_softmax_cutoff",
    "character_filters",
    "conv_aggregator_layers",
    "conv_feature_layers",
    "feature_encoder_spec",
    "encoder_layers",
    "decoder_layers",
    "downsample",
    "pretrained",
    "project_input",
    "encoder_attention",
    "decoder_attention",
    "self_attention",
    "gated_attention",
    "left_pad_source",
    "left_pad_target",
    "pipeline_balance",
    "pipeline_encoder_balance",
    "pipeline_decoder_balance",
    "pipeline_devices",
    "pipeline_encoder_devices",
    "pipeline_decoder_devices",
    "adam_betas",
    "adamax_betas",
    "adafactor_eps",
    "lamb_betas",
)
# ... then settings that may also hold names or paths.
_TEXTS_IN_TEXT = ("wer_args", "xformers_att_config")
# The name of a side may come first: encoder.xformers_att_config, or with an underscore.
_EVALUATED = re.compile(
    r"(?:(?:en|de)coder[._])?"
    rf"(?:(?P<numbers>{'|'.join(_NUMBERS_IN_TEXT)})|{'|'.join(_TEXTS_IN_TEXT)})"
)
# omegaconf calls a function for ${NAME:...}: oc.env reads the environment; users add others.
_FUNCTION_CALL = re.compile(r"\$\{.*:", re.DOTALL)
# Largest list that a multiple such as "[(512, 3)] * 4" may make; the longest in fairseq has 20.
_MOST_ENTRIES = 10_000
_MOST_CHARACTERS = 60  # characters of a refused value
_REMEDY = "Give a file from a source that you trust."


class CheckpointError(ValueError):
    """A file that cannot be used as a checkpoint of fairseq; the text names cause and remedy."""


class UnsafeSettingError(CheckpointError):
    """A setting in a checkpoint that fairseq would run as code."""


def read_checkpoint(path: str | Path, remedy: str = "") -> dict[str, Any]:
    """Contents of a checkpoint file of fairseq. Nothing else in this project opens such a file.

    Tensors stay in the file until they are used, if the format allows (torch 1.6 and later).

    Args:
        path: Path of the file.
        remedy: Other inputs that the caller accepts; text that continues "Give another checkpoint
            ...".

    Raises:
        CheckpointError: for files that cannot be read, or hold no model.
        UnsafeSettingError: for settings that fairseq would run as code.
    """
    if not Path(path).is_file():
        problem = "is a folder" if Path(path).is_dir() else "no such file"
        raise CheckpointError(f"{path}: {problem}; check the path of the checkpoint.")
    allow_checkpoint_files()
    try:
        is_zip = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
            raise ValueError("the checkpoint has no entry 'model'")
    except Exception as error:  # a damaged file can stop the reader anywhere, with any error
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint of fairseq ({reason(error)}): it is damaged, "
            "incomplete or not written by fairseq-train. Give another checkpoint of the training, "
            f"such as checkpoint_best.pt{remedy}."
        ) from error
    for section in ("args", "cfg"):
        _refuse_code(state.get(section), section, path)
    return state


def reason(error: Exception) -> str:
    """The reason for which a file could not be read, as one line for users."""
    # Only parts of torch's message help users. The rest advises to switch weights_only off, which
    # would run code, or names "miniz", torch's reader of zip files.
    if type_name := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it holds {type_name[1]}, which no training saves"
    if isinstance(error, pickle.UnpicklingError | LookupError):
        return "not a file of torch, or with objects that no training saves"
    # a zip file ends with its central directory and the distance to the start of the directory
    before_beginning = isinstance(error, OSError) and error.errno == errno.EINVAL
    if isinstance(error, EOFError) or before_beginning or "central directory" in str(error):
        return "it is cut off"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return first_line(error).split(". ")[0]


def fairseq_arguments(state: Mapping[str, Any], section: str = "model") -> dict[str, Any]:
    """One section of the configuration in a checkpoint of fairseq. A file of an older fairseq has
    no configuration; then all arguments."""
    cfg = state.get("cfg")
    arguments = cfg.get(section) if isinstance(cfg, Mapping) else state.get("args")
    if isinstance(arguments, argparse.Namespace):
        return dict(vars(arguments))
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def fairseq_config(
    arguments: Mapping[str, Any], names: Iterable[str], side: str | None = None
) -> PositionConfig:
    """Position settings of a fairseq model, stock models included.

    Args:
        arguments: Arguments of the model; an option that is None has the default of the type.
        names: Names of the model's parameters.
        side: One of :data:`SIDES`; default the encoder if there is one.

    Raises:
        ValueError: for values that are not allowed.
    """
    family = find_fairseq_family(names) or FAIRSEQ_FAMILIES[-1]
    side = side or next(iter(family.sides))
    row = family.sides[side]
    if row.field is None:
        names = [option.name for option in option_fields("text")]
        settings = {name: arguments.get(PREFIX + name) for name in names}
    else:
        settings = dict(arguments.get(row.field) or {})
    # a decoder may have another type than its encoder
    decoder_type = settings.pop("type", None)
    type_name = decoder_type or arguments.get(TYPE_ARG) or family.stock_type(arguments, side)
    return PositionConfig(type_name, row.domain, row.architecture, **settings)


def fairseq_configs(
    arguments: Mapping[str, Any], names: Iterable[str]
) -> dict[str, PositionConfig]:
    """Position settings of each side that the model has, by side; see :func:`fairseq_config`."""
    names = list(names)
    family = find_fairseq_family(names)
    return {
        side: fairseq_config(arguments, names, side) for side in (family.sides if family else ())
    }


# ---- settings that fairseq evaluates -------------------------------------------------------------


def literal(text: str) -> Any:
    """Value of a text that holds data: everything that ``ast.literal_eval`` accepts, and sums and
    multiples of such data, as in fairseq's settings of layers: ``"[(512, 3)] * 4 + [(1024, 3)]"``.

    Raises:
        ValueError: for all other texts; no text is run.
        TypeError: if `text` is no string, as ``eval`` raises.
    """
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"{_short(text)} is not allowed, because fairseq would run it as Python; allowed: "
            "numbers, quoted texts, and lists, tuples and dicts of them."
        ) from None


def _value(node: ast.AST) -> Any:
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if not isinstance(node.op, ast.Mult):
        raise ValueError("neither a sum nor a multiple")
    for factor, times in ((left, right), (right, left)):
        if isinstance(factor, Sized) and len(factor) * times > _MOST_ENTRIES:
            raise ValueError("the list would fill the memory")
    return left * right


def _refuse_code(value: Any, name: str, path: str | Path) -> None:
    """Checks a section of the settings and everything inside the section.

    Raises:
        UnsafeSettingError: names file, setting, value, and what is allowed.
    """
    value = _without_omegaconf(value)
    if isinstance(value, str) and _FUNCTION_CALL.search(value):
        raise UnsafeSettingError(
            f"{path}: the setting {name} is {_short(value)}, which calls a function of omegaconf; "
            f"allowed: texts without ${{NAME:...}}. {_REMEDY}"
        )
    for key, inner in _entries(value):
        match = _EVALUATED.fullmatch(key)
        if match and not _is_data(inner, texts=match["numbers"] is None):
            allowed = "numbers" if match["numbers"] else "numbers, quoted texts"
            raise UnsafeSettingError(
                f"{path}: the setting {name}.{key} is {_short(inner)}, which fairseq would run as "
                f"Python; allowed: {allowed}, and lists or dicts of them. {_REMEDY}"
            )
        _refuse_code(inner, f"{name}.{key}", path)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a container of settings, of any type that a checkpoint may hold."""
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), inner) for index, inner in enumerate(value))
    # attributes of a Namespace; fairseq reads the attributes of an OrderedDict in the same way
    yield from ((str(key), inner) for key, inner in getattr(value, "__dict__", {}).items())


def _without_omegaconf(value: Any) -> Any:
    """A container of omegaconf as dict, list or text. The container's methods would call the
    functions that this module refuses. This package does not import omegaconf; if no host has
    imported omegaconf, no container exists."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(value):
        return value
    return omegaconf.OmegaConf.to_container(value, resolve=False)


def _is_data(value: Any, texts: bool) -> bool:
    """Whether a value, or the data that its text stands for, holds only numbers, or also texts."""
    value = _without_omegaconf(value)
    if isinstance(value, str):
        try:
            value = literal(value) if value.strip() else None
        except ValueError:
            return False
    return _holds_data(value, texts)


def _holds_data(value: Any, texts: bool) -> bool:
    value = _without_omegaconf(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return all(_holds_data(inner, texts) for inner in value)
    return value is None or isinstance(value, Number) or (texts and isinstance(value, str))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


# ---- types of objects ----------------------------------------------------------------------------


def allow_checkpoint_files() -> None:
    """Declares as safe, for ``torch.load(weights_only=True)``, the types that fairseq stores beside
    tensors: Namespace (settings) and numpy numbers (metrics). These types hold data and run no
    code.

    Each builder of numpy is declared under its names in numpy 1 and 2, because a file holds the
    name of the version that wrote the file. A second call changes nothing. (torch's context manager
    would, at its end, also remove types that other code has declared.)
    """
    builders = np.zeros(1).__reduce__()[0], np.float64().__reduce__()[0]
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            np.ndarray,
            np.dtype,
            *(type(np.dtype(name)) for name in NUMBERS),
            *(
                (builder, f"numpy.{core}.multiarray.{builder.__name__}")
                for builder in builders
                for core in ("core", "_core")
            ),
        ]
    )
