"""The registry: position-embedding types as rows of data, and the papers' settings by name.

Sources: CAPE (Likhomanenko et al., NeurIPS 2021), SHAPE (Kiyono et al., EMNLP 2021), relative
position representations (Shaw et al., NAACL 2018). This module needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ByDomain:
    """A default that differs between text (tokens), audio (seconds) and images ([-1, 1] square)."""

    text: Any
    audio: Any
    image: Any


@dataclass(frozen=True)
class PositionType:
    """One row of the registry: what a position-embedding type is made of.

    Attributes:
        encoding: What is added to the content: "none", "sinusoid" or "table".
        options: The options this type has beside the common ones, with its defaults.
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
    "abspos": PositionType("table", {}, "learned table; wraps around (1-D), bicubic (2-D)"),
    "relpos": PositionType(
        "none",
        {"relative_context": ByDomain(150, 919, 15)},
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
            "max_global_shift": ByDomain(5.0, 30.0, 0.5),
            "max_local_shift": 0.5,
            "max_global_scale": ByDomain(1.0, 1.1, 1.4),
            "mean_normalize": ByDomain(False, True, False),
            **_SOURCE,
        },
        "sinusoids, continuous shift, local shift and scale in training (CAPE)",
        seq2seq={"synchronize": True, "source_scale": "auto", "source_bos": True},
    ),
}
DEFAULT_TYPE = "cape"

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
