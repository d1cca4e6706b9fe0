"""Parts of a model as graphs with tensors only: inputs with names and axes, caches taken apart.

Axes have names: batch, length (tokens of a source or given now), past (tokens in the cache), states
(encoder states that a decoder sees), frames, height, width; numbers are sizes that do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_models.seams.grids import PatchGrid
from hf_models.seams.images import PatchEmbeddings
from hf_models.serving.known_inputs import first_outputs

Axes = tuple[str | int, ...]
COMMAND = "export onnx"  # in errors
VIDEO_AXES = ("frames", "height", "width")
LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class Input:
    """An input of a graph.

    Attributes:
        axes: Name of each axis with any size, or size of the axis.
        draw: Function that makes values of a shape, for a check.
        paddings: Sides on which a mask marks padding; empty for other inputs.
    """

    axes: Axes
    draw: Callable[[Sequence[int], torch.Generator], Tensor]
    paddings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A file to write.

    Attributes:
        name: Name of the file.
        module: Takes the inputs in order, and returns a tuple of tensors.
        inputs: Inputs by name.
        outputs: Names of the returned tensors, in order.
        sample: Sizes of the axes of the inputs for tracing the module: at least 2, because
            torch.export keeps a 1, and no size for which the module takes a special branch.
        others: Sizes for checks, the smallest sizes included.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Input]
    outputs: list[str]
    sample: dict[str, int]
    others: list[dict[str, int]] = field(default_factory=list)

    @property
    def paddings(self) -> list[str | None]:
        """Sides on which inputs may be padded, and None."""
        return [None, *dict.fromkeys(side for row in self.inputs.values() for side in row.paddings)]


def draw(
    inputs: dict[str, Input], sizes: dict[str, int], padding: str | None = None
) -> tuple[Tensor, ...]:
    """Values for inputs with axes of these `sizes`, the same in each call.

    Args:
        inputs: Inputs of a graph.
        sizes: Sizes of the named axes.
        padding: Side on which masks mark padding in all samples but the first; None for none.
    """
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    values = []
    for port in inputs.values():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in port.axes]
        value = port.draw(shape, generator)
        values.append(_padded(value, padding) if padding in port.paddings else value)
    return tuple(values)


def _padded(mask: Tensor, side: str) -> Tensor:
    """A mask ``[B, T]`` with zeros on one side: none in the first sample, two more in each next
    sample; at least one 1 stays."""
    batch, length = mask.shape
    num_ones = (length - 2 * torch.arange(batch)).clamp(min=1)[:, None]
    number = torch.arange(length)
    return mask * (number < num_ones if side == RIGHT else number >= length - num_ones)


# ---- inputs --------------------------------------------------------------------------------------


def normal_values(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Values of an :class:`Input` of floats."""
    return torch.randn(*shape, generator=generator)


def _ones(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def whole_numbers(low: int, high: int) -> Callable[[Sequence[int], torch.Generator], Tensor]:
    """Values of an :class:`Input` of numbers from `low` to `high` - 1."""
    return lambda shape, generator: torch.randint(low, high, tuple(shape), generator=generator)


def token_input(words: int, batch: str = "batch") -> Input:
    """Numbers of tokens ``[batch, length]``, of a vocabulary of this many."""
    return Input((batch, "length"), whole_numbers(0, words))


def mask_input(axis: str, *paddings: str, batch: str = "batch") -> Input:
    """A mask ``[batch, axis]`` that may mark padding on these sides."""
    return Input((batch, axis), _ones, paddings)


def layer_inputs(count: int, prefix: str, axes: Axes) -> dict[str, Input]:
    """Keys and values of attention in each layer."""
    return {
        f"{prefix}_{layer}_{part}": Input(axes, normal_values)
        for layer in range(count)
        for part in ("key", "value")
    }


# ---- models of one graph -------------------------------------------------------------------------

LENGTHS = "lengths"  # number of outputs of each recording, without padding
SIZES = ((1, 1), (3, 2), (2, 7), (1, 97), (3, 260))


class _OneGraph(nn.Module):
    """A model with outputs that are picked by name."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, tuple(inputs), tuple(outputs)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(self.inputs, values, strict=True))
        output = dict(self.model(**arguments, return_dict=True))
        if LENGTHS in self.outputs:
            lengths = arguments["attention_mask"].sum(-1)
            output[LENGTHS] = self.model._get_feat_extract_output_lengths(lengths)
        return tuple(output[name] for name in self.outputs)


def _one_graph(
    model: Any, inputs: dict[str, Input], sample: dict[str, int], others: list[dict[str, int]]
) -> Graph:
    """A graph of a whole model, with all tensors that it returns."""
    values = draw(inputs, sample)
    output = first_outputs(model, dict(zip(inputs, values, strict=True)), COMMAND)
    outputs = [name for name, value in output.items() if isinstance(value, Tensor)]
    if not outputs:
        raise ValueError(
            f"export onnx has no graph for {type(model).__name__}, which returns tuples of tensors "
            "alone; allowed: models that return scores or states. transformers.exporters have "
            "more ways to export a model."
        )
    if "hop_nanoseconds" in inputs:
        outputs.append(LENGTHS)
    return Graph("model", _OneGraph(model, inputs, outputs), inputs, outputs, sample, others)


def image_graph(model: Any) -> Graph:
    """Images of any height and width.

    Raises:
        ValueError: for relative biases, and for a table that the stock model smooths.
    """
    for name in ("use_relative_position_bias", "use_shared_relative_position_bias"):
        if getattr(model.config, name, False):
            raise ValueError(
                f"{name}=True is not allowed for export onnx; allowed: False, because an exported "
                "graph would compute these biases for one size of images only. Train without "
                "biases, or with the relative positions of this package (type relpos)."
            )
    for module in model.modules():
        if isinstance(module, PatchEmbeddings) and module.antialias and module.table is not None:
            raise ValueError(
                f"the learned table of {type(model).__name__} is smoothed when it is made smaller, "
                "and ONNX Runtime smooths differently at some sizes; allowed for export onnx: "
                "types without a table, such as cape. Convert the model to one and fine-tune it."
            )
    pixels, patch, whole = _images(model)
    inputs = {"pixel_values": pixels}
    other = whole + patch  # another size than the table has, so that tracing sees a resized table
    shapes = (
        *((1, patch, patch), (3, patch, 3 * patch), (1, 2 * patch, patch)),
        *((1, whole, whole), (2, whole, 2 * patch), (3, whole + patch, whole + 2 * patch - 1)),
    )
    names = ("batch", "height", "width")
    others = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return _one_graph(model, inputs, {"batch": 2, "height": other, "width": other + patch}, others)


def _images(model: Any, batch: str = "batch") -> tuple[Input, int, int]:
    """Input of images, the longer side of a patch, and the longer side of the images that the
    configuration names."""
    sizes = getattr(model.config, "vision_config", model.config)
    patch, whole = (
        size if isinstance(size, int) else max(size)
        for size in (sizes.patch_size, sizes.image_size)
    )
    sides = _sides(model, height=whole, width=whole)
    return Input((batch, sizes.num_channels, *sides), normal_values), patch, whole


def _sides(model: Any, **trained: int) -> Axes:
    """Names of the axes of images, videos or sounds, or the trained sizes if a stock table stays
    that serves one size alone."""
    grids = (module for module in model.modules() if isinstance(module, PatchGrid))
    is_fixed = any(grid.keeps_table and not grid.resizes_table for grid in grids)
    return tuple(trained.values() if is_fixed else trained)


def video_graph(model: Any, seam: Any) -> Graph:
    """Videos of any number of frames, height and width.

    Args:
        model: The model.
        seam: The module that encodes the positions of tubelets.
    """
    kernel = seam.kernel
    number, _, *image = seam.shape_of_videos
    whole = (number, *image)
    frames, *sides = _sides(model, **dict(zip(VIDEO_AXES, whole, strict=True)))
    axes = ("batch", frames, seam.channels, *sides)
    inputs = {model.main_input_name: Input(axes, normal_values)}
    # few tubelets, because large models compute the attention of thousands: the trained size of
    # images with one tubelet, and the trained number of frames with one
    shapes = [
        (1, *kernel),
        (2, 2 * kernel[0] + 1, kernel[1], 3 * kernel[2] - 1),
        (3, kernel[0], *whole[1:]),
        (1, whole[0], *kernel[1:]),
    ]
    # tracing sees another grid than the trained one, for which some stock code takes a branch
    cells = (2, 3, 4) if tuple(seam.grid[1:]) != (3, 4) else (2, 4, 3)
    sample = [cells * side for cells, side in zip(cells, kernel, strict=True)]
    names = ("batch", *VIDEO_AXES)
    sizes = [dict(zip(names, shape, strict=True)) for shape in ((2, *sample), *shapes)]
    return _one_graph(model, inputs, sizes[0], sizes[1:])


def text_and_image_graph(model: Any) -> Graph:
    """Texts of any length beside images of any height and width, with a score for each pair."""
    pixels, patch, whole = _images(model, "images")
    words = model.config.get_text_config().vocab_size
    inputs = {
        "input_ids": token_input(words, "texts"),
        "attention_mask": mask_input("length", RIGHT, batch="texts"),
        "pixel_values": pixels,
    }
    names = ("texts", "length", "images", "height", "width")
    other = whole + patch
    shapes = ((1, 2, 1, whole, whole), (3, 97, 2, patch, 3 * patch), (2, 9, 3, other, whole))
    others = [dict(zip(names, shape, strict=True)) for shape in shapes]
    sample = dict(zip(names, (2, 9, 3, other, other + patch), strict=True))
    return _one_graph(model, inputs, sample, others)


def spectrogram_graph(model: Any) -> Graph:
    """Sounds of any duration, with an output for each patch or for the sound."""
    config = model.config
    bins, patch = config.num_mel_bins, config.patch_size
    (frames,) = _sides(model, frames=config.max_length)
    inputs = {"input_values": Input(("batch", frames, bins), normal_values)}
    lengths = (patch, 2 * patch + 1, config.max_length, 2 * config.max_length)
    others = [{"batch": batch, "frames": frames} for batch in (1, 3) for frames in lengths]
    return _one_graph(model, inputs, {"batch": 2, "frames": config.max_length + patch}, others)


def frames_graph(model: Any) -> Graph:
    """Recordings of any length, with a score for each class at each position."""
    inputs = {
        "input_features": Input(("batch", "frames", model.config.num_mel_bins), normal_values),
        "attention_mask": mask_input("frames", RIGHT),
        "hop_nanoseconds": Input(("batch",), whole_numbers(5_000_000, 20_000_000)),
    }
    others = [{"batch": batch, "frames": frames} for batch, frames in SIZES]
    return _one_graph(model, inputs, {"batch": 2, "frames": 50}, others)


def tokens_graph(model: Any) -> Graph:
    """Texts of any length, with an output for each token or for the text."""
    words = model.get_input_embeddings().num_embeddings
    inputs = {"input_ids": token_input(words), "attention_mask": mask_input("length", LEFT, RIGHT)}
    if getattr(model.config, "type_vocab_size", 0):
        types = whole_numbers(0, model.config.type_vocab_size)
        inputs["token_type_ids"] = Input(("batch", "length"), types)
    others = [{"batch": batch, "length": length} for batch, length in SIZES]
    return _one_graph(model, inputs, {"batch": 2, "length": 9}, others)
