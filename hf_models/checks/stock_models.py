"""A tiny stock model of any model type of the installed transformers, with inputs that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from cape_plugins.checkpoints.generated import GENERATED
from hf_models.checks.calls import calls_of
from hf_models.checks.outputs import outputs_of
from hf_models.checks.small import small_configs
from hf_models.checks.tiny import fill_zeros
from hf_models.generated.families import stock_models

_LARGEST = 60_000_000  # parameters; a larger model has a size without a rule
# Auto classes in the order in which their models are tried, "" for AutoModel.
_TASKS = (
    "MaskedLM",
    "Seq2SeqLM",
    "CausalLM",
    "ImageTextToText",
    "SpeechSeq2Seq",
    "CTC",
    "ImageClassification",
    "MaskedImageModeling",
    "VideoClassification",
    "AudioClassification",
    "TimeSeriesPrediction",
    "TextEncoding",
    "",
)


class NoStockModel(Exception):
    """Raised if no tiny stock model runs; the text gives the reasons."""


class NoModelType(NoStockModel):
    """Raised for a model type that is a part of other models, or another name of a type."""


class StockModel(NamedTuple):
    """A tiny stock model that runs.

    Attributes:
        model: The model, in evaluation mode, with random weights.
        inputs: Inputs of its forward, without padding.
        auto: Auto class that loads it; None for a part of other models, which its own class loads.
        step: How its configuration was made: see :func:`~hf_models.checks.small.small_configs`.
    """

    model: Any
    inputs: Mapping[str, Tensor]
    auto: Any
    step: str


def stock_types() -> list[str]:
    """Model types of the installed transformers, in order. Aliases, whose configuration has another
    model type, are left out."""
    types = CONFIG_MAPPING._mapping
    return sorted(name for name in types if not name.startswith("cape_"))


def tiny_stock_models(
    model_type: str, fields: Mapping[str, Any] | None = None
) -> Iterator[StockModel]:
    """The models of a model type that run with a tiny configuration, one for each Auto class. Parts
    of other models, which no Auto class loads, are tried if the table of generated families has a
    row for them.

    Args:
        model_type: Such as "mistral".
        fields: Fields of the stock configuration, for a model type of several kinds.

    Raises:
        ValueError: if the installed transformers has no such model type.
        NoModelType: if no Auto class loads a model of this type and the table has no row, or for
            another name of a type.
        NoStockModel: if no model with the configuration of this type runs. Models of other types,
            which some Auto classes give for this one, are yielded before.
    """
    if model_type not in CONFIG_MAPPING._mapping:
        raise ValueError(
            f"{model_type!r} is no model type of the installed transformers; allowed: the keys of "
            "transformers.CONFIG_MAPPING, such as 'mistral'."
        )
    config_class = CONFIG_MAPPING[model_type]
    if config_class.model_type != model_type:
        raise NoModelType(f"The type is another name of {config_class.model_type}.")
    reasons: list[str] = []
    heads = list(_heads(config_class))
    if not heads and model_type in GENERATED:
        # the last class of a file contains the others
        heads = [(None, stock) for stock in reversed(stock_models(config_class))]
    if not heads:
        raise NoModelType("The type is a part of other models, and no Auto class loads it.")
    of_type = [stock for _, stock in heads if _is_of_type(stock, model_type)]
    running = []
    for auto, stock in heads:
        with torch.random.fork_rng():
            model = _first_that_runs(stock, auto, fields or {}, reasons)
        if model is not None:
            running.append(stock)
            yield model
    if reasons and {*running}.isdisjoint(of_type or running):
        raise NoStockModel("; ".join(reasons[:2]))


def _first_that_runs(
    stock: Any, auto: Any, fields: Mapping[str, Any], reasons: list[str]
) -> StockModel | None:
    """The model with the first small configuration that runs; adds the errors to `reasons`."""
    try:
        for step, make in small_configs(stock.config_class, fields):
            try:
                return _built(stock, make(), auto, step)
            except Exception as error:  # a stock model may refuse small sizes by any error
                reasons.append(f"{stock.__name__}, {step}: {one_line(error)}")
    except Exception as error:  # some classes have no default instance
        reasons.append(f"the default configuration: {one_line(error)}")
    return None


def one_line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:160]}"


def _heads(config_class: type) -> Iterator[tuple[Any, Any]]:
    """Auto classes with the model that each loads."""
    for task in _TASKS:
        auto = getattr(modeling_auto, f"AutoModelFor{task}" if task else "AutoModel", None)
        try:
            model = None if auto is None else auto._model_mapping.get(config_class, None)
        except ValueError:  # a release may list a class that it lacks
            continue
        model = model[0] if isinstance(model, tuple) else model
        if model is not None:
            yield auto, model


def _is_of_type(stock: Any, model_type: str) -> bool:
    """Whether a class has the configuration of a model type; True if a package is missing, without
    which transformers does not show the configuration."""
    try:
        return stock.config_class.model_type == model_type
    except ImportError:
        return True


def _built(stock: Any, config: Any, auto: Any, step: str) -> StockModel:
    """Builds a model and finds inputs for it.

    Raises:
        Exception: what the stock code raises, at the first inputs.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in stock(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size // 10**6} million parameters")
    torch.manual_seed(0)
    model = fill_zeros(stock(config).eval())
    errors = []
    for inputs in calls_of(model):
        try:
            outputs_of(model, inputs)
            return StockModel(model, inputs, auto, step)
        except Exception as error:  # stock code may raise any error
            errors.append(error)
    raise errors[0] if errors else ValueError(f"{model.main_input_name} is no known input")
