"""Patch embeddings of spectrograms with a table for one duration, as in the audio spectrogram
transformer, for all such families: sounds of any duration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import (
    Draw,
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
)
from cape_plugins.mathematics.encodings import Sinusoid
from cape_plugins.settings.domains import HOP_SECONDS, WINDOW_SECONDS
from hf_models.seams.grids import ParameterOwner, PatchGrid
from hf_models.seams.scope import Scope
from hf_models.switching.modeling import embed_positions

_SPECTROGRAM = "input_values"  # [B, frames, bands]


class SpectrogramTable(ParameterOwner):
    """Takes the place of a stock module with a table for bands x frames.

    The first half of the channels encodes the time of a patch in seconds, which training moves. The
    second half encodes the row of the patch on the frequency axis. Training does not move this row:
    real sounds are shifted and scaled in time, but hardly in frequency.

    Attributes:
        bands: Sinusoids of the rows of patches.
    """

    adds = False  # no type in attention: only added embeddings tell layers the band of a patch
    bands: Sinusoid

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: modules with a parameter of positions and a
        convolution over a single channel."""
        for path, module, keywords in PatchGrid.find(model):
            first = next(part for part in module.modules() if isinstance(part, nn.Conv2d))
            if first.in_channels == 1 and not keywords["is_module"]:
                yield path, module, keywords

    def trained_size(self, owner: nn.Module, config: Any) -> tuple[int, int]:
        """Bands and frames of the sounds that the stock table is for."""
        return self.config.num_mel_bins, self.config.max_length

    def input_size(self, scope: Scope) -> tuple[int, int, int] | None:
        """Number, bands and frames of the sounds of a forward; None if the forward has none."""
        size = scope.size(_SPECTROGRAM)
        return None if size is None else (size[0], size[2], size[1])

    def adapt_call(self, model: nn.Module, call: dict[str, Any]) -> None:
        """See :class:`~hf_models.seams.base.Seam`.

        Raises:
            ValueError: if the stock table is kept, and is for sounds of another size.
        """
        super().adapt_call(model, call)
        size = self.input_size(Scope(model.argument_names, call))
        if size is None or not self.keeps_table:
            return
        trained_bands, trained_frames = self.trained_size(self, self.config)
        if self.patches(*size[1:]) != self.patches(trained_bands, trained_frames):
            raise ValueError(
                f"a sound of {size[2]} frames and {size[1]} bands does not fit the stock table; "
                f"allowed with 'abspos': {trained_frames} frames and {trained_bands} bands. Pad or "
                "cut the sounds, resize the table by hf_models.extend_table(model, FRAMES, "
                "'stretch'), or choose another type, such as 'cape'."
            )

    def build_encoder(self, settings: PositionConfig) -> PositionEncoder:
        """The encoder of the times of patches; a patch is at its centre."""
        self.bands = Sinusoid(self.width // 2)
        centre = WINDOW_SECONDS / 2 + (self.kernel[1] - 1) / 2 * HOP_SECONDS
        return build_position_encoder(settings, self.width - self.width // 2, start=centre)

    def embed_patches(
        self, grid: tuple[int, ...], draw: Draw | None, like: Tensor
    ) -> Tensor | None:
        """``[1 or B, rows * columns, C]`` in the precision of `like`; None if nothing is added.
        Patches above each other have one time and one local shift."""
        rows, columns = grid
        number = torch.arange(columns, dtype=torch.float32, device=like.device).view(1, -1, 1)
        times = Positions(number, self.stride[1] * HOP_SECONDS, in_steps=True, first=0)
        time = embed_positions(self.positions, times, draw, like)
        if time is None:
            return None
        row = torch.arange(rows, dtype=torch.float32, device=like.device)[:, None]
        band = self.bands.grid(row).to(like.dtype)[:, None]
        parts = time[:, None].expand(-1, rows, -1, -1), band.expand(len(time), -1, columns, -1)
        return torch.cat(parts, dim=-1).flatten(1, 2)

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the patches of a sound with `height` bands and `width` frames.

        Raises:
            ValueError: if the sound is smaller than a patch.
        """
        if height < self.kernel[0] or width < self.kernel[1]:
            raise ValueError(
                f"sound of {width} frames and {height} bands is smaller than a patch "
                f"({self.kernel[1]} frames, {self.kernel[0]} bands); allowed: at least one patch. "
                "Give a longer sound, or the number of bands that the model was made for."
            )
        return super().patches(height, width)
