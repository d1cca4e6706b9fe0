"""Random inputs for a model of this package and for its stock model, and the comparison of both."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cape_plugins.serving.command import SHORTEST
from cape_plugins.utils.texts import first_line
from hf_models.serving.known_inputs import first_outputs, known_inputs
from hf_models.storage.stock_model import shape_of_images, shape_of_inputs
from hf_models.switching.install import stock_class

COMMAND = "export stock"  # in errors
CLOSE = 1e-3  # difference of outputs, more than the rounding of float32 in many layers


def samples_of(cape: PreTrainedModel) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a model, and its scores or states for them.

    Raises:
        ValueError: for a model of other inputs, or with random outputs.
    """
    with known_inputs(cape, COMMAND):
        inputs = _inputs(cape)
    return inputs, _first(first_outputs(cape, inputs, COMMAND))


def _inputs(cape: PreTrainedModel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    name, shape = cape.main_input_name, shape_of_inputs(cape)
    if name == "input_ids":
        inputs = {name: torch.randint(_vocabulary_size(cape), shape, generator=generator)}
        inputs[name][:, -1] = _eos(cape)  # some models classify the state of this token
    else:
        inputs = {name: torch.rand(shape, generator=generator)}
    parameters = inspect.signature(stock_class(type(cape)).forward).parameters
    # models that generate continue a text without images, too
    if name == "input_ids" and "pixel_values" in parameters and not cape.can_generate():
        inputs["pixel_values"] = torch.rand(shape_of_images(cape), generator=generator)
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = torch.randint(
            _vocabulary_size(cape), (1, SHORTEST - 1), generator=generator
        )
    return inputs


@torch.no_grad()
def compare(
    cape: PreTrainedModel, stock: PreTrainedModel, inputs: dict[str, Tensor], expected: Tensor
) -> float:
    """Largest difference of the outputs of both models.

    Args:
        cape: The model of this package.
        stock: The stock model.
        inputs: See :func:`samples_of`.
        expected: Outputs of `cape` for these inputs.

    Raises:
        ValueError: if the stock model computes something else.
    """
    name = cape.main_input_name
    shape, stock_inputs = tuple(inputs[name].shape), dict(inputs)
    if (hint := hint_of(cape)) is not None:
        stock_inputs[name] = torch.cat((inputs[name].new_full((1, 1), hint), inputs[name]), dim=1)
    try:
        difference = (expected - _first(stock(**stock_inputs))).abs().max().item()
    except (IndexError, RuntimeError, ValueError) as error:
        difference, reason = math.inf, f" ({first_line(error)})"
    else:
        reason = f" (difference {difference:.3g})"
    if not difference <= CLOSE * max(1.0, expected.abs().max().item()):
        raise ValueError(
            f"{type(stock).__name__} has other outputs for inputs of shape {shape}{reason}; "
            "allowed: sizes that the stock class takes (some classes take square images only), and "
            "heads that a caller can give the BOS hint to. Use another size, or serve the model by "
            "`cape-plugins export onnx`."
        )
    return difference


def _vocabulary_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().vocab_size


def _eos(model: PreTrainedModel) -> int:
    eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    eos = eos[0] if isinstance(eos, list) else eos
    return eos or 0


def _first(output: Any) -> Tensor:
    """Logits or states; the last of several feature maps."""
    return output[0] if isinstance(output[0], Tensor) else output[0][-1]


def hint_of(cape: PreTrainedModel) -> int | None:
    """The token that the model puts before the source; None if there is none."""
    stacks = (module for module in cape.modules() if getattr(module, "has_hint", False))
    stack = next(stacks, None)
    return None if stack is None else stack.bos_token
