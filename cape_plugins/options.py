"""One option of a position embedding: its field in a dataclass, and values from text.

This module needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from fractions import Fraction
from typing import Any

# Words for a ratio that is counted in the training data: do end-of-sentence tokens count? fairseq's
# preprocess.log counts them, the numbers of the CAPE paper (appendix D.1) do not.
COUNTED = {"auto": True, "auto-no-eos": False}


def option_field(
    form: str, off: Any, unit: str | Callable[[], str], help: str, **limits: Any
) -> Any:
    """A field whose ``None`` means "the default of the type" and whose `off` has no effect.

    Args:
        form: "float", "int", "bool", "choice" or "ratio".
        off: The value that leaves the model as if the option did not exist.
        unit: Unit of the value, as shown to people; see :func:`unit_of`.
        help: The consequence of the value.
        limits: ``low``, ``high`` (inclusive) for numbers, ``choices`` for a choice; ``grid`` if
            the option exists where positions are a grid only; ``training`` if it acts in training
            only; ``architecture`` if other models refuse it.
    """
    if form == "bool":
        allowed = "true or false"
    elif form == "choice":
        allowed = " or ".join(limits["choices"])
    elif form == "ratio":
        allowed = f"{', '.join(COUNTED)}, a number > 0 or TARGET/SOURCE"
    else:
        low, high = limits.get("low", 0), limits.get("high", math.inf)
        allowed = f">= {low}" if high == math.inf else f"{low} to {high}"
    metadata = {"form": form, "off": off, "unit": unit, "help": help, "range": allowed, **limits}
    return field(default=None, metadata=metadata)


def unit_of(metadata: Mapping[str, Any]) -> str:
    """Unit of an option, as shown to people; "" where there is none."""
    unit = metadata["unit"]
    return unit() if callable(unit) else unit


def choose(name: str, value: Any, allowed: Any) -> None:
    """Refuses a name that is not among those `allowed`.

    Raises:
        ValueError: naming them.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}. Choose one.")


def parse_value(meta: Mapping[str, Any], value: Any) -> Any:
    """`value`, perhaps text, as an option with this metadata takes it.

    Raises:
        ValueError, TypeError, ZeroDivisionError, OverflowError: if it cannot.
    """
    form = meta["form"]
    if form == "bool":
        return _parse_bool(value)
    if form == "choice":
        if value in meta["choices"]:
            return value
        raise ValueError
    if form == "ratio":
        return _parse_ratio(value)
    return _parse_number(form, value, meta.get("low", 0), meta.get("high", math.inf))


def _parse_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _parse_ratio(value: Any) -> str:
    """A word of :data:`COUNTED`, or the positive ratio as text: "470049/454234" stays two exact
    integers."""
    if isinstance(value, bool):
        raise ValueError
    text = str(value).replace(" ", "")
    if text in COUNTED:
        return text
    if len(text.lower().partition("e")[2]) > 4:
        raise ValueError  # Fraction would write such a number out in full
    if not 0 < float(Fraction(text)) < math.inf:
        raise ValueError
    return "1" if Fraction(text) == 1 else text


def _parse_number(form: str, value: Any, low: float, high: float) -> float | int:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high:
        raise ValueError
    if form == "float":
        return number
    if number != int(number):
        raise ValueError
    return int(number)
