"""The thesis's classifier: a Transformer encoder over frames, positions concatenated to features.

    [40 log-mel | d position channels] -> linear -> post-LN encoder layers -> linear -> classes

Without positions the d channels are zero, and the model has the same size.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import (
    PositionConfig,
    RelativePositions,
    build_position_encoder,
    build_relative_positions,
    combine,
    frame_positions,
    relative_attention,
)
from cape_plugins.speech.features import HOP_SECONDS
from recipes.lab.steps import CommandError
from recipes.phones.data import BANDS

POSITION_PARAMETERS = ("positions.", "relative.")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model."""

    dim: int  # d, channels of the positions; d + 40 must be divisible by the heads
    layers: int
    heads: int
    ffn: int  # width of the hidden layer of the feed-forward parts
    dropout: float  # of attention weights, hidden layers and what is added to the residual

    def __post_init__(self) -> None:
        width = self.dim + BANDS
        if width % self.heads:
            raise CommandError(
                f"--dim {self.dim}: {BANDS} features and {self.dim} position channels make "
                f"{width}, which is no multiple of --heads {self.heads}; change one of them"
            )
        if self.dim < 4 or self.dim % 2:
            raise CommandError(f"--dim {self.dim}: allowed: even numbers from 4 on, such as 88")
        if not 0 <= self.dropout < 1:
            raise CommandError(f"--dropout {self.dropout}: allowed: 0 to less than 1, such as 0.1")


class Output(NamedTuple):
    logits: Tensor  # [B, T, classes]
    weights: list[Tensor]  # [B, H, T, T] of each layer, in the order of the frames, if asked for


class Layer(nn.Module):
    """Post-LN encoder layer (Vaswani et al.) that can show its attention weights."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, sizes.ffn)
        self.contract = nn.Linear(sizes.ffn, width)
        self.ffn_norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, relative: RelativePositions | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout, weights = self.dropout if self.training else 0.0, None
        if relative is not None:
            mixed, weights = relative_attention(
                query, key, value, relative, dropout=dropout, need_weights=need_weights
            )
        elif need_weights:
            weights = (query @ key.mT * key.shape[-1] ** -0.5).softmax(-1)
            mixed = F.dropout(weights, dropout) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        mixed = self.mix(mixed.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + F.dropout(mixed, dropout))
        hidden = F.dropout(self.expand(x).relu(), dropout)
        return self.ffn_norm(x + F.dropout(self.contract(hidden), dropout)), weights


class PhoneClassifier(nn.Module):
    """Classes of frames; a learned position table has `table_size` rows, one a frame."""

    def __init__(
        self, num_classes: int, config: PositionConfig, sizes: Sizes, table_size: int
    ) -> None:
        super().__init__()
        self.dim = sizes.dim
        width = BANDS + sizes.dim
        self.project = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, sizes) for _ in range(sizes.layers))
        self.classify = nn.Linear(width, num_classes)
        # last, so that one seed draws the same other weights whatever the position embedding
        self.positions = build_position_encoder(
            config,
            sizes.dim,
            unit=HOP_SECONDS,  # positions count frames, so that the sinusoid is the thesis's
            frequencies="marian",
            table_size=table_size,
            table_std=0.5**0.5,  # as large as sines are
        )
        self.relative = nn.ModuleList(
            build_relative_positions(config, width // sizes.heads, sizes.heads)
            for _ in range(config.relative_depth(sizes.layers))
        )

    def embed(self, length: int, device: torch.device | str | None = None) -> Tensor | None:
        """``[1, T, d]`` embeddings of frames in natural order; None if the type has none."""
        lengths = torch.tensor([length], device=device)
        frames = frame_positions(lengths, HOP_SECONDS, max_frames=length)
        return self.positions(frames, self.positions.draw(1, device))

    def forward(
        self,
        features: Tensor,
        positions: bool = True,
        order: Tensor | None = None,
        need_weights: bool = False,
    ) -> Output:
        """Classes of features ``[B, T, 40]``, all of T frames.

        Without `positions` they are left out, of whatever type; `order`, ``[T]``, is the position
        of each frame, by default 0, 1, 2 ...
        """
        embedding = self.embed(features.shape[1], features.device) if positions else None
        if embedding is not None and order is not None:
            embedding = embedding[:, order]
        x = self.project(combine(features, embedding, "concat", self.dim))
        # relative attention counts rows, so the frames stand in the order of their positions there
        moved = order is not None and positions and len(self.relative) > 0
        if moved:
            x = x[:, order.argsort()]
        all_weights = []
        relative = self.relative if positions else ()
        for layer, own in zip_longest(self.layers, relative):
            x, weights = layer(x, own, need_weights)
            if weights is not None:
                all_weights.append(weights[:, :, order][..., order] if moved else weights)
        return Output(self.classify(x[:, order] if moved else x), all_weights)
