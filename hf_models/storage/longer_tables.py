"""Learned position tables of another size that keep what was learned: more tokens, longer sounds,
images of another size. Models with such a table are fine-tuned afterwards."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from cape_plugins import PositionTable, resize_grid
from cape_plugins.settings.registry import ROTARY
from hf_models.seams.grids import PatchGrid, PatchTable, TakesAnySize, as_pair
from hf_models.seams.images import PatchEmbeddings
from hf_models.seams.packed_grids import PackedTable
from hf_models.seams.rows import RowTable
from hf_models.switching.configuration import copy_implementations
from hf_models.switching.install import LearnedTable

EXTENSIONS = ("wrap", "copy", "stretch")
KEPT_ROWS = 20  # of Long-CLIP (arXiv 2403.15378, section 3.1): the rows that training saw most
# Fields that hold a size, and buffers that end with the table
_FIELD = re.compile(r"position|image_size|max_length|num_frames|num_patches|^n_ctx$")
_BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids)$")
_SIZE = re.compile(r"(?:(?P<field>[\w.]+)=)?(?P<first>\d+)(?:x(?P<second>\d+))?")
ALLOWED_SIZES = (
    "N tokens or frames, N or HEIGHTxWIDTH pixels, or FIELD=N with the field of the configuration "
    "that holds the size, such as vision_config.image_size=336"
)


class _Table(NamedTuple):
    """A learned table of a model.

    Attributes:
        name: Name of the parameter.
        weight: ``[..., special rows + positions, C]``.
        special: Rows that are no positions.
        grid: Sizes of the axes of patches; None for a table of tokens.
        behind: How many of the special rows are behind the last position; the others are before
            the first one.
    """

    name: str
    weight: Tensor
    special: int
    grid: tuple[int, ...] | None
    behind: int = 0

    @property
    def positions(self) -> int:
        return self.weight.shape[-2] - self.special


class _Growth(NamedTuple):
    """A field of the configuration with its new value, and the tables that follow.

    Attributes:
        field: Path of the field, with dots.
        value: New value.
        new: The tables at their new size, by name.
    """

    field: str
    value: Any
    new: dict[str, _Table]


def extend_table(
    model: PreTrainedModel, size: str | int, extension: str = "copy"
) -> PreTrainedModel:
    """Builds a model with a learned position table of another size and all other weights of
    `model`.

    ``copy`` gives new rows the trained rows once more, from the first on: up to the old length the
    outputs stay the same. ``stretch`` keeps the first rows and interpolates the others
    linearly over the rest, as in Long-CLIP; ``stretch:K`` keeps K rows (default 20). Tables of
    images and spectrograms are repeated by ``copy`` and resized bicubically by ``stretch``. Rows of
    special tokens stay. ``wrap`` needs no new rows, and so no call of this function: each learned
    table begins anew behind its last row.

    Args:
        model: A model of this package with a learned table, such as of the type ``abspos``. Extend
            it before an optimizer or an adapter is made.
        size: Number of tokens or frames, image size in pixels as N or ``HEIGHTxWIDTH``, or
            ``FIELD=N`` with a field of the configuration. Models of packed patches (SigLIP 2) have
            a number of patches, a square number, instead of an image size.
        extension: ``copy``, ``stretch`` or ``stretch:K``.

    Returns:
        A new model of the same class, whose configuration has the new size.

    Raises:
        ValueError: if the model has no learned table, if no field of its configuration sets the
            size, if the size is no longer than before, or for other values of `extension`;
            ``stretch:K`` is for tables of tokens alone.
    """
    kind, number = parse_extension(extension)
    keep = KEPT_ROWS if number is None else number
    growth = _growth(model, str(size))
    tables = {table.name: table for table in _tables(model)}
    grids = [grid for name in growth.new if (grid := tables[name].grid) is not None]
    if number is not None and grids:
        raise ValueError(
            f"table extension {extension!r} is not allowed for {type(model).__name__}, whose table "
            f"of {_by(grids[0])} patches is resized as a whole, so no rows can stay; allowed: "
            f"copy, stretch. Leave out :{number}."
        )
    config = _with_field(model.config, growth.field, growth.value)
    sides = as_pair(growth.value)
    is_square = sides[0] == sides[1] or not grids
    if not is_square and not _takes_images(model, config, sides):
        # an image with equal sides shows that the size is the reason
        equal = _with_field(config, growth.field, type(growth.value)((sides[0], sides[0])))
        if _takes_images(model, equal, (sides[0], sides[0])):
            raise ValueError(
                f"table size {size} is not allowed for {type(model).__name__}, whose stock code "
                "takes a table of patches for a square; allowed: height = width. Give N pixels, "
                "or choose a type that needs no table, such as cape, for images of any size."
            )
    copy_implementations(model.config, config)
    longer = type(model)(config).to(device=model.device, dtype=model.dtype)
    weights = model.state_dict()
    with torch.no_grad():
        for name, new in growth.new.items():
            weights[name] = _extended(tables[name], new, kind, keep)
    counts = {name: value for name, value in longer.state_dict().items() if _BUFFERS.search(name)}
    longer.load_state_dict(weights | counts)
    for name, parameter in model.named_parameters():
        longer.get_parameter(name).requires_grad_(parameter.requires_grad)
    longer.generation_config = deepcopy(getattr(model, "generation_config", None))
    return longer.train(model.training)


def difference(model: PreTrainedModel, longer: PreTrainedModel, extension: str) -> str:
    """Returns the reason why a longer table changes the outputs, for a sentence; an empty text if
    outputs up to the old length stay the same.

    Args:
        model: Model before :func:`extend_table`.
        longer: Model that :func:`extend_table` returned.
        extension: As for :func:`extend_table`.
    """
    kind, number = parse_extension(extension)
    keep = KEPT_ROWS if number is None else number
    longer_tables = {table.name: table for table in _tables(longer)}
    pairs = [(table, longer_tables[table.name]) for table in _tables(model)]
    table, new = next((old, new) for old, new in pairs if old.weight.shape != new.weight.shape)
    if table.grid is not None:
        sizes = f"{_by(table.grid)} patches becomes one of {_by(new.grid)}"
        return f"the learned table of {sizes} ({kind})"
    if kind == "copy":
        return ""
    return (
        f"the learned table of {table.positions} rows becomes one of {new.positions}; from row "
        f"{min(keep, table.positions)} on, rows lie between the trained ones (stretch)"
    )


def parse_extension(extension: str) -> tuple[str, int | None]:
    """The kind of extension, and the number of rows that stay; None if `extension` has no number.

    Raises:
        ValueError: for another text.
    """
    kind, colon, number = extension.partition(":")
    is_number = number.isdecimal() and kind == "stretch" if colon else True
    if kind not in EXTENSIONS[1:] or not is_number:
        raise ValueError(
            f"table extension {extension!r} is not allowed; allowed: copy, stretch, or "
            f"stretch:K with the number K of rows that stay (stretch alone keeps {KEPT_ROWS})."
        )
    return kind, int(number) if colon else None


def _tables(model: nn.Module) -> Iterator[_Table]:
    """The learned tables of a model of this package."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        grid, special, behind, weight = None, 0, 0, None
        if isinstance(module, RowTable) and module.keeps_table:
            weight, special = module._parameters["weight"], module.first_row
        elif isinstance(module, LearnedTable):
            weight, special = module.weight, module.offset
        elif isinstance(module, PatchEmbeddings) and module.table is not None:
            weight, grid = module.table_parameter, module.table_size
            special = len(module.special_tokens)
        elif isinstance(module, PatchGrid) and module.keeps_table:
            is_module = isinstance(module, PatchTable)
            name = "weight" if is_module else getattr(module, "table_name", "")
            weight = getattr(module, name, None)
            special, grid = module.special_tokens, module.grid_of_table
            behind = module.tokens_behind
        elif isinstance(module, PackedTable) and module.keeps_table:
            weight, grid = getattr(module, module.table_name).weight, module.grid
            if math.prod(grid) != len(weight):  # no square, which stock code cannot use
                continue
        elif type(module) is PositionTable:  # an InterpolatedTable has the size in its settings
            weight, grid = module.weight, module.size if len(module.size) > 1 else None
        if id(weight) in names:  # fixed tables are no parameters
            yield _Table(names[id(weight)], weight, special, grid, behind)


def _growth(model: PreTrainedModel, size: str) -> _Growth:
    """Finds the field that holds the size of the learned table: with the new size in it, the
    tables of positions get the new size and all other weights keep their shape."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"table size {size!r} is not allowed; allowed: {ALLOWED_SIZES}.")
    tables = list(_tables(model))
    if not tables:
        architectures = {name for _, name in model.config.position_fields.values()}
        remedy = "It turns queries and keys at any position: leave the table size out."
        if architectures != {ROTARY}:
            remedy = "Give the model a type with a table: "
            remedy += 'hf_models.switch(model, {"type": "abspos"}), or --position-embedding abspos.'
        raise ValueError(
            f"{type(model).__name__} has no learned position table of this package that table size "
            f"{size} could extend. {remedy}"
        )
    number = int(match["first"])
    pixels = (number, int(match["second"])) if match["second"] else number
    token_tables = [table for table in tables if table.grid is None]
    candidates = token_tables if match["second"] is None and token_tables else tables
    candidates = tables if match["field"] else candidates
    growths, other_weights = [], {}
    for field, value in _fields(model.config):
        if match["field"] not in (None, field):
            continue
        for new_value, of_grid in _new_values(value, pixels, candidates):
            new, others = _new_shapes(model, field, new_value, tables)
            is_kind = all((table.grid is not None) == of_grid for table in new.values())
            is_long = of_grid or all(table.positions == number for table in new.values())
            if new and is_kind and is_long and new.keys() <= {table.name for table in candidates}:
                if others:
                    other_weights[field] = others
                else:
                    growths.append(_Growth(field, new_value, new))
    if len(growths) == 1:
        return growths[0]
    raise ValueError(_refusal(model, size, candidates, growths, other_weights))


def _refusal(
    model: PreTrainedModel,
    size: str,
    candidates: list[_Table],
    growths: list[_Growth],
    other_weights: dict[str, list[str]],
) -> str:
    """Why :func:`_growth` found no field, or more than one."""
    start = f"table size {size} is not allowed for {type(model).__name__}"
    if growths:
        fields = " or ".join(growth.field for growth in growths)
        return f"{start}, where it could be {fields}; give one of these as FIELD={size}."
    if other_weights:
        field, others = next(iter(other_weights.items()))
        return (
            f"{start}: {field} also sets the size of {', '.join(others[:3])}, which are no "
            "position tables. Use a type that needs no table, such as cape."
        )
    sizes = ", ".join(
        f"{table.name} of {_by(table.grid) + ' patches' if table.grid else table.positions}"
        for table in candidates
    )
    return (
        f"{start}, whose tables are {sizes}; allowed: more tokens than now, or another size of "
        f"images or sounds: {ALLOWED_SIZES}."
    )


def _fields(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of a configuration and of its parts that may hold a size, with their values."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _fields(value, f"{path}{name}.")
        is_pair = isinstance(value, list | tuple) and all(isinstance(n, int) for n in value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if (is_number or (is_pair and value)) and _FIELD.search(name):
            yield path + name, value


def _new_values(value: Any, size: Any, tables: list[_Table]) -> list[tuple[Any, bool]]:
    """Values that a field may need for the new size, and whether each is for a grid: the size
    itself, or as much more as tables of tokens have to grow. Some fields count the rows before the
    first position too."""
    new_values = []
    is_one = isinstance(size, int)
    if is_one and isinstance(value, int):
        lengths = {table.positions for table in tables if table.grid is None}
        new_values += [(value + size - length, False) for length in lengths if length < size]
    if any(table.grid is not None for table in tables):
        if not isinstance(value, int):
            new_values.append((type(value)((size, size) if is_one else size), True))
        else:
            new_values.append((size if is_one or size[0] != size[1] else size[0], True))
    return new_values


def _with_field(config: Any, path: str, value: Any) -> Any:
    """A copy of a configuration with another value in one field."""
    config = deepcopy(config)
    *parts, name = path.split(".")
    owner = config
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return config


def _new_shapes(
    model: PreTrainedModel, field: str, value: Any, tables: list[_Table]
) -> tuple[dict[str, _Table], list[str]]:
    """Tables that a field of the configuration gives another size, by name, and the names of other
    weights with another shape. Builds the model without memory."""
    try:
        config = _with_field(model.config, field, value)
        with torch.device("meta"):
            other = type(model)(config)
    except Exception:  # a value that the field cannot have, which stock code refuses by any error
        return {}, []
    old_shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    names = [
        name for name, weight in other.state_dict().items() if old_shapes.get(name) != weight.shape
    ]
    new = {table.name: table for table in _tables(other) if table.name in names}
    old_names = {table.name for table in tables}
    return new, [name for name in names if name not in old_names and not _BUFFERS.search(name)]


def _takes_images(model: PreTrainedModel, config: Any, sides: tuple[int, int]) -> bool:
    """Whether a model with this configuration adds its tables to an image of this height and width.
    Some stock code takes each table for a square (DPT). Runs the model without memory."""
    with torch.device("meta"):
        other = type(model)(config)
    for module in other.modules():
        cuts = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        if isinstance(module, TakesAnySize) and cuts:  # tables behind layers take no image (YOLOS)
            try:
                module(torch.empty(1, cuts[0].in_channels, *sides, device="meta"))
            except Exception:  # stock code fails by any error
                return False
    return True


def _extended(old: _Table, new: _Table, kind: str, keep: int) -> Tensor:
    """The weights of a table at its new size, in the shape of its parameter."""
    tables = old.weight.reshape(-1, *old.weight.shape[-2:])  # a table of each layer, or one
    parts = []
    for rows in tables:
        before, trained, behind = rows.split((old.special - old.behind, old.positions, old.behind))
        if old.grid is None:
            longer = _longer(trained, new.positions, kind, keep)
        elif kind == "copy":
            longer = _repeated(trained, old.grid, new.grid)
        else:
            longer = resize_grid(trained, old.grid, new.grid)
        parts += before, longer, behind
    return torch.cat(parts).view(new.weight.shape)


def _longer(trained: Tensor, positions: int, kind: str, keep: int) -> Tensor:
    """``[positions, C]`` from ``[N, C]``. The stretched rows end beyond the last trained row, where
    the line through the last two rows goes on, as in Long-CLIP."""
    count = len(trained)
    row = torch.arange(positions, device=trained.device)
    if kind == "copy":
        return F.embedding(row % count, trained)
    if keep > count - 2:
        raise ValueError(
            f"table extension stretch:{keep} leaves nothing to interpolate in a table "
            f"of {count} rows; allowed: at most {count - 2}."
        )
    old_row = keep + (row - keep).double() * (count - keep) / (positions - keep)
    old_row = torch.where(row < keep, row.double(), old_row)
    below = old_row.floor().clamp(max=count - 2).long()
    part = (old_row - below).float()[:, None]
    first, second = F.embedding(below, trained), F.embedding(below + 1, trained)
    between = first.float() + part * (second.float() - first.float())
    return torch.where(part == 0, first, between.to(trained.dtype))


def _repeated(trained: Tensor, grid: tuple[int, ...], new_grid: tuple[int, ...]) -> Tensor:
    """``[new cells, C]``: the grid beside itself, from the first cell of each axis on."""
    cells = trained.unflatten(0, grid)
    for axis, (size, new_size) in enumerate(zip(grid, new_grid, strict=True)):
        cells = cells.index_select(axis, torch.arange(new_size, device=cells.device) % size)
    return cells.flatten(0, len(grid) - 1)


def _by(grid: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, grid or ()))
