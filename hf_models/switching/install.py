"""Puts position embeddings into stock models: the one mechanism of all families.

A stock model is built, or loaded, unchanged. Then the parts get the classes of this package
(:func:`install`), and each part that encodes positions puts in a position encoder
(:class:`PositionHost`). Values for which a stock forward has no argument are bound to the part that
needs them, for one call only (:mod:`cape_plugins.mathematics.binding`): the random numbers of a
training forward, and the embeddings that replace the output of a stock module
(:class:`PositionSlot`). So families copy neither constructors nor forwards, but stock tables are
built and dropped at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from transformers.models.auto import modeling_auto

from cape_plugins import PositionEncoder, Positions
from cape_plugins.mathematics.binding import TRACED_ONLY, Bound
from hf_models.host import check_forwards, record_outputs
from hf_models.switching.stock_names import share_model_names, share_processors
from hf_models.switching.weight_names import translate_older_names

# after a graph break torch.compile would compile these functions alone, for each module and value
for _function in TRACED_ONLY:
    eval_frame.skip_code(_function.__code__)


class PositionSlot(Bound, nn.Module):
    """Replaces a stock position module: returns the embeddings bound to it, and ignores the
    arguments of the call. Without bound embeddings nothing is added."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``[B or 1, T, C]``, or zero; always a tensor, which some stock forwards need."""
        return torch.zeros(()) if self.bound is None else self.bound


class LearnedTable(PositionSlot):
    """Mixin over a learned stock table, an ``nn.Embedding`` with `offset` rows in front. The table
    stays where stock checkpoints have it and looks its rows up itself, so training equals training
    of the stock model bit for bit. Longer texts begin the table anew, like all learned tables in
    this package (CAPE 5.2)."""

    offset: int = 0

    def look_up(self, positions: Positions, batch_size: int) -> Tensor:
        """``[B, T, C]``, one row for each counted position."""
        if positions.row_of is not None:
            number = positions.row_of.clamp(min=0)
        else:
            number = positions.rows[..., 0].long().expand(batch_size, -1)
        size, length = self.num_embeddings - self.offset, positions.rows.shape[1]
        # The length alone shows that most texts fit into the table; to look at numbers would halt a
        # GPU. A compiled program serves all lengths, so it always wraps around.
        may_branch = isinstance(positions.first, int) and not torch.compiler.is_compiling()
        if not may_branch or positions.first + length > size:
            number = number % size
        # a call of the module, before which accelerate brings offloaded weights back
        return self(rows=number + self.offset if self.offset else number)

    def forward(self, *args: Any, rows: Tensor | None = None, **kwargs: Any) -> Any:
        """The rows with these numbers; without numbers as :meth:`PositionSlot.forward`."""
        if rows is not None:
            return nn.Embedding.forward(self, rows)
        return super().forward(*args, **kwargs)


class PositionHost:
    """Mixin over a stock module that encodes positions, or calls a module that does."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """Replaces stock positions by position encoders.

        Args:
            config: Configuration of the model, with its position embeddings.
            trained: Whether the weights come from a trained stock model, so dropped weights may
                have to be kept elsewhere.
        """
        raise NotImplementedError


class SwitchedModel:
    """Base class of the models of this package; stacks and stock models lack this base.

    Models that generate do so with fixed positions, also in training mode: each step must see the
    same positions as the steps before.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "generate"):  # models without it must not seem to have it
            cls.generate = _with_fixed_positions(cls.generate)

    @classmethod
    def part_for(cls, module: nn.Module) -> type | None:
        """The class that takes the place of a stock module inside a model of this class; None if
        the module stays."""
        return PARTS.get(type(module))

    def check_installed(self) -> None:
        """Checks the outermost model once all parts have their positions.

        Raises:
            ValueError: if the position embedding has no effect.
        """


def _with_fixed_positions(stock_generate: Any) -> Any:
    """Wraps ``generate``, so that positions do not move during the call."""

    @functools.wraps(stock_generate)
    def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with fixed_positions(model):
            return stock_generate(model, *args, **kwargs)

    return generate


@contextlib.contextmanager
def fixed_positions(model: nn.Module) -> Iterator[None]:
    """Keeps the position encoders below `model` in evaluation mode for the body of a ``with``
    statement; all other modules stay in their modes."""
    encoders = [part for part in model.modules() if isinstance(part, PositionEncoder)]
    training = [encoder for encoder in encoders if encoder.training]
    for encoder in training:
        encoder.training = False
    try:
        yield
    finally:
        for encoder in training:
            encoder.training = True


@dataclass(frozen=True)
class FamilyClasses:
    """Classes of a family of models: a stock configuration with one more field, and stock classes
    with positions switched. cape_plugins.checkpoints.families describes the checkpoints of the
    family.

    Attributes:
        config: Configuration of this package, a subclass of the stock configuration; all models
            among the parts have this configuration.
        parts: Classes that take the place of stock classes, each a subclass with the stock class as
            last base.
        auto: Auto classes of transformers and the model that each loads; default the Auto classes
            that load the stock models.

    Raises:
        ValueError: for a part without a stock class as last base, or a :class:`PositionHost`
            without ``install_positions``.
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
    if not issubclass(stock, nn.Module) or issubclass(stock, (Bound, PositionHost, SwitchedModel)):
        raise ValueError(
            f"the last base of the part {part.__name__} is {stock.__name__}, which is no stock "
            f"class; allowed: class {part.__name__}(mixins, the stock class). Put the stock class "
            "behind all mixins."
        )
    if issubclass(part, PositionHost) and part.install_positions is PositionHost.install_positions:
        raise ValueError(
            f"the part {part.__name__} inherits install_positions from PositionHost, which does "
            "nothing there; allowed: a method install_positions(self, config, trained) in "
            "the class or in a mixin before PositionHost. Define it, or leave out PositionHost."
        )


PARTS: dict[type, type] = {}  # stock class to the class that takes its place


def add_parts(family: FamilyClasses) -> FamilyClasses:
    """Makes the parts of a family known to :func:`install`, and tells transformers about the
    family: configuration and names of the models, tokenizers and processors of the stock models,
    and older names in stock checkpoints, which transformers translates by class name.

    The code that makes a family of this package calls this function itself, because a
    self-contained folder has this code, but not the code that registers families. For other
    families ``hf_models.register_family`` calls this function.
    """
    for stock, part in family.stock_parts.items():
        PARTS[stock] = part
        if is_model(part):
            part.config_class = family.config
        translate_older_names(stock.__name__, part.__name__)
    share_model_names(family.config, family.stock_parts)
    share_processors(family.config)
    return family


def _auto_classes(parts: Mapping[type, type]) -> dict[Any, type]:
    """Maps each Auto class that loads one of the stock classes to the class in its place."""
    configs = {stock.config_class for stock in parts if hasattr(stock, "config_class")}
    loading = (pair for config in configs for pair in auto_models(config).items())
    return {auto: parts[stock] for auto, stock in loading if stock in parts}


def auto_models(config: type) -> dict[Any, type]:
    """Maps each Auto class that loads models with this configuration class to the model."""
    loading = {}
    for auto in vars(modeling_auto).values():
        models = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        # looks up one configuration: listing all would import every model of transformers
        model = None if models is None else models.get(config, None)
        if model is not None:  # the first of several models is loaded
            loading[auto] = model[0] if isinstance(model, tuple) else model
    return loading


def install(model: nn.Module, trained: bool = False) -> None:
    """Gives the parts of a built model their classes, and lets each :class:`PositionHost` install
    positions.

    Args:
        model: A model with position embeddings in its configuration.
        trained: See :meth:`PositionHost.install_positions`.
    """
    model_class = type(model) if is_model(type(model)) else PARTS.get(type(model))
    part_for = model_class.part_for if is_model(model_class) else SwitchedModel.part_for
    for module in list(model.modules()):
        stock = type(module)
        part = part_for(module)
        if part is not None:
            if not getattr(part, "takes_any_forward", False):
                check_forwards(part, stock)
            module.__class__ = part
            record_outputs(module)
            # transformers does not split modules with these class names over devices
            if stock.__name__ in (model._no_split_modules or ()):
                model._no_split_modules.add(part.__name__)
        elif module is not model:
            continue
        if isinstance(module, PositionHost):
            old_modules = set(module.modules())
            module.install_positions(model.config, trained)
            for new_module in set(module.modules()) - old_modules:
                new_module.training = module.training
    for module in model.modules():
        if isinstance(module, Bound):  # else compiled code would see the attribute appear later
            vars(module).setdefault("bound_in_graph", None)
    if is_model(type(model)):
        model.check_installed()
    settings = [model.config.position_settings(field) for field in model.config.position_fields]
    in_attention = [config for config in settings if config.in_attention]
    has_attention = any(hasattr(module, "layer_bias") for module in model.modules())
    if in_attention and not has_attention and type(model) in PARTS.values():
        raise ValueError(
            f"positions in attention, in layers={in_attention[0].layers!r}, have no effect on "
            f"{type(model).__name__}: no layer takes them. Choose a type that adds to the content, "
            "such as 'cape', or other layers where the model has layers that take them."
        )


def stock_class(part: type) -> type | None:
    """The stock class that `part` replaces; None if there is none."""
    return next((stock for stock, cape_class in PARTS.items() if cape_class is part), None)


def is_model(part: Any) -> bool:
    """Whether a class is a model of this package, not a stack of a model."""
    return isinstance(part, type) and issubclass(part, SwitchedModel)
