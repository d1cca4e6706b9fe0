"""Small configurations of any stock model, made from the defaults of its configuration class."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_models.checks.sizes import (
    BY_TYPE,
    DEPTHS,
    FILLED,
    HEAD_WIDTH,
    HEADS,
    KEPT,
    KEY_HEADS,
    LARGE,
    LAYERS,
    NEEDED,
    PATCHES,
    RULES,
    SCALED_LENGTH,
    TOKEN,
    TOKENS,
    VOCABULARY,
    WIDTH,
    WIDTHS,
)

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_UNTOUCHED = ("id2label", "label2id", "num_labels", "architectures", "transformers_version")
_ROPE, _SECTIONS = "rope_parameters", "mrope_section"


def small_configs(config_class: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Small configurations of a stock class, the smallest first: some models need fields that are
    empty by default, or sizes that belong together.

    Args:
        config_class: A stock configuration class.
        fields: Fields with the values that they must have.

    Returns:
        For each step its name, and a function without arguments that makes the configuration. The
        function may raise an error, because some classes refuse values that others need.
    """
    default = config_class()
    extra = {**BY_TYPE.get(config_class.model_type, {}), **fields}
    small = _small_values(default)
    _match_sections(small, default)
    filled = _filled(deepcopy(small), default)
    layers = {
        name: value
        for name, value in small.items()
        if isinstance(value, dict) or NEEDED.search(name)
    }
    for step, values in (("shrunk", small), ("filled", filled), ("layers only", layers)):
        yield step, lambda values=values: config_class(**{**deepcopy(values), **extra})


def _small_values(default: Any) -> dict[str, Any]:
    """The fields to change; the value for a part is a dict."""
    values, small = dict(vars(default)), {}
    fields = (
        {f.name for f in dataclasses.fields(default)}
        if dataclasses.is_dataclass(default)
        else {*values}
    )
    for name, value in values.items():
        if name.startswith("_") or name in _UNTOUCHED:
            continue
        if isinstance(value, PreTrainedConfig):
            small[name] = {**_small_values(value), "model_type": value.model_type}
        elif name in fields or isinstance(value, int):
            new = _small_value(name, value)
            if new != value:
                small[name] = new
    small |= _image_sizes(values)
    if (rope := _small_rope(default)) is not None:
        small[_ROPE] = rope
    if (kinds := values.get("layer_types")) and isinstance(kinds, list):
        # one layer of each kind
        kinds = list(dict.fromkeys(kinds))
        small["layer_types"] = kinds * LAYERS if len(kinds) == 1 else kinds
        small |= dict.fromkeys(values.keys() & {*_LAYERS}, len(small["layer_types"]))
    return small | _small_key_heads(values, small)


def _small_value(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _small_number(name, value)
    is_list = isinstance(value, list | tuple) and value
    if not is_list or not all(type(number) is int for number in value):
        return value
    if TOKEN.search(name):
        return type(value)(_small_number(name, number) for number in value)[:1]
    if WIDTHS.search(name):
        unit = max(1, max(value) // WIDTH)
        return type(value)(max(8, number // unit // 8 * 8) for number in value)
    if DEPTHS.search(name) and len(value) <= 5:
        return type(value)(1 for _ in value)
    return value


def _small_number(name: str, value: int) -> int:
    if TOKEN.search(name) and value >= VOCABULARY:
        meaning = name.removesuffix("_token_id")
        return TOKENS.get(meaning, VOCABULARY - 1 - value % 20)
    for pattern, largest in RULES:
        if pattern.search(name):
            return min(largest, value)
    if KEPT.search(name):
        return value
    is_width = name.endswith(("size", "dim", "rank", "channels", "features"))
    return WIDTH if is_width and value >= LARGE else value


def _image_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of an image of a few patches."""
    sizes, patch = {}, values.get("patch_size")
    if not isinstance(patch, int | list | tuple):
        return {}
    for name in ("image_size", "crop_size"):
        size = values.get(name)
        if isinstance(size, int) and isinstance(patch, int):
            sizes[name] = min(size, PATCHES * patch)
        elif isinstance(size, list | tuple):
            patches = [patch] * len(size) if isinstance(patch, int) else patch
            sizes[name] = type(size)(PATCHES * side for side in patches)
    return sizes


def _small_key_heads(values: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, int]:
    """Fewer heads of keys than of queries, if the default has fewer."""
    heads = next((small.get(name, values[name]) for name in _HEADS if name in values), HEADS)
    default = {values[name] for name in _HEADS if name in values}
    names = (name for name in _KEY_HEADS if values.get(name) is not None)
    return {
        name: heads if values[name] in default else min(KEY_HEADS, values[name]) for name in names
    }


# ---- rotary positions ----------------------------------------------------------------------------


def _small_rope(default: Any) -> dict[str, Any] | None:
    """RoPE parameters with a small trained length, and with sections where the code needs some;
    None if the configuration has none."""
    if not hasattr(default, _ROPE):
        return None
    rope = deepcopy(getattr(default, _ROPE))
    if _needs_sections(type(default)):
        is_one = isinstance(rope, dict) and "rope_type" in rope
        rope = rope if is_one else {"rope_type": "default", "rope_theta": 10_000.0}
        rope.setdefault(_SECTIONS, [])
    if not isinstance(rope, dict):
        return None
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("original_max_position_embeddings"):
            part["original_max_position_embeddings"] = SCALED_LENGTH
    return rope


def _needs_sections(config_class: type) -> bool:
    """Whether the modeling code reads sections of M-RoPE, which defaults leave out."""
    folder = Path(inspect.getfile(config_class)).parent
    return any(_SECTIONS in path.read_text("utf-8") for path in folder.glob("modeling_*.py"))


def _match_sections(small: dict[str, Any], default: Any) -> None:
    """Gives sections of M-RoPE the sum that the width of the heads asks for, in place."""
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            _match_sections(small[name], part)
    rope = small.get(_ROPE)
    if rope is None or _SECTIONS not in rope:
        return
    if hasattr(default, "head_dim"):
        small.setdefault("head_dim", HEAD_WIDTH)
    width = small.get("head_dim", HEAD_WIDTH)
    turned = rope.get("partial_rotary_factor", getattr(default, "partial_rotary_factor", None))
    half = int(width * (turned or 1.0)) // 2
    part = half // 3
    rope[_SECTIONS] = [half - 2 * part, part, part]


def _filled(small: dict[str, Any], default: Any) -> dict[str, Any]:
    """Adds values for fields that are empty by default, in place."""
    for name, value in vars(default).items():
        if value is None and name in FILLED:
            small.setdefault(name, FILLED[name])
        elif isinstance(value, PreTrainedConfig):
            _filled(small[name], value)
    return small
