"""Stock checkpoints of Hugging Face models of this package: models of the stock class, with
position embeddings in the stock tables. Such checkpoints do not need this package."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from cape_plugins.checkpoints.families import find_family, width_of
from cape_plugins.serving.checks import refuse_large_table
from cape_plugins.serving.output import Exported
from cape_plugins.serving.templates import fill
from cape_plugins.settings.arguments import HUGGING_FACE
from cape_plugins.utils.files import editing_json
from hf_models.convert import own_class
from hf_models.processors.feature_extraction import choose_extractor
from hf_models.processors.limits import follow_in_folder, set_limit
from hf_models.seams.grids import PatchGrid
from hf_models.seams.images import ImageModel
from hf_models.seams.natural_length import STRIDE, NaturalLengthEncoder
from hf_models.seams.packed_grids import refuse_packed_patches
from hf_models.seams.rows import RowTable
from hf_models.serving.source_folder import refuse_data
from hf_models.serving.stock_samples import COMMAND, compare, hint_of, samples_of
from hf_models.storage.loading import clear_errors, load_whole
from hf_models.storage.other_files import copy_other_files
from hf_models.storage.stock_model import (
    Part,
    build_stock,
    fill_table,
    of_images,
    parts_of,
    refuse_random_positions,
    shape_of_inputs,
)
from hf_models.switching.install import stock_class

TEMPLATE = Path(__file__).with_name("stock_folder.md")
_COMPUTES = "computes its positions and ignores tables in its file"
_TOKEN_LIMITS = ("max_target_positions", "max_position_embeddings")  # fields of configurations


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Writes a folder that the stock class loads.

    Args:
        source: Folder of a model of this package.
        folder: Empty folder.
        args: Arguments of ``cape-plugins export stock``.

    Raises:
        ValueError: for a model that the stock class cannot compute; names the reason and a way that
            works.
    """
    _check_arguments(args)
    with clear_errors(str(source)):
        cape, stock_type = _load(source)
    refuse_packed_patches(cape, COMMAND)
    refuse_random_positions(cape)
    # both compute in float32, to compare without rounding; the file keeps the stored precision
    stored, cape = cape.dtype, cape.float()
    _refuse_in_attention(cape, stock_type)
    limit = _set_size(cape, args)
    inputs, expected = samples_of(cape)
    stock = build_stock(cape, stock_type)
    parts = parts_of(cape, stock)
    if args.max_tokens and not any(part.table for part in parts):
        raise ValueError(
            f"--max-tokens {args.max_tokens} is not allowed for a {stock_type.__name__}, which "
            "computes its positions; leave it out."
        )
    for part in parts:
        _check(part, stock)
    for part in parts:
        if part.table:
            fill_table(stock, part)
    difference = compare(cape, stock, inputs, expected)
    copy_other_files(str(source), folder)
    choose_extractor(folder, False)
    if args.image_size:
        _resize_processor(folder, *args.image_size)
    stock._keys_to_ignore_on_save = None  # Marian would leave out the tables
    stock.to(stored).save_pretrained(folder)
    follow_in_folder(folder, stock.config)
    if args.max_tokens:
        set_limit(folder, args.max_tokens)
    tables = ", ".join(part.table for part in parts if part.table) or "none"
    report = (
        f"{stock_type.__name__} of transformers, tables: {tables}; outputs on random inputs within "
        f"{difference:.1e} of {source.resolve().name}"
    )
    if stored != torch.float32:
        report += ", both in float32"
    return Exported(_readme(cape, stock, parts, limit, folder), report)


def _check_arguments(args: argparse.Namespace) -> None:
    host = HUGGING_FACE.replace("_", "-")
    if args.to not in (None, host):
        raise ValueError(
            f"--to {args.to} is not allowed for a Hugging Face model; allowed: {host}, the "
            "default. Leave it out."
        )
    refuse_data(args)


def _load(source: Path) -> tuple[PreTrainedModel, Any]:
    """The model, and the stock class of the model."""
    config = AutoConfig.from_pretrained(source)
    cape_class = own_class(str(source), config)
    name, stock_type = cape_class.__name__.removeprefix("Cape"), stock_class(cape_class)
    if not hasattr(config, "position_fields"):
        raise ValueError(f"SOURCE {source} holds a stock {name} already; there is nothing to do.")
    if stock_type is None:
        raise ValueError(
            f"SOURCE {source} holds a {cape_class.__name__}, which transformers has no stock class "
            "for; allowed: the other families. `cape-plugins export onnx` takes the model, and "
            "`python -m hf_models.convert --self-contained` writes its code beside the weights."
        )
    cape, _ = load_whole(cape_class, str(source))
    return cape.eval(), stock_type


def _set_size(cape: PreTrainedModel, args: argparse.Namespace) -> str | None:
    """Sets the requested size of the table. Returns the name of the setting that limits tokens, if
    the configuration has such a setting."""
    images = [module for module in cape.modules() if isinstance(module, ImageModel)]
    tables = [module for module in cape.modules() if isinstance(module, RowTable)]
    text_config = cape.config.get_text_config()
    limit = next((name for name in _TOKEN_LIMITS if hasattr(text_config, name)), None)
    if args.image_size:
        if not images:
            _set_image_size(cape, *args.image_size)
        for model in images:
            patches = math.prod(model.embeddings.patches(*args.image_size))
            refuse_large_table("--image-size", patches, of_images(model.config).hidden_size)
            model.resize_images(*args.image_size)
    if args.max_tokens:
        if images or limit is None:
            raise ValueError(
                f"--max-tokens {args.max_tokens} is not allowed for a {type(cape).__name__}, which "
                "has no table of tokens; leave it out."
            )
        (side, *_) = find_family(cape.config.model_type).sides.values()
        width = tables[0].embedding_dim if tables else width_of(side, cape.config)
        if width:  # may be narrower than the layers
            refuse_large_table("--max-tokens", args.max_tokens, width)
        size = args.max_tokens
        if tables:  # some fields count the rows before the first position too
            size += getattr(text_config, limit) - tables[0].positions_of_table
        setattr(text_config, limit, size)
    return None if images else limit


def _set_image_size(cape: PreTrainedModel, height: int, width: int) -> None:
    """Sets the size of the images of a generated family.

    Raises:
        ValueError: if the model reads no images, or has a learned table of another size.
    """
    message_start = f"--image-size {height} {width} is not allowed for a {type(cape).__name__}"
    grids = [module for module in cape.modules() if isinstance(module, PatchGrid)]
    sizes = of_images(cape.config)
    if not grids or not hasattr(sizes, "image_size"):
        raise ValueError(f"{message_start}, which reads no images; allowed: --max-tokens.")
    for grid in grids:
        if grid.keeps_table:
            raise ValueError(
                f"{message_start} with a learned table, which would have to be resized first: "
                "`python -m hf_models.convert SOURCE NEW --position-table-size "
                f"{height}x{width} --position-table-extension stretch`."
            )
        sides = zip(grid.grid[:-2], grid.kernel[:-2], strict=True)  # none, or frames
        grid.grid = grid.patches(*(cells * side for cells, side in sides), height, width)
        refuse_large_table("--image-size", math.prod(grid.grid), grid.width)
    is_pair = isinstance(sizes.image_size, list | tuple)
    sizes.image_size = (height, width) if is_pair or height != width else height


def _refuse_in_attention(cape: PreTrainedModel, stock_type: type) -> None:
    for field in cape.config.position_fields:
        settings = cape.config.position_settings(field)
        if settings.in_attention:
            context = settings.relative_context
            suffix = f" with relative_context={context}" if context else ""
            raise ValueError(
                f"{field} {settings.type!r}{suffix} is not allowed for a {stock_type.__name__}, "
                "whose attention has no such positions; allowed: types that add to the content. "
                "`cape-plugins export onnx` takes the model, and `python -m hf_models.convert "
                "--self-contained` writes its code beside the weights."
            )


def _check(part: Part, stock: PreTrainedModel) -> None:
    """Refuses settings that the stock class cannot compute. A caller can put the BOS hint before
    the source, and a table can hold embeddings that are added."""
    changes = part.config.changes(part.stock)
    differences = sorted(changes.keys() - {"source_bos"})
    if part.table is None and differences:
        option = min(differences, key=lambda name: (name != "type", name))
        value, of_stock = changes[option]
        reason = getattr(part.module, "without_table", _COMPUTES)
        raise ValueError(
            f"{option}={value!r} is impossible in a {type(stock).__name__}, which {reason}; "
            f"allowed: settings with the outputs of the stock model ({option}={of_stock!r}). See "
            "whether `cape-plugins export ctranslate2` or `onnx` takes the model; "
            "`hf_models.convert --self-contained` writes its code beside the weights."
        )


def _longest(stock: PreTrainedModel, parts: list[Part], limit: str) -> int:
    """Number of tokens for which the table of a stock model has rows."""
    (part, *_) = (part for part in parts if part.table)
    if isinstance(part.module, RowTable):
        return len(stock.get_parameter(part.table)) - part.module.first_row
    return getattr(stock.config, limit)


def _resize_processor(folder: Path, height: int, width: int) -> None:
    """Sets the image size of an image processor that makes images of one size."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        with editing_json(folder / name) as saved:
            settings = saved.get("image_processor", saved)
            for key in ("size", "crop_size"):
                if {"height", "width"} == (settings.get(key) or {}).keys():
                    settings[key] = {"height": height, "width": width}


def _readme(
    cape: PreTrainedModel,
    stock: PreTrainedModel,
    parts: list[Part],
    limit: str | None,
    folder: Path,
) -> str:
    """The README of the folder.

    Args:
        cape: The model of this package.
        stock: The stock model.
        parts: The parts that encode positions.
        limit: Setting with the number of positions of a text; None if there is none.
        folder: Folder with all other files.
    """
    tables = [f"`{part.table}`" for part in parts if part.table]
    frames = any(isinstance(part.module, NaturalLengthEncoder) for part in parts)
    hint, shape = hint_of(cape), shape_of_inputs(cape)
    pixels, text = (name in stock.main_input_name for name in ("pixel_values", "input_ids"))
    video = pixels and len(shape) == 5  # [1, frames, channels, height, width]
    sounds = stock.main_input_name == "input_values"
    generates = stock.can_generate()
    has_tokenizer = any(folder.glob("tokenizer*")) or any(folder.glob("*.spm"))
    tokens = not (pixels or frames or sounds)
    # a prompt is padded on the left, because generation continues its last token
    pad_left = generates and not stock.config.is_encoder_decoder
    return fill(
        TEMPLATE,
        model=type(stock).__name__,
        trained=cape.config.position_embedding["type"],
        tables=", ".join(tables),
        images=pixels and not video,
        video=video and bool(tables),
        number=shape[1],
        height=shape[-2],
        width=shape[-1],
        frames=frames and STRIDE * stock.config.max_source_positions,
        has_hint=tokens and hint is not None,
        hint=hint,
        plain=tokens and hint is None,
        positions=limit and tables and _longest(stock, parts, limit),
        generates=generates,
        pad_left=tokens and pad_left,
        pad_right=tokens and tables and not pad_left,
        padding_side="left" if pad_left else "right",
        difference=tokens and cape.config.stock_difference,
        never_save=type(stock)._keys_to_ignore_on_save,
        text=text,
        tokenizer=text and has_tokenizer,
        ids=text and not has_tokenizer,
        name=stock.main_input_name,
        shape=shape,
    )
