"""The classifier of the thesis: a Transformer encoder over frames, with position embeddings
concatenated to the features.

    [40 log-mel | d position channels] -> linear -> post-LN encoder layers -> linear -> classes

Without positions the d channels are zero, and the model has the same size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cape_plugins
from cape_plugins import PositionConfig
from cape_plugins.speech.features import HOP_SECONDS
from recipes.lab.steps import CommandError
from recipes.phones.data import BANDS


@dataclass(frozen=True)
class Sizes:
    dim: int  # d, number of position channels; d + 40 must be divisible by the number of heads
    layers: int
    heads: int
    ffn: int  # width of the hidden layer of the feed-forward parts
    dropout: float  # rate for attention weights, hidden layers and outputs before the residual sum

    def __post_init__(self) -> None:
        width = self.dim + BANDS
        if width % self.heads:
            sizes = f"{BANDS} features and {self.dim} position channels make {width}"
            why = f"which is no multiple of --heads {self.heads}; change one of them"
            raise CommandError(f"--dim {self.dim}: {sizes}, {why}")
        if self.dim < 4 or self.dim % 2:
            raise CommandError(f"--dim {self.dim}: allowed: even numbers from 4 on, such as 88")


class Output(NamedTuple):
    logits: Tensor  # [B, T, classes]
    weights: list[Tensor]  # [B, H, T, T] of each layer, in the order of the frames, if asked for


class Layer(nn.Module):
    """Post-LN encoder layer (Vaswani et al.) that can return its attention weights."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, sizes.ffn)
        self.contract = nn.Linear(sizes.ffn, width)
        self.ffn_norm = nn.LayerNorm(width)
        self.relative = self.layer_bias = None

    def learn_positions(self, config: PositionConfig) -> None:
        """Adds the parameters of positions that act in the attention of this layer."""
        head_dim = self.mix.in_features // self.heads
        self.relative = cape_plugins.build_relative_positions(config, head_dim, self.heads)
        self.layer_bias = cape_plugins.build_layer_bias(config, self.heads, unit=HOP_SECONDS)

    def forward(
        self,
        x: Tensor,
        positions: bool,
        need_weights: bool,
        padding: Tensor | None = None,
        in_attention: cape_plugins.AttentionPositions | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Frames ``[B, T, width]``, and weights ``[B, H, T, T]`` if `need_weights`.

        Args:
            x: ``[B, T, width]``.
            positions: Whether positions act in the attention of this layer.
            need_weights: Whether to return the weights of attention.
            padding: ``[B, T]``, True on padding.
            in_attention: Positions of types that turn queries and keys or bias their scores.
        """
        if not positions:
            in_attention = None
        relative = self.relative if positions else None
        mixed, weights = self._attend(x, relative, in_attention, need_weights, padding)
        dropout = self.dropout if self.training else 0.0
        x = self.attention_norm(x + F.dropout(self.mix(mixed), dropout))
        hidden = F.dropout(self.expand(x).relu(), dropout)
        return self.ffn_norm(x + F.dropout(self.contract(hidden), dropout)), weights

    def _attend(
        self,
        x: Tensor,
        relative: cape_plugins.RelativePositions | None,
        in_attention: cape_plugins.AttentionPositions | None,
        need_weights: bool,
        padding: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout, weights, bias = self.dropout if self.training else 0.0, None, None
        if relative is not None:
            mixed, weights = cape_plugins.relative_attention(
                query,
                key,
                value,
                relative,
                dropout=dropout,
                need_weights=need_weights,
                key_padding_mask=padding,
            )
            return mixed.transpose(1, 2).flatten(2), weights
        if in_attention is not None:
            query, key = in_attention.turn(query, key)
            bias = in_attention.bias_of(self.layer_bias, query, key)
        if padding is not None:
            bias = query.new_zeros(()) if bias is None else bias
            bias = bias.masked_fill(padding[:, None, None], -torch.inf)
        if need_weights:
            scores = query @ key.mT * key.shape[-1] ** -0.5
            weights = (scores if bias is None else scores + bias).softmax(-1)
            mixed = F.dropout(weights, dropout) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, bias, dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2), weights


def stack_positions(config: PositionConfig, sizes: Sizes) -> cape_plugins.StackPositions | None:
    """Positions for the attention of all layers; None if the type has no such positions. Raises a
    ValueError if the size of the heads does not suit rope."""
    head_dim = (BANDS + sizes.dim) // sizes.heads
    return cape_plugins.build_stack_positions(config, head_dim, sizes.heads, HOP_SECONDS)


class PhoneClassifier(nn.Module):
    """Predicts classes of frames; a learned position table has `table_size` rows, one for a frame.

    Parameters of positions are created last, so that one seed gives all types the same initial
    values of the other weights. All types share the models trained without positions; tests with
    positions add the parameters of the type. Learned tables begin with the standard deviation of
    sinusoids, sqrt(1/2), because they are concatenated to normalised features.
    """

    def __init__(
        self, num_classes: int, config: PositionConfig, sizes: Sizes, table_size: int
    ) -> None:
        super().__init__()
        self.config, self.dim, width = config, sizes.dim, BANDS + sizes.dim
        self.project = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, sizes) for _ in range(sizes.layers))
        self.classify = nn.Linear(width, num_classes)
        # last, so that one seed gives the same other weights for every position embedding
        self.positions = cape_plugins.build_position_encoder(
            config,
            sizes.dim,
            # positions count frames, so the sinusoid is the sinusoid of the thesis
            unit=HOP_SECONDS,
            frequencies="marian",
            table_size=table_size,
            table_std=0.5**0.5,  # as large as sines
        )
        self.in_attention = stack_positions(config, sizes)
        for number, layer in enumerate(self.layers):
            if config.in_layer(number):
                layer.learn_positions(config)

    def embed(
        self,
        length: int,
        device: torch.device | str | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor | None:
        """``[B, T, d]`` embeddings of frames in natural order; None if the type has no such
        embeddings. Each sample is augmented independently; `lengths` ``[B]`` are the lengths of the
        samples without padding (default: one sample without padding)."""
        lengths = torch.tensor([length], device=device) if lengths is None else lengths.to(device)
        return self.positions(*self._frames(lengths, length))

    def _frames(
        self, lengths: Tensor, longest: int
    ) -> tuple[cape_plugins.Positions, cape_plugins.Draw | None]:
        """Positions of frames in natural order, and the augmentation of each sample."""
        frames = cape_plugins.frame_positions(lengths, HOP_SECONDS, max_frames=longest)
        return frames, self.positions.draw(len(lengths), lengths.device)

    def forward(
        self,
        features: Tensor,
        positions: bool = True,
        order: Tensor | None = None,
        need_weights: bool = False,
        lengths: Tensor | None = None,
    ) -> Output:
        """Classes of frames.

        Args:
            features: ``[B, T, 40]``.
            positions: False leaves out positions of any type.
            order: ``[B, T]``, the position of each frame (default: 0, 1, 2 ...).
            need_weights: Return the weights of attention.
            lengths: ``[B]``, frames of each sample without the padding after them (default: all
                frames).
        """
        count, longest = features.shape[:2]
        lengths = torch.full((count,), longest) if lengths is None else lengths
        padding = None
        if (lengths < longest).any():
            padding = (torch.arange(longest) >= lengths[:, None]).to(features.device)
        embedding = in_attention = None
        if positions:
            frames, draw = self._frames(lengths.to(features.device), longest)
            embedding = self.positions(frames, draw)
            if self.in_attention is not None:
                random = self.positions.draws
                in_attention = self.in_attention(self.positions, frames, draw, random=random)
        samples = torch.arange(len(features), device=features.device)[:, None]
        if embedding is not None and order is not None:
            embedding = embedding.expand(count, -1, -1)[samples, order]
        x = self.project(cape_plugins.combine(features, embedding, "concat", self.dim))
        # positions in attention belong to rows, so the frames are put into the order of their
        # positions
        moved = order is not None and positions and self.config.in_attention
        if moved:
            x = x[samples, order.argsort()]
        all_weights = []
        for number, layer in enumerate(self.layers):
            acts = positions and self.config.in_layer(number)
            x, weights = layer(x, acts, need_weights, padding, in_attention)
            if weights is not None:
                all_weights.append(_reordered(weights, order) if moved else weights)
        return Output(self.classify(x[samples, order] if moved else x), all_weights)


def _reordered(weights: Tensor, order: Tensor) -> Tensor:
    """Weights ``[B, H, T, T]`` of frames in the order ``[B, T]``."""
    queries = weights.take_along_dim(order[:, None, :, None], 2)
    return queries.take_along_dim(order[:, None, None], 3)
