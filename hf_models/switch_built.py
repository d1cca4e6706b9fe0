"""Gives models that are built already, stock or of this package, another position embedding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from cape_plugins.families import find_family
from hf_models.settings import FIELD, require_own_config
from hf_models.switching import PARTS, install, is_model, stock_class

# a learned table in stock classes
STOCK_TABLES = (
    *("embed_positions.weight", "position_embeddings.weight"),
    *("position_embeddings", "position_embedding.weight"),
)
_OWN = re.compile(r"\.(positions|relative)\.")  # parameters that no stock class has


def switch(model: Any, position_embedding: Mapping[str, Any], **fields: Any) -> Any:
    """Gives a built model another position embedding, in place and with all its weights.

    Args:
        model: A model of transformers of a known family, stock or switched already, and the
            outermost one: a part such as ``classifier.bert`` would be switched without the
            classifier, which cannot be seen from the part and would be saved and loaded as a stock
            one. The modules and parameters of one that was switched already are new ones, and for
            a moment there are two of each.
        position_embedding: ``{"type": ..., option: value}``.
        fields: Further fields of the configuration, such as ``hop_seconds``; those of a model that
            was switched already stay.

    Returns:
        `model`, whose class and configuration are now those of this package.

    Raises:
        ValueError: if the family is unknown, a setting is wrong, or a module has a forward of its
            own; the model stays as it was.
    """
    if is_model(type(model)):
        return _switch_again(model, position_embedding, fields)
    own, stock_config = PARTS.get(type(model)), getattr(model, "config", None)
    if not is_model(own):
        raise ValueError(_refusal(model))
    if not isinstance(position_embedding, Mapping):
        raise ValueError(
            f"{FIELD}={position_embedding!r} is not allowed; allowed: a dict with 'type' and "
            'options, such as {"type": "cape", "max_global_shift": 5.0}.'
        )
    allowed = _own_fields(own.config_class, type(stock_config)) - {FIELD}
    if unknown := sorted(fields.keys() - allowed):
        raise ValueError(
            f"{unknown[0]}={fields[unknown[0]]!r} cannot be set by switch; allowed for "
            f"{own.__name__}: {', '.join(sorted(allowed)) or 'nothing'}. Set it before the stock "
            "model is built."
        )
    _refuse_hooks(model)
    settings = {FIELD: position_embedding, **fields}
    try:
        config = own.config_class.of_stock(stock_config, **settings)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    require_own_config(config, own.__name__)
    before = _recorded(model)
    try:
        _switch(model, stock_config, config)
    except BaseException:  # the model is the caller's, and stays what it was
        _restore(before)
        raise
    model.finish()
    return model


def _own_fields(config: Any, stock_config: Any) -> set[str]:
    """Fields of a class of configurations that the stock class does not have."""
    return vars(config()).keys() - vars(stock_config()).keys()


def _switch_again(model: Any, position_embedding: Any, fields: Mapping[str, Any]) -> Any:
    """Switches a model of this package: its weights in a new stock model are switched."""
    stock, config = stock_class(type(model)), model.config
    if stock is None:
        name = type(model).__name__
        raise ValueError(
            f"model is a {name}, which transformers has no stock model for. Save it by "
            f"save_pretrained(FOLDER) and load it by {name}.from_pretrained(FOLDER, "
            f"{FIELD}={{...}})."
        )
    _refuse_hooks(model)
    names = _own_fields(type(config), stock.config_class) - config.position_fields.keys()
    twin = build_stock(model, stock).to(model.device)
    twin.config._attn_implementation = config._attn_implementation
    known = twin.state_dict().keys()
    switched = switch(
        twin, position_embedding, **{name: getattr(config, name) for name in names} | dict(fields)
    )
    old, new = model.state_dict(), switched.state_dict()
    switched.load_state_dict(  # tables that both have, and the stock model has not
        {
            name: value
            for name, value in old.items()
            if name not in known and name in new and value.shape == new[name].shape
        },
        strict=False,
    )
    learning = {name: value.requires_grad for name, value in model.named_parameters()}
    for name, parameter in switched.named_parameters():
        parameter.requires_grad_(learning.get(name, True))
    switched.train(model.training)
    vars(model).clear()
    vars(model).update(vars(switched))
    return model


def build_stock(model: PreTrainedModel, stock: Any, **fields: Any) -> PreTrainedModel:
    """The stock model with the weights of a model of this package, in evaluation mode. Tables that
    this does not have are those of a new stock model. Relative embeddings are left out, which no
    stock model holds: callers that want the same output refuse them.

    Args:
        model: A model of this package.
        stock: The class that it stands for.
        fields: Fields of the stock configuration to change.
    """
    settings = {**stock_settings(model.config, stock.config_class), **fields}
    twin = stock(stock.config_class(**settings)).to(model.dtype).eval()
    if model.can_generate():
        twin.generation_config = model.generation_config
    tables = {
        name: table for name, table in twin.state_dict().items() if name.endswith(STOCK_TABLES)
    }
    kept = {
        name: weight
        for name, weight in model.state_dict().items()
        if not _OWN.search(name) and (name not in tables or weight.shape == tables[name].shape)
    }
    twin.load_state_dict({**tables, **kept})
    return twin


def stock_settings(config: Any, stock_config: Any) -> dict[str, Any]:
    """Fields of the configuration of a stock model, from one of this package.

    Args:
        config: Of this package.
        stock_config: Class of the stock configuration.
    """
    # the last names code of this package
    left_out = _own_fields(type(config), stock_config) | {"model_type", "auto_map"}
    return {name: value for name, value in config.to_dict().items() if name not in left_out}


def _refusal(model: Any) -> str:
    """Why a model cannot be switched, and what to do."""
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        return f"model is wrapped in a {name}. Switch it before peft wraps it (get_peft_model)."
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    for part in filter(is_model, PARTS.values()):
        if model_type in part.config_class.model_types():
            return without_head(name, part.config_class)
    if find_family(model_type) is not None:
        return (
            f"model is a {name}. The row of {model_type!r} is known, but no class of its models "
            "is: register them by hf_models.register_family(FamilyClasses(...))."
        )
    known = sorted(stock.__name__ for stock, part in PARTS.items() if is_model(part))
    return (
        f"model is a {name}, whose positions cannot be switched; allowed: {', '.join(known)}. "
        "Give such a model."
    )


def without_head(name: str, config: Any) -> str:
    """Says that a family has no class for a head, and what to do.

    Args:
        name: The stock class, or the Auto class, that asks for the head.
        config: Configuration of the family in this package.
    """
    models = (part for part in PARTS.values() if is_model(part) and part.config_class is config)
    return (
        f"{name} stands for no class of {config.model_type!r}, which has "
        f"{', '.join(sorted(model.__name__ for model in models))}. Take one of them, or write a "
        "class for this head and make it known by hf_models.register_family: two lines, in "
        "docs/huggingface.md under Other heads."
    )


def _refuse_hooks(model: nn.Module) -> None:
    """Raises for a module whose forward would hide that of its new class."""
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} {name!r} has a forward of its own, as accelerate sets it "
                "(device_map, dispatch_model, Accelerator.prepare), which would run instead of "
                "that of its new class; allowed: modules as they are built. Switch the model "
                f"before, or load it by from_pretrained(..., {FIELD}={{...}}, device_map=...)."
            )


def _switch(model: Any, stock_config: Any, config: Any) -> None:
    parts = [(getattr(stock_config, part), getattr(config, part)) for part in config.sub_configs]
    for module in model.modules():
        for old, new in ((stock_config, config), *parts):
            if getattr(module, "config", None) is old:
                module.config = new
    before = set(model.parameters())
    install(model, trained=True)
    for parameter in set(model.parameters()) - before:
        parameter.data = parameter.data.to(model.device, model.dtype)


def _recorded(model: nn.Module) -> list[tuple[nn.Module, type, dict[str, Any]]]:
    """Modules with their classes and what they hold, but for the values of tensors."""

    def held(module: nn.Module) -> dict[str, Any]:
        states = vars(module).items()
        return {name: copy(value) if isinstance(value, dict) else value for name, value in states}

    return [(module, type(module), held(module)) for module in model.modules()]


def _restore(modules: list[tuple[nn.Module, type, dict[str, Any]]]) -> None:
    for module, stock, held in modules:
        module.__class__ = stock
        vars(module).clear()
        vars(module).update(held)
