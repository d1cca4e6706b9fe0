"""Lets the calls of transformers that build a model take a position embedding: those of the Auto
classes, and those of stock classes, with a stock configuration or without. What they build is then
the model of this package.

transformers drops arguments that a configuration does not know, without a word, or hands them to a
model that does not know them either. Calls without a position embedding are the stock ones.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_models.settings import refuse_misplaced
from hf_models.switch_built import without_head
from hf_models.switching import PARTS, is_model


def accept_position_embeddings(configs: Collection[Any]) -> None:
    """Changes the calls, once and for all.

    Args:
        configs: Configurations of this package; those that are added later count as well.
    """
    AutoConfig.from_pretrained = _with_own_configuration(AutoConfig.from_pretrained, configs)
    for name in ("from_pretrained", "_from_config"):
        stock = getattr(PreTrainedModel, name).__func__
        setattr(PreTrainedModel, name, classmethod(_of_own_class(stock, configs)))
    autos = [auto for auto in vars(modeling_auto).values() if hasattr(auto, "_model_mapping")]
    for auto, name in product(autos, ("from_pretrained", "from_config")):
        if name in vars(auto):  # each has a copy, with a docstring for it
            stock = vars(auto)[name].__func__
            setattr(auto, name, classmethod(_naming_heads(stock, configs)))


def _given_fields(arguments: Mapping[str, Any], configs: Collection[Any]) -> list[str]:
    """The position embeddings among the arguments of a call."""
    return sorted({field for own in configs for field in own.position_fields} & arguments.keys())


def _no_effect(field: str, value: Any, place: Any, model_type: str, configs: Any) -> str:
    known = sorted({name for own in configs for name in own.model_types()})
    return (
        f"{field}={value!r} has no effect on {place}, a model of type {model_type!r}; model types "
        f"with a position embedding to choose: {', '.join(known)}. Leave it out, or give such a "
        "model."
    )


def _with_own_configuration(stock_from_pretrained: Any, configs: Collection[Any]) -> Any:
    """``AutoConfig.from_pretrained``, by which every Auto class finds the configuration."""

    @functools.wraps(stock_from_pretrained)
    def from_pretrained(pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        result = stock_from_pretrained(pretrained_model_name_or_path, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        given = _given_fields(kwargs, configs)
        for own in configs:
            if config.model_type in own.model_types():
                refuse_misplaced(kwargs, own.position_fields)
        if all(hasattr(config, field) for field in given):
            return result
        for own in configs:
            if config.model_type in own.model_types():
                for name in ("trust_remote_code", "code_revision"):
                    kwargs.pop(name, None)
                return own.from_pretrained(pretrained_model_name_or_path, **kwargs)
        place, model_type = pretrained_model_name_or_path, config.model_type
        raise ValueError(_no_effect(given[0], kwargs[given[0]], place, model_type, configs))

    return from_pretrained


def _of_own_class(stock_method: Any, configs: Collection[Any]) -> Any:
    """A class method of all stock models, with which Auto classes build them, too."""

    @functools.wraps(stock_method)
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = _given_fields(kwargs, configs)
        # not those of this package, nor of users, which may have a field of this name
        if not given or not cls.__module__.startswith("transformers."):
            return stock_method(cls, *args, **kwargs)
        own = PARTS.get(cls)
        if is_model(own):
            return getattr(own, stock_method.__name__)(*args, **kwargs)
        model_type = getattr(cls.config_class, "model_type", "")
        family = next((own for own in configs if model_type in own.model_types()), None)
        if family is not None:
            raise ValueError(without_head(cls.__name__, family))
        field = given[0]
        raise ValueError(_no_effect(field, kwargs[field], cls.__name__, model_type, configs))

    return build


def _naming_heads(stock_method: Any, configs: Collection[Any]) -> Any:
    """A class method of all Auto classes. Of a model of this package that has no class for the head
    it says so, where the stock message lists all models that there are."""

    @functools.wraps(stock_method)
    def build(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_method(cls, *args, **kwargs)
        except ValueError as error:  # which names the class of the configuration
            for own in configs:
                if str(own) in str(error) and own not in cls._model_mapping:
                    raise ValueError(without_head(cls.__name__, own)) from None
            raise

    return build
