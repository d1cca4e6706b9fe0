"""Lets ``from_pretrained`` and ``from_config`` of Auto classes and of stock classes take a position
embedding, with or without a stock configuration. With a position embedding these calls build the
model of this package, a subclass of the stock model.

transformers silently drops arguments that a configuration does not know, or hands them to a model
that does not know them either. Calls without a position embedding do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from itertools import product
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from cape_plugins.checkpoints.families import FAMILY_ROWS
from hf_models.calls.switching import without_head
from hf_models.generated.families import can_make, make_if_known, part_of
from hf_models.generated.model import how_to_check
from hf_models.switching.install import is_model
from hf_models.switching.settings import (
    FIELD,
    embeddings_in,
    refuse_in_constructor,
    refuse_misplaced,
)


def accept_position_embeddings(configs: Collection[Any]) -> None:
    """Changes the calls, for the whole process.

    Args:
        configs: Configurations of this package; configurations that are added later count, too.
    """
    AutoConfig.from_pretrained = _with_cape_configurations(AutoConfig.from_pretrained, configs)
    for name in ("from_pretrained", "_from_config"):
        stock = getattr(PreTrainedModel, name).__func__
        setattr(PreTrainedModel, name, classmethod(_building_cape_models(stock, configs)))
    PreTrainedModel.__new__ = staticmethod(_naming_calls(PreTrainedModel.__new__, configs))
    autos = [auto for auto in vars(modeling_auto).values() if hasattr(auto, "_model_mapping")]
    for auto, name in product(autos, ("from_pretrained", "from_config")):
        if name in vars(auto):  # each Auto class has a copy of the method, with its docstring
            stock = vars(auto)[name].__func__
            setattr(auto, name, classmethod(_naming_heads(stock, configs)))


def _fields(configs: Collection[Any]) -> set[str]:
    """Names of all position embeddings, also of families that are not made yet."""
    rows = (side for family in FAMILY_ROWS.values() for side in family.sides.values())
    of_rows = {side.field for side in rows if side.field}
    return of_rows | {field for config_class in configs for field in config_class.position_fields}


def _no_effect(field: str, value: Any, checkpoint: Any, model_type: str) -> str:
    return (
        f"{field}={value!r} has no effect on {checkpoint}, a model of type {model_type!r}; "
        f"allowed: the model types that docs/families.md lists. {how_to_check(model_type)} Leave "
        f"{field} out, or give such a model."
    )


def _with_cape_configurations(stock_from_pretrained: Any, configs: Collection[Any]) -> Any:
    """Wraps ``AutoConfig.from_pretrained``, by which every Auto class finds the configuration."""

    @functools.wraps(stock_from_pretrained)
    def from_pretrained(pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        result = stock_from_pretrained(pretrained_model_name_or_path, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        fields = sorted(embeddings_in(kwargs, None, _fields(configs)))
        if fields:
            make_if_known(config.model_type)
        elif can_make(config.model_type):
            refuse_misplaced(kwargs, (FIELD,))
        for config_class in list(configs):
            if config.model_type in config_class.model_types():
                refuse_misplaced(kwargs, config_class.position_fields)
        if all(hasattr(config, field) for field in fields):
            return result
        for config_class in configs:
            if config.model_type in config_class.model_types():
                # AutoConfig takes these arguments itself; a configuration class would store them
                for name in ("trust_remote_code", "code_revision"):
                    kwargs.pop(name, None)
                return config_class.from_pretrained(pretrained_model_name_or_path, **kwargs)
        path, model_type = pretrained_model_name_or_path, config.model_type
        raise ValueError(_no_effect(fields[0], kwargs[fields[0]], path, model_type))

    return from_pretrained


def _building_cape_models(stock_method: Any, configs: Collection[Any]) -> Any:
    """Wraps a class method of all stock models, by which Auto classes build models, too."""

    @functools.wraps(stock_method)
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        # classes of this package and of users stay: they may have a field with this name
        if not cls.__module__.startswith("transformers."):
            return stock_method(cls, *args, **kwargs)
        all_fields = _fields(configs)
        config = next(filter(_is_stock_config, (*args, kwargs.get("config"))), None)
        embeddings = embeddings_in(kwargs, config, all_fields)
        other_arguments = {name: v for name, v in kwargs.items() if name not in all_fields}
        kwargs, fields = {**other_arguments, **embeddings}, sorted(embeddings)
        if not fields:
            return stock_method(cls, *args, **kwargs)
        part = part_of(cls)
        if is_model(part):
            return getattr(part, stock_method.__name__)(*args, **kwargs)
        model_type = getattr(cls.config_class, "model_type", "")
        family = next(
            (config_class for config_class in configs if model_type in config_class.model_types()),
            None,
        )
        if family is not None:
            raise ValueError(without_head(cls.__name__, family))
        field = fields[0]
        raise ValueError(_no_effect(field, kwargs[field], cls.__name__, model_type))

    return build


def _is_stock_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig) and not hasattr(value, "position_fields")


def _naming_calls(stock_new: Any, configs: Collection[Any]) -> Any:
    """Wraps ``__new__`` of all stock models, to refuse a position embedding with a clear error."""

    @functools.wraps(stock_new)
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("transformers."):
            config = next(filter(_is_stock_config, (*args, kwargs.get("config"))), None)
            refuse_in_constructor(cls, embeddings_in(kwargs, config, _fields(configs)))
        return stock_new(cls)

    return build


def _naming_heads(stock_method: Any, configs: Collection[Any]) -> Any:
    """Wraps a class method of all Auto classes: gives a short error for a family of this package
    without a class for the head. The stock error lists all existing models."""

    @functools.wraps(stock_method)
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_method(cls, *args, **kwargs)
        except ValueError as error:  # the error names the class of the configuration
            for config_class in configs:
                if str(config_class) in str(error) and config_class not in cls._model_mapping:
                    raise ValueError(without_head(cls.__name__, config_class)) from None
            raise

    return build
