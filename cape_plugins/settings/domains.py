"""Domains as rows of data: the settings in which text, audio, images and videos differ. A new
domain is a new row.

    DOMAINS["scan"] = Domain(grid=("slices", "rows", "columns"), frequencies=..., unit=..., ...)

is enough for settings, flags, error texts, encodings, learned tables, relative attention and
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Defaults of log-mel frames (CAPE Appendix C).
HOP_SECONDS = 0.01
WINDOW_SECONDS = 0.025
_PAPER_SIZES = (160 / 224, 1, 384 / 224)  # pixels, CAPE Figure 9
# VideoMAE and ViViT read clips of about 2 s: every fourth or second frame of 30 a second.
_FRAME_SECONDS = 4 / 30
# Percent of the updates of the first training for which a model is trained after a switch
SWITCH_PERCENT = 50


class Recommended(NamedTuple):
    """What docs/choosing.md recommends for longer inputs.

    Attributes:
        where: The inputs for which these settings are best.
        settings: Types with their options, the best first.
    """

    where: str
    settings: Sequence[Mapping[str, Any]]


_RELPOS = Recommended("most tasks", ({"type": "relpos"},))


@dataclass(frozen=True)
class Domain:
    """One kind of positions: axes, unit, frequencies, and defaults.

    Positions are a sequence or the cells of a grid. A learned table of a sequence has a row for
    each number, and begins again at its first row after the last. Each axis of a grid spans [-1,
    1], except for time, and a learned table is resized to the grid.

    Attributes:
        frequencies: Frequency matrix of sinusoids, ``[D, K/2]``: a key of
            :data:`~cape_plugins.mathematics.encodings.FREQUENCIES` or a function of K and a device
            like the values there.
        unit: Unit of coordinates and of the global shift.
        steps: Name of the elements along an axis, in the plural.
        axis: Label of an axis of positions in pictures.
        grid: Names of the D axes of a grid, the slowest first. Coordinates have the fastest first:
            x, then y. Empty for a sequence, D = 1. Relative tables have these names.
        timed: Whether the slowest axis of a grid is time in seconds from the middle, instead of
            spanning [-1, 1]; the option ``seconds_per_frame`` is the distance of frames.
        rotary_speed: Radians per `unit` by which the fastest pair of channels is turned (rope).
        defaults: Defaults of options that types leave to the domain.
        architecture: Architecture of the papers' models for this domain.
        spacing: Distance between neighbours in `unit`, in pictures of models that store no
            distance. Lengths are then given in `unit`. None if positions are counted, and for
            grids.
        symbol: Abbreviation of `unit`, shown after numbers.
        dim: Number of channels in pictures of settings without a model.
        table_size: Size of a model's learned table; for a grid the size of the papers' training
            inputs.
        sizes: Maps the name of a picture, or "test", to the sizes of inputs shown by default:
            numbers of positions, lengths in `unit` if there is a `spacing`, for grids factors of
            the sides of `table_size`.
        from_scratch: Type that docs/choosing.md recommends if nothing in use is longer than in
            training.
        coarse: Type for grids on which many channels of sinusoids alias; empty for sequences.
        longer: What docs/choosing.md recommends for longer inputs, and for grids of other sizes.
        twice: The same up to twice the length of training, if this is something else.
        pairs: The same for pairs of source and target, up to twice as long as in training.
        longer_pairs: The same for pairs of source and target that are longer still.
        with_decoder: Note on models that write text token by token, for longer inputs.
        by_position: An example of tasks in which positions alone lead to the answer.
        switch_percent: The percent of :data:`SWITCH_PERCENT` for a switch to a recommended type;
            a switch to other types has the constant (docs/settings.md, A trained model).
        keeps_type: Whether a trained model keeps its type for longer inputs (docs/settings.md, A
            trained model).
    """

    frequencies: str | Callable[..., Any]
    unit: str
    steps: str
    axis: str
    grid: tuple[str, ...] = ()
    timed: bool = False
    rotary_speed: float = 1.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    architecture: str = "encoder"
    spacing: float | None = None
    symbol: str = ""
    dim: int = 512
    table_size: int | tuple[int, ...] = 1024
    sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)
    from_scratch: str = "relpos"
    coarse: str = ""
    longer: Recommended = _RELPOS
    twice: Recommended | None = None
    pairs: Recommended | None = None
    longer_pairs: Recommended | None = None
    with_decoder: str = ""
    by_position: str = ""
    switch_percent: int = SWITCH_PERCENT
    keeps_type: bool = False

    def __post_init__(self) -> None:
        # neighbours on a grid have a fixed distance in time only, which is the option
        # seconds_per_frame
        if self.grid and self.spacing is not None:
            raise ValueError(
                f"spacing={self.spacing} of a domain with grid={self.grid} is not allowed: each "
                "axis of a grid spans [-1, 1]; allowed: None. Leave spacing out, or grid."
            )

    @property
    def num_coords(self) -> int:
        """D, the number of coordinates of a position."""
        return len(self.grid) or 1

    @property
    def bias_unit(self) -> float:
        """Distance in `unit` that biases of attention count as 1: the distance of neighbours in
        inputs of the default size."""
        if not self.grid:
            return self.spacing or 1.0
        sizes = (self.table_size,) if isinstance(self.table_size, int) else self.table_size
        size = min(sizes[1:] if self.timed else sizes)
        return 2 / size

    def default_sizes(self, picture: str) -> Sequence[float]:
        """Sizes of the inputs that a picture shows by default."""
        return self.sizes.get(picture, (1,) if self.grid else (20 * (self.spacing or 1),))


_IMAGE_TYPES: dict[str, Any] = {
    "from_scratch": "rope",
    "coarse": "abspos",
    "longer": Recommended(
        "training at mixed sizes (UniViT); after training at one size, sinpos is ahead beyond 1.5 "
        "times this size",
        ({"type": "rope"},),
    ),
}
DOMAINS: dict[str, Domain] = {
    "text": Domain(
        frequencies="text",
        unit="tokens",
        steps="tokens",
        axis="position (tokens)",
        defaults={
            "max_global_shift": 5.0,
            "max_global_scale": 1.0,
            "mean_normalize": False,
            "max_position": 2048,
            "relative_context": 150,
            "rotary_base": 10_000.0,  # as Llama
        },
        architecture="seq2seq",
        sizes={
            "components": (50, 200),
            "similarity": (200,),
            "augmentation": (20,),
            "coverage": (50,),
            "test": (50, 100, 200),
        },
        pairs=Recommended("translation, up to twice the length of training", ({"type": "rope"},)),
        longer_pairs=Recommended(
            "translation, beyond twice the length of training",
            ({"type": "relpos"}, {"type": "fire"}),
        ),
        by_position="lists of numbers",
        keeps_type=True,
    ),
    "audio": Domain(
        frequencies="audio",
        unit="seconds",
        steps="frames",
        axis="time (s)",
        rotary_speed=30.0,  # less than pi between frames that are up to 100 ms apart
        defaults={
            "max_global_shift": 30.0,
            "max_global_scale": 1.1,
            "mean_normalize": True,
            "max_position": 4096,
            "relative_context": 919,
            "rotary_base": 10_000.0,
        },
        spacing=3 * HOP_SECONDS,  # hop of 10 ms, stride 3 (CAPE Appendix C)
        symbol="s",
        dim=768,
        table_size=460,
        sizes={
            "components": (2, 10),
            "similarity": (6,),
            "augmentation": (15,),
            "coverage": (15,),
            "test": (15, 30, 60),
        },
        from_scratch="rope",
        longer=Recommended("speech with CTC", ({"type": "alibi", "directed": True},)),
        twice=Recommended(
            "speech with CTC, up to twice the length of training",
            ({"type": "rope", "max_local_shift": 0.5, "max_global_scale": 2.0},),
        ),
        by_position="the control task of cape-plugins demo",
        switch_percent=25,
        with_decoder=" A model with a decoder of text takes fire or relpos instead.",
    ),
    "image": Domain(
        frequencies="image",
        unit="half the image side",
        steps="patches",
        axis="position (normalised)",
        grid=("rows", "columns"),
        rotary_speed=2 * math.pi,  # as DINOv3
        defaults={
            "max_global_shift": 0.5,
            "max_global_scale": 1.4,
            "mean_normalize": False,
            "relative_context": 15,
            "rotary_base": 100.0,  # as DINOv3
        },
        dim=768,
        table_size=(14, 14),
        sizes={
            "components": _PAPER_SIZES,
            "similarity": (1,),
            "augmentation": _PAPER_SIZES[:1],
            "coverage": (1,),
            "test": _PAPER_SIZES,
        },
        **_IMAGE_TYPES,
    ),
    "video": Domain(
        frequencies="video",
        unit="half the image side and seconds",
        steps="tubelets",
        axis="position (normalised)",
        grid=("frames", "rows", "columns"),
        timed=True,
        rotary_speed=2 * math.pi,
        # As for images: in a clip of 2 s, time is as long as a side, which spans [-1, 1].
        defaults={
            "max_global_shift": 0.5,
            "max_global_scale": 1.4,
            "mean_normalize": False,
            "relative_context": 15,
            "rotary_base": 100.0,
            "seconds_per_frame": _FRAME_SECONDS,
        },
        dim=768,
        table_size=(8, 14, 14),
        sizes={"test": _PAPER_SIZES},
        **_IMAGE_TYPES,
    ),
}


def default_of(domain: str, option: str) -> Any:
    """Default of an option that types leave to the domain.

    Raises:
        ValueError: if the row of the domain does not have the option.
    """
    defaults = DOMAINS[domain].defaults
    if option not in defaults:
        raise ValueError(
            f"domain {domain!r} has no default of {option}; add it to the `defaults` of the "
            "domain's row in DOMAINS, or give the option a value."
        )
    return defaults[option]


def each_domain(attribute: str, named: bool = False) -> str:
    """An attribute of all domains as text, such as "tokens, frames or patches"; if `named`, such as
    "tokens (text), seconds (audio), half the image side (image)"."""
    if named:
        return ", ".join(f"{getattr(row, attribute)} ({name})" for name, row in DOMAINS.items())
    *most, last = dict.fromkeys(getattr(row, attribute) for row in DOMAINS.values())
    return f"{', '.join(most)} or {last}" if most else last
