"""Models of images that turn queries and keys by the centres of their patches, as in DINOv3, for
all such families."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import Draw, patch_positions
from hf_models.seams.base import Seam
from hf_models.seams.grids import as_pair
from hf_models.seams.patch_counts import count_patches
from hf_models.seams.rotary import arguments_of, leave_layers_unturned
from hf_models.switching.modeling import build_positions, process_generator

_PIXELS = "pixel_values"
_FREQUENCIES = "inv_freq"  # stock buffer [C of a head / 4], for both axes
# fields of stock configurations with an augmentation that draws once for a whole batch
_STOCK_AUGMENTATION = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


class PatchAngles(Seam):
    """Takes the place of the stock module that turns an image into cosines and sines.

    Settings that move nothing leave the stock module unchanged, with the augmentation of the stock
    configuration, which moves all images of a batch alike. Settings that move positions replace
    this augmentation: there is a draw for each image, and nothing moves twice.
    """

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with frequencies whose forward takes
        images and nothing else."""
        for path, module in model.named_modules():
            is_angles = arguments_of(type(module))[1:] == (_PIXELS,)
            if is_angles and _FREQUENCIES in module._buffers and not isinstance(module, cls):
                yield path, module, {}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.positions = build_positions(config, self.side)
        self.patch_size = as_pair(self.config.patch_size)
        settings = self.settings_in(config)
        leave_layers_unturned(owner, settings)
        if settings.random or not settings.encoding.turns:
            # a copy, because the configuration of the model stays as users set it
            self.config = copy.copy(self.config)
            for name in _STOCK_AUGMENTATION:
                setattr(self.config, name, None)

    def adapt_call(self, model: Any, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.seams.base.Seam`. Refuses images without a patch."""
        if isinstance(pixels := call.get(_PIXELS), Tensor):
            count_patches(*pixels.shape[-2:], self.patch_size, self.patch_size)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``[patches, C]``, or ``[B, 1, patches, C]`` if images are moved.

        Args:
            pixel_values: ``[B, channels, height, width]``.
        """
        if not self.positions.config.encoding.turns:
            cos, sin = super().forward(pixel_values)
            return torch.ones_like(cos), torch.zeros_like(sin)
        draw = None
        if self.bound is not None:
            draw = self.bound.draw(self.positions, len(pixel_values), pixel_values.device)
        return super().forward(pixel_values) if draw is None else self._moved(pixel_values, draw)

    def _moved(self, pixel_values: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        sizes = count_patches(*pixel_values.shape[-2:], self.patch_size, self.patch_size)
        grid = patch_positions(*sizes, device=pixel_values.device)
        coords = self.positions.coordinates(grid, draw, generator=process_generator, random=True)
        # the stock model has y before x, and the angles of both axes twice
        angles = 2 * math.pi * coords.flip(-1)[..., None] * self.inv_freq
        angles = angles.flatten(-2).tile(2)[:, None]
        return angles.cos().to(pixel_values.dtype), angles.sin().to(pixel_values.dtype)
