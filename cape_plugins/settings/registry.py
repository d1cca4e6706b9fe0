"""The registry: types of position embedding and encodings as rows of data, and the papers'
settings by name.

Sources: CAPE (Likhomanenko et al., NeurIPS 2021), SHAPE (Kiyono et al., EMNLP 2021), relative
position representations (Shaw et al., NAACL 2018), randomized positional encodings (Ruoss et al.,
ACL 2023), random float sampling (Shimizu et al., arXiv 2602.14050), RoPE (Su et al., arXiv
2104.09864), ALiBi (Press et al., ICLR 2022), FIRE (Li et al., ICLR 2024), DINOv3 (Simeoni et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cape_plugins.settings.domains import DOMAINS

# Stands for a default that each domain sets, see Domain.defaults.
DOMAIN_DEFAULT = object()


@dataclass(frozen=True)
class Encoding:
    """One row of :data:`ENCODINGS`: properties that hosts and pictures may ask for.

    Attributes:
        adds: Adds an embedding to the content, computed by a module of
            :data:`~cape_plugins.BUILDERS`.
        learned: Has parameters.
        counts: Looks up the number of a position, and ignores coordinates.
        steps: Embeds numbers of steps since the first position, whole or not, instead of
            coordinates.
        relative: Acts in attention through relative keys, and needs a relative context.
        turns: Turns queries and keys in attention by their coordinates.
        biases: Adds a bias to attention scores that depends on the distance between coordinates.
    """

    adds: bool = True
    learned: bool = False
    counts: bool = False
    steps: bool = False
    relative: bool = False
    turns: bool = False
    biases: bool = False

    @property
    def in_attention(self) -> bool:
        """Whether attention uses the coordinates of queries and keys; only distances between
        coordinates count."""
        return self.turns or self.biases


ENCODINGS: dict[str, Encoding] = {
    "none": Encoding(adds=False),
    "sinusoid": Encoding(),
    "table": Encoding(learned=True, counts=True),
    "interpolated": Encoding(learned=True, steps=True),
    "relative": Encoding(adds=False, learned=True, relative=True),
    "rotary": Encoding(adds=False, turns=True),
    "linear": Encoding(adds=False, biases=True),
    "fire": Encoding(adds=False, biases=True, learned=True),
}


@dataclass(frozen=True)
class PositionType:
    """One row of the registry: encoding, options and draws of a position-embedding type.

    Attributes:
        encoding: Key of :data:`ENCODINGS`.
        options: The options that this type has beside the common options, with defaults;
            :data:`DOMAIN_DEFAULT` stands for the default of the domain. All options of training may
            be combined; ``max_position`` has an effect only where positions are drawn.
        summary: One line for help texts and tables.
        seq2seq: Defaults that hold in encoder-decoder models only.
        sampling: Key of :data:`~cape_plugins.mathematics.augmentation.SAMPLINGS`, if training
            always draws and sorts positions, instead of counting them. Such a type needs a
            sequence.
        learned: Key of the encoding that takes the place of `encoding` with the option
            ``learned_table``.
    """

    encoding: str
    options: Mapping[str, Any]
    summary: str
    seq2seq: Mapping[str, Any] = field(default_factory=dict)
    sampling: str = ""
    learned: str = ""


_TIME_OPTIONS = {"seconds_per_frame": DOMAIN_DEFAULT}
_GRID_OPTIONS = {"gamma": 1.0, **_TIME_OPTIONS}
_ALIGN_OPTIONS = {"source_scale": "1", "synchronize": False}
_AUGMENT_OPTIONS = {"augment_probability": 1.0}
_DRAW_OPTIONS = {"max_position": DOMAIN_DEFAULT, "random_evaluation": False, **_AUGMENT_OPTIONS}
# Augmentation of types that act on distances, off by default, so that the type is as published.
# There is no global shift, because a shift of all positions changes no distance.
_DISTANCE_OPTIONS = {
    "max_local_shift": 0.0,
    "max_global_scale": 1.0,
    "draw_positions": "none",
    **_DRAW_OPTIONS,
}

TYPES: dict[str, PositionType] = {
    "nopos": PositionType("none", {}, "no position embedding"),
    "sinpos": PositionType(
        "sinusoid", {**_GRID_OPTIONS, **_ALIGN_OPTIONS}, "sinusoids (Vaswani et al.)"
    ),
    "abspos": PositionType("table", {}, "learned table; wraps around (1-D), is resized (grids)"),
    "relpos": PositionType(
        "relative",
        {"relative_context": DOMAIN_DEFAULT},
        "learned relative keys in self-attention (Shaw et al.), no absolute positions",
    ),
    "rope": PositionType(
        "rotary",
        {"rotary_base": DOMAIN_DEFAULT, **_GRID_OPTIONS, **_DISTANCE_OPTIONS},
        "queries and keys turned by their positions (RoPE)",
    ),
    "alibi": PositionType(
        "linear",
        {"directed": False, **_TIME_OPTIONS, **_DISTANCE_OPTIONS},
        "a penalty on attention that grows with the distance (ALiBi)",
    ),
    "fire": PositionType(
        "fire",
        {**_TIME_OPTIONS, **_DISTANCE_OPTIONS},
        "a learned bias of the distance in attention (FIRE)",
    ),
    "shape": PositionType(
        "sinusoid",
        {**_GRID_OPTIONS, "max_offset": 500, **_AUGMENT_OPTIONS, **_ALIGN_OPTIONS},
        "sinusoids, random integer offset in training (SHAPE)",
    ),
    "cape": PositionType(
        "sinusoid",
        {
            **_GRID_OPTIONS,
            "max_global_shift": DOMAIN_DEFAULT,
            "max_local_shift": 0.5,
            "max_global_scale": DOMAIN_DEFAULT,
            "mean_normalize": DOMAIN_DEFAULT,
            **_AUGMENT_OPTIONS,
            **_ALIGN_OPTIONS,
        },
        "sinusoids, continuous shift, local shift and scale in training (CAPE)",
        seq2seq={"synchronize": True, "source_scale": "auto", "source_bos": True},
    ),
}
_SAMPLED_TYPES = {
    "randpos": ("subset", "a sorted random subset of whole positions in training (Ruoss et al.)"),
    "rfs": ("uniform", "sorted uniform positions in training (random float sampling)"),
}
for _name, (_sampling, _summary) in _SAMPLED_TYPES.items():
    TYPES[_name] = PositionType(
        "sinusoid",
        {**_DRAW_OPTIONS, "learned_table": False, **_ALIGN_OPTIONS},
        f"sinusoids, {_summary}",
        seq2seq={"synchronize": True, "source_scale": "auto"},
        sampling=_sampling,
        learned="interpolated",
    )
DEFAULT_TYPE = "cape"

ROTARY = "rotary"  # architecture of models that turn queries and keys


@dataclass(frozen=True)
class Architecture:
    """One row of :data:`ARCHITECTURES`.

    Attributes:
        needs: What an option of only this architecture needs, as text for the error of models of
            other architectures.
        sides: The stacks of a model with this architecture.
    """

    needs: str
    sides: tuple[str, ...]


ARCHITECTURES = {
    "encoder": Architecture(
        "a text that is known at once: in a text that grows step by step, positions of cached "
        "tokens would change",
        ("encoder",),
    ),
    "decoder": Architecture("a text that grows", ("decoder",)),
    "seq2seq": Architecture("one position embedding of source and target", ("encoder", "decoder")),
    ROTARY: Architecture("queries and keys that are turned", ("decoder",)),
}
# Types of rotary models, which turn queries and keys with the frequencies of the stock model. Only
# distances count in these models, so a shift of all positions has no effect. cape, randpos and rfs
# are rope with other defaults here.
ROTARY_TYPES: dict[str, PositionType] = {
    "nopos": PositionType("none", {}, "queries and keys are not turned"),
    "rope": PositionType("rotary", _DISTANCE_OPTIONS, TYPES["rope"].summary),
    "cape": PositionType(
        "rotary",
        {"max_local_shift": 0.5, "max_global_scale": DOMAIN_DEFAULT, **_AUGMENT_OPTIONS},
        "RoPE with local shift and scale in training",
    ),
    **{
        name: PositionType("rotary", _DRAW_OPTIONS, f"RoPE, {summary}", sampling=sampling)
        for name, (sampling, summary) in _SAMPLED_TYPES.items()
    },
}


def types_of(architecture: str, domain: str | None = None) -> dict[str, PositionType]:
    """The types that a model of this architecture can have, in any domain or in `domain`."""
    types = ROTARY_TYPES if architecture == ROTARY else TYPES
    grid = domain is not None and DOMAINS[domain].grid
    return {name: row for name, row in types.items() if not (grid and row.sampling)}


# Settings of papers and of released models by name; docs/paper_map.md lists them.
PRESETS: dict[str, dict[str, Any]] = {
    # CAPE Table 2: WMT14, 6L-6L with shift 5 or 50, 18L-18L with shift 10
    "cape_wmt14": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 5.0},
    "cape_wmt14_18l": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 10.0},
    "cape_wmt14_wide": {"type": "cape", "architecture": "seq2seq", "max_global_shift": 50.0},
    "relpos_wmt14": {"type": "relpos", "architecture": "seq2seq", "relative_context": 150},
    # CAPE section 5.2: "covers 60 s" is the width of the interval, so the default of 30 s stays
    "cape_wsj": {"type": "cape", "domain": "audio", "max_global_scale": 1.1},
    "cape_tedlium": {"type": "cape", "domain": "audio", "max_global_scale": 2.0},
    # The default context: 919 frames of 30 ms. The released code adds nothing beyond the context.
    "relpos_wsj": {"type": "relpos", "domain": "audio", "relative_beyond": "zero"},
    "relpos_first_wsj": {
        "type": "relpos",
        "domain": "audio",
        "relative_beyond": "zero",
        "layers": "first",
    },
    # CAPE section 5.1: ViT with scale 1.4, the default; UniViT without scale
    "cape_imagenet": {"type": "cape", "domain": "image"},
    "cape_univit": {"type": "cape", "domain": "image", "max_global_scale": 1.0},
    # DINOv3, as released: rescaled by up to 2, neither shifted nor jittered; docs/decisions.md
    "dinov3": {"type": "rope", "domain": "image", "max_global_scale": 2.0},
    # Translation models switched from sinusoids (Gumma et al., arXiv 2408.11382). The presets are
    # the type only, with its defaults. The paper's fine-tuning is LoRA with some long-context data.
    "rope_indictrans": {"type": "rope", "architecture": "seq2seq"},
    "alibi_indictrans": {"type": "alibi", "architecture": "seq2seq"},
    # SmolLM3: no positions in every fourth layer, base 2 000 000
    "rope_smollm3": {
        "type": "rope",
        "architecture": "decoder",
        "rotary_base": 2e6,
        "layers": "not:4",
    },
    # SHAPE section 3.1 and Table 4; SHAPE's relative baseline clips at 16, with values (2.2)
    "shape_wmt16": {"type": "shape", "architecture": "seq2seq", "max_offset": 500},
    "relpos_wmt16": {
        "type": "relpos",
        "architecture": "seq2seq",
        "relative_context": 16,
        "relative_values": True,
    },
}
