"""Patch embeddings with a table of the patches of one image size, as in CLIP, SigLIP and ViT-MAE,
for all such families: images of any height and width.

The table is a parameter or an ``nn.Embedding`` of the module that cuts images into patches. The
first rows of the table may belong to special tokens, such as the class token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import (
    Draw,
    PositionConfig,
    PositionEncoder,
    build_position_encoder,
    patch_positions,
)
from hf_models.seams.base import Seam, seam_class
from hf_models.seams.grid_necks import GridNeck, is_neck
from hf_models.seams.patch_counts import count_patches
from hf_models.seams.rotary import arguments_of
from hf_models.seams.rows import is_position_table
from hf_models.seams.scope import Scope
from hf_models.seams.stack_attention import leave_for_layers
from hf_models.switching.modeling import embed_positions

LAYOUT = "cos_sin_interleaved"  # order of sines and cosines, as in the other image families
_FLAG = "interpolate_pos_encoding"  # argument of stock models that lets images have any size
_PIXELS = "pixel_values"
_IMAGE_PARTS = ("vision_config", "encoder")  # of images in configurations of several parts
_MOST_SPECIAL_TOKENS = 16
# Parameters of single special tokens, in the order of their rows. Each gets the row that a trained
# table has for it.
_SPECIAL_TOKENS = ("cls_token", "class_token", "class_embedding", "distillation_token")


class PatchGrid(Seam):
    """Base of the modules that give the embeddings of patches and special tokens.

    Attributes:
        convolution: Class of the stock module that cuts inputs into patches.
        kernel: Height and width of a patch, in pixels.
        stride: Distance of neighbouring patches in pixels, down and to the right.
        grid: Rows and columns of patches at the image size of the configuration.
        special_tokens: Number of tokens that are no patches.
        tokens_behind: Number of special tokens behind the patches; the others are before them.
        width: C.
        keeps_table: Whether the stock table stays, with all that stock code does with it.
        resizes_table: Whether a table that stays serves inputs of any size.
    """

    adds = True
    resizes_table: ClassVar[bool] = False
    convolution: ClassVar[type[nn.Module]] = nn.Conv2d
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    grid: tuple[int, ...]
    special_tokens: int
    tokens_behind: int = 0
    width: int
    keeps_table: bool

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with a convolution over images and a
        table with the name of positions, and behind them necks of heads that take the grid."""
        found = False
        for path, module in model.named_modules():
            if found and is_neck(model, path):
                yield path, module, {"part": GridNeck}
            has_patches = any(isinstance(part, cls.convolution) for part in module.modules())
            if isinstance(module, Seam) or not has_patches:
                continue
            for name, table in _tables(module):
                yield path, module, {"name": name, "is_module": isinstance(table, nn.Module)}
                found = True
                break

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`; `name` is the attribute of the table and
        `is_module` tells whether it is a module."""
        if (part := keywords.get("part")) is not None:
            return part.bases_and_attributes(stock)
        if keywords["is_module"]:
            return (TableOwner, stock), {"table_name": keywords["name"]}
        return ParameterOwner.bases_and_attributes(stock, **keywords)

    def measure(self, owner: nn.Module, table: Tensor, config: Any) -> None:
        """Reads the sizes of patches, grid and table, and builds :attr:`positions`.

        Args:
            owner: The module with the convolution.
            table: ``[..., special tokens + patches, C]``.
            config: Configuration of the model.

        Raises:
            ValueError: if the table does not fit the size of inputs in the configuration.
        """
        self.kernel, self.stride = self.patch_sizes(owner)
        self.grid = self.patches(*self.trained_size(owner, config))
        rows, self.width = table.shape[-2:]
        self.special_tokens = rows - math.prod(self.grid_of_table)
        if not 0 <= self.special_tokens - self.tokens_behind <= _MOST_SPECIAL_TOKENS:
            raise ValueError(
                f"the table of {type(owner).__name__} has {rows} rows for a grid of "
                f"{' x '.join(map(str, self.grid_of_table))} patches; allowed: one for each patch, "
                f"behind at most {_MOST_SPECIAL_TOKENS} rows for special tokens."
            )
        settings = self.settings_in(config)
        self.keeps_table = settings.encoding.counts
        self.positions = self.build_encoder(settings)
        if self.keeps_table:  # the stock table has the rows
            self.positions.encoding = None

    @property
    def grid_of_table(self) -> tuple[int, ...]:
        """Sizes of the axes for which the stock table has rows."""
        return self.grid

    def patch_sizes(self, owner: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and distances of patches along the axes of the grid. For `owner` see
        :meth:`measure`."""
        cut = next(part for part in owner.modules() if isinstance(part, self.convolution))
        return tuple(cut.kernel_size), tuple(cut.stride)

    def trained_size(self, owner: nn.Module, config: Any) -> tuple[int, ...]:
        """Height and width of the inputs that the stock table is for, as the convolution sees them.
        For the arguments see :meth:`measure`."""
        parts = (getattr(config, part, None) for part in _IMAGE_PARTS)
        holders = (owner, getattr(owner, "config", None), *parts)
        sizes = (getattr(holder, "image_size", None) for holder in holders)
        return as_pair(next(filter(None, sizes), None) or config.image_size)

    def input_size(self, scope: Scope) -> tuple[int, ...] | None:
        """Number, height and width of the inputs of a forward; None if the forward has none."""
        size = scope.size(_PIXELS)
        return None if size is None else (size[0], *size[-2:])

    def build_encoder(self, settings: PositionConfig) -> PositionEncoder:
        """The encoder of the positions of patches, for the size in :attr:`grid` and `width`."""
        return build_position_encoder(settings, self.width, layout=LAYOUT, table_size=self.grid)

    def embed_patches(
        self, grid: tuple[int, ...], draw: Draw | None, like: Tensor
    ) -> Tensor | None:
        """``[1 or B, rows * columns, C]`` in the precision of `like`; None if nothing is added."""
        positions = patch_positions(*grid, device=like.device)
        leave_for_layers(self, self.bound, positions, draw, patches=grid)
        return embed_positions(self.positions, positions, draw, like)

    def patches(self, *size: int) -> tuple[int, ...]:
        """Rows and columns of the patches of an input; see :func:`count_patches`."""
        return count_patches(*size, self.kernel, self.stride)

    def adapt_call(self, model: Any, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Images need no flag to have any size."""
        if self.keeps_table:
            return
        if (size := self.input_size(Scope(model.argument_names, call))) is not None:
            self.patches(*size[1:])  # refuses images without a patch
        if _FLAG in model.argument_names:
            call[_FLAG] = True

    def embedding(self, like: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """``[1 or B, special tokens + patches, C]`` for the inputs of this forward, zero at special
        tokens. For the arguments see :meth:`embed_grid`."""
        embedding, _ = self.embed_grid(like, size)
        before = self.special_tokens - self.tokens_behind
        return left_alone(F.pad(embedding, (0, 0, before, self.tokens_behind)))

    def embed_grid(
        self, like: Tensor, size: tuple[int, ...] | None = None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the embeddings of the patches, ``[1 or B, patches, C]`` in the precision and on
        the device of `like`, and the grid of the patches.

        Args:
            like: Any tensor.
            size: Height and width of the inputs; default: the size of the inputs in this forward of
                the model, or, outside of a forward, the size that the model was made for.
        """
        draw = None
        if self.bound is not None and (inputs := self.input_size(self.bound)) is not None:
            draw = self.bound.draw(self.positions, inputs[0], like.device)
            size = inputs[1:] if size is None else size
        grid = self.grid if size is None else self.patches(*size)
        embedding = self.embed_patches(grid, draw, like)
        if embedding is None:
            embedding = like.new_zeros(1, math.prod(grid), self.width)
        return embedding, grid


class TakesAnySize(Seam):
    """Mixin over the stock module that adds the table: lets stock code take inputs of any size,
    also where another stock model calls the module, such as an encoder that generates text.

    Attributes:
        table_name: Attribute of the stock table.
        drops_table: Whether the stock table is dropped.
        patch_grid: The module that gives the embeddings.
    """

    adds = True
    table_name: str
    drops_table: bool
    patch_grid: PatchGrid

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        if self.drops_table and _FLAG in arguments_of(type(self).recipe[1]):
            kwargs[_FLAG] = True
        return super().forward(*args, **kwargs)


class ParameterOwner(TakesAnySize, PatchGrid):
    """Takes the place of a stock module whose table is a parameter or a buffer: the attribute with
    the name of the table gives the embeddings of the forward."""

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :meth:`PatchGrid.bases_and_attributes`."""
        name = keywords["name"]
        return (cls, stock), {"table_name": name, name: _parameter_or_embedding(name)}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        name = self.table_name
        tensors = self._parameters if name in self._parameters else self._buffers
        table = tensors[name]
        self.measure(self, table, config)
        self.drops_table = not self.keeps_table
        if self.drops_table:
            del tensors[name]
            self.register_buffer("like", table.detach().new_zeros(1), persistent=False)
            if trained:
                _keep_special_rows(self, table, self.special_tokens)

    def stock_table(self, path: str) -> str:
        """See :class:`~hf_models.seams.base.Seam`."""
        return f"{path}.{self.table_name}"

    @property
    def patch_grid(self) -> PatchGrid:
        """See :class:`TableOwner`."""
        return self

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """See transformers."""
        if self.drops_table:
            return self.embedding(self.like, self.size_of(embeddings, height, width))
        return super().interpolate_pos_encoding(embeddings, height, width)

    def size_of(self, embeddings: Tensor, height: int, width: int) -> tuple[int, ...]:
        """Size of the inputs of these embeddings ``[B, special tokens + patches, C]``."""
        return height, width

    def _resize_pos_embed(self, table: Tensor, *sizes: int) -> Tensor:
        """See transformers. Embeddings that are made for an image have its size already."""
        return table if self.drops_table else super()._resize_pos_embed(table, *sizes)


class PatchTable(PatchGrid, nn.Embedding):
    """Takes the place of a stock table that is a module: each call gives the embeddings."""

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`."""
        return (cls,), keywords

    @property
    def weight(self) -> Tensor:
        """The stock table; where it is dropped, zeros of the same shape that take no memory."""
        if (table := self._parameters.get("weight")) is not None:
            return table
        return left_alone(self.like.expand(self.num_embeddings, self.embedding_dim))

    def forward(self, rows: Tensor | None = None) -> Tensor:
        """``[1 or B, special tokens + patches, C]``."""
        return nn.Embedding.forward(self, rows) if self.keeps_table else self.embedding(self.like)


class TableOwner(TakesAnySize):
    """Takes the place of a stock module whose table is a module: asks the table for the embeddings
    of each image size."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        table = getattr(self, self.table_name)
        weight = table.weight
        table.__class__ = seam_class(PatchTable, type(table))
        table.side = self.side
        table.measure(self, weight, config)
        self.positions = table.positions
        self.drops_table = not table.keeps_table
        if self.drops_table:
            del table._parameters["weight"]
            table.register_buffer("like", weight.detach().new_zeros(1), persistent=False)
            if trained:
                _keep_special_rows(self, weight, table.special_tokens)

    def stock_table(self, path: str) -> str:
        """See :class:`~hf_models.seams.base.Seam`."""
        return f"{path}.{self.table_name}.weight"

    @property
    def patch_grid(self) -> PatchTable:
        """The module that gives the embeddings."""
        return getattr(self, self.table_name)

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """See transformers."""
        if not self.drops_table:
            return super().interpolate_pos_encoding(embeddings, height, width)
        table = getattr(self, self.table_name)
        return table.embedding(table.like, (height, width))


def _tables(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tables of positions that a module holds itself, by the name of the attribute."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        is_table = tensor is not None and tensor.is_floating_point() and tensor.dim() > 1
        if is_table and is_position_table(name):
            yield name, tensor
    for name, child in module._modules.items():
        if isinstance(child, nn.Embedding) and is_position_table(name):
            yield name, child


def _parameter_or_embedding(name: str) -> property:
    """An attribute of a class that gives the stock table, or the embeddings of this forward."""

    def get(self: ParameterOwner) -> Tensor:
        table = self._parameters.get(name, self._buffers.get(name))
        return self.embedding(self.like) if table is None else table

    return property(get)


def _keep_special_rows(owner: nn.Module, table: Tensor, special_tokens: int) -> None:
    """Adds the rows of special tokens to the vectors of the tokens, if the vectors are known."""
    # the embeddings that replace the table are zero at special tokens
    tokens = [getattr(owner, name) for name in _SPECIAL_TOKENS if hasattr(owner, name)]
    if special_tokens == len(tokens):
        with torch.no_grad():
            # not strict: the rows of the patches follow, for which no vector is kept
            for token, row in zip(tokens, table.reshape(-1, table.shape[-1]), strict=False):
                token.add_(row)


def left_alone(tensor: Tensor) -> Tensor:
    """The tensor, which the stock initialisation of weights will not change."""
    if not torch.compiler.is_compiling():
        tensor._is_hf_initialized = True
    return tensor


def as_pair(size: Any) -> tuple[int, int]:
    """Height and width, from one number or two."""
    return tuple(size)[-2:] if isinstance(size, Sequence) else (size, size)
