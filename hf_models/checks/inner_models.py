"""Compares models inside a model, called alone, with the same models in the forward of the whole
model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from cape_plugins.doctor.check import Mismatch, NotApplicable
from hf_models.checks.outputs import equal, tensors_of
from hf_models.seams.base import Seam
from hf_models.switching.install import SwitchedModel


def inner_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Stock models of other families inside `model` that have positions, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and not isinstance(module, SwitchedModel)
        and any(isinstance(part, Seam) for part in module.modules())
    }


@torch.no_grad()
def same_alone(model: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """Calls each model inside `model`, such as the text model of CLIP, with the arguments that the
    whole model gives it. Without its scope such a model has no positions in attention.

    Raises:
        Mismatch: if an output differs.
        NotApplicable: if the forward calls no such model.
    """
    calls: dict[str, tuple[Any, ...]] = {}

    def note(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # at once, because CLIP writes the projection into the output of its text model
        calls.setdefault(path, (args, kwargs, tensors_of(output)))

    inner = inner_models(model)
    hooks = [
        module.register_forward_hook(partial(note, path), with_kwargs=True)
        for path, module in inner.items()
    ]
    torch.manual_seed(1)  # some stock models draw in evaluation
    model(**inputs)
    for hook in hooks:
        hook.remove()
    if not calls:
        raise NotApplicable("the forward calls no model of another family inside it")
    for path, (args, kwargs, expected) in calls.items():
        # without the cache, into which the whole model has written
        kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, Cache)}
        torch.manual_seed(1)
        try:
            equal(expected, tensors_of(inner[path](*args, **kwargs)))
        except Mismatch as error:
            raise Mismatch(f"{path}: {error}") from error
    return f"{len(calls)} equal"
