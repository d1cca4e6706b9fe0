"""Stock models with the weights of models of this package, and with their position embeddings in
the tables of the stock classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cape_plugins import PositionConfig, PositionEncoder, patch_positions, token_positions
from cape_plugins.checkpoints.families import find_family
from cape_plugins.serving.command import SHORTEST
from hf_models.calls import switching as switch_built
from hf_models.seams.base import Seam
from hf_models.seams.frames import Frames, add_positions
from hf_models.seams.grids import PatchTable, TakesAnySize
from hf_models.seams.images import PatchEmbeddings
from hf_models.seams.natural_length import STRIDE, NaturalLengthEncoder
from hf_models.seams.optional_grids import OptionalTable
from hf_models.seams.rows import RowTable
from hf_models.seams.video import VideoSeam
from hf_models.switching.install import LearnedTable
from hf_models.switching.modeling import embed_positions


class Part(NamedTuple):
    """A part of a model that encodes positions.

    Attributes:
        module: Module of a model of this package.
        config: Position settings of the module.
        stock: Position settings of the stock model.
        table: Name of the parameter of the stock model that can hold the embeddings; None if there
            is none.
    """

    module: Any
    config: PositionConfig
    stock: PositionConfig
    table: str | None


def build_stock(cape: PreTrainedModel, stock_class: Any) -> PreTrainedModel:
    """See :func:`hf_models.calls.switching.build_stock`; the stock model has a table to fill."""
    fields = {}
    of_patches = PatchEmbeddings | OptionalTable
    has_patches = any(isinstance(module, of_patches) for module in cape.modules())
    if has_patches and hasattr(cape.config, "use_absolute_position_embeddings"):
        fields["use_absolute_position_embeddings"] = True
    return switch_built.build_stock(cape, stock_class, **fields)


def parts_of(cape: PreTrainedModel, stock: PreTrainedModel) -> list[Part]:
    """The parts of a model that encode positions."""
    names, saved = stock.state_dict().keys(), vars(cape.config)
    family, parts = find_family(cape.config.model_type, saved), []
    for path, module in cape.named_modules():
        if not hasattr(module, "positions") or isinstance(module, PatchTable):  # see its owner
            continue
        side = getattr(module, "side", "encoder")
        row = family.sides[side]
        of_stock = PositionConfig(family.stock_type(saved, side), row.domain, row.architecture)
        if isinstance(module, Seam):
            table = module.stock_table(path)
        else:
            candidates = (f"{path}.{end}" for end in switch_built.STOCK_TABLES)
            table = next((name for name in candidates if name in names), None)
        config = cape.config.position_settings(row.field)
        parts.append(Part(module, config, of_stock, table))
    return parts


def of_images(config: Any) -> Any:
    """The part of a configuration for images."""
    return getattr(config, "vision_config", config)


def shape_of_inputs(model: PreTrainedModel) -> tuple[int, ...]:
    """Shape of one image, video, recording or text of a model of this package."""
    config = model.config
    if model.main_input_name == "input_ids":
        return (1, SHORTEST - 1)  # plus the hint
    if model.main_input_name == "input_values":
        return (1, config.max_length, config.num_mel_bins)
    seams = (module for module in model.modules() if isinstance(module, VideoSeam))
    if (seam := next(seams, None)) is not None:
        return (1, *seam.shape_of_videos)
    if model.main_input_name == "pixel_values":
        return shape_of_images(model)
    if hasattr(config, "num_mel_bins"):
        return (1, config.num_mel_bins, STRIDE * config.max_source_positions)
    return (1, 100, config.input_feat_per_channel)


def shape_of_images(model: PreTrainedModel) -> tuple[int, ...]:
    """Shape of one image."""
    config = of_images(model.config)
    size = config.image_size
    sides = size if isinstance(size, list | tuple) else (size, size)
    return (1, config.num_channels, *sides)


def refuse_random_positions(cape: PreTrainedModel) -> None:
    """Refuses a model that draws positions in evaluation.

    Raises:
        ValueError: for such a model.
    """
    for module in cape.modules():
        if isinstance(module, PositionEncoder) and module.draws:
            _refuse(module.config, "random positions")


@torch.no_grad()
def fill_table(stock: PreTrainedModel, part: Part) -> None:
    """Writes the embeddings that the part adds to its first positions into the stock table.

    Raises:
        ValueError: if the embeddings depend on the length of the text.
    """
    table = stock.get_parameter(part.table)
    if isinstance(part.module, PatchEmbeddings):
        rows = _rows_of_patches(part.module, table)
    elif isinstance(part.module, TakesAnySize):
        rows = _rows_of_grid(part.module, table)
    elif isinstance(part.module, NaturalLengthEncoder):
        rows = _rows_of_frames(part.module, table)
    elif isinstance(part.module, RowTable):
        first = part.module.first_row
        rows = part.module.weight[:1].expand_as(table).clone()
        rows[first:] = _rows_of_tokens(part, len(table) - first)
    else:
        first = getattr(stock.get_submodule(part.table.removesuffix(".weight")), "offset", 0)
        rows = torch.zeros_like(table)
        rows[first:] = _rows_of_tokens(part, len(table) - first)
    table.copy_(rows.view_as(table))


def _rows_of_patches(embeddings: PatchEmbeddings, like: Tensor) -> Tensor:
    """``[special tokens + patches, C]`` at the image size of the configuration."""
    if embeddings.table is not None:
        return embeddings.table.detach()
    rows = torch.zeros_like(like)
    patches = embeddings.positions(patch_positions(*embeddings.table_size))
    if patches is not None:
        rows.view(-1, like.shape[-1])[len(embeddings.special_tokens) :] = patches.to(like.dtype)
    return rows


def _rows_of_grid(seam: TakesAnySize, table: Tensor) -> Tensor:
    """The rows in the shape of the stock table ``[..., special tokens + patches, C]``, at the size
    of inputs in the configuration."""
    grid = seam.patch_grid
    if not seam.drops_table:  # came with the weights
        return table
    return grid.embedding(table)[0].expand_as(table)


def _rows_of_frames(encoder: NaturalLengthEncoder, like: Tensor) -> Tensor:
    """``[T', C]`` for a recording with the length that the stock model takes."""
    content = torch.zeros_like(like)[None]
    frames = Frames(torch.tensor([len(like)]), encoder.config.hop_seconds, None, None)
    return add_positions(encoder.positions, content, frames, STRIDE)[0]


def _rows_of_tokens(part: Part, rows: int) -> Tensor:
    """``[T, C]`` for a text of T tokens."""
    values, shorter = (_embed_tokens(part.module, length) for length in (rows, rows // 3))
    if not torch.allclose(values[: len(shorter)], shorter, atol=1e-5):
        _refuse(part.config, "other positions in texts of other lengths")
    return values


def _refuse(config: PositionConfig, reason: str) -> None:
    raise ValueError(
        f"position embedding {config.type!r} with random_evaluation={config.random_evaluation}, "
        f"mean_normalize={config.mean_normalize} has {reason}, which no table can hold; allowed: "
        "positions that are counted from the first token and not drawn in evaluation. Keep the "
        "cape checkpoint."
    )


def _embed_tokens(module: Any, length: int) -> Tensor:
    if isinstance(module, RowTable):
        rows = torch.arange(module.first_row, module.first_row + length)
        # some stock tables choose the rows themselves, from a mask or from the shape of the text
        return RowTable.forward(module, rows)
    positions = token_positions(torch.ones(1, length, dtype=torch.bool))
    embedding = getattr(module, "embed_tokens", None) or module.word_embeddings
    table: nn.Module = getattr(module, "embed_positions", None) or module.position_embeddings
    if isinstance(table, LearnedTable):
        return table.look_up(positions, 1)[0]
    rows = embed_positions(module.positions, positions, None, embedding.weight)
    return embedding.weight.new_zeros(length, embedding.embedding_dim) if rows is None else rows[0]
