"""Checks of saving and loading through the Auto classes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cape_plugins.doctor.check import Check, Mismatch, NotApplicable, check
from hf_models.checks.outputs import largest, outputs_of
from hf_models.checks.samples import Samples
from hf_models.switching.install import auto_models
from hf_models.switching.settings import FIELD


def storage_checks(
    stock: Any,
    cape_model: Any,
    samples: Samples,
    position_embedding: Mapping[str, Any],
    autos: Sequence[Any] | None = None,
    stock_weights: bool = True,
) -> Iterator[Check]:
    """Loads through the Auto classes: the saved switched model, and the stock checkpoint with a
    position embedding.

    Args:
        stock: The stock model.
        cape_model: The switched model.
        samples: Inputs of both models; only the first sample is compared.
        position_embedding: Settings of the switched model.
        autos: Auto classes, or others, that load the model; by default all Auto classes that do.
        stock_weights: Whether the switched model has the weights of the stock checkpoint. False if
            a learned table is dropped: ``switch``, but not ``from_pretrained``, adds the table's
            rows of special tokens to the tokens. Then only loading is checked.
    """
    if autos is None:
        models = auto_models(type(cape_model.config)).items()
        autos = [auto for auto, model in models if model is type(cape_model)]
    autos = autos or [type(cape_model)]
    with tempfile.TemporaryDirectory() as cape_folder, tempfile.TemporaryDirectory() as folder:
        saving = check(
            "saved", lambda: cape_model.save_pretrained(cape_folder) or type(cape_model).__name__
        )
        if saving.failed:
            yield saving
            return
        stock.save_pretrained(folder)
        for auto in autos:
            load = partial(_load, auto, cape_folder, folder)
            name = f"saved and loaded by {auto.__name__}"
            yield check(name, partial(_load_difference, load, cape_model, samples))
            load = partial(_load, auto, folder, folder, **{FIELD: position_embedding})
            name = f"stock checkpoint loaded by {auto.__name__} with {FIELD}"
            compare = partial(_load_difference, load, cape_model, samples)
            yield check(name, compare if stock_weights else partial(_loaded_type, load))
        yield check(
            "the stock class refuses the folder", partial(_check_refusal, stock, cape_folder)
        )


def _load(auto: Any, folder: str, stock_folder: str, **settings: Any) -> Any:
    try:
        return auto.from_pretrained(folder, local_files_only=True, **settings)
    except Exception:
        try:
            auto.from_pretrained(stock_folder, local_files_only=True)
        except Exception as error:
            # no fault of the position embedding: AutoBackbone of transformers 5.23.0 takes every
            # local folder for a name on the hub
            reason = f"{type(error).__name__} with the stock model as well"
            raise NotApplicable(reason) from None
        raise


def _loaded_type(load: Callable[[], Any]) -> str:
    return type(load()).__name__


def _load_difference(load: Callable[[], Any], cape_model: Any, samples: Samples) -> float:
    model = load().eval()
    if type(model) is not type(cape_model):
        raise Mismatch(f"loaded a {type(model).__name__}, expected {type(cape_model).__name__}")
    expected, weights = cape_model.state_dict(), model.state_dict()
    if names := expected.keys() ^ weights.keys():
        raise Mismatch(f"the weights {', '.join(sorted(names))} are in one of the two models only")
    changed = [name for name in expected if not torch.equal(expected[name], weights[name])]
    if changed:
        raise Mismatch(f"{len(changed)} weights differ from the saved ones, such as {changed[0]}")
    model.set_attn_implementation(cape_model.config._attn_implementation)
    outputs = []
    with torch.random.fork_rng():  # some models draw in evaluation too, such as masks of patches
        for each_model in (cape_model, model):
            torch.manual_seed(0)
            outputs.append(outputs_of(each_model, samples.rows[0]))
    return largest(*outputs)


def _check_refusal(stock: Any, folder: str) -> str:
    try:
        type(stock).from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return "it does not load"
    raise Mismatch(f"{type(stock).__name__} loads the folder, and would compute other positions")
