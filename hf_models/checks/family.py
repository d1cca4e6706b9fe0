"""Checks that a family has to pass with every release of the host. With the stock type a model
computes the same as the stock class. With any other type a model trains, and cached steps equal one
forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from cape_plugins.checkpoints.families import find_family
from cape_plugins.doctor.check import (
    SKIPPED,
    Check,
    NotApplicable,
    check,
    unless_stock_fails,
    wishes,
)
from hf_models.calls.switching import switch
from hf_models.checks.generation import generation_checks
from hf_models.checks.inputs import input_checks
from hf_models.checks.model import draw_new_tables, evaluation, model_checks, padding_checks
from hf_models.checks.outputs import largest, outputs_of
from hf_models.checks.samples import Samples, pad_token, sample_inputs
from hf_models.checks.storage import storage_checks
from hf_models.checks.tiny import fill_zeros
from hf_models.generated.families import part_of
from hf_models.switching.install import PARTS, is_model
from hf_models.switching.settings import FIELD

# Standard deviation of new tables: numbers near zero would hide errors.
_NEW_TABLES = 0.5


def check_family(
    stock_model: Any,
    position_embedding: Mapping[str, Any] | None = None,
    inputs: Samples | None = None,
) -> list[Check]:
    """Compares a family of this package with its stock model, and trains one step with another
    position embedding.

    A copy is switched to the type of the stock model and has to give the same logits, also in
    padded batches, in generation with a cache, and after saving and loading. Numbers are compared,
    because wrong positions often choose the same tokens.

    Args:
        stock_model: A model of transformers of a registered family, with any weights; stays
            unchanged. Copies compute on the CPU in float32; tables of zeros get random values.
        position_embedding: ``{"type": ..., option: value}`` to train with; by default ``cape``,
            and then a type with relative attention if the family has one. A source scale that
            is left out is 1.
        inputs: Samples without padding; by default two samples of random numbers.

    Returns:
        The checks, in order; ``check.failed`` is True for a difference.

    Raises:
        ValueError: if the class of the model has no counterpart in a registered family, inputs of
            the model cannot be made, or the family refuses `position_embedding`.
    """
    cape_class = part_of(type(stock_model))
    if not is_model(cape_class):
        allowed = sorted(stock.__name__ for stock, part in PARTS.items() if is_model(part))
        raise ValueError(
            f"stock_model is a {type(stock_model).__name__}, which has no counterpart in a "
            "registered family. Register its family by hf_models.register_family, or give one of "
            f"the allowed: {', '.join(allowed)}."
        )
    samples = sample_inputs(stock_model) if inputs is None else inputs
    settings = vars(stock_model.config)
    domain_and_architecture = cape_class.config_class.fields_for(settings)[FIELD]
    to_train = wishes(position_embedding, *domain_and_architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if position_embedding is not None:
            _refuse(stock_model, to_train[0])
        checks = list(_stock_checks(stock_model, samples))
        for number, wish in enumerate(to_train):
            checks += _wish_checks(stock_model, wish, inputs, optional=number > 0)
    return checks


def copy_of(stock_model: Any) -> Any:
    """A model with the same weights, in evaluation mode and float32, without tables of zeros. The
    model has a padding token, which heads that look for the last token need.

    The model is built anew, because buffers, such as sinusoids, may have been rounded to half
    precision.
    """
    model = type(stock_model)(deepcopy(stock_model.config)).eval()
    computed = {name for name, table in model.named_parameters() if not table.requires_grad}
    weights = {
        name: weight for name, weight in stock_model.state_dict().items() if name not in computed
    }
    model.load_state_dict(weights, strict=False)
    if getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = pad_token(model.config)
    return fill_zeros(model)


# ---- the stock type ------------------------------------------------------------------------------


def _stock_checks(stock_model: Any, samples: Samples) -> Iterator[Check]:
    """Compares a model of the stock type with the stock class."""
    stock, cape_model = copy_of(stock_model), copy_of(stock_model)
    types = _stock_types(stock.config)
    position_embedding = types[FIELD]
    switched = check("switch to the stock type", partial(_switch, cape_model, types))
    yield switched
    if switched.failed:
        return
    for name, compare in (("logits", _logits), ("hidden states and attentions", _states)):
        row = check(name, partial(compare, stock, cape_model, samples))
        yield unless_stock_fails(row, partial(compare, stock, stock, samples))
    yield from input_checks(stock, cape_model, samples)
    yield from padding_checks(cape_model, samples, stock, compare=True)
    yield from generation_checks(cape_model, samples, stock, compare=True)
    yield check("evaluation draws no random numbers", lambda: evaluation(cape_model, samples))
    yield from storage_checks(stock, cape_model, samples, position_embedding)


def _stock_types(config: Any) -> dict[str, dict[str, Any]]:
    """Position embeddings of a stock model, by field."""
    family = find_family(config.model_type)
    return {
        row.field: {"type": family.stock_type(vars(config), side)}
        for side, row in family.sides.items()
    }


def _switch(model: Any, fields: Mapping[str, Mapping[str, Any]]) -> str:
    switch(model, **fields)
    return repr(fields[FIELD]["type"])


def _refuse(stock_model: Any, wish: Mapping[str, Any]) -> None:
    """Raises the error of a family for the settings, unless the family cannot be switched at all:
    then the release of the host is at fault, not the settings."""
    try:
        _switch(copy_of(stock_model), {FIELD: wish})
    except ValueError:
        types = _stock_types(stock_model.config)
        if not check("switch", partial(_switch, copy_of(stock_model), types)).failed:
            raise


def _logits(stock: Any, other: Any, samples: Samples) -> float:
    return max(largest(outputs_of(stock, row), outputs_of(other, row)) for row in samples.rows)


def _states(stock: Any, other: Any, samples: Samples) -> float:
    """Difference of the states of all layers, and of attention weights, which only eager attention
    returns."""
    outputs = []
    for model in (stock, other):
        attention = model.config._attn_implementation
        model.set_attn_implementation("eager")
        options = {"output_hidden_states": True, "output_attentions": True}
        outputs.append(outputs_of(model, samples.rows[0], **options))
        model.set_attn_implementation(attention)
    return largest(*outputs)


# ---- another type --------------------------------------------------------------------------------


def _wish_checks(
    stock_model: Any, wish: Mapping[str, Any], inputs: Samples | None, optional: bool
) -> Iterator[Check]:
    cape_model, prefix = copy_of(stock_model), f"{wish['type']}: "
    old_names = {name for name, _ in cape_model.named_parameters()}
    switched = check(f"{prefix}switch", partial(_switch_if_possible, cape_model, wish, optional))
    yield switched
    if switched.failed or switched.status == SKIPPED:
        return
    draw_new_tables(cape_model, old_names, _NEW_TABLES)
    yield from model_checks(cape_model, copy_of(stock_model), prefix, inputs)


def _switch_if_possible(cape_model: Any, wish: Mapping[str, Any], optional: bool) -> str:
    """Switches the model; an `optional` type may fail: not all families have relative attention."""
    try:
        return _switch(cape_model, {FIELD: wish})
    except ValueError as refusal:
        if optional:
            raise NotApplicable(str(refusal)) from None
        raise
