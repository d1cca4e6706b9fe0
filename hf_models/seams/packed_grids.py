"""Patch embeddings with a table for patches that are packed, images of different sizes in one batch
``[B, patches, numbers of a patch]``, as in SigLIP 2, for all such families."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import Positions, build_position_encoder, coordinate_positions
from hf_models.seams.base import Seam
from hf_models.seams.grids import LAYOUT, left_alone
from hf_models.seams.rows import is_position_table, takes_packed_patches
from hf_models.seams.stack_attention import refuse_in_attention
from hf_models.switching.modeling import embed_positions


class PackedTable(Seam):
    """Takes the place of a stock module that embeds packed patches and adds a table, which it
    resizes to each image.

    Attributes:
        table_name: Attribute of the stock table, an ``nn.Embedding``.
        keeps_table: Whether the stock table stays, with all that stock code does with it.
        grid: Rows and columns of the stock table.
        width: C.
    """

    adds = True
    table_name: str
    keeps_table: bool
    grid: tuple[int, int]
    width: int

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules whose forward takes patches and the
        sizes of images, with a table of positions."""
        for path, module in model.named_modules():
            if isinstance(module, Seam) or not takes_packed_patches(module):
                continue
            for name, child in module.named_children():
                if isinstance(child, nn.Embedding) and is_position_table(name):
                    yield path, module, {"name": name}

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`."""
        return (cls, stock), {"table_name": keywords["name"]}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Types that act in attention are refused."""
        weight = getattr(self, self.table_name).weight
        rows, self.width = weight.shape
        settings = self.settings_in(config)
        refuse_in_attention(
            settings, f"{type(self).__name__} gets images of different sizes in one batch"
        )
        self.grid = (math.isqrt(rows),) * 2  # stock code takes the table for a square, too
        self.positions = build_position_encoder(
            settings, self.width, layout=LAYOUT, table_size=self.grid
        )
        self.keeps_table = settings.encoding.counts
        if self.keeps_table:  # the stock table has the rows
            self.positions.encoding = None
        else:
            setattr(self, self.table_name, DroppedTable(weight))

    def resize_positional_embeddings(
        self, positional_embeddings: Tensor, spatial_shapes: Tensor, max_length: int
    ) -> Tensor:
        """Position embeddings ``[B, patches, C]`` for images of these sizes, or zeros ``[1, 1,
        C]``; zero on padding.

        Args:
            positional_embeddings: ``[rows, columns, C]``, the stock table.
            spatial_shapes: ``[B, 2]`` integer, rows and columns of patches of each image.
            max_length: Number of patches of each sample, with padding.

        Raises:
            ValueError: for an image without patches, or with more than `max_length`.
        """
        if self.keeps_table:
            return super().resize_positional_embeddings(
                positional_embeddings, spatial_shapes, max_length
            )
        sizes = spatial_shapes.to(positional_embeddings.device)
        draw = None
        if self.bound is not None:
            draw = self.bound.draw(self.positions, len(sizes), sizes.device)
        positions = packed_positions(sizes, max_length)
        embedding = embed_positions(self.positions, positions, draw, positional_embeddings)
        if embedding is None:
            return positional_embeddings.new_zeros(1, 1, self.width)
        return embedding


class DroppedTable(nn.Module):
    """Replaces a table that is dropped: zeros of the same shape that take no memory."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape
        self.register_buffer("like", table.detach().new_zeros(1), persistent=False)

    @property
    def weight(self) -> Tensor:
        """``[rows, C]``."""
        return left_alone(self.like.expand(self.num_embeddings, self.embedding_dim))


def packed_positions(sizes: Tensor, length: int) -> Positions:
    """Centres of the patches of images of different sizes, as :func:`cape_plugins.patch_positions`
    gives them for each image.

    Args:
        sizes: ``[B, 2]`` integer, rows and columns of patches of each image.
        length: T, patches of each sample, with padding behind the patches.

    Returns:
        Positions with coords ``[B, T, 2]``, x (column) first, then y (row).

    Raises:
        ValueError: for an image without patches, or with more than `length`.
    """
    if not torch.compiler.is_compiling():
        _check_sizes(sizes, length)
    rows, columns = (size[:, None] for size in sizes.unbind(1))
    number = torch.arange(length, device=sizes.device)[None]
    cells = torch.stack((number % columns, number // columns), dim=-1).float()
    counts = sizes.flip(1)[:, None].float()  # [B, 1, 2], columns before rows
    coords = (cells - (counts - 1) / 2) / ((counts - 1).clamp(min=1) / 2)
    return coordinate_positions(coords, number < rows * columns, 2 / counts)


def _check_sizes(sizes: Tensor, length: int) -> None:
    for rows, columns in sizes.tolist():  # stock code reads the sizes as well
        if min(rows, columns) < 1 or rows * columns > length:
            raise ValueError(
                f"spatial_shapes holds {rows} x {columns} patches for an image of a batch with "
                f"{length} patches; allowed: at least one patch, and no more than the batch has. "
                "Give the sizes that the image processor returns."
            )


def refuse_packed_patches(model: nn.Module, command: str) -> None:
    """Refuses a model with packed patches.

    Args:
        model: A model of this package.
        command: What cannot take the model, such as "export onnx".

    Raises:
        ValueError: for a model with packed patches.
    """
    if any(isinstance(module, PackedTable) for module in model.modules()):
        raise ValueError(
            f"{command} has no inputs for {type(model).__name__}, which takes packed patches of "
            "images of different sizes; allowed: models that take whole images. `python -m "
            "hf_models.convert --self-contained` writes the code of the model beside its weights."
        )
