"""Defines every option of a position embedding once: meaning, unit, range, and conversion from
text.

Command-line flags, Hugging Face config fields, error texts and docs/flags.md are generated from
:class:`OptionFields` and the registry, and are written nowhere else. This module needs the standard
library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from cape_plugins.settings.domains import DOMAINS, Domain, each_domain
from cape_plugins.settings.registry import DEFAULT_TYPE, ENCODINGS, ROTARY, types_of

# Words for a ratio that is counted in the training data, each with whether end-of-sentence tokens
# count. fairseq's preprocess.log counts these tokens; the notebook behind appendix D.1 of the CAPE
# paper does not.
COUNTED = {"auto": True, "auto-no-eos": False}
# The option that a decoder with separate settings takes from its encoder by default.
AUGMENT_PROBABILITY = "augment_probability"


class OptionError(ValueError):
    """An option with a refused value. The text of the error names options as fields of Python;
    commands name flags, see :meth:`text`.

    Args:
        option: Name of the option.
        value: Value of the option.
        problem: Why the value is refused.
        allowed: Values that are allowed.
        remedy: What to do.
        needed: Name of another option, if `allowed` is about the other option.
    """

    def __init__(
        self,
        option: str,
        value: Any,
        problem: str,
        allowed: str = "",
        remedy: str = "",
        needed: str = "",
    ) -> None:
        # all arguments, so that the error can be pickled
        super().__init__(option, value, problem, allowed, remedy, needed)
        self.option, self.value, self.problem = option, value, problem
        self.allowed, self.remedy, self.needed = allowed, remedy, needed

    def __str__(self) -> str:
        return self.text(lambda option: option, lambda option, value: f"{option}={value!r}")

    def text(self, name: Callable[[str], str], setting: Callable[[str, Any], str]) -> str:
        """The message, with options as `name` and options with values as `setting` writes them."""
        needed = f"{name(self.needed)} " if self.needed else ""
        allowed = f"; allowed: {needed}{self.allowed}" if self.allowed else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{setting(self.option, self.value)} {self.problem}{allowed}.{remedy}"


def option_field(
    form: str, off: Any, unit: str | Callable[[], str], help: str, **limits: Any
) -> Any:
    """A field in which ``None`` means "the default of the type" and `off` has no effect.

    Args:
        form: "float", "int", "bool", "choice", "layers" or "ratio".
        off: The value with which the option has no effect.
        unit: Unit of the value, for help texts; see :func:`unit_of`.
        help: The consequence of the value.
        limits: ``low``, ``high`` (inclusive) for numbers, ``choices`` for a choice; ``grid`` if
            the option exists for grids only, ``timed`` if the option exists only for grids with an
            axis of time; ``training`` if the option acts in training only; ``architecture`` if
            models of other architectures refuse the option.
    """
    if form == "bool":
        allowed = "true or false"
    elif form == "choice":
        allowed = " or ".join(limits["choices"])
    elif form == "layers":
        allowed = "all, first, every:N or not:N"
    elif form == "ratio":
        allowed = f"{', '.join(COUNTED)}, a number > 0 or TARGET/SOURCE"
    else:
        low, high = limits.get("low", 0), limits.get("high", math.inf)
        allowed = f">= {low}" if high == math.inf else f"{low} to {high}"
    metadata = {"form": form, "off": off, "unit": unit, "help": help, "range": allowed, **limits}
    return field(default=None, metadata=metadata)


def unit_of(metadata: Mapping[str, Any]) -> str:
    """Unit of an option, for help texts; "" if the option has no unit."""
    unit = metadata["unit"]
    return unit() if callable(unit) else unit


@dataclass(frozen=True)
class OptionFields:
    """Fields of :class:`~cape_plugins.PositionConfig`, which completes and checks them."""

    type: str = DEFAULT_TYPE
    domain: str = "text"
    architecture: str = "encoder"
    max_global_shift: float | None = option_field(
        "float",
        0.0,
        lambda: each_domain("unit", named=True),
        "half-width D of the global shift U(-D, D) drawn per sample in training (CAPE Eq. 5)",
        training=True,
    )
    max_local_shift: float | None = option_field(
        "float",
        0.0,
        "grid steps",
        "half-width of the shift drawn per position in training; 0.5, half the distance to the "
        "neighbour, is the largest shift that keeps the order (CAPE Eq. 6)",
        high=0.5,
        training=True,
    )
    max_global_scale: float | None = option_field(
        "float",
        1.0,
        "",
        "largest global scale L; log scale is U(-ln L, ln L) per sample in training (CAPE Eq. 7)",
        low=1,
        training=True,
    )
    max_offset: int | None = option_field(
        "int",
        0,
        lambda: each_domain("steps"),
        "largest integer offset, drawn from U{0..max} per sample in training (SHAPE)",
        training=True,
    )
    draw_positions: str | None = option_field(
        "choice",
        "none",
        "",
        "training draws the positions of a sample below the number L of positions, and sorts them: "
        "a subset of whole numbers (Ruoss et al.) or uniform numbers (random float sampling); "
        "sequences only",
        choices=("none", "subset", "uniform"),
        training=True,
    )
    max_position: int | None = option_field(
        "int",
        0,
        "grid steps",
        "number L of positions that training draws from, at least the longest length in "
        "training, better the longest length in use (Ruoss et al.); 0 draws no positions",
        high=1_000_000,
        training=True,
    )
    augment_probability: float | None = option_field(
        "float",
        1.0,
        "",
        "probability with which training augments a sample: its shift, local shift, scale, "
        "offset or drawn positions together, on source and target; all other samples have the "
        "positions of evaluation; 1 in the papers",
        high=1,
        training=True,
    )
    random_evaluation: bool | None = option_field(
        "bool",
        False,
        "",
        "positions are drawn in evaluation, too, as Ruoss et al. do; for encoder-only models",
        architecture="encoder",
    )
    learned_table: bool | None = option_field(
        "bool",
        False,
        "",
        "a learned table instead of sinusoids, with one row for each of the L positions, "
        "interpolated linearly between rows",
    )
    mean_normalize: bool | None = option_field(
        "bool",
        False,
        "",
        "subtract the mean position of the valid positions, also in evaluation (CAPE App. A); "
        "impossible where positions are causal",
    )
    gamma: float | None = option_field(
        "float",
        1.0,
        "",
        "multiplies the [-1, 1] grid of images (CAPE App. B, Table 6); grids only",
        low=1e-6,
        grid=True,
    )
    seconds_per_frame: float | None = option_field(
        "float",
        0.0,
        "seconds",
        "time between the frames that a model of videos is given; 0 lets each video span [-1, 1] "
        "in time, too, whatever its duration; videos only",
        timed=True,
    )
    synchronize: bool | None = option_field(
        "bool",
        False,
        "",
        "source and target of a pair share one shift, scale, offset or set of drawn positions "
        "(CAPE 5.3); encoder-decoder models only",
        training=True,
        architecture="seq2seq",
    )
    source_scale: str | float | None = option_field(
        "ratio",
        "1",
        "target tokens per source token",
        "factor alpha on source positions (CAPE 5.3); auto counts it in the training data, "
        "auto-no-eos without EOS, as CAPE's notebook for App. D.1; encoder-decoder models only",
        architecture="seq2seq",
    )
    source_bos: bool | None = option_field(
        "bool",
        False,
        "",
        "the model puts a BOS token before the source, which marks the common origin of source "
        "and target positions (CAPE 5.3, App. D); encoder-decoder models only",
        architecture="seq2seq",
    )
    relative_context: int | None = option_field(
        "int",
        0,
        lambda: each_domain("steps"),
        "relative attention: largest distance N that has an embedding; each layer learns 2 N + 1 "
        "rows; 0 switches relative attention off (Shaw et al.)",
        high=100_000,
    )
    relative_values: bool | None = option_field(
        "bool", False, "", "add relative embeddings to the values, too (Shaw et al. Eq. 3)"
    )
    relative_beyond: str | None = option_field(
        "choice",
        "clip",
        "",
        "clip: distances beyond the context have the outermost embedding (Shaw et al.); zero: "
        "distances beyond the context have no embedding (as released with CAPE)",
        choices=("clip", "zero"),
    )
    relative_heads: str | None = option_field(
        "choice",
        "shared",
        "",
        "one relative table shared by the heads, or one per head",
        choices=("shared", "separate"),
    )
    rotary_base: float | None = option_field(
        "float",
        1.0,
        "",
        "ratio of the fastest to the slowest rotation of queries and keys, the theta of RoPE",
        low=1,
    )
    directed: bool | None = option_field(
        "bool",
        False,
        "",
        "every other head has a steeper slope before a token, and the other heads have a steeper "
        "slope after it, so that attention without a causal mask can tell before from after; "
        "sequences only",
    )
    layers: str | None = option_field(
        "layers",
        "all",
        "",
        "self-attention layers that have positions; not:4 leaves out every fourth (SmolLM3)",
    )


OPTION_FIELDS = {f.name: f for f in fields(OptionFields) if f.metadata}
_RELATIVE = tuple(name for name in OPTION_FIELDS if name.startswith("relative_"))
# maps names of options in older settings and checkpoints to the current names
FORMER_NAMES = {"relative_layers": "layers"}


def option_fields(domain: str | None = None) -> tuple[Any, ...]:
    """The dataclass fields of the options (type, domain and architecture are not options): all
    fields, or the fields that exist in `domain`."""
    options = tuple(OPTION_FIELDS.values())
    return options if domain is None else tuple(o for o in options if exists_in(o, DOMAINS[domain]))


def exists_in(option: Any, domain: Domain) -> bool:
    """Whether an option exists for positions of a domain."""
    needs_grid, needs_time = map(option.metadata.get, ("grid", "timed"))
    return not (needs_grid and not domain.grid) and not (needs_time and not domain.timed)


def applies(option: str, type_name: str, architecture: str = "encoder") -> bool:
    """True if position-embedding type `type_name` has this option in models of `architecture`."""
    row = types_of(architecture)[type_name]
    if option in row.options:
        return True
    if architecture == ROTARY:
        return option == "layers" and ENCODINGS[row.encoding].turns
    if option in ("layers", "source_bos"):  # the hint marks where positions that are added begin
        return option == "layers" or ENCODINGS[row.encoding].adds
    return option in _RELATIVE and not ENCODINGS[row.encoding].in_attention


def parse_option(name: str, value: Any) -> Any:
    """Turns `value`, perhaps text from a command line, into the type of option `name`.

    Raises:
        OptionError: names the option, the value, the allowed range and the meaning.
    """
    meta = OPTION_FIELDS[name].metadata
    try:
        return parse_value(meta, value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        unit = f" {unit_of(meta)}".rstrip()
        allowed, meaning = f"{meta['range']}{unit}", f"Meaning: {meta['help']}."
        raise OptionError(name, value, "is not allowed", allowed, meaning) from None


def choose(name: str, value: Any, allowed: Any) -> None:
    """Refuses a name that is not `allowed`.

    Raises:
        ValueError: names the allowed names.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}. Choose one.")


def parse_value(meta: Mapping[str, Any], value: Any) -> Any:
    """Turns `value`, perhaps text, into the type of an option with this metadata.

    Raises:
        ValueError, TypeError, ZeroDivisionError, OverflowError: if the option cannot take `value`.
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
    if form == "layers":
        return _parse_layers(value)
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
        raise ValueError  # Fraction would write all digits of 1e9999999, and fill the memory
    if not 0 < float(Fraction(text)) < math.inf:
        raise ValueError
    return "1" if Fraction(text) == 1 else text


def _parse_layers(value: Any) -> str:
    """ "all", "first", "every:N" or "not:N"."""
    if value in ("all", "first"):
        return value
    word, _, number = str(value).partition(":")
    if word not in ("every", "not") or not number.isdecimal() or int(number) < (word == "not") + 1:
        raise ValueError
    return f"{word}:{int(number)}"


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
