"""Patch embeddings with a table of the patches of one image size, as in CLIP, SigLIP and ViT-MAE,
for all such families: images of any height and width.

The table is a parameter or an ``nn.Embedding`` of the module that cuts images into patches. Its
first rows may belong to special tokens, such as the class token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import build_position_encoder, patch_positions
from cape_plugins.checkpoints.families import find_family
from hf_models.generated.seam import Seam, seam_class
from hf_models.seams.rows import is_position_table
from hf_models.switching.modeling import embed_positions
from hf_models.switching.settings import FIELD

_LAYOUT = "cos_sin_interleaved"  # of the sinusoids of the other families of images
_FLAG = "interpolate_pos_encoding"  # argument of stock models that lets images have any size
_PIXELS = "pixel_values"
_MOST_SPECIAL_TOKENS = 16
# parameters of a single special token, which gets the row that a trained table has for it
_CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")


class PatchGrid(Seam):
    """Base of the modules that give the embeddings of patches and special tokens.

    Attributes:
        kernel: Height and width of a patch, in pixels.
        stride: Distance of neighbouring patches in pixels, down and to the right.
        grid: Rows and columns of patches at the image size of the configuration.
        special_tokens: Number of tokens before the patches.
        width: C.
        keeps_table: Whether the stock table stays, with all that stock code does with it.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    grid: tuple[int, int]
    special_tokens: int
    width: int
    keeps_table: bool

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.generated.seam.Seam`: modules with a convolution over images and a
        table with the name of positions."""
        for path, module in model.named_modules():
            has_patches = any(isinstance(part, nn.Conv2d) for part in module.modules())
            if isinstance(module, Seam) or not has_patches:
                continue
            for name, table in _tables(module):
                yield path, module, {"name": name, "is_module": isinstance(table, nn.Module)}
                break

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.generated.seam.Seam`; `name` is the attribute of the table and
        `is_module` tells whether it is a module."""
        name = keywords["name"]
        if keywords["is_module"]:
            return (TableOwner, stock), {"table_name": name}
        return (ParameterOwner, stock), {"table_name": name, name: _parameter_or_embedding(name)}

    def measure(self, owner: nn.Module, table: Tensor, config: Any) -> None:
        """Reads the sizes of patches, grid and table, and builds the position encoder.

        Args:
            owner: The module with the convolution.
            table: ``[..., special tokens + patches, C]``.
            config: Configuration of the model.

        Raises:
            ValueError: if the table does not fit the image size of the configuration.
        """
        self.side = next(iter(find_family(config.model_type).sides))
        convolution = next(part for part in owner.modules() if isinstance(part, nn.Conv2d))
        self.kernel, self.stride = tuple(convolution.kernel_size), tuple(convolution.stride)
        sizes = getattr(owner, "config", None) or getattr(config, "vision_config", config)
        pixels = getattr(owner, "image_size", None) or sizes.image_size
        self.grid = self.patches(*_pair(pixels))
        rows, self.width = table.shape[-2:]
        self.special_tokens = rows - math.prod(self.grid)
        if not 0 <= self.special_tokens <= _MOST_SPECIAL_TOKENS:
            raise ValueError(
                f"the table of {type(owner).__name__} has {rows} rows for a grid of "
                f"{self.grid[0]} x {self.grid[1]} patches; allowed: one for each patch, behind at "
                f"most {_MOST_SPECIAL_TOKENS} rows for special tokens."
            )
        settings = config.position_settings(FIELD)
        self.keeps_table = settings.encoding.counts
        self.positions = build_position_encoder(
            settings, self.width, layout=_LAYOUT, table_size=self.grid
        )
        if self.keeps_table:
            self.positions.encoding = None

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the patches of an image.

        Raises:
            ValueError: if the image is smaller than a patch.
        """
        if height < self.kernel[0] or width < self.kernel[1]:
            raise ValueError(
                f"image of {height} x {width} pixels is smaller than a patch "
                f"({self.kernel[0]} x {self.kernel[1]}); allowed: at least one patch. Resize the "
                "image, or choose a smaller patch_size."
            )
        lengths = zip((height, width), self.kernel, self.stride, strict=True)
        rows, columns = ((length - patch) // step + 1 for length, patch, step in lengths)
        return rows, columns

    def adapt_call(self, model: Any, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.generated.seam.Seam`. Images need no flag to have any size."""
        if self.keeps_table:
            return
        if isinstance(pixels := call.get(_PIXELS), Tensor):
            self.patches(*pixels.shape[-2:])  # refuses images without a patch
        if _FLAG in model.argument_names:
            call[_FLAG] = True

    def embedding(self, like: Tensor) -> Tensor:
        """``[1 or B, special tokens + patches, C]`` for the images of this forward, zero at special
        tokens, in the precision and on the device of `like`."""
        scope, size, draw = self.bound, None, None
        if scope is not None and (size := scope.size(_PIXELS)) is not None:
            draw = scope.draw(self.positions, size[0], like.device)
        rows, columns = self.grid if size is None else self.patches(*size[-2:])
        positions = patch_positions(rows, columns, device=like.device)
        embedding = embed_positions(self.positions, positions, draw, like)
        if embedding is None:
            embedding = like.new_zeros(1, rows * columns, self.width)
        return _left_alone(F.pad(embedding, (0, 0, self.special_tokens, 0)))


class ParameterOwner(PatchGrid):
    """Takes the place of a stock module whose table is a parameter or a buffer: its name gives the
    embeddings."""

    table_name: str

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.generated.seam.Seam`."""
        name = self.table_name
        held = self._parameters if name in self._parameters else self._buffers
        table = held[name]
        self.measure(self, table, config)
        if not self.keeps_table:
            del held[name]
            self.register_buffer("like", table.detach().new_zeros(1), persistent=False)
            if trained:
                _keep_class_row(self, table, self.special_tokens)

    def interpolate_pos_encoding(self, *args: Any, **kwargs: Any) -> Tensor:
        """See transformers."""
        if self.keeps_table:
            return super().interpolate_pos_encoding(*args, **kwargs)
        return self.embedding(self.like)


class PatchTable(PatchGrid, nn.Embedding):
    """Takes the place of a stock table that is a module: gives the embeddings to each call."""

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.generated.seam.Seam`."""
        return (cls,), keywords

    @property
    def weight(self) -> Tensor:
        """The stock table; where it is dropped, zeros of the same shape that take no memory."""
        if (table := self._parameters.get("weight")) is not None:
            return table
        return _left_alone(self.like.expand(self.num_embeddings, self.embedding_dim))

    def forward(self, rows: Tensor | None = None) -> Tensor:
        """``[1 or B, special tokens + patches, C]``."""
        return nn.Embedding.forward(self, rows) if self.keeps_table else self.embedding(self.like)


class TableOwner(Seam):
    """Takes the place of a stock module whose table is a module: has the module asked for each
    image size."""

    table_name: str

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.generated.seam.Seam`."""
        table = getattr(self, self.table_name)
        weight = table.weight
        table.__class__ = seam_class(PatchTable, type(table))
        table.measure(self, weight, config)
        self.side, self.positions = table.side, table.positions
        if not table.keeps_table:
            del table._parameters["weight"]
            table.register_buffer("like", weight.detach().new_zeros(1), persistent=False)
            if trained:
                _keep_class_row(self, weight, table.special_tokens)

    def interpolate_pos_encoding(self, *args: Any, **kwargs: Any) -> Tensor:
        """See transformers."""
        table = getattr(self, self.table_name)
        return super().interpolate_pos_encoding(*args, **kwargs) if table.keeps_table else table()


def _tables(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tables of positions that a module holds itself, by the name of the attribute."""
    for name, held in (*module._parameters.items(), *module._buffers.items()):
        is_table = held is not None and held.is_floating_point() and held.dim() > 1
        if is_table and is_position_table(name):
            yield name, held
    for name, child in module._modules.items():
        if isinstance(child, nn.Embedding) and is_position_table(name):
            yield name, child


def _parameter_or_embedding(name: str) -> property:
    """An attribute of a class that gives the stock table, or the embeddings of this forward."""

    def get(self: ParameterOwner) -> Tensor:
        table = self._parameters.get(name, self._buffers.get(name))
        return self.embedding(self.like) if table is None else table

    return property(get)


def _keep_class_row(owner: nn.Module, table: Tensor, special_tokens: int) -> None:
    """Adds the row of the only special token to the vector of the token."""
    tokens = [getattr(owner, name) for name in _CLASS_TOKENS if hasattr(owner, name)]
    if special_tokens == 1 and len(tokens) == 1:
        with torch.no_grad():
            tokens[0].add_(table.reshape(-1, table.shape[-1])[0])


def _left_alone(tensor: Tensor) -> Tensor:
    """The tensor, which the stock initialisation of weights will not change."""
    if not torch.compiler.is_compiling():
        tensor._is_hf_initialized = True
    return tensor


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, from one number or two."""
    return tuple(size)[-2:] if isinstance(size, Sequence) else (size, size)
