"""Patch embeddings and models of images of any height and width, for all families of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import Draw, patch_positions, resize_grid
from cape_plugins.mathematics.binding import Bound
from hf_models.seams.attention import add_positions_to_attention, positions_for_layers
from hf_models.switching.install import PositionHost
from hf_models.switching.modeling import (
    build_positions,
    draw_positions,
    embed_positions,
    process_generator,
)


class NoTable(nn.Module):
    """Replaces a dropped table whose `weight` stock code always initialises (SigLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)


class PatchEmbeddings(Bound, PositionHost):
    """Mixin over stock embeddings of patches and special tokens; holds the draw of a call.

    Special tokens, such as the class token, have learned vectors and no place in the image. A
    learned table keeps the name and shape of the stock parameter and is resized bicubically to each
    image. The first rows belong to the special tokens.

    Attributes:
        special_tokens: Names of the parameters of the special tokens, in the order of the rows.
        has_flag: Whether the stock forward takes ``interpolate_pos_encoding``. A forward without
            this flag adds nothing if ``position_embeddings`` is None.
        antialias: Whether the stock model smooths its table before making it smaller.
        square: Whether the image size of the stock configuration is one number.
    """

    special_tokens: tuple[str, ...] = ("cls_token",)
    has_flag = True
    antialias = False
    square = False

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`. If the table is dropped, the rows
        of special tokens are added to the special tokens, but only from a `trained` table.
        ``switch`` and ``hf_models.convert`` have loaded the trained table before this call,
        ``from_pretrained`` loads it later."""
        self.patch_size, self.image_size = _pair(config.patch_size), _pair(config.image_size)
        self.table_size = self.patches(*self.image_size)
        self.positions = None
        table = self.table
        if config.position_config.encoding.counts:
            if table is None:  # a stock model with other positions, such as relative biases
                rows = len(self.special_tokens) + self.table_size[0] * self.table_size[1]
                special = getattr(self, self.special_tokens[0])
                self.set_table(nn.Parameter(special.new_zeros(1, rows, special.shape[-1])))
            return
        # built before anything changes, because this may refuse settings; sinusoids have no table,
        # but the size of the grid lets them warn of coarse grids
        positions = build_positions(config, "encoder", self.table_size)
        if trained and table is not None:
            with torch.no_grad():
                for row, name in enumerate(self.special_tokens):
                    getattr(self, name).add_(table[:, row : row + 1])
        self.set_table(None)
        self.positions = positions

    @property
    def table(self) -> Tensor | None:
        """``[1, special tokens + patches, C]``; None if the type has no table."""
        return None if self.positions is not None else self.position_embeddings

    @property
    def table_parameter(self) -> Tensor:
        """The parameter of the :attr:`table`, if the type has one."""
        return self.position_embeddings

    def set_table(self, table: nn.Parameter | None) -> None:
        """Changes the :attr:`table`. A dropped table becomes an empty buffer, which no checkpoint
        holds. With None, DINOv2 and BEiT would silently add nothing to the patches."""
        del self.position_embeddings
        if table is not None:
            self.register_parameter("position_embeddings", table)
        else:
            self.register_buffer("position_embeddings", torch.empty(0), persistent=False)

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers; takes images of every size, with or without the flag."""
        if self.has_flag:
            kwargs["interpolate_pos_encoding"] = True
        return super().forward(pixel_values, *args, **kwargs)

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Any:
        """Position embeddings, ``[1 or B, special tokens + patches, C]``, or zero."""
        rows, columns = self.patches(height, width)
        if self.positions is None:
            return self.resized_table(rows, columns)
        grid = patch_positions(rows, columns, device=embeddings.device)
        addend = embed_positions(self.positions, grid, self.bound, embeddings)
        return 0.0 if addend is None else F.pad(addend, (0, 0, len(self.special_tokens), 0))

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of `height` x `width` pixels.

        Raises:
            ValueError: if the image is smaller than a patch.
        """
        rows, columns = height // self.patch_size[0], width // self.patch_size[1]
        if rows < 1 or columns < 1:
            raise ValueError(
                f"image of {height} x {width} pixels is smaller than a patch "
                f"({self.patch_size[0]} x {self.patch_size[1]}); allowed: at least one patch. "
                "Resize the image, or choose a smaller patch_size."
            )
        return rows, columns

    def resize_images(self, height: int, width: int) -> None:
        """See :meth:`ImageModel.resize_images`."""
        if self.square and height != width:
            raise ValueError(
                f"an image size of {height} x {width} pixels is not allowed for "
                f"{type(self).__name__}, whose configuration holds one number; allowed: height = "
                "width. Give a square; forward still takes images of any height and width."
            )
        size = self.patches(height, width)
        if self.table is not None:
            with torch.no_grad():
                table = self.resized_table(*size).clone()
            self.set_table(nn.Parameter(table, self.table.requires_grad))
        self.image_size, self.table_size = (height, width), size
        # SigLIP keeps these sizes here, the other families in a module
        stock = getattr(self, "patch_embeddings", self)
        stock.image_size, stock.num_patches = self.image_size, size[0] * size[1]

    def resized_table(self, height: int, width: int) -> Tensor:
        """``[1, special tokens + patches, C]`` for an image of `height` x `width` patches."""
        table, special = self.table, len(self.special_tokens)
        if (height, width) == self.table_size:
            return table
        rows = resize_grid(
            table[0, special:], self.table_size, (height, width), antialias=self.antialias
        )
        return torch.cat((table[:, :special], rows[None]), dim=1)


class PatchEmbeddingsWithModule(PatchEmbeddings):
    """Mixin over stock embeddings whose table is a module that looks rows up (SigLIP)."""

    @property
    def table(self) -> Tensor | None:
        """See :class:`PatchEmbeddings`."""
        return None if self.positions is not None else self.position_embedding.weight[None]

    @property
    def table_parameter(self) -> Tensor:
        """See :class:`PatchEmbeddings`."""
        return self.position_embedding.weight

    def set_table(self, table: nn.Parameter | None) -> None:
        """See :class:`PatchEmbeddings`."""
        self.position_embedding = NoTable()
        if table is not None:
            self.position_embedding = nn.Embedding.from_pretrained(
                table.data[0], freeze=not table.requires_grad
            )


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, from one number or two."""
    return tuple(size) if isinstance(size, Sequence) else (size, size)


class ImageModel(PositionHost):
    """Mixin over a stock model with ``embeddings`` that are :class:`PatchEmbeddings`: images of any
    size, no flag needed."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        settings = config.position_config
        self.has_relative_positions = settings.relative_context > 0
        attentions = (module for module in self.modules() if hasattr(module, "q_proj"))
        self.stack_positions = add_positions_to_attention(attentions, settings)

    def resize_images(self, height: int, width: int) -> None:
        """Makes `height` x `width` pixels the image size of the configuration.

        The model takes images of every size before and after. But a learned table keeps the size of
        the configuration and is resized in each forward. To finetune at another size, this method
        resizes the table once, bicubically; the table then learns at this size (DeiT). The rows of
        special tokens and all other weights stay. Call this method before making an optimizer.

        Raises:
            ValueError: if the size is smaller than a patch, or if the size is no square and the
                configuration holds squares only (SigLIP).
        """
        self.embeddings.resize_images(height, width)
        self.config.image_size = height if height == width else (height, width)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        *args: Any,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            pixel_values: ``[B, channels, H, W]``; any H and W of at least one patch.
            draw: Random numbers for this forward; by default drawn in training.
        """
        channels = self.config.num_channels
        sizes = tuple(pixel_values.shape) if isinstance(pixel_values, Tensor) else ()
        if len(sizes) != 4 or sizes[1] != channels or sizes[0] == 0:
            description = f"has shape {sizes}" if sizes else f"is {type(pixel_values).__name__}"
            raise ValueError(
                f"pixel_values {description}; allowed: a tensor [batch, {channels} channels, "
                "height, width] of at least one image. Give one image as image[None]."
            )
        patches = self.embeddings.patches(*sizes[2:])
        if self.has_relative_positions:
            kwargs["patches"] = patches
        positions = self.embeddings.positions
        if draw is None and positions is not None:
            draw = draw_positions(positions, pixel_values)
        if self.stack_positions is not None:
            grid = patch_positions(*patches, device=pixel_values.device)
            kwargs |= positions_for_layers(
                self.stack_positions, positions, grid, draw, process_generator
            )
        with self.embeddings.using(draw):
            return super().forward(pixel_values, *args, **kwargs)
