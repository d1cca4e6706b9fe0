"""What a family has to hold in every release of its hosts: with the stock type a model computes what
the stock class does, with any other it trains, and its cached steps are those of one forward."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cape_plugins import PositionConfig, PositionEncoder
from cape_plugins.checks import Check, Mismatch, NotApplicable, check
from cape_plugins.families import find_family
from cape_plugins.options import COUNTED
from cape_plugins.registry import DEFAULT_TYPE, types_of
from hf_models.generated import Generated, forced_logits, generate, step_difference
from hf_models.settings import FIELD
from hf_models.switching import PARTS, auto_models, is_model, switch
from hf_models.tiny import Samples, fill_zeros, pad_token, sample_inputs

BEAMS = 3
_STEP = 1e-3  # of the one training step
_NEW_TABLES = 0.5  # standard deviation


def check_family(
    stock_model: Any,
    position_embedding: Mapping[str, Any] | None = None,
    inputs: Samples | None = None,
) -> list[Check]:
    """Compares a family of this package with its stock model, and trains one step with another
    position embedding.

    A copy is switched to the type of the stock model and has to give the same logits, also in padded
    batches, in generation with a cache, and after it is saved and loaded. The comparisons are of
    numbers: wrong positions often choose the same tokens.

    Args:
        stock_model: A model of transformers of a registered family, with any weights; it stays as
            it is. Copies compute in float32, and tables of zeros are drawn in them.
        position_embedding: ``{"type": ..., option: value}`` to train with; by default ``cape``,
            and then a type with relative attention where the family has one. A source scale that
            is left out is 1.
        inputs: Samples without padding; by default two of random numbers.

    Returns:
        the checks, in their order; ``check.failed`` tells those with a difference.

    Raises:
        ValueError: if the class of the model has no counterpart in a registered family, or its
            inputs cannot be made.
    """
    own_class = PARTS.get(type(stock_model))
    if not is_model(own_class):
        known = sorted(stock.__name__ for stock, part in PARTS.items() if is_model(part))
        raise ValueError(
            f"stock_model is a {type(stock_model).__name__}, which has no counterpart in a "
            f"registered family; allowed: {', '.join(known)}. Register its family by "
            "hf_models.register_family, or give such a model."
        )
    samples = sample_inputs(stock_model) if inputs is None else inputs
    checks = list(_stock_checks(stock_model, samples))
    for wish in wishes(stock_model, position_embedding):
        checks += _wish_checks(stock_model, wish, inputs)
    return checks


def wishes(stock_model: Any, settings: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Position embeddings to train with: the one that is wished, or those of the default."""
    place = PARTS[type(stock_model)].config_class.position_fields[FIELD]
    if settings is not None:
        return [_with_scale(settings, place)]
    relative = (n for n, row in types_of(place[1], place[0]).items() if RELATIVE in row.options)
    return [_with_scale({"type": name}, place) for name in (DEFAULT_TYPE, *relative)]


RELATIVE = "relative_context"


def _with_scale(settings: Mapping[str, Any], place: tuple[str, str]) -> dict[str, Any]:
    """Settings that a model takes: nobody has counted alpha here."""
    counted = PositionConfig.from_dict(settings, *place).source_scale in COUNTED
    return {**settings, "source_scale": "1"} if counted else {**settings}


def copy_of(stock_model: Any) -> Any:
    """A copy in evaluation mode and float32, without tables of zeros and with a padding token, as
    heads that look for the last token ask for."""
    model = fill_zeros(deepcopy(stock_model).float().eval().requires_grad_(True))
    if getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = pad_token(model.config)
    return model


# ---- the stock type ------------------------------------------------------------------------------


def _stock_checks(stock_model: Any, samples: Samples) -> Iterator[Check]:
    """Compares with the stock class."""
    stock, own = copy_of(stock_model), copy_of(stock_model)
    family = find_family(own.config.model_type)
    types = {
        row.field: {"type": family.stock_type(vars(own.config), side)}
        for side, row in family.sides.items()
    }
    position_embedding = types.pop(FIELD)
    switched = check("switch to the stock type", partial(_switched, own, position_embedding, types))
    yield switched
    if switched.failed:
        return
    yield check("logits", lambda: _logits(stock, own, samples))
    yield check("hidden states and attentions", lambda: _states(stock, own, samples))
    for side in ("right", "left"):
        yield check(f"padding on the {side}", partial(_padding, stock, own, samples, side))
    yield from _generation_checks(own, samples, stock)
    yield check("evaluation draws no random numbers", lambda: _evaluation(own, samples))
    yield from _storage_checks(stock, own, samples, position_embedding)


def _switched(model: Any, position_embedding: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    switch(model, position_embedding, **fields)
    return repr(position_embedding["type"])


@torch.no_grad()
def _outputs(model: Any, inputs: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return tensors_of(model(**inputs, return_dict=True, **options))


def tensors_of(output: Any, name: str = "") -> dict[str, Tensor]:
    """Numbers of an output by name, those of tuples by their place; caches are left out."""
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
    """Largest difference of tensors of the same names, relative to the largest number of each.

    Raises:
        Mismatch: for another name or shape.
    """
    if missing := expected.keys() ^ got.keys():
        who = "the stock model" if missing <= got.keys() else "the switched model"
        raise Mismatch(f"{who} gives no {', '.join(sorted(missing))}")
    worst = 0.0
    for name, numbers in expected.items():
        if numbers.shape != got[name].shape:
            shapes = f"{tuple(got[name].shape)}, expected {tuple(numbers.shape)}"
            raise Mismatch(f"{name} has shape {shapes}")
        worst = max(worst, relative(numbers, got[name]))
    return worst


def relative(expected: Tensor, got: Tensor) -> float:
    """Largest difference relative to the largest number; infinite where one is no number."""
    difference = (expected - got).abs().max() / expected.abs().max().clamp(min=1e-12)
    return difference.item() if difference.isfinite() else float("inf")


def _logits(stock: Any, own: Any, samples: Samples) -> float:
    return max(largest(_outputs(stock, row), _outputs(own, row)) for row in samples.rows)


def _states(stock: Any, own: Any, samples: Samples) -> float:
    """Of all layers; attention weights are returned by eager attention alone."""
    outputs = []
    for model in (stock, own):
        before = model.config._attn_implementation
        model.set_attn_implementation("eager")
        options = {"output_hidden_states": True, "output_attentions": True}
        outputs.append(_outputs(model, samples.rows[0], **options))
        model.set_attn_implementation(before)
    return largest(*outputs)


def _padding(reference: Any, model: Any, samples: Samples, side: str) -> float:
    """Samples in one padded batch against each alone in `reference`."""
    main = model.main_input_name
    if main not in samples.padding:
        raise NotApplicable(f"{main} of one size")
    if side == "left" and main != "input_ids":
        raise NotApplicable("recordings are padded on the right")
    together = _outputs(model, samples.batch(side))
    alone = [_outputs(reference, row) for row in samples.rows]
    names = list(alone[0])
    if side == "left":  # heads of encoders read the first place, which is padding then
        names = [name for name in names if len({row[name].shape for row in alone}) > 1]
    if not names:
        raise NotApplicable("its head reads one place of the batch")
    worst = 0.0
    for number, row in enumerate(alone):
        parts = {
            name: _without_padding(together[name][number : number + 1], row[name], side)
            for name in names
        }
        worst = max(worst, largest({name: row[name] for name in names}, parts))
    return worst


def _without_padding(padded: Tensor, expected: Tensor, side: str) -> Tensor:
    """The part of a sample ``[1, T, ...]`` that it has alone, ``[1, t, ...]``."""
    length = expected.shape[1] if expected.dim() > 1 else None
    if length is None or padded.shape[1] == length:
        return padded
    return padded[:, :length] if side == "right" else padded[:, -length:]


def _evaluation(model: Any, samples: Samples) -> str:
    settings = (model.config.position_settings(field) for field in model.config.position_fields)
    if any(config.random_evaluation for config in settings):
        raise NotApplicable("its settings ask for random positions in evaluation")
    batch = samples.batch()
    before = torch.get_rng_state()
    first, second = _outputs(model, batch), _outputs(model, batch)
    if not torch.equal(before, torch.get_rng_state()):
        raise Mismatch("a forward in evaluation mode has drawn random numbers")
    if largest(first, second):
        raise Mismatch("two forwards in evaluation mode differ")
    return "none drawn, two forwards are equal"


# ---- generation ----------------------------------------------------------------------------------


def _generation_checks(
    own: Any, samples: Samples, stock: Any | None = None, prefix: str = ""
) -> Iterator[Check]:
    """Logits of each step: of the stock model, and of one forward over all tokens."""
    if not own.can_generate():
        return
    for beams, name in ((1, "greedy generation"), (BEAMS, "beam search")):
        generated = _Once(partial(generate, own, samples.rows[0], beams))
        if stock is not None:
            yield check(name, partial(_against_stock, stock, samples.rows[0], beams, generated))
        yield check(
            f"{prefix}{name}: cached steps against one forward",
            partial(_against_forward, own, samples.rows[0], generated),
        )
    if own.config.is_encoder_decoder or own.main_input_name not in samples.padding:
        return
    yield check(
        f"{prefix}greedy generation from a batch padded on the left",
        partial(_from_padded, own if stock is None else stock, own, samples),
    )


class _Once:
    """The result of a call that two checks need, or its error for both."""

    def __init__(self, call: Callable[[], Generated]) -> None:
        self.call, self.result = call, None

    def __call__(self) -> Generated:
        if self.result is None:
            self.result = self.call()
        return self.result


def _against_stock(
    stock: Any, row: Mapping[str, Tensor], beams: int, generated: Callable[[], Generated]
) -> float:
    return step_difference(generate(stock, row, beams), generated())


def _against_forward(
    own: Any, row: Mapping[str, Tensor], generated: Callable[[], Generated]
) -> float:
    steps = generated()
    return relative(forced_logits(own, row, steps.sequences, steps.logits.shape[1]), steps.logits)


def _from_padded(reference: Any, own: Any, samples: Samples) -> float:
    together = generate(own, samples.batch("left"), 1)
    worst = 0.0
    for number, row in enumerate(samples.rows):
        alone = generate(reference, row, 1)
        part = together.row(number, alone.sequences.shape[1])
        worst = max(worst, step_difference(alone, part))
    return worst


# ---- storage -------------------------------------------------------------------------------------


def _storage_checks(
    stock: Any, own: Any, samples: Samples, position_embedding: Mapping[str, Any]
) -> Iterator[Check]:
    """Through the Auto classes: the switched model as it was saved, and the stock checkpoint with a
    position embedding."""
    models = auto_models(type(own.config)).items()
    autos = [auto for auto, model in models if model is type(own)] or [type(own)]
    with tempfile.TemporaryDirectory() as own_folder, tempfile.TemporaryDirectory() as folder:
        saved = check("saved", lambda: own.save_pretrained(own_folder) or type(own).__name__)
        if saved.failed:
            yield saved
            return
        stock.save_pretrained(folder)
        for auto in autos:
            load = partial(_load, auto, own_folder, folder)
            name = f"saved and loaded by {auto.__name__}"
            yield check(name, partial(_loaded, load, own, samples))
            load = partial(_load, auto, folder, folder, **{FIELD: position_embedding})
            name = f"stock checkpoint loaded by {auto.__name__} with {FIELD}"
            yield check(name, partial(_loaded, load, own, samples))
        yield check("the stock class refuses the folder", partial(_refused, stock, own_folder))


def _load(auto: Any, folder: str, stock_folder: str, **settings: Any) -> Any:
    try:
        return auto.from_pretrained(folder, local_files_only=True, **settings)
    except Exception:
        try:
            auto.from_pretrained(stock_folder, local_files_only=True)
        except Exception as error:  # whatever it is, it is no fault of the position embedding
            reason = f"{type(error).__name__} with the stock model as well"
            raise NotApplicable(reason) from None
        raise


def _loaded(load: Callable[[], Any], own: Any, samples: Samples) -> float:
    model = load().eval()
    if type(model) is not type(own):
        raise Mismatch(f"gives a {type(model).__name__}, expected {type(own).__name__}")
    expected, weights = own.state_dict(), model.state_dict()
    if names := expected.keys() ^ weights.keys():
        raise Mismatch(f"the weights {', '.join(sorted(names))} are in one of both only")
    changed = [name for name in expected if not torch.equal(expected[name], weights[name])]
    if changed:
        raise Mismatch(f"{len(changed)} weights are not those saved, such as {changed[0]}")
    model.set_attn_implementation(own.config._attn_implementation)
    return largest(_outputs(own, samples.rows[0]), _outputs(model, samples.rows[0]))


def _refused(stock: Any, folder: str) -> str:
    try:
        type(stock).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return "it does not load"
    raise Mismatch(f"{type(stock).__name__} loads it, and would compute other positions")


# ---- the wished type -----------------------------------------------------------------------------


def _wish_checks(
    stock_model: Any, wish: Mapping[str, Any], inputs: Samples | None
) -> Iterator[Check]:
    own, prefix = copy_of(stock_model), f"{wish['type']}: "
    before = {name for name, _ in own.named_parameters()}
    switched = check(f"{prefix}switch", partial(_switched, own, wish, {}))
    yield switched
    if switched.failed:
        return
    with torch.no_grad():  # a wrong distance must be seen in a table that is not trained
        for name, table in own.named_parameters():
            if name not in before:
                table.normal_(std=_NEW_TABLES)
    yield from model_checks(own, before, prefix, inputs)


def model_checks(
    own: Any, stock_names: set[str], prefix: str = "", inputs: Samples | None = None
) -> Iterator[Check]:
    """Checks of a model of this package on its own, which is trained by one step at the end.

    Args:
        own: In evaluation mode and float32.
        stock_names: Parameters that its stock model has, too.
        prefix: Of the names of the checks.
        inputs: Samples without padding; by default two of random numbers.
    """
    full_length = not getattr(own.config, "at_natural_length", False)
    samples = sample_inputs(own, full_length) if inputs is None else inputs
    yield check(
        f"{prefix}evaluation draws no random numbers", lambda: _evaluation(own, samples)
    )
    for side in ("right", "left"):
        yield check(f"{prefix}padding on the {side}", partial(_padding, own, own, samples, side))
    yield from _generation_checks(own, samples, prefix=prefix)
    yield check(f"{prefix}training draws positions", lambda: _augmentation(own, samples))
    yield check(f"{prefix}one training step", lambda: _training(own, samples, stock_names))


def _augmentation(own: Any, samples: Samples) -> str:
    """With only the position encoders in training mode, so that nothing else is random."""
    encoders = [module for module in own.modules() if isinstance(module, PositionEncoder)]
    for encoder in encoders:
        encoder.train()
    try:
        if not any(encoder.draws for encoder in encoders):
            raise NotApplicable("nothing is random")
        batch = samples.batch()
        with torch.random.fork_rng():
            outputs = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                # rotary models draw where there are gradients
                outputs.append(tensors_of(own(**batch, return_dict=True)))
    finally:
        own.eval()
    if not largest(*outputs):
        raise Mismatch("training forwards of two seeds are equal: no draw reaches the positions")
    return "forwards of two seeds differ"


def _training(own: Any, samples: Samples, stock_names: set[str]) -> str:
    batch = samples.batch()
    shapes = {name: tuple(value.shape) for name, value in _outputs(own, batch).items()}
    own.train()
    optimizer = torch.optim.SGD(own.parameters(), _STEP)
    output = own(**batch, return_dict=True)
    trained = {name: tuple(value.shape) for name, value in tensors_of(output).items()}
    if trained != shapes:
        raise Mismatch(f"shapes in training {trained}, in evaluation {shapes}")
    answers = [value for value in tensors_of(output).values() if value.requires_grad]
    loss = torch.stack([value.square().mean() for value in answers]).sum()
    loss.backward()
    gradients = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise Mismatch(f"the gradient of {name} is not finite")
    new = {name for name, _ in own.named_parameters()} - stock_names
    if new and not any(gradients[name].any() for name in new & gradients.keys()):
        raise Mismatch(f"no gradient reaches {', '.join(sorted(new))}")
    optimizer.step()
    own.eval()
    for name, value in _outputs(own, batch).items():
        if not value.isfinite().all():
            raise Mismatch(f"{name} is not finite after the step")
    return f"loss {loss.item():.3g}, {len(gradients)} gradients are finite"

