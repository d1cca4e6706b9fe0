"""Checks of types that act in attention, for generated families whose stock model adds positions: a
part of the proof in :mod:`hf_models.checks.proof`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cape_plugins import ENCODINGS
from cape_plugins.checkpoints.families import FIELD
from cape_plugins.doctor.check import (
    FAILED,
    SKIPPED,
    Check,
    Mismatch,
    NotApplicable,
    check,
    unless_stock_fails,
)
from cape_plugins.settings.registry import types_of
from hf_models.checks.calls import SIDES, unpadded
from hf_models.checks.generation import from_padded
from hf_models.checks.inner_models import inner_models, same_alone
from hf_models.checks.model import augmentation, draw_new_tables, draws_nothing, one_step, padding
from hf_models.checks.outputs import outputs_of
from hf_models.checks.stock_models import one_line
from hf_models.generated.families import part_of

REACHED = ": positions reach the output"  # follows the type in the name of a check
IN_ATTENTION = "in attention"  # check that is skipped where the stock code allows no such type
_SHIFT = {"max_local_shift": 0.5}  # for types that augment nothing by default
_AUDIBLE = 0.2  # standard deviation of weights
_NEW_TABLES = 3.0  # standard deviation

Switch = Callable[[Any, Mapping[str, Any]], Any]


def attention_checks(
    model: Any,
    inputs: Mapping[str, Tensor],
    switched: Switch,
    same_checkpointed: Callable[..., float],
) -> Iterator[Check]:
    """Checks a type of each kind that acts in attention: relative keys, turned queries and keys,
    biases.

    Args:
        model: The stock model, in evaluation mode.
        inputs: A batch without padding.
        switched: Gives a copy of the model another position embedding.
        same_checkpointed: Compares gradients with and without gradient checkpointing.
    """
    model = _audible(model)
    bare = switched(model, {"type": "nopos"})
    for wish in _wishes(model):
        name = wish["type"]
        try:
            cape_model = switched(model, wish)
        except ValueError as error:
            yield Check(IN_ATTENTION, SKIPPED, str(error))
            return
        except Exception as error:
            yield Check(f"{name}: switch", FAILED, one_line(error))
            return
        old = {path for path, _ in model.named_parameters()}
        draw_new_tables(cape_model, old, _NEW_TABLES)
        yield from _checks(name, cape_model, bare, inputs, old, same_checkpointed)


def _audible(model: Any) -> Any:
    """A copy with larger weights. In a new model attention is so even that positions in attention
    change the output by no more than rounding."""
    copy = deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in copy.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.normal_(std=_AUDIBLE)
    return copy


def _wishes(model: Any) -> list[dict[str, Any]]:
    """The first type of each kind, with a local shift where the type has one."""
    fields = part_of(type(model)).config_class.fields_for(vars(model.config))
    domain, architecture = fields[FIELD]
    wishes: dict[tuple[bool, ...], dict[str, Any]] = {}
    for name, row in types_of(architecture, domain).items():
        encoding = ENCODINGS[row.encoding]
        kind = encoding.turns, encoding.biases, "relative_context" in row.options
        if any(kind):
            shift = {option: _SHIFT[option] for option in _SHIFT if option in row.options}
            wishes.setdefault(kind, {"type": name, **shift})
    return list(wishes.values())


def _checks(
    name: str,
    cape_model: Any,
    bare: Any,
    inputs: Mapping[str, Tensor],
    old: set[str],
    same_checkpointed: Callable[..., float],
) -> Iterator[Check]:
    yield check(f"{name}{REACHED}", partial(_differs, bare, cape_model, inputs))
    samples = unpadded(bare, inputs)
    for side in SIDES:
        compare = partial(_same_padded, samples=samples, side=side)
        row = check(f"{name}: padding on the {side}", partial(compare, cape_model))
        yield unless_stock_fails(row, partial(compare, bare))
    compare = partial(_same_steps, samples=samples)
    row = check(f"{name}: generation", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, bare))
    compare = partial(draws_nothing, inputs=inputs)
    row = check(f"{name}: evaluation draws nothing", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, bare))
    if inner_models(cape_model):
        yield check(f"{name}: inner models alone", partial(same_alone, cape_model, inputs))
    if cape_model.config.position_settings(FIELD).random:
        yield check(f"{name}: training draws positions", partial(augmentation, cape_model, inputs))
    compare = partial(same_checkpointed, inputs=inputs)
    row = check(f"{name}: gradient checkpointing", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, bare))
    compare = partial(one_step, inputs=inputs, stock_names=old)
    row = check(f"{name}: one training step", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, bare))


def _differs(bare: Any, model: Any, inputs: Mapping[str, Tensor]) -> str:
    torch.manual_seed(1)  # some stock models draw in evaluation
    without = outputs_of(bare, inputs)
    torch.manual_seed(1)
    outputs = outputs_of(model, inputs)
    if all(torch.allclose(without[name], outputs[name], equal_nan=True) for name in without):
        raise Mismatch("the output is the same without positions")
    return "the output changes without positions"


def _same_padded(model: Any, samples: Any, side: str) -> float:
    if samples is None:
        raise NotApplicable("the forward of the model takes no tokens with a mask")
    return padding(model, model, samples, side)


def _same_steps(model: Any, samples: Any) -> float:
    if samples is None or not model.can_generate():
        raise NotApplicable("the model does not generate")
    return from_padded(samples, "left", model, model)
