"""Puts position embeddings into stock models: the one mechanism of all families.

A stock model is built, or loaded, as it is. Then its parts get the classes of this package
(:func:`install`), and each part that encodes positions puts in its own (:class:`Seam`). What a
stock forward has no argument for is bound to the part that needs it, for this call only
(:mod:`cape_plugins.binding`): the random numbers of a training forward, and the embeddings that
stand in for those of a stock module (:class:`Addend`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import modeling_auto

from cape_plugins import Positions
from cape_plugins.binding import Bound
from cape_plugins.families import find_family
from hf_models.host import check_forwards, record_outputs
from hf_models.settings import FIELD, require_own_config
from hf_models.stock_names import share_model_names, share_processors


class Addend(Bound, nn.Module):
    """Takes the place of a stock position module: gives the embeddings bound to it, whatever
    it is called with. Nothing bound means that nothing is added."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``[B or 1, T, C]``, or zero, a tensor in any case, as some stock forwards ask for."""
        return torch.zeros(()) if self.bound is None else self.bound


class LearnedTable(Addend):
    """Mixin over a learned stock table, ``nn.Embedding`` with `offset` rows in front, which
    stays where stock checkpoints have it. Texts longer than the table begin it anew, as all
    learned tables of this package do (CAPE section 5.2)."""

    offset: int = 0

    def look_up(self, positions: Positions, batch_size: int) -> Tensor:
        """``[B, T, C]``, one row for each counted position."""
        if positions.index is not None:
            number = positions.numbers.clamp(min=0)
        else:
            number = positions.rows[..., 0].long().expand(batch_size, -1)
        size, length = self.num_embeddings - self.offset, positions.rows.shape[1]
        # that a text fits into the table, as most do, is known without looking at numbers, but not
        # to a program, which serves all lengths
        plain = isinstance(positions.first, int) and not torch.compiler.is_compiling()
        if not plain or positions.first + length > size:
            number = number % size
        return nn.Embedding.forward(self, number + self.offset if self.offset else number)


class Seam:
    """Mixin over a stock module that encodes positions, or calls a module that does."""

    def take_place(self, config: Any, trained: bool) -> None:
        """Puts position encoders into the place of stock ones.

        Args:
            config: Configuration of the model, with its position embeddings.
            trained: Whether the weights are those of a trained stock model, of which a part that
                is dropped may have to be kept elsewhere.
        """
        raise NotImplementedError


class SwitchedModel:
    """Base of the models of this package, by which they are told from stacks and stock ones."""


@dataclass(frozen=True)
class FamilyClasses:
    """Classes of a family of models: a stock configuration with one more field, and stock classes
    with positions switched. What a checkpoint of it stores is in cape_plugins.families.

    Attributes:
        config: Configuration of this package, a subclass of the stock one; that of all models among
            the parts.
        parts: Classes that take the place of stock ones, each a subclass whose last base is the
            stock class.
        auto: Auto classes of transformers and the model that each loads; default those that load
            the stock models.

    Raises:
        ValueError: for a part whose last base is no stock class, or that is a :class:`Seam` without
            ``take_place``.
    """

    config: type
    parts: Sequence[type]
    auto: Mapping[Any, type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.parts:
            _check_part(part)
        if not self.auto:
            object.__setattr__(self, "auto", _auto_classes(self.stock_parts))

    @property
    def stock_parts(self) -> dict[type, type]:
        """Stock classes, and the classes that take their place."""
        return {part.__bases__[-1]: part for part in self.parts}

    @property
    def model_type(self) -> str:
        """Model type of the configuration."""
        return self.config.model_type

    @property
    def models(self) -> dict[str, type]:
        """Models, by name."""
        models = (*filter(is_model, self.parts), *self.auto.values())
        return {model.__name__: model for model in models}


def _check_part(part: type) -> None:
    stock = part.__bases__[-1]
    if not issubclass(stock, nn.Module) or issubclass(stock, (Bound, Seam, SwitchedModel)):
        raise ValueError(
            f"the last base of the part {part.__name__} is {stock.__name__}, which is no stock "
            f"class; allowed: class {part.__name__}(mixins, the stock class). Put the stock class "
            "behind all mixins."
        )
    if issubclass(part, Seam) and part.take_place is Seam.take_place:
        raise ValueError(
            f"the part {part.__name__} is a Seam whose take_place is that of Seam, which does "
            "nothing; allowed: a method take_place(self, config, trained) of its own or of a mixin "
            "before Seam. Define it, or leave out Seam."
        )


PARTS: dict[type, type] = {}  # stock class to the one that takes its place


def add_parts(family: FamilyClasses) -> FamilyClasses:
    """Makes the parts of a family known to :func:`install`, and to transformers the configuration
    of its models, their names, the tokenizers and processors of the stock ones, and the older names
    in checkpoints of these, which it translates by class name.

    A family of this package calls it in its own file, because a self-contained folder has that file
    but nobody who registers the family; for all others ``hf_models.register_family`` calls it.
    """
    for stock, part in family.stock_parts.items():
        PARTS[stock] = part
        if is_model(part):
            part.config_class = family.config
        if older_names := get_checkpoint_conversion_mapping(stock.__name__):
            register_checkpoint_conversion_mapping(part.__name__, older_names, overwrite=True)
    share_model_names(family.config, family.stock_parts)
    share_processors(family.config)
    return family


def _auto_classes(parts: Mapping[type, type]) -> dict[Any, type]:
    """Auto classes that load one of the stock classes, to the class in its place."""
    configs = {stock.config_class for stock in parts if hasattr(stock, "config_class")}
    loading = (pair for config in configs for pair in auto_models(config).items())
    return {auto: parts[stock] for auto, stock in loading if stock in parts}


def auto_models(config: type) -> dict[Any, type]:
    """Auto classes that load models with configurations of a class, and these models."""
    loading = {}
    for auto in vars(modeling_auto).values():
        models = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        # asked for this configuration: a list of all would import every model there is
        model = None if models is None else models.get(config, None)
        if model is not None:  # of several the one that is loaded
            loading[auto] = model[0] if isinstance(model, tuple) else model
    return loading


def install(model: nn.Module, trained: bool = False) -> None:
    """Gives the parts of a built model their classes and lets each :class:`Seam` take its place.

    Args:
        model: A model whose configuration has position embeddings.
        trained: See :meth:`Seam.take_place`.
    """
    for module in list(model.modules()):
        stock = type(module)
        if stock in PARTS:
            check_forwards(PARTS[stock], stock)
            module.__class__ = PARTS[stock]
            record_outputs(module)
            if stock.__name__ in model._no_split_modules:
                model._no_split_modules.add(PARTS[stock].__name__)
        elif module is not model:
            continue
        if isinstance(module, Seam):
            module.take_place(model.config, trained)
            module.train(module.training)  # reaches new modules, too
    settings = [model.config.position_settings(field) for field in model.config.position_fields]
    asked = any(config.relative_context for config in settings)
    took = any(hasattr(module, "relative") for module in model.modules())
    if asked and not took and type(model) in PARTS.values():
        raise ValueError(
            f"relative_context has no effect on {type(model).__name__}: no part of its family puts "
            "relative positions into attention. Choose a type without them, or let a part call "
            "hf_models.relative.add_relative_positions."
        )


def switch(model: Any, position_embedding: Mapping[str, Any], **fields: Any) -> Any:
    """Gives a built stock model another position embedding, in place and with all its weights.

    Args:
        model: A stock model of transformers of a known family, and the outermost one: a part such
            as ``classifier.bert`` would be switched without the classifier, which cannot be seen
            from the part and would be saved and loaded as a stock one.
        position_embedding: ``{"type": ..., option: value}``.
        fields: Further fields of the configuration, such as ``hop_seconds``.

    Returns:
        `model`, whose class and configuration are now those of this package.

    Raises:
        ValueError: if the family is unknown, a setting is wrong, or a module has a forward of its
            own; the model stays as it was.
    """
    own, stock_config = PARTS.get(type(model)), getattr(model, "config", None)
    if not is_model(own):
        known = sorted(stock.__name__ for stock, part in PARTS.items() if is_model(part))
        raise ValueError(
            f"model is a {type(model).__name__}, whose positions cannot be switched; allowed: "
            f"{', '.join(known)}. {_remedy(model)}Give such a model."
        )
    if not isinstance(position_embedding, Mapping):
        raise ValueError(
            f"{FIELD}={position_embedding!r} is not allowed; allowed: a dict with 'type' and "
            'options, such as {"type": "cape", "max_global_shift": 5.0}.'
        )
    allowed = vars(own.config_class()).keys() - vars(type(stock_config)()).keys() - {FIELD}
    if unknown := sorted(fields.keys() - allowed):
        raise ValueError(
            f"{unknown[0]}={fields[unknown[0]]!r} cannot be set by switch; allowed for "
            f"{own.__name__}: {', '.join(sorted(allowed)) or 'nothing'}. Set it before the stock "
            "model is built."
        )
    _refuse_hooks(model)
    settings = {**stock_config.to_dict(), FIELD: position_embedding, **fields}
    try:
        config = own.config_class.from_dict(settings)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    config._attn_implementation = stock_config._attn_implementation
    require_own_config(config, own.__name__)
    before = _recorded(model)
    try:
        _switch(model, stock_config, config)
    except BaseException:  # the model is the caller's, and stays what it was
        _restore(before)
        raise
    model.finish()
    return model


def _remedy(model: Any) -> str:
    """What else would help with a model that cannot be switched; empty if nothing would."""
    if hasattr(model, "peft_config"):
        return "Switch it before peft wraps it (get_peft_model). "
    if is_model(type(model)):
        return "It has been switched already; load or build it anew. "
    family = find_family(getattr(getattr(model, "config", None), "model_type", ""))
    own = filter(is_model, PARTS.values())
    registered = [find_family(part.config_class.model_type) for part in own]
    if family is None or family in registered:
        return ""
    return (
        f"The row of {family.model_type!r} is known, but no class of its models is: register them "
        "by hf_models.register_family(FamilyClasses(...)). "
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


def stock_class(own: type) -> type | None:
    """The stock class in whose place `own` stands; None if there is none."""
    return next((stock for stock, part in PARTS.items() if part is own), None)


def is_model(part: Any) -> bool:
    """Whether a class is a model of this package, and not a stack of one."""
    return isinstance(part, type) and issubclass(part, SwitchedModel)
