"""The classes of generated families, by name, as pickle asks for them. The classes are made at
first use: see :mod:`hf_models.generated.families`."""

from __future__ import annotations

from typing import Any

from hf_models.generated.families import class_of_name


def __getattr__(name: str) -> Any:
    if (found := class_of_name(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
