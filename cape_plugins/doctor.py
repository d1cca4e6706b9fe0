"""The command ``cape-plugins doctor``: which hosts are installed, and whether models compute there
what they should."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from cape_plugins.arguments import TYPE_ARG, add_position_args, given_settings
from cape_plugins.checks import Check
from cape_plugins.registry import DEFAULT_TYPE, ROTARY_TYPES, TYPES
from cape_plugins.serving.command import FAIRSEQ, HUGGING_FACE

GROUP = "cape_plugins.doctor"  # entry points, named after the host
PACKAGES = (
    *("cape-plugins", "torch", "transformers", "tokenizers", "huggingface_hub", "accelerate"),
    *("peft", "fairseq", "fairseq-fixed"),
)
# Checks of one model, a file or a folder or a name, or of built-in ones; the settings are those of
# its position embedding in training, None for the default.
Doctor = Callable[[str | None, Mapping[str, Any] | None], Iterator[tuple[str, Check]]]


def add_doctor_args(parser: argparse.ArgumentParser) -> None:
    """Adds the model, its position embedding in training, and the form of the report."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder or hub name of a Hugging Face model, or checkpoint file of fairseq (default: "
        "a tiny model of each family)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for reports of errors"
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="of a fairseq checkpoint: folder with its dictionaries (default: the one that it was "
        "trained on)",
    )
    add_position_args(parser, None, types={**ROTARY_TYPES, **TYPES})
    parser.set_defaults(run=run_doctor)
