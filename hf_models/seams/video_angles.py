"""Models of videos whose attention turns queries and keys by frame, row and column, as V-JEPA 2,
for all such families: augmented positions, and videos of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cape_plugins import patch_positions
from hf_models.seams.attention import refuse_unknown_layers
from hf_models.seams.base import Seam, seam_class
from hf_models.seams.informed import InformedLayer
from hf_models.seams.scope import Scope
from hf_models.seams.video import VideoSeam, video_size
from hf_models.switching.modeling import build_positions, process_generator

_METHODS = ("get_position_ids", "apply_rotary_embeddings")
_PLACES = "places"  # key of the places of a forward


class VideoAngles(InformedLayer, VideoSeam):
    """Takes the place of a stock layer with an attention that numbers its tokens by the sizes of
    the configuration. All layers of a forward see the same places."""

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: layers with an attention that has the
        methods of the stock one."""
        for path, module in model.named_modules():
            for name, part in module.named_children():
                is_known = isinstance(module, Seam) or isinstance(part, Seam)
                if not is_known and all(hasattr(part, method) for method in _METHODS):
                    yield path, module, {"attention_name": name}

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.positions = build_positions(config, self.side)
        self.kernel = config.tubelet_size, config.patch_size, config.patch_size
        self.channels = config.in_chans
        sides = (config.crop_size // config.patch_size,) * 2
        self.grid = (config.frames_per_clip // config.tubelet_size, *sides)
        settings = self.settings_in(config)
        refuse_unknown_layers(settings, config.num_hidden_layers, type(owner).__name__)
        attention: Any = self._modules[self.attention_name]
        attention.__class__ = seam_class(TurnedAttention, type(attention))
        attention.side = self.side
        number = int(path.rpartition(".")[2])
        attention.turns = settings.encoding.turns and settings.names_layer(number)

    @property
    def informed(self) -> tuple[Any, ...]:
        """The attention."""
        return (self._modules[self.attention_name],)

    def information(self, scope: Scope) -> Tensor | None:
        """``[1 or B, tubelets, 3]``, column, row and frame of each tubelet, moved in training; None
        for unmoved videos of the trained size, which stock code numbers itself."""
        if _PLACES not in scope.moved:
            scope.moved[_PLACES] = self._places(scope)
        return scope.moved[_PLACES]

    def _places(self, scope: Scope) -> Tensor | None:
        if (size := video_size(scope)) is None or not self.positions.config.encoding.turns:
            return None
        # stock code repeats the frame of a video that is shorter than a tubelet
        cells = zip(size[1:], self.kernel, strict=True)
        grid = tuple(torch.sym_max(1, length // side) for length, side in cells)
        device = next(self.parameters()).device
        draw = scope.draw(self.positions, size[0], device)
        if draw is None and grid[1:] == self.grid[1:]:
            return None
        positions = patch_positions(*grid, device=device, seconds=1.0)
        coords = self.positions.coordinates(
            positions, draw, generator=process_generator, random=draw is not None
        )
        x, y, frame = coords.unbind(-1)
        frames, rows, columns = grid
        # from [-1, 1] and seconds back to the numbers of stock code, which count from 0
        places = (x + 1) * columns / 2 - 0.5, (y + 1) * rows / 2 - 0.5, frame + (frames - 1) / 2
        return torch.stack(places, -1)


class TurnedAttention(Seam):
    """Takes the place of the stock attention.

    Attributes:
        turns: Whether queries and keys are turned.
    """

    turns: bool

    def get_position_ids(self, x: Tensor, masks: Tensor | None = None) -> tuple[Tensor, ...]:
        """Frames, rows and columns of the tokens, each ``[1 or B, 1, T]``; see transformers."""
        places = self.bound
        if not isinstance(places, Tensor):
            return super().get_position_ids(x, masks)
        if masks is not None:  # [B, T], the numbers of the tokens
            places = places.expand(len(masks), -1, -1)
            places = places.gather(1, masks[..., None].expand(-1, -1, places.shape[-1]))
        columns, rows, frames = places[:, None].unbind(-1)
        return frames, rows, columns

    def apply_rotary_embeddings(self, qk: Tensor, pos_ids: tuple[Tensor, ...]) -> Tensor:
        """Queries or keys ``[B, H, T, d]``, turned; see transformers."""
        if not self.turns:
            return qk
        if not isinstance(self.bound, Tensor):
            return super().apply_rotary_embeddings(qk, pos_ids)
        # stock code computes angles in the precision of its input, which rounds the positions
        return super().apply_rotary_embeddings(qk.float(), pos_ids).to(qk.dtype)
