"""Refuses models whose inputs an exporter does not know, before the exporter builds anything."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cape_plugins.utils.texts import first_line
from hf_models.switching.install import stock_class

# What a model of a kind that the exporters know may lack, or call by another name.
_OTHER_SHAPE = (AttributeError, LookupError, NotImplementedError, TypeError)
# Arguments of stock forwards that hold no texts, images, videos or sounds.
_NO_DATA = re.compile(
    r"mask|position|labels|embeds|output|return|cache|past|logits|loss|args|interpolate|decoder|"
    r"token_type|^self$"
)
_WAY = (
    "`python -m hf_models.convert SOURCE NEW --self-contained` writes the code of the model beside "
    "its weights."
)
_CLOSE = 1e-3  # difference of outputs, more than rounding and less than the effect of a mask


@contextmanager
def known_inputs(
    model: Any, command: str, errors: tuple[type[Exception], ...] = _OTHER_SHAPE
) -> Iterator[None]:
    """Turns errors of code that makes inputs for a model, or runs stock code on such inputs, into
    one sentence.

    Args:
        model: A model of this package.
        command: What cannot take the model, such as "export onnx".
        errors: The errors; refusals of the command itself are ``ValueError``.

    Raises:
        ValueError: in the place of one of `errors`.
    """
    try:
        yield
    except errors as error:
        stock = stock_class(type(model)) or type(model)
        names = inspect.signature(stock.forward).parameters
        inputs = ", ".join(name for name in names if not _NO_DATA.search(name))
        reason = first_line(error) or type(error).__name__
        raise ValueError(
            f"{command} has no inputs that fit {type(model).__name__}, whose forward takes "
            f"{inputs} ({reason}); allowed: models that take token ids, log-mel frames, "
            "spectrograms, images or videos, and models that score texts beside images. "
            f"{_WAY}"
        ) from error


@torch.no_grad()
def first_outputs(model: Any, inputs: Mapping[str, Tensor], command: str) -> Any:
    """The outputs of a model for inputs that the exporter made.

    Args:
        model: A model of this package.
        inputs: Inputs by name.
        command: The command that exports the model.

    Raises:
        ValueError: if the model does not take the inputs, or draws random numbers.
    """
    with known_inputs(model, command, (Exception,)):  # stock code raises any error
        output, again = (model(**inputs, return_dict=True) for _ in range(2))
    for name, value in output.items():
        if isinstance(value, Tensor) and not _is_close(value, again[name]):
            raise ValueError(
                f"{command} takes no {type(model).__name__}, which draws random numbers (such as "
                f"masks) in evaluation, too, so its {name} has no fixed value; allowed: models "
                f"whose outputs follow from their inputs. {_WAY}"
            )
    return output


def _is_close(value: Tensor, again: Tensor) -> bool:
    if value.shape != again.shape:
        return False
    scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
    return torch.allclose(
        value.double(), again.double(), rtol=0, atol=_CLOSE * scale, equal_nan=True
    )
