"""Position embeddings of trained models: settings and learned tables, read from a Hugging Face
folder or a fairseq checkpoint, without transformers or fairseq."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cape_plugins.checkpoints.fairseq_files import (
    CheckpointError,
    fairseq_arguments,
    fairseq_config,
    read_checkpoint,
)
from cape_plugins.checkpoints.families import (
    OWN_PREFIX,
    SIDES,
    Side,
    find_fairseq_family,
    find_family,
    known_types,
    value_of,
    width_of,
)
from cape_plugins.mathematics.builders import build_position_encoder
from cape_plugins.mathematics.encoder import PositionEncoder
from cape_plugins.mathematics.positions import Positions, frame_positions, patch_positions
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS, Domain

# number of tokens or frames; or sizes of a grid, (height, width) in patches
Size = int | tuple[int, ...]
SOURCE_TARGET = {"encoder": "source", "decoder": "target"}


@dataclass(frozen=True)
class Stack:
    """The position embedding of an encoder or decoder, and the spacing of its positions.

    Attributes:
        config: Settings of the position embedding.
        encoder: Position encoder.
        spacing: Distance between neighbours in the unit of the domain, such as seconds between
            frames.
        grid: Sizes of the training inputs; for images (height, width) in patches.
        name: Name of the checkpoint.
        relative: Maps labels to relative embeddings, which layers add to keys or values (Shaw et
            al.): ``[2 C + 1, K]`` for distances -C to C from query to key, in decoders
            ``[C + 1, K]`` for distances -C to 0. Empty for other types.
    """

    config: PositionConfig
    encoder: PositionEncoder
    spacing: float = 1.0
    grid: tuple[int, ...] = ()
    name: str = ""
    relative: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def domain(self) -> Domain:
        """Domain of the positions."""
        return DOMAINS[self.config.domain]

    @property
    def dim(self) -> int:
        """K, channels of the embedding."""
        for rows in self.relative.values():
            return rows.shape[1]
        return self.encoder.encoding.dim

    def positions(self, size: Size) -> Positions:
        """Raw positions of an input of `size` tokens, frames or patches, without padding; B = 1."""
        if self.domain.grid:
            return patch_positions(*size, seconds=self.config.seconds_per_frame or None)
        return frame_positions(torch.tensor([size]), self.spacing, size)


def read_stack(path: str | Path, side: str | None = None) -> Stack:
    """Reads the position embedding of a trained model; reads weights only for a learned table.

    Models without position settings are read as the stock models of their host.

    Args:
        path: Folder of a Hugging Face model of one of the
            :data:`~cape_plugins.checkpoints.families.FAMILY_ROWS`, or checkpoint file of fairseq.
        side: One of :data:`SIDES`; default the encoder if there is one.

    Raises:
        ValueError: if the model cannot be read; names the file and the remedy.
        ImportError: for a learned table in a Hugging Face folder without the package safetensors.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"--model {path}: no such file or folder; check the path.")
    try:
        return _read_folder(path, side) if path.is_dir() else _read_fairseq(path, side)
    except KeyError as error:
        raise ValueError(
            f"--model {path} lacks the setting {error.args[0]!r}; was the whole model saved by "
            "transformers or fairseq-train?"
        ) from None


# ---- Hugging Face ------------------------------------------------------------------------------


def _read_folder(folder: Path, side: str | None) -> Stack:
    file = folder / "config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {folder}: {file.name} cannot be read ({error}); give a folder that "
            "save_pretrained wrote."
        ) from None
    model_type = str(saved.get("model_type"))
    if find_family(model_type) is None:
        for module in entry_points(group="cape_plugins.families"):
            module.load()  # the module adds rows
    family = find_family(model_type, saved)
    if family is None:
        raise ValueError(
            f"--model {folder}: model type {model_type!r} is unknown; allowed: "
            f"{known_types()}, with or without the prefix {OWN_PREFIX}. A family outside "
            "this package needs a row first: cape_plugins.checkpoints.families.add_family_row, "
            "see docs/flags.md (Pictures)."
        )
    side = choose_side(side, tuple(family.sides), folder)
    row = family.sides[side]
    settings = saved.get(row.field) or {"type": family.stock_type(saved, side)}
    config = PositionConfig.from_dict(settings, row.domain, row.architecture)
    readers = _safetensors(folder) if _is_learned(config) else {}
    return _stack(config, row, saved, readers, folder, side, tuple(family.sides))


def _safetensors(folder: Path) -> dict[str, Any]:
    """Maps the name of each tensor in the folder's weight files to a function that reads it."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(
            f"the learned table in {folder} needs the package safetensors; "
            'pip install "cape-plugins[hf]"'
        ) from None
    readers = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            weights = safe_open(file, "pt")
        except Exception as error:  # safetensors has a special type of error for damaged files
            raise ValueError(f"--model: {file} cannot be read ({error}).") from None
        readers |= {name: (lambda n=name, w=weights: w.get_tensor(n)) for name in weights.keys()}  # noqa: SIM118
    return readers


# ---- fairseq -----------------------------------------------------------------------------------


def _read_fairseq(path: Path, side: str | None) -> Stack:
    try:
        state = read_checkpoint(path, ", or the folder of a Hugging Face model")
    except CheckpointError as error:
        raise ValueError(f"--model {error}") from None
    settings, weights = fairseq_arguments(state), state["model"]
    family = find_fairseq_family(weights)
    sides = tuple(family.sides) if family else ()
    side = choose_side(side, sides, path)
    config = fairseq_config(settings, weights, side)
    readers = {name: (lambda value=value: value) for name, value in weights.items()}
    return _stack(config, family.sides[side], settings, readers, path, side, sides)


# ---- both --------------------------------------------------------------------------------------


def _name(path: Path, side: str, sides: Sequence[str]) -> str:
    """Name for titles, with the folder, because checkpoints in different folders have the same
    names."""
    resolved = path.resolve()
    name = f"{resolved.parent.name}/{resolved.name}" if path.is_file() else resolved.name
    return f"{name}, {side}" if len(sides) > 1 else name


_STEPS = ".encoding.weight"
# Tables of relative attention: number of the layer, axis of a grid, keys or values.
_RELATIVE = re.compile(r"\.(\d+)\.[a-z_.]*relative\.(?:(\w+)\.)?(keys|values)$")


def _is_learned(config: PositionConfig) -> bool:
    """Whether the weights hold a table to read."""
    encoding = config.encoding
    return encoding.learned if encoding.adds else config.relative_context > 0


def _learned(
    config: PositionConfig, row: Side, readers: Mapping[str, Any], side: str, path: Path
) -> dict[str, Any]:
    """ "table", ``[T, K]``, or "relative", see :class:`Stack`; float32."""
    (other_side,) = set(SIDES) - {side}
    side_readers = {name: read for name, read in readers.items() if f"{other_side}." not in name}
    relative = {}
    # an interpolated table comes from this package, whatever the stock table is called
    end, first = (_STEPS, 0) if config.encoding.steps else (row.table, row.table_first)
    for name, read in side_readers.items():
        if config.encoding.adds and name.endswith(end):
            table = read().float()
            return {"table": table.reshape(-1, table.shape[-1])[first:]}
        match = _RELATIVE.search(name)
        if not config.encoding.adds and match:
            layer, axis, part = match.groups()
            label = ", ".join(filter(None, (f"layer {layer}", axis, part)))
            rows = read().float().transpose(0, 1).flatten(1)  # heads side by side
            # a decoder never sees the keys to the right
            relative[label] = rows[: config.relative_context + 1] if side == "decoder" else rows
    if relative:
        return {"relative": dict(sorted(relative.items(), key=_by_layer))}
    raise ValueError(
        f"--model {path} has a learned position table in its settings, but not among its weights; "
        "give the model with its weights."
    )


def _by_layer(item: tuple[str, Tensor]) -> tuple[int, str]:
    """Sorts "layer 2" before "layer 10"."""
    label, _ = item
    return int(label.split(",")[0].removeprefix("layer ")), label


def _stack(
    config: PositionConfig,
    row: Side,
    settings: Mapping[str, Any],
    readers: Mapping[str, Any],
    path: Path,
    side: str,
    sides: Sequence[str],
) -> Stack:
    """The stack of a row for a model with these `settings`, and the tables it has learned."""
    learned = _learned(config, row, readers, side, path) if _is_learned(config) else {}
    table = learned.pop("table", None)
    grid = row.grid(settings) if row.grid else ()
    encoder = build_position_encoder(
        config,
        width_of(row, settings),
        side=SOURCE_TARGET[side],
        start=value_of(row.start, settings),
        unit=value_of(row.unit, settings),
        frequencies=row.frequencies,
        layout=row.layout,
        table_size=grid or (1 if table is None else len(table)),
    )
    if table is not None:
        weight = encoder.encoding.weight
        if weight.shape != table.shape:
            raise ValueError(
                f"the learned table has shape {tuple(table.shape)}, the settings of the model "
                f"need {tuple(weight.shape)}; do table and settings belong to one model?"
            )
        weight.data.copy_(table)
    spacing = value_of(row.spacing, settings)
    return Stack(config, encoder, spacing, grid, _name(path, side, sides), **learned)


def choose_side(side: str | None, sides: Sequence[str], model: str | Path) -> str:
    """`side`, by default the first of `sides`.

    Raises:
        ValueError: if the model does not have this side.
    """
    if not sides:
        raise ValueError(f"{model} has neither an encoder nor a decoder; give a Transformer.")
    if side is not None and side not in sides:
        raise ValueError(
            f"--side {side} is not in {model}; allowed: {', '.join(sides)}. Leave it out for "
            f"{sides[0]}."
        )
    return side or sides[0]
