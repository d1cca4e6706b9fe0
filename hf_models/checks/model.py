"""Checks of one model of this package with any position embedding; a stock model is not needed.
A check returns a difference or a text, raises :class:`~cape_plugins.doctor.check.Mismatch` if it
fails, and :class:`~cape_plugins.doctor.check.NotApplicable` if it does not fit the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cape_plugins import PositionEncoder
from cape_plugins.doctor.check import Check, Mismatch, NotApplicable, check, unless_stock_fails
from hf_models.checks.generation import generation_checks
from hf_models.checks.outputs import largest, outputs_of, tensors_of
from hf_models.checks.samples import Samples, sample_inputs

_STEP = 1e-3  # learning rate of the one training step


def model_checks(
    cape_model: Any, stock: Any | None, prefix: str = "", inputs: Samples | None = None
) -> Iterator[Check]:
    """Checks a model of this package by itself; the last check trains the model for one step.

    Args:
        cape_model: Model of this package in evaluation mode and float32.
        stock: The stock model, if there is one. Checks that both models fail are skipped.
        prefix: Prefix of the names of the checks.
        inputs: Samples without padding; by default two samples of random numbers.
    """
    full_length = not getattr(cape_model.config, "at_natural_length", False)
    samples = sample_inputs(cape_model, full_length) if inputs is None else inputs
    yield check(
        f"{prefix}evaluation draws no random numbers", lambda: evaluation(cape_model, samples)
    )
    comparable = stock if full_length else None  # no stock model takes recordings of natural length
    yield from padding_checks(cape_model, samples, comparable, prefix)
    yield from generation_checks(cape_model, samples, comparable, prefix)
    yield check(
        f"{prefix}training draws positions", lambda: augmentation(cape_model, samples.batch())
    )
    names = set() if stock is None else {name for name, _ in stock.named_parameters()}
    yield check(f"{prefix}one training step", lambda: one_step(cape_model, samples.batch(), names))


def padding_checks(
    cape_model: Any, samples: Samples, stock: Any | None, prefix: str = "", compare: bool = False
) -> Iterator[Check]:
    """Checks padding on either side.

    Args:
        cape_model: Model of this package in evaluation mode.
        samples: Samples without padding.
        stock: The stock model, if there is one.
        prefix: Prefix of the names of the checks.
        compare: Whether to compare with samples of the stock model without padding.
    """
    reference = stock if compare else cape_model
    for side in ("right", "left"):
        row = check(
            f"{prefix}padding on the {side}",
            partial(padding, reference, cape_model, samples, side),
        )
        # some stock models count padding on the left, unlike this package: only an error of the
        # stock model skips the check
        yield unless_stock_fails(row, stock and partial(_runs, stock, samples, side))


def _runs(stock: Any, samples: Samples, side: str) -> str:
    outputs_of(stock, samples.batch(side))
    return "no error"


def padding(reference: Any, model: Any, samples: Samples, side: str) -> float:
    """Largest relative difference between samples in one padded batch of `model` and each sample
    alone in `reference`."""
    main = model.main_input_name
    if main not in samples.padding:
        raise NotApplicable(f"{main} have one size, so nothing is padded")
    if side == "left" and main != "input_ids":
        raise NotApplicable("recordings are padded on the right")
    batch = outputs_of(model, samples.batch(side))
    singles = [outputs_of(reference, row) for row in samples.rows]
    names = list(singles[0])
    if side == "left":  # some heads read the first column, which is padding here
        names = [name for name in names if len({row[name].shape for row in singles}) > 1]
    if not names:
        raise NotApplicable("the head may read the first column, which is padding here")
    worst = 0.0
    for number, row in enumerate(singles):
        parts = {
            name: _without_padding(batch[name][number : number + 1], row[name], side)
            for name in names
        }
        worst = max(worst, largest({name: row[name] for name in names}, parts))
    return worst


def _without_padding(padded: Tensor, expected: Tensor, side: str) -> Tensor:
    """The part ``[1, t, ...]`` of a padded sample ``[1, T, ...]`` that is no padding."""
    length = expected.shape[1] if expected.dim() > 1 else None
    if length is None or padded.shape[1] == length:
        return padded
    return padded[:, :length] if side == "right" else padded[:, -length:]


def evaluation(model: Any, samples: Samples) -> str:
    """Checks that a forward in evaluation mode draws nothing and that a second forward is equal."""
    settings = (model.config.position_settings(field) for field in model.config.position_fields)
    if any(config.random_evaluation for config in settings):
        raise NotApplicable("the settings ask for random positions in evaluation")
    return draws_nothing(model, samples.batch())


def draws_nothing(model: Any, inputs: Mapping[str, Tensor]) -> str:
    """:func:`evaluation` with given inputs."""
    before = torch.get_rng_state()
    first, second = outputs_of(model, inputs), outputs_of(model, inputs)
    if not torch.equal(before, torch.get_rng_state()):
        raise Mismatch("a forward in evaluation mode has drawn random numbers")
    if largest(first, second):
        raise Mismatch("two forwards in evaluation mode differ")
    return "none drawn, two forwards are equal"


def augmentation(cape_model: Any, inputs: Mapping[str, Tensor]) -> str:
    """Checks draws with only the position encoders in training mode, because dropout would hide a
    draw that does not arrive."""
    encoders = [module for module in cape_model.modules() if isinstance(module, PositionEncoder)]
    for encoder in encoders:
        encoder.train()
    try:
        if not any(encoder.draws for encoder in encoders):
            raise NotApplicable("nothing is random")
        with torch.random.fork_rng():
            outputs = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                # with gradients, because a call without them may be a step of generation
                outputs.append(tensors_of(cape_model(**inputs, return_dict=True)))
    finally:
        cape_model.eval()
    if not largest(*outputs):
        raise Mismatch("training forwards of two seeds are equal: no draw reaches the positions")
    return "forwards of two seeds differ"


def draw_new_tables(model: Any, stock_names: Container[str], std: float) -> None:
    """Draws all parameters that a switch has added: large values show a wrong distance.

    Args:
        model: Model that was switched; changed in place.
        stock_names: Names of the parameters before the switch, which keep their values.
        std: Standard deviation of the new values.
    """
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name not in stock_names:
                table.normal_(std=std)


def one_step(cape_model: Any, inputs: Mapping[str, Tensor], stock_names: set[str]) -> str:
    """Trains a model for one step.

    Args:
        cape_model: Model in evaluation mode and float32; changes.
        inputs: Inputs of its forward.
        stock_names: Names of parameters that the stock model has. Each other parameter has to get a
            gradient.
    """
    shapes = {name: tuple(value.shape) for name, value in outputs_of(cape_model, inputs).items()}
    cape_model.train()
    optimizer = torch.optim.SGD(cape_model.parameters(), _STEP)
    output = cape_model(**inputs, return_dict=True)
    training_shapes = {name: tuple(value.shape) for name, value in tensors_of(output).items()}
    if training_shapes != shapes:
        raise Mismatch(f"shapes in training {training_shapes}, in evaluation {shapes}")
    answers = [value for value in tensors_of(output).values() if value.requires_grad]
    loss = torch.stack([value.square().mean() for value in answers]).sum()
    loss.backward()
    gradients = {n: p.grad for n, p in cape_model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise Mismatch(f"the gradient of {name} is not finite")
    new = {name for name, _ in cape_model.named_parameters()} - stock_names
    if new and not any(gradients[name].any() for name in new & gradients.keys()):
        raise Mismatch(f"no gradient reaches {', '.join(sorted(new))}")
    optimizer.step()
    cape_model.eval()
    for name, value in outputs_of(cape_model, inputs).items():
        if not value.isfinite().all():
            raise Mismatch(f"{name} is not finite after the step")
    return f"loss {loss.item():.3g}, {len(gradients)} gradients are finite"
