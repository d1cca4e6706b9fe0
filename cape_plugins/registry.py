"""The registry: types of position embedding and encodings as rows of data, and the papers'
settings by name.

Sources: CAPE (Likhomanenko et al., NeurIPS 2021), SHAPE (Kiyono et al., EMNLP 2021), relative
position representations (Shaw et al., NAACL 2018). This module needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Stands for a default that each domain sets, see Domain.defaults.
OF_DOMAIN = object()


@dataclass(frozen=True)
class Encoding:
    """One row of :data:`ENCODINGS`: what hosts and pictures may ask of an encoding.

    Attributes:
        build: Makes the module that turns positions into embeddings; called with the keywords
            ``dim, frequencies, layout, table_size, table_std`` of
            :func:`~cape_plugins.encoder.build_position_encoder`. The module has the attribute
            ``dim`` and embeds coordinates ``[B, T, D]`` to ``[B, T, K]``; its method ``grid`` does
            so for ``[T, D]``, as exactly as it can. One that looks up numbers of positions has
            :meth:`~cape_plugins.encodings.PositionTable.lookup` instead. None if `adds` is False.
        adds: Adds to the content.
        learned: Has parameters.
        counts: Looks up the number of a position, whose coordinates do not matter.
        relative: Acts in attention by relative keys, and needs a relative context.
        turns: The host turns queries and keys by their positions in attention; these are what it
            asks a :meth:`~cape_plugins.encoder.PositionEncoder.coordinates` for.
    """

    build: Callable[..., Any] | None = None
    adds: bool = True
    learned: bool = False
    counts: bool = False
    relative: bool = False
    turns: bool = False


# Name to row; those that compute are beside their classes in encodings.py.
ENCODINGS: dict[str, Encoding] = {
    "none": Encoding(adds=False),
    "relative": Encoding(adds=False, learned=True, relative=True),
    "rotary": Encoding(adds=False, turns=True),
}


@dataclass(frozen=True)
class PositionType:
    """One row of the registry: what a position-embedding type is made of.

    Attributes:
        encoding: Key of :data:`ENCODINGS`.
        options: The options this type has beside the common ones, with its defaults;
            :data:`OF_DOMAIN` is that of the domain.
        summary: One line for help texts and tables.
        seq2seq: Defaults that hold in encoder-decoder models only.
    """

    encoding: str
    options: Mapping[str, Any]
    summary: str
    seq2seq: Mapping[str, Any] = field(default_factory=dict)


_SOURCE = {"source_scale": "1", "synchronize": False}

TYPES: dict[str, PositionType] = {
    "nopos": PositionType("none", {}, "no position embedding"),
    "sinpos": PositionType("sinusoid", {"gamma": 1.0, **_SOURCE}, "sinusoids (Vaswani et al.)"),
    "abspos": PositionType("table", {}, "learned table; wraps around (1-D), is resized (grids)"),
    "relpos": PositionType(
        "relative",
        {"relative_context": OF_DOMAIN},
        "learned relative keys in self-attention (Shaw et al.), no absolute positions",
    ),
    "shape": PositionType(
        "sinusoid",
        {"gamma": 1.0, "max_offset": 500, **_SOURCE},
        "sinusoids, random integer offset in training (SHAPE)",
    ),
    "cape": PositionType(
        "sinusoid",
        {
            "gamma": 1.0,
            "max_global_shift": OF_DOMAIN,
            "max_local_shift": 0.5,
            "max_global_scale": OF_DOMAIN,
            "mean_normalize": OF_DOMAIN,
            **_SOURCE,
        },
        "sinusoids, continuous shift, local shift and scale in training (CAPE)",
        seq2seq={"synchronize": True, "source_scale": "auto", "source_bos": True},
    ),
}
DEFAULT_TYPE = "cape"

ROTARY = "rotary"  # architecture of models that turn queries and keys
# Types of such models. Only distances count there, so that a shift of all positions does nothing.
ROTARY_TYPES: dict[str, PositionType] = {
    "nopos": PositionType("none", {}, "queries and keys are not turned"),
    "rope": PositionType("rotary", {}, "queries and keys turned by their positions (RoPE)"),
    "cape": PositionType(
        "rotary",
        {"max_local_shift": 0.5, "max_global_scale": OF_DOMAIN},
        "RoPE with local shift and scale in training",
    ),
}


def types_of(architecture: str) -> dict[str, PositionType]:
    """The types that a model of this architecture can have."""
    return ROTARY_TYPES if architecture == ROTARY else TYPES


PRESETS: dict[str, dict[str, Any]] = {
    # CAPE Table 2: WMT14, 6L-6L with shift 5 or 50, 18L-18L with shift 10
    "cape_wmt14": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 5.0},
    "cape_wmt14_18l": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 10.0},
    "cape_wmt14_wide": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 50.0},
    "relpos_wmt14": {"type": "relpos", "architecture": "seq2seq", "relative_context": 150},
    # CAPE section 5.2: "covers 60 s" is the width of the interval, 30 s to either side
    "cape_wsj": {"type": "cape", "domain": "audio", "max_global_scale": 1.1},
    "cape_tedlium": {"type": "cape", "domain": "audio", "max_global_scale": 2.0},
    # 919 frames of 30 ms; the released code adds nothing beyond the context
    "relpos_wsj": {"type": "relpos", "domain": "audio", "relative_beyond": "zero"},
    "relpos_first_wsj": {
        "type": "relpos",
        "domain": "audio",
        "relative_beyond": "zero",
        "relative_layers": "first",
    },
    # CAPE section 5.1: ViT with scale 1.4, UniViT without scale
    "cape_imagenet": {"type": "cape", "domain": "image"},
    "cape_univit": {"type": "cape", "domain": "image", "max_global_scale": 1.0},
    # SHAPE section 4; its relative baseline clips at 16 and has values too
    "shape_wmt16": {"type": "shape", "architecture": "seq2seq", "max_offset": 500},
    "relpos_wmt16": {
        "type": "relpos",
        "architecture": "seq2seq",
        "relative_context": 16,
        "relative_values": True,
    },
}
