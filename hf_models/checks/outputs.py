"""Compares the outputs of two models, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cape_plugins.doctor.check import Mismatch, relative_difference


@torch.no_grad()
def outputs_of(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Tensors by name, as :func:`tensors_of` gives them, of a forward without gradients."""
    return tensors_of(model(**inputs, return_dict=True, **options))


def tensors_of(output: Any, name: str = "") -> dict[str, Tensor]:
    """Floating-point tensors of an output, by names such as "logits" and "hidden_states.0". Caches
    and whole numbers are left out."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, tuple | list):
        parts = enumerate(output)
    else:
        return {}
    nested = (tensors_of(part, f"{name}.{key}".lstrip(".")) for key, part in parts)
    return {key: value for part in nested for key, value in part.items()}


def largest(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """Largest difference of tensors with the same name, relative to the largest number of a tensor.

    Raises:
        Mismatch: if names or shapes differ.
    """
    if unshared := expected.keys() ^ got.keys():
        model_name = "the stock model" if unshared <= got.keys() else "the switched model"
        raise Mismatch(f"{model_name} gives no {', '.join(sorted(unshared))}")
    worst = 0.0
    for name, numbers in expected.items():
        if numbers.shape != got[name].shape:
            shapes = f"{tuple(got[name].shape)}, expected {tuple(numbers.shape)}"
            raise Mismatch(f"{name} has shape {shapes}")
        worst = max(worst, relative_difference(numbers, got[name]))
    return worst


def equal(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Compares tensors bit for bit. NaN equals NaN: a query on padding without any key gives NaN in
    both models.

    Raises:
        Mismatch: if names, shapes or numbers differ.
    """
    if unshared := expected.keys() ^ got.keys():
        raise Mismatch(f"{', '.join(sorted(unshared))} in one model only")
    for name, numbers in expected.items():
        if numbers.shape != got[name].shape:
            raise Mismatch(f"{name} has shape {tuple(got[name].shape)}, not {tuple(numbers.shape)}")
        if not torch.equal(numbers.nan_to_num(), got[name].nan_to_num()):
            raise Mismatch(f"{name} differs by {relative_difference(numbers, got[name]):.2g}")
    return f"{len(expected)} equal"
