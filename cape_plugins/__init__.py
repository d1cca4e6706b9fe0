"""Continuous augmented positional embeddings (CAPE), SHAPE and their baselines, in plain torch.

This package turns positions into embeddings; ``fairseq_user_dir`` and ``hf_models`` use these
embeddings in fairseq and Hugging Face models. This package imports torch and numpy only.
"""

from cape_plugins.corpus.alpha import TokenCounts
from cape_plugins.mathematics.augmentation import Draw, augment, draw_global, draw_local
from cape_plugins.mathematics.builders import BUILDERS, build_position_encoder
from cape_plugins.mathematics.encoder import PositionEncoder
from cape_plugins.mathematics.encodings import Sinusoid, combine
from cape_plugins.mathematics.in_attention import (
    AttentionPositions,
    StackPositions,
    build_layer_bias,
    build_stack_positions,
)
from cape_plugins.mathematics.positions import (
    Positions,
    coordinate_positions,
    frame_positions,
    patch_positions,
    timed_frame_positions,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.relative import relative_attention
from cape_plugins.mathematics.relative_tables import (
    RelativeGridPositions,
    RelativePositions,
    build_relative_positions,
)
from cape_plugins.mathematics.tables import PositionTable, resize_grid
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS, Domain
from cape_plugins.settings.registry import ENCODINGS, PRESETS, TYPES, Encoding, PositionType

__version__ = "0.2.0"

__all__ = [
    "BUILDERS",
    "DOMAINS",
    "ENCODINGS",
    "PRESETS",
    "TYPES",
    "AttentionPositions",
    "Domain",
    "Draw",
    "Encoding",
    "PositionConfig",
    "PositionEncoder",
    "PositionTable",
    "PositionType",
    "Positions",
    "RelativeGridPositions",
    "RelativePositions",
    "Sinusoid",
    "StackPositions",
    "TokenCounts",
    "augment",
    "build_layer_bias",
    "build_position_encoder",
    "build_relative_positions",
    "build_stack_positions",
    "combine",
    "coordinate_positions",
    "draw_global",
    "draw_local",
    "frame_positions",
    "patch_positions",
    "relative_attention",
    "resize_grid",
    "timed_frame_positions",
    "token_position_at",
    "token_positions",
]
