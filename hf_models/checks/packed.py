"""Comparisons of texts that are packed in one sample, one behind the other, each with positions
from 0 on: no text sees another text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cape_plugins.doctor.check import LIMIT, NotApplicable, relative_difference
from hf_models.checks.calls import PADDING, Batch
from hf_models.checks.outputs import outputs_of

PACKED = "packed texts"  # name of the check
TEXT, POSITIONS = "input_ids", "position_ids"
_CACHE = "use_cache"


def packed(model: Any, inputs: Mapping[str, Tensor]) -> tuple[Batch, list[Batch]]:
    """The two samples of `inputs` as one sample, the second text shorter than the first, and each
    text alone.

    Args:
        model: A stock model, or a model of this package.
        inputs: A batch of texts of one length, without padding.

    Raises:
        NotApplicable: if the model does not take texts with positions alone.
    """
    arguments = inspect.signature(type(model).forward).parameters
    if {*inputs} != {TEXT} or POSITIONS not in arguments:
        raise NotApplicable("the forward of the model does not take texts with positions alone")
    first, second = inputs[TEXT]
    texts = [first[None], second[None, :-PADDING]]
    positions = [torch.arange(text.shape[1])[None] for text in texts]
    alone = [{TEXT: text, POSITIONS: p} for text, p in zip(texts, positions, strict=True)]
    together = {name: torch.cat([text[name] for text in alone], 1) for name in (TEXT, POSITIONS)}
    # with a cache, transformers sees no border of texts where positions begin at 0 again
    options = {_CACHE: False} if _CACHE in arguments else {}
    return {**together, **options}, [{**text, **options} for text in alone]


def difference_of_packed(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """Largest relative difference between the outputs of packed texts and of each text alone.

    Raises:
        NotApplicable: as :func:`packed`, and for a model without an output for each token.
    """
    batch, alone = packed(model, inputs)
    together, separate = outputs_of(model, batch), [outputs_of(model, text) for text in alone]
    lengths = [text[TEXT].shape[1] for text in alone]
    of_tokens = [
        name
        for name, values in together.items()
        if values.dim() > 1 and values.shape[:2] == (1, sum(lengths))
    ]
    if not of_tokens:
        raise NotApplicable("the model has no output for each token")
    return max(
        relative_difference(text_outputs[name], part)
        for name in of_tokens
        for text_outputs, part in zip(separate, together[name].split(lengths, 1), strict=True)
    )


def same_packed(stock: Any, model: Any, inputs: Mapping[str, Tensor]) -> float:
    """As :func:`difference_of_packed`, for models whose texts do not see each other.

    Raises:
        NotApplicable: also if the texts see each other in the stock model, and in `model`.
    """
    difference = difference_of_packed(model, inputs)
    if difference > LIMIT and difference_of_packed(stock, inputs) > LIMIT:
        raise NotApplicable("packed texts see each other, as in the stock model")
    return difference
