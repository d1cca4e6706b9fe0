"""Builds the position encoder of one side of a model from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from cape_plugins.mathematics.encoder import SIDES, PositionEncoder
from cape_plugins.mathematics.encodings import Frequencies, Sinusoid, warn_of_coarse_grid
from cape_plugins.mathematics.tables import InterpolatedTable, PositionTable
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS


def _sinusoid(dim: int, frequencies: str | Frequencies, layout: str, **_: Any) -> Sinusoid:
    return Sinusoid(dim, frequencies, layout)


def _table(dim: int, table_size: Any, table_std: float | None, **_: Any) -> PositionTable:
    return PositionTable(dim, table_size, table_std)


def _interpolated(
    dim: int, max_position: int, table_std: float | None, **_: Any
) -> InterpolatedTable:
    return InterpolatedTable(dim, max_position, table_std)


# Builders of the modules that embed positions, by key in ENCODINGS. A builder takes the keywords
# dim, frequencies, layout, table_size and table_std of build_position_encoder, and max_position of
# the settings. The module has the attribute dim and embeds coordinates [B, T, D] to [B, T, K]; the
# method grid embeds [T, D] as exactly as possible. A module that looks up numbers of positions has
# PositionTable.lookup instead.
BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "sinusoid": _sinusoid,
    "table": _table,
    "interpolated": _interpolated,
}


def build_position_encoder(
    config: PositionConfig,
    dim: int,
    *,
    side: str = SIDES[0],
    start: float = 0.0,
    unit: float = 1.0,
    frequencies: str | Frequencies | None = None,
    layout: str = "cos_sin_interleaved",
    table_size: int | tuple[int, ...] | None = None,
    table_std: float | None = None,
) -> PositionEncoder:
    """The position encoder of one side of a model.

    Args:
        config: Complete settings.
        dim: K.
        side: "source" or "target"; alpha scales positions of the source only.
        start: Coordinate of position 0, in multiples of `unit`.
        unit: Distance that the host counts as 1, in the unit of the domain, such as seconds between
            frames.
        frequencies: Key of :data:`~cape_plugins.mathematics.encodings.FREQUENCIES`, or a function
            like the values there; default the frequencies of the domain.
        layout: One of :data:`~cape_plugins.mathematics.encodings.LAYOUTS`; default the layout of
            the paper.
        table_size: Rows of a learned table; for a grid the size of the inputs, (height, width) in
            patches. Sinusoids warn if the grid is too coarse. Default 1024, or the grid of the
            domain.
        table_std: Standard deviation of the initial table; default ``dim ** -0.5``.

    Raises:
        ValueError: if `dim` does not fit the encoding, for an unknown side or a bad unit.
    """
    encoding, domain = None, DOMAINS[config.domain]
    if table_size is None:
        table_size = domain.table_size if domain.grid else 1024
    if config.encoding.adds:
        encoding = BUILDERS[config.encoding_name](
            dim=dim,
            frequencies=frequencies or domain.frequencies,
            layout=layout,
            table_size=table_size,
            table_std=table_std,
            max_position=config.max_position,
        )
    if domain.grid and not isinstance(table_size, int) and isinstance(encoding, Sinusoid):
        seconds = config.seconds_per_frame or None
        warn_of_coarse_grid(encoding, table_size, domain.table_size, config.gamma, seconds)
    return PositionEncoder(config, encoding, side, start, unit)
