"""Gives built models, of transformers or of this package, another position embedding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from cape_plugins.checkpoints.families import find_family
from cape_plugins.mathematics.binding import Bound
from hf_models.generated.families import make_if_known, part_of
from hf_models.generated.model import how_to_check
from hf_models.seams.base import Seam
from hf_models.switching.configuration import copy_implementations
from hf_models.switching.install import (
    PARTS,
    PositionHost,
    SwitchedModel,
    install,
    is_model,
    stock_class,
)
from hf_models.switching.settings import FIELD, require_own_config

# a learned table in stock classes
STOCK_TABLES = (
    "embed_positions.weight",
    "position_embeddings.weight",
    "position_embeddings",
    "position_embedding.weight",
)
_ADDED = re.compile(r"\.(positions|relative)\.")  # parameters that no stock class has
_TORCH_ATTRIBUTES = vars(nn.Module()).keys()  # attributes that every module has


def switch(model: Any, position_embedding: Mapping[str, Any], **fields: Any) -> Any:
    """Gives a built model another position embedding, in place and with all weights.

    Modules and parameters stay, and with them hooks, precisions, adapters, and optimizers that were
    made before; only position embeddings are exchanged. Embeddings that the new type needs are new
    parameters, which the caller has to add to an optimizer.

    Args:
        model: The outermost model of transformers, of a known family, stock or switched already.
            Do not give a part such as ``classifier.bert``: the classifier around the part would
            keep its stock class, and would be saved and loaded as a stock model. Switching a model
            for the second time takes the memory of a second copy of the weights for a moment,
            because a stock model is built to see what has to be undone.
        position_embedding: ``{"type": ..., option: value}``.
        fields: Further fields of the configuration, such as ``hop_seconds``; a model that was
            switched already keeps the old values of missing fields.

    Returns:
        `model`, with a class and configuration of this package.

    Raises:
        ValueError: if the family is unknown, a setting is wrong, or a module's forward has been
            replaced; then the model does not change.
    """
    switched_before = is_model(type(model))
    part = type(model) if switched_before else part_of(type(model))
    if not is_model(part):
        raise ValueError(_refusal(model))
    stock, old_config = stock_class(part), model.config
    if stock is None:
        raise ValueError(
            f"model is a {part.__name__}, which transformers has no stock model for. Save it by "
            f"save_pretrained(FOLDER) and load it by {part.__name__}.from_pretrained(FOLDER, "
            f"{FIELD}={{...}})."
        )
    _check_settings(part, stock, position_embedding, fields)
    _refuse_hooks(model)
    settings, stock_config = {FIELD: position_embedding, **fields}, old_config
    if switched_before:
        stock_config = stock.config_class(**stock_settings(old_config, stock.config_class))
        other_fields = _added_fields(part, stock) - old_config.position_fields.keys()
        settings = {**{name: getattr(old_config, name) for name in other_fields}, **settings}
    try:
        config = part.config_class.of_stock(stock_config, **settings)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    # from the old configuration: a stock configuration of Speech2Text takes only eager attention
    copy_implementations(old_config, config)
    require_own_config(config, part.__name__)
    snapshot, parameters = _snapshot(model), dict(model.named_parameters())
    try:
        trained = restore_stock(model, stock, stock_config) if switched_before else True
        _switch(model, old_config, config, trained)
    except BaseException:  # also Ctrl-C: the model belongs to the caller
        _restore(snapshot)
        raise
    _keep_tables(model, parameters)
    model.finish()
    return model


def _check_settings(
    part: Any, stock: Any, position_embedding: Any, fields: Mapping[str, Any]
) -> None:
    """Raises for settings that are no dict, and for fields that only a new model can have."""
    if not isinstance(position_embedding, Mapping):
        raise ValueError(
            f"{FIELD}={position_embedding!r} is not allowed; allowed: a dict with 'type' and "
            'options, such as {"type": "cape", "max_global_shift": 5.0}.'
        )
    allowed = _added_fields(part, stock) - {FIELD}
    if unknown_fields := sorted(fields.keys() - allowed):
        raise ValueError(
            f"{unknown_fields[0]}={fields[unknown_fields[0]]!r} cannot be set by switch; allowed "
            f"for {part.__name__} beside {FIELD}: {', '.join(sorted(allowed)) or 'nothing'}. Leave "
            "it out; other fields of a configuration are set before the stock model is built."
        )


def _added_fields(part: Any, stock: Any) -> set[str]:
    """Fields that the configuration of a model has and the stock configuration lacks."""
    return vars(part.config_class()).keys() - vars(stock.config_class()).keys()


def restore_stock(model: Any, stock: Any, stock_config: Any) -> bool:
    """Turns a model of this package back into a stock model, in place, except its configuration.

    A stock model is built and switched in the same way as `model` was. Every change in the stock
    model is undone in `model`, and dropped stock modules are taken from the stock model. So no part
    has to know how its ``install_positions`` is undone. Everything else stays, also changes by the
    owner.

    Args:
        model: A model of this package.
        stock: The stock class of the model.
        stock_config: Configuration of the stock model.

    Returns:
        Whether all parameters are old: none was dropped and replaced by a new parameter.

    Raises:
        ValueError: if a part of this package is in a place where no stock model has a part.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # the settings that would warn are removed by this call
        twin = stock(stock_config).to(model.device)  # drawn on the CPU, and its numbers are lost
        stock_modules = [(module, type(module), _contents(module)) for module in twin.modules()]
        new_parameters = set(twin.parameters())
        _switch(twin, stock_config, model.config, trained=False)
    in_model = _counterparts(twin, model, stock_modules)
    for module, stock_type, contents in stock_modules:
        counterpart, switched = in_model.get(id(module), module), _contents(module)
        if type(counterpart) is not type(module):
            continue  # a module of the owner without position embedding; others are refused below
        was_dropped = counterpart is module
        counterpart.__class__ = stock_type
        for name in switched.keys() - contents.keys():
            if name in _contents(counterpart):
                delattr(counterpart, name)
        for name, value in contents.items():
            if was_dropped or switched.get(name, ...) is not value:
                if name in counterpart._modules and not isinstance(value, nn.Module):
                    delattr(counterpart, name)  # torch refuses a tensor in the place of a module
                setattr(counterpart, name, in_model.get(id(value), value))
    for name, module in model.named_modules():
        if isinstance(module, (Bound, PositionHost, SwitchedModel)):
            raise ValueError(
                f"{type(module).__name__} {name!r} is no part that the configuration describes, "
                "perhaps because layers or wrappers were added by hand, so its position embedding "
                "cannot be exchanged; allowed: models without added parts. Switch the stock model, "
                "or switch before parts are added."
            )
    return new_parameters.isdisjoint(model.parameters())


def _contents(module: nn.Module) -> dict[str, Any]:
    """Attributes, parameters, buffers and modules that a module holds, by name."""
    attributes = {
        name: value for name, value in vars(module).items() if name not in _TORCH_ATTRIBUTES
    }
    return {**attributes, **module._parameters, **module._buffers, **module._modules}


def _counterparts(
    twin: Any, model: Any, stock_modules: list[tuple[nn.Module, type, dict[str, Any]]]
) -> dict[int, Any]:
    """Modules, parameters, buffers and configurations of `model`, by the id of the counterpart in
    `twin`."""
    in_model = {}
    for listing in ("named_modules", "named_parameters", "named_buffers"):
        theirs = dict(getattr(model, listing)(remove_duplicate=False))
        for name, value in getattr(twin, listing)(remove_duplicate=False):
            if name in theirs:
                in_model.setdefault(id(value), theirs[name])
    for module, _, contents in stock_modules:
        if isinstance(module, PreTrainedModel) and id(module) in in_model:
            in_model[id(contents["config"])] = in_model[id(module)].config
    return in_model


def _keep_tables(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Puts old `parameters` back in the place of new parameters with the same name and shape:
    tables of this package that both types have."""
    for name, parameter in list(model.named_parameters()):
        old_parameter = parameters.get(name, parameter)
        if old_parameter is not parameter and old_parameter.shape == parameter.shape:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, old_parameter)


def build_stock(model: PreTrainedModel, stock: Any, **fields: Any) -> PreTrainedModel:
    """The stock model with the weights of a model of this package, in evaluation mode. Missing
    tables come from a new stock model. Relative embeddings are left out, because no stock model
    holds them; callers that need the same output refuse relative embeddings.

    Args:
        model: A model of this package.
        stock: The stock class of the model.
        fields: Fields of the stock configuration to change.

    Raises:
        ValueError: for different weights that share one parameter in the stock model.
    """
    settings = {**stock_settings(model.config, stock.config_class), **fields}
    twin = stock(stock.config_class(**settings)).to(model.dtype).eval()
    if model.can_generate():
        twin.generation_config = model.generation_config
    seams = [(path, part) for path, part in model.named_modules() if isinstance(part, Seam)]
    names = {seam.stock_table(path) for path, seam in seams}
    names |= {name for path, seam in seams for name in seam.other_stock_tables(path)}
    tables = {
        name: table
        for name, table in twin.state_dict().items()
        if name in names or name.endswith(STOCK_TABLES)
    }
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if not _ADDED.search(name) and (name not in tables or weight.shape == tables[name].shape)
    }
    twin.load_state_dict({**tables, **weights})
    loaded = twin.state_dict()
    for name, weight in weights.items():
        if not torch.equal(loaded[name], weight.to(loaded[name])):  # by a tied weight
            raise ValueError(
                f"{name} differs from the weight that the configuration ties it to, so a "
                f"{stock.__name__} would hold only one of the two; allowed: equal weights, or a "
                "configuration that does not tie them. Set config.tie_word_embeddings = False "
                "before the model is saved."
            )
    return twin


def stock_settings(config: Any, stock_config: Any) -> dict[str, Any]:
    """Fields of the configuration of a stock model, from a configuration of this package.

    Args:
        config: Configuration of this package.
        stock_config: Class of the stock configuration.
    """
    added = vars(type(config)()).keys() - vars(stock_config()).keys()
    left_out = added | {"model_type", "auto_map"}  # auto_map names code of this package
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _refusal(model: Any) -> str:
    """Why a model cannot be switched, and what to do."""
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        return f"model is wrapped in a {name}. Switch it before peft wraps it (get_peft_model)."
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    make_if_known(model_type)  # the head of a user may be the first use of a generated family
    for part in filter(is_model, PARTS.values()):
        if model_type in part.config_class.model_types():
            return without_head(name, part.config_class)
    if find_family(model_type) is not None:
        return (
            f"model is a {name}. The row of {model_type!r} is known, but its models have no "
            "classes: register classes by hf_models.register_family(FamilyClasses(...))."
        )
    return (
        f"model is a {name}, whose positions cannot be switched; allowed: the model types that "
        f"docs/families.md lists. {how_to_check(model_type)} Give a model of such a type."
    )


def without_head(name: str, config: Any) -> str:
    """Message that a family has no class for a head, with the remedy.

    Args:
        name: The stock class, or the Auto class, that asks for the head.
        config: Configuration of the family in this package.
    """
    models = (part for part in PARTS.values() if is_model(part) and part.config_class is config)
    return (
        f"{name} has no counterpart in {config.model_type!r}, which has "
        f"{', '.join(sorted(model.__name__ for model in models))}. Take one of them, or write a "
        "class for this head and make it known by hf_models.register_family: two lines, which "
        "docs/huggingface.md shows under Other heads."
    )


def _refuse_hooks(model: nn.Module) -> None:
    """Raises for a module with a replaced forward, which would hide the forward of a new class."""
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} {name!r} has a replaced forward, for example from "
                "accelerate (device_map, dispatch_model, Accelerator.prepare), which would run "
                "instead of the forward of the new class; allowed: modules with the forward of "
                "their class. Switch the model before accelerate sees it, or load it by "
                f"from_pretrained(..., {FIELD}={{...}}, device_map=...)."
            )


def _switch(model: Any, old_config: Any, config: Any, trained: bool) -> None:
    parts = [(getattr(old_config, part), getattr(config, part)) for part in config.sub_configs]
    for module in model.modules():
        for old, new in ((old_config, config), *parts):
            if getattr(module, "config", None) is old:
                module.config = new
    before = set(model.parameters())
    install(model, trained)
    for parameter in set(model.parameters()) - before:
        # a new table gets the device and the precision of the model
        parameter.data = parameter.data.to(model.device, model.dtype)


def _snapshot(model: nn.Module) -> list[tuple[nn.Module, type, dict[str, Any]]]:
    """Modules with their classes and attributes; tensors are not copied."""

    def contents(module: nn.Module) -> dict[str, Any]:
        states = vars(module).items()
        return {name: copy(value) if isinstance(value, dict) else value for name, value in states}

    return [(module, type(module), contents(module)) for module in model.modules()]


def _restore(modules: list[tuple[nn.Module, type, dict[str, Any]]]) -> None:
    for module, old_class, contents in modules:
        module.__class__ = old_class
        vars(module).clear()
        vars(module).update(contents)
