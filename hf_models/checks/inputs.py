"""Checks with inputs beside the main input: token types, positions, embeddings, images of another
shape, labels. The stock model and the switched model get the same inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cape_plugins.doctor.check import SKIPPED, Check, NotApplicable, check, unless_stock_fails
from hf_models.checks.outputs import largest, outputs_of
from hf_models.checks.samples import Samples, tokens

_TARGETS = 4  # labels of a recording
Inputs = dict[str, Any]


def input_checks(stock: Any, cape_model: Any, samples: Samples) -> Iterator[Check]:
    """Compares outputs for each kind of inputs that the stock forward takes.

    Args:
        stock: The stock model.
        cape_model: Model of this package, switched to the stock type.
        samples: Inputs of both models.
    """
    for name, make in _KINDS.items():
        compare = partial(_compare, make, samples, stock)
        row = check(name, partial(compare, cape_model))
        if row.status != SKIPPED:
            yield unless_stock_fails(row, partial(compare, stock))


def _compare(
    make: Callable[[Any, Samples], Inputs], samples: Samples, stock: Any, other: Any
) -> float:
    inputs = make(stock, samples)
    return largest(outputs_of(stock, inputs), outputs_of(other, inputs))


def _names(model: Any) -> set[str]:
    return {*inspect.signature(type(model).forward).parameters}


def _token_types(stock: Any, samples: Samples) -> Inputs:
    """Token types; the second half of the text has another type."""
    types = getattr(stock.config, "type_vocab_size", 0)
    if "token_type_ids" not in _names(stock) or types < 2:
        raise NotApplicable("the model has no token types")
    row = samples.rows[0]
    ids = torch.zeros_like(row["input_ids"])
    ids[:, ids.shape[1] // 2 :] = 1
    return {**row, "token_type_ids": ids}


def _positions(stock: Any, samples: Samples) -> Inputs:
    """Positions 2, 4, 6 and so on. A model with rotary positions sees only distances, so
    consecutive positions would show nothing; some tables have two rows before the first position.
    The mask marks one text; without a mask such positions would be borders of packed texts."""
    row, inputs = samples.rows[0], {}
    for prefix in ("", "decoder_"):
        content = row.get(f"{prefix}input_ids")
        if f"{prefix}position_ids" in _names(stock) and content is not None:
            inputs[f"{prefix}position_ids"] = 2 * torch.arange(1, content.shape[1] + 1)[None]
            inputs[f"{prefix}attention_mask"] = torch.ones_like(content)
    if not inputs:
        raise NotApplicable("the forward of the model takes no positions")
    return {**row, **inputs}


def _embeddings(stock: Any, samples: Samples) -> Inputs:
    """Embeddings of the tokens instead of the tokens."""
    row, table = dict(samples.rows[0]), stock.get_input_embeddings()
    embeddings: dict[str, Tensor] = {}
    for prefix in ("", "decoder_"):
        ids, name = row.get(f"{prefix}input_ids"), f"{prefix}inputs_embeds"
        if name in _names(stock) and ids is not None:
            with torch.no_grad():
                embeddings[name] = table(row.pop(f"{prefix}input_ids"))
    if not embeddings:
        raise NotApplicable("the forward of the model takes no embeddings")
    return {**row, **embeddings}


def _image(stock: Any, samples: Samples) -> Inputs:
    """An image that is two patches wider than high."""
    if stock.main_input_name != "pixel_values":
        raise NotApplicable("the model takes no images")
    sizes = getattr(stock.config, "vision_config", stock.config)
    patch = getattr(sizes, "patch_size", None) or sizes.tubelet_size
    width = 2 * (patch if isinstance(patch, int) else patch[-1])
    row = samples.rows[0]
    image = row["pixel_values"]
    wider = {**row, "pixel_values": torch.cat((image, image[..., :width].flip(-2)), dim=-1)}
    if "interpolate_pos_encoding" in _names(stock):
        wider["interpolate_pos_encoding"] = True
    return wider


def _labels(stock: Any, samples: Samples) -> Inputs:
    """Inputs with labels in the shape of the model's outputs."""
    row = dict(samples.rows[0])
    if {"start_positions", "end_positions"} <= _names(stock):
        return {**row, "start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    if "labels" not in _names(stock):
        raise NotApplicable("the forward of the model takes no labels")
    logits = outputs_of(stock, row).get("logits")
    if logits is None or logits.dim() not in (2, 3):
        raise NotApplicable("this check has no labels for the outputs of the model")
    if logits.dim() == 2:
        regression = logits.shape[1] == 1
        return {**row, "labels": torch.ones(1) if regression else torch.tensor([1])}
    # stock models make the input of the decoder from the labels
    target = row.pop("decoder_input_ids", row.get("input_ids"))
    return {**row, "labels": _words(stock, logits, _TARGETS if target is None else target.shape[1])}


def _words(stock: Any, logits: Tensor, length: int) -> Tensor:
    """``[1, length]`` labels for a language model or a classifier of tokens."""
    generator = torch.Generator().manual_seed(2)
    if logits.shape[-1] == getattr(stock.config, "vocab_size", 0):
        return tokens(stock.config, length, generator)
    return torch.randint(logits.shape[-1], (1, length), generator=generator)


_KINDS: dict[str, Callable[[Any, Samples], Inputs]] = {
    "token types": _token_types,
    "positions of the caller": _positions,
    "embeddings of the caller": _embeddings,
    "image of another shape": _image,
    "loss": _labels,
}
