"""Updates of two models, and gradients with and without gradient checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from cape_plugins.doctor.check import NotApplicable, relative_difference
from hf_models.checks.outputs import equal, tensors_of

UPDATES, _RATE = 3, 0.05  # steps of SGD and their learning rate


def same_updates(model: Any, other: Any, inputs: Mapping[str, Tensor]) -> str:
    """Compares all parameters after some updates, and so the gradients of all parameters."""
    expected, got = (_updated(deepcopy(twin), inputs) for twin in (model, other))
    return equal(expected, got)


def _updated(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    model.train()
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), _RATE)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        _loss(model, inputs).backward()
        optimizer.step()
    # computed tables are parameters in some stock classes only
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
    return {name: parameter.detach() for name, parameter in trained}


def same_checkpointed(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """Largest difference of gradients with and without gradient checkpointing, which runs layers
    once more in the backward pass: positions that are drawn inside a layer differ there. The
    difference is relative to the largest gradient of the model, because the gradients of key biases
    are mere rounding."""
    if not model.supports_gradient_checkpointing:
        raise NotApplicable("the model has no gradient checkpointing")
    gradients = []
    for is_on in (False, True):
        copy = deepcopy(model).train()
        if is_on:
            copy.gradient_checkpointing_enable()
        torch.manual_seed(7)
        _loss(copy, inputs).backward()
        parts = [p.grad.flatten() for p in copy.parameters() if p.grad is not None]
        gradients.append(torch.cat(parts))
    return relative_difference(*gradients)


def _loss(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    outputs = tensors_of(model(**inputs, return_dict=True)).values()
    answers = [numbers for numbers in outputs if numbers.requires_grad]
    return torch.stack([numbers.float().square().mean() for numbers in answers]).sum()
