"""Models of videos that add positions to tubelets, patches of a few frames, for all such families:
videos of more frames and of other sizes.

There are three forms: a learned table for all tubelets, as in ViViT; a fixed table that is no
parameter, as in VideoMAE, whose decoder has a second one; and a table for the patches of a frame
beside another for the frames, as in TimeSformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import Draw, PositionConfig, PositionEncoder, patch_positions, resize_grid
from hf_models.seams.base import Seam
from hf_models.seams.grids import (
    ParameterOwner,
    PatchGrid,
    left_alone,
)
from hf_models.seams.informed import InformedLayer
from hf_models.seams.patch_counts import count_cells
from hf_models.seams.rows import is_position_table
from hf_models.seams.scope import Scope
from hf_models.seams.stack_attention import leave_for_layers
from hf_models.switching.modeling import embed_positions

# [B, frames, channels, height, width], by name
_PIXELS, _VIDEO_PIXELS = "pixel_values", "pixel_values_videos"
_IMAGE_SIZE = "image_size"  # attribute that stock code compares with the size of its input
_TIME_TABLE = re.compile(r"^(time|temporal)_(pos|emb)")  # [1, frames, C]
_FRAMES = "frames"  # key of the embeddings of a forward
_TIME_ATTENTION = "temporal_attention"  # part of layers that attend to time apart from space


class VideoPositions(Seam):
    """Finds the modules of a model of videos that know positions or sizes, of all forms."""

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`; the keyword `part` is the class for the
        module."""
        for path, module, keywords in TubeletTable.find(model):
            if not keywords.pop("is_module"):
                yield path, module, {"part": TubeletTable, **keywords}
        for path, module, keywords in FrameTable.find(model):
            times = [name for name in module._parameters if _TIME_TABLE.search(name)]
            if times:
                yield path, module, {"part": FrameTable, "time_name": times[0], **keywords}
        fixed = list(FixedTable.find(model))
        for path, module, keywords in fixed:
            yield path, module, {"part": FixedTable, **keywords}
        for path, module in model.named_modules() if fixed else ():
            has_size = _IMAGE_SIZE in vars(module) and not isinstance(module, Seam)
            if has_size and any(isinstance(child, nn.Conv3d) for child in module.children()):
                yield path, module, {"part": AnySize}
        for path, module in model.named_modules():
            if _TIME_ATTENTION in module._modules and not isinstance(module, Seam):
                yield path, module, {"part": TimedLayer}


class VideoSeam(Seam):
    """Base of the seams that know the sizes of the videos that a model is made for.

    Attributes:
        kernel: Frames, height and width of a tubelet.
        grid: Frames, rows and columns of the tubelets of a video in the configuration.
        channels: Channels of a frame.
    """

    kernel: tuple[int, ...]
    grid: tuple[int, ...]
    channels: int

    @property
    def shape_of_videos(self) -> tuple[int, int, int, int]:
        """Frames, channels, height and width of the videos in the configuration."""
        cells = zip(self.grid, self.kernel, strict=True)
        frames, height, width = (number * side for number, side in cells)
        return frames, self.channels, height, width


class TubeletGrid(PatchGrid, VideoSeam):
    """Base of the modules that give the embeddings of tubelets, frame by frame.

    Attributes:
        seconds: Distance of neighbouring tubelets in time; None if each video spans [-1, 1].
    """

    adds = False  # no type in attention: models hide tubelets from layers, or divide attention
    convolution = nn.Conv3d
    seconds: float | None

    def trained_size(self, owner: nn.Module, config: Any) -> tuple[int, ...]:
        """Frames, height and width of the videos that the stock table is for."""
        return config.num_frames, *super().trained_size(owner, config)

    def measure(self, owner: nn.Module, table: Tensor, config: Any) -> None:
        """See :class:`~hf_models.seams.grids.PatchGrid`."""
        super().measure(owner, table, config)
        self.channels = config.num_channels

    def input_size(self, scope: Scope) -> tuple[int, ...] | None:
        """Number, frames, height and width of the videos of a forward; None without videos."""
        return video_size(scope)

    def build_encoder(self, settings: PositionConfig) -> PositionEncoder:
        """The encoder of the positions of tubelets."""
        self.seconds = self.stride[0] * settings.seconds_per_frame or None
        return super().build_encoder(settings)

    def embed_patches(
        self, grid: tuple[int, ...], draw: Draw | None, like: Tensor
    ) -> Tensor | None:
        """``[1 or B, frames * rows * columns, C]`` in the precision of `like`; None if nothing is
        added."""
        positions = patch_positions(*grid, device=like.device, seconds=self.seconds)
        leave_for_layers(self, self.bound, positions, draw, patches=grid)
        return embed_positions(self.positions, positions, draw, like)

    def patches(self, *size: int) -> tuple[int, ...]:
        """Frames, rows and columns of the tubelets of a video.

        Args:
            size: Frames, height and width.

        Raises:
            ValueError: if the video is smaller than a tubelet.
        """
        if any(length < side for length, side in zip(size, self.kernel, strict=True)):
            frames, height, width = size
            raise ValueError(
                f"video of {frames} frames of {height} x {width} pixels is smaller than a tubelet "
                f"({self.kernel[0]} frames of {self.kernel[1]} x {self.kernel[2]}); allowed: at "
                "least one tubelet. Give more frames, or resize them."
            )
        return count_cells(size, self.kernel, self.stride)


class TubeletTable(TubeletGrid, ParameterOwner):
    """Takes the place of a stock module with a learned table for all tubelets."""

    adds = True

    def size_of(self, embeddings: Tensor, height: int, width: int) -> tuple[int, ...]:
        """See :class:`~hf_models.seams.grids.ParameterOwner`. Stock code does not pass the number
        of frames, which follows from the number of tubelets."""
        _, rows, columns = self.patches(self.kernel[0], height, width)
        tubelets = (embeddings.shape[1] - self.special_tokens) // (rows * columns)
        return self.kernel[0] + (tubelets - 1) * self.stride[0], height, width


class FrameTable(TubeletGrid, ParameterOwner):
    """Takes the place of a stock module with a table for the patches of a frame, which it adds to
    all frames ``[B * frames, special tokens + patches, C]``, and another for the frames."""

    convolution = nn.Conv2d
    without_table = "adds a row for the patch to a row for the frame"

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`; `time_name` is the table of frames."""
        bases, attributes = super().bases_and_attributes(stock, **keywords)
        time_name = keywords["time_name"]
        attributes |= {"time_name": time_name, time_name: _parameter_or_nothing(time_name)}
        return bases, attributes

    def stock_table(self, path: str) -> str | None:
        """See :class:`~hf_models.seams.base.Seam`. Other positions are no sum of two tables."""
        return None

    def other_stock_tables(self, path: str) -> tuple[str, ...]:
        """See :class:`~hf_models.seams.base.Seam`."""
        return (f"{path}.{self.time_name}",)

    @property
    def grid_of_table(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.grid[1:]

    def patch_sizes(self, owner: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A patch is one frame long."""
        kernel, stride = super().patch_sizes(owner)
        return (1, *kernel), (1, *stride)

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        super().prepare(owner, path, config, trained)
        if self.drops_table:
            del self._parameters[self.time_name]

    def embedding(self, like: Tensor, size: tuple[int, ...] | None = None) -> Tensor:
        """``[B * frames, special tokens + patches, C]``, zero at special tokens. Stock code asks
        twice in a forward, and gets the same embeddings."""
        if self.bound is None:
            return self._embed_frames(like, size, 1)
        moved = self.bound.moved
        if _FRAMES not in moved:
            number, *_ = self.input_size(self.bound)
            moved[_FRAMES] = self._embed_frames(like, size, number)
        return moved[_FRAMES]

    def _embed_frames(self, like: Tensor, size: tuple[int, ...] | None, number: int) -> Tensor:
        embedding, grid = self.embed_grid(like, size)
        frames = embedding.unflatten(1, (grid[0], -1)).expand(number, -1, -1, -1).flatten(0, 1)
        return left_alone(F.pad(frames, (0, 0, self.special_tokens, 0)))


class FixedTable(TubeletGrid, nn.Module):
    """Takes the place of a fixed table that a stock model holds as a plain tensor ``[1, tubelets,
    C]``, and has the methods of the tensor that stock code calls.

    Attributes:
        table: The rows, which the stock type resizes to the video.
    """

    resizes_table = True
    table: Tensor

    @classmethod
    def find(cls, model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """See :class:`~hf_models.seams.base.Seam`: tensors with the name of positions beside a
        convolution over videos. The modules are new and hold the tensor."""
        for path, module in model.named_modules():
            if not any(isinstance(part, cls.convolution) for part in module.modules()):
                continue
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.dim() == 3 and is_position_table(name):
                    holder = nn.Module()
                    holder.table = value
                    yield f"{path}.{name}".lstrip("."), holder, {}

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """See :class:`~hf_models.seams.base.Seam`."""
        return (cls,), keywords

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.measure(owner, self.table, config)
        setattr(owner, path.rpartition(".")[2], self)

    def rows(self) -> Tensor:
        """``[1 or B, tubelets, C]`` float32 for the videos of this forward, on their device."""
        videos = None if self.bound is None else self.bound.argument(_PIXELS)
        if not self.keeps_table:
            like = self.table if videos is None else self.table.new_empty(0, device=videos.device)
            return self.embedding(like)
        size = None if self.bound is None else self.input_size(self.bound)
        grid = self.grid if size is None else self.patches(*size[1:])
        return resize_grid(self.table[0], self.grid, grid)[None]

    def detach(self) -> Tensor:
        """:meth:`rows`, as stock encoders ask for them."""
        return self.rows()

    def expand(self, *sizes: int) -> Tensor:
        """:meth:`rows` for each video, as stock decoders ask for them."""
        return self.rows().expand(*sizes)


class AnySize(Seam):
    """Mixin over a stock module that compares the size of its input with an attribute: accepts any
    size. The module adds no positions, so :meth:`prepare` does nothing."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""

    @property
    def image_size(self) -> Any:
        """Height and width of the videos of this forward; outside of a model the stock value."""
        size = None if self.bound is None else video_size(self.bound)
        return vars(self)[_IMAGE_SIZE] if size is None else size[-2:]


class _Sizes(NamedTuple):
    """The fields of a configuration that a layer reads, with the sizes of a forward's videos."""

    num_frames: int
    image_size: int
    patch_size: int


class TimedLayer(InformedLayer, Seam):
    """Mixin over a stock layer that takes its tokens apart into frames by the configuration: takes
    videos of any number of frames. The stock layer would mix up frames and patches."""

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.seams.base.Seam`."""
        self.patch_size = config.patch_size

    def information(self, scope: Scope) -> _Sizes | None:
        """The sizes of the videos of a forward."""
        size = video_size(scope)
        # image_size is the width: stock code counts columns by it, and rows by what is left
        return None if size is None else _Sizes(size[1], size[3], self.patch_size)

    @property
    def config(self) -> Any:
        """The configuration from which the stock layer reads sizes."""
        sizes = self.bound
        return sizes if isinstance(sizes, _Sizes) else vars(self)["config"]


def video_size(scope: Scope) -> tuple[int, int, int, int] | None:
    """Number, frames, height and width of the videos of a forward; None if it has none."""
    size = scope.size(_PIXELS, _VIDEO_PIXELS)
    return None if size is None else (*size[:2], *size[-2:])


def _parameter_or_nothing(name: str) -> property:
    """An attribute of a class that gives the stock table of frames, or zeros ``[1, frames, 1]`` for
    this forward."""

    def get(self: FrameTable) -> Tensor:
        if (table := self._parameters.get(name)) is not None:
            return table
        size = None if self.bound is None else self.input_size(self.bound)
        return left_alone(self.like.new_zeros(1, self.grid[0] if size is None else size[1], 1))

    return property(get)
