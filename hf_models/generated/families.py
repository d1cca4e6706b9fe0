"""Makes the classes of a family from the stock classes, at the first request.

``import hf_models`` makes no family and imports no stock model. A family is made when

* a model of it is switched, or a class of it is named: ``hf_models.CapeMistralForCausalLM``;
* a checkpoint of it is loaded, which needs its configuration: transformers finds the model types
  ``cape_...`` in a table that makes what it lacks;
* a stock checkpoint of its model type is loaded with a ``position_embedding``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from cape_plugins.checkpoints.families import OWN_PREFIX
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.generated.model import GeneratedModel, how_to_check
from hf_models.releases import warn_if_not_proved
from hf_models.seams.image_sizes import size_mixins
from hf_models.switching.configuration import position_config_class
from hf_models.switching.install import PARTS, FamilyClasses, stock_class
from hf_models.switching.registry import AUTO_CLASSES, MODELS, register_family
from hf_models.switching.weight_names import translate_older_names

# Module in which pickle finds the classes by name; in self-contained folders with another prefix.
_MODULE = f"{__name__.removesuffix('families')}classes"
_PREFIX = "Cape"
_FEATURES = re.compile(r"get_\w+_features$")  # methods that users call instead of the forward
_families: dict[str, FamilyClasses] = {}
_lock = threading.RLock()  # several threads may load models at the same time


def can_make(model_type: Any) -> bool:
    """Whether a model type, with or without the prefix ``cape_``, is a generated family that the
    installed transformers has."""
    if not isinstance(model_type, str):
        return False
    stock_type = model_type.removeprefix(OWN_PREFIX)
    return stock_type in GENERATED and stock_type in CONFIG_MAPPING._mapping


def make(model_type: str) -> FamilyClasses:
    """The classes of a generated family, registered.

    Args:
        model_type: Key of :data:`~cape_plugins.checkpoints.generated.GENERATED`, with or without
            the prefix ``cape_``.

    Raises:
        ValueError: for another model type, or one that the installed transformers lacks.
    """
    stock_type = model_type.removeprefix(OWN_PREFIX)
    if not can_make(stock_type):
        release = transformers.__version__
        raise ValueError(
            f"model_type={model_type!r} is no generated family of transformers {release}; allowed: "
            "the names in cape_plugins.checkpoints.generated that this release has. "
            f"{how_to_check(stock_type)}"
        )
    with _lock:
        if stock_type not in _families:
            warn_if_not_proved(stock_type, transformers.__version__)
            _families[stock_type] = _make(CONFIG_MAPPING[stock_type])
        return _families[stock_type]


def forget(model_type: str) -> None:
    """Lets the next use make a family anew, after its row has been replaced or removed."""
    if (family := _families.pop(model_type, None)) is not None:
        AUTO_CLASSES.pop(family.config, None)
        # AutoConfig would go on to give the old class, which has no models any more
        CONFIG_MAPPING._extra_content.pop(family.config.model_type, None)
        for name in family.models:
            MODELS.pop(name, None)
        for stock in family.stock_parts:
            del PARTS[stock]


def make_if_known(model_type: Any) -> None:
    """Makes the family of a model type, if it is a generated one."""
    if can_make(model_type):
        make(model_type)


def part_of(stock: type) -> type | None:
    """The class of this package in the place of a stock class; None if there is none."""
    if stock not in PARTS and stock.__module__.startswith("transformers."):
        make_if_known(getattr(getattr(stock, "config_class", None), "model_type", None))
    return PARTS.get(stock)


def class_of_name(name: str) -> type | None:
    """A configuration or model of a generated family by its name, such as "CapeMistralModel"; None
    if no family has the name."""
    stock = getattr(transformers, name.removeprefix(_PREFIX), None)
    if not name.startswith(_PREFIX) or not isinstance(stock, type):
        return None
    config = getattr(stock, "config_class", stock)
    model_type = getattr(config, "model_type", None)
    if not can_make(model_type):
        return None
    family = make(model_type)
    classes = {family.config.__name__: family.config, **MODELS}
    return classes.get(name)


# ---- the classes ---------------------------------------------------------------------------------


def _make(stock_config: type) -> FamilyClasses:
    # imported first, because a dataclass looks names up in the module of its class
    importlib.import_module(_MODULE)
    model_type = stock_config.model_type
    config = position_config_class(stock_config, _MODULE, stock_config.__doc__)
    parts = [_part(stock, config) for stock in stock_models(stock_config)]
    # weights that stock checkpoints hold in another form, such as experts one by one
    translate_older_names(model_type, config.model_type)
    family = FamilyClasses(config, tuple(parts))
    register_family(family)
    return family


def stock_models(config: type) -> list[type[nn.Module]]:
    """The stock models with this configuration class that have a forward."""
    package, _, name = config.__module__.rpartition(".")
    module = importlib.import_module(f"{package}.{name.replace('configuration', 'modeling', 1)}")
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.config_class is config
        and value.forward is not nn.Module.forward
    ]


def _part(stock: Any, config: type) -> type:
    """The class in the place of a stock model."""
    signature = inspect.signature(stock.forward)
    parameters = list(signature.parameters.values())
    takes_any = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    draw = inspect.Parameter("draw", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters.insert(len(parameters) - takes_any, draw)
    forward = _new_forward()
    forward.__doc__ = GeneratedModel.forward.__doc__
    forward.__signature__ = signature.replace(parameters=parameters)
    return type(
        _PREFIX + stock.__name__,
        (*size_mixins(stock), GeneratedModel, stock),
        {
            "__module__": _MODULE,
            "__doc__": stock.__doc__,
            "config_class": config,
            "accepts_loss_kwargs": _accepts_loss_kwargs(stock),
            "argument_names": tuple(signature.parameters)[1:],
            "forward": forward,
            "__reduce_ex__": _reduce,
            **{
                name: _in_scope(getattr(stock, name))
                for name in dir(stock)
                if _FEATURES.match(name)
            },
        },
    )


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
    """A stock method that calls a part of the model, such as ``get_image_features`` of GroupViT,
    with positions and draws as in the forward. Not all parts are models, which open a scope."""
    names = tuple(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def in_scope(self: GeneratedModel, *args: Any, **kwargs: Any) -> Any:
        if not any(seam.adds for seam in self.seams()):
            return method(self, *args, **kwargs)
        return self.run_in_scope(functools.partial(method, self), names, args, kwargs)

    return in_scope


def _reduce(self: GeneratedModel, protocol: Any) -> Any:
    """Pickles a model by its stock class: pickle could not find the class of a stack inside a model
    by its name."""
    stock = stock_class(type(self))
    if stock is None:  # a subclass of the user, which has a name
        return super(GeneratedModel, self).__reduce_ex__(protocol)
    return _rebuilt, (stock,), self.__dict__


def _rebuilt(stock: type) -> Any:
    cls: Any = part_of(stock)
    return cls.__new__(cls)


def _new_forward() -> Callable[..., Any]:
    """A function for one class, because the Trainer and generation read its signature."""

    def forward(self: GeneratedModel, *args: Any, **kwargs: Any) -> Any:
        return GeneratedModel.forward(self, *args, **kwargs)

    return forward


def _accepts_loss_kwargs(stock: Any) -> bool:
    """Whether the loss of a stock model takes the number of items in all batches of a step, which
    the Trainer passes: if the stock class says so, or if the stock forward hands its keywords on
    to the loss function."""
    if (of_class := getattr(stock, "accepts_loss_kwargs", None)) is not None:
        return of_class
    function = inspect.unwrap(stock.forward)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    losses = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "loss_function"
    )
    return any(keyword.arg is None for loss in losses for keyword in loss.keywords)


# ---- first use by transformers -------------------------------------------------------------------


class _MadeOnDemand(dict):
    """Registered configurations of transformers by model type, and the configurations of generated
    families, each made when it is first asked for."""

    def __contains__(self, model_type: object) -> bool:
        return super().__contains__(model_type) or (
            str(model_type).startswith(OWN_PREFIX) and can_make(model_type)
        )

    def __missing__(self, model_type: str) -> type:
        if model_type not in self:
            raise KeyError(model_type)
        return make(model_type).config


def let_transformers_make_families() -> None:
    """Lets AutoConfig, and with it all Auto classes, find the generated families."""
    CONFIG_MAPPING._extra_content = _MadeOnDemand(CONFIG_MAPPING._extra_content)
