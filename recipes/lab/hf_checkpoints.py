"""Builds and loads the Hugging Face models of the recipes: new models, and the checkpoint of
``--model``."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig

from cape_plugins.utils.texts import first_line
from recipes.lab.steps import CommandError

# Errors of checkpoints that do not match their model type, are damaged, or have other shapes
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)


def make_config(config_class: type[Any], sizes: Mapping[str, Any], **more: Any) -> Any:
    """A configuration of a model from scratch."""
    names = {field.name for field in dataclasses.fields(config_class)}
    names |= config_class.attribute_map.keys()
    unknown = sorted(set(sizes) - names - {"model_type", "architectures", "transformers_version"})
    if unknown:
        raise CommandError(f"--model-config: {config_class.__name__} has no {', '.join(unknown)}")
    try:
        return config_class(**{key: value for key, value in sizes.items() if key in names}, **more)
    except (ValueError, StrictDataclassError) as error:
        raise CommandError(
            f"transformers refuses the configuration of the model: {error}"
        ) from None


def unloadable(path: str, error: Exception) -> CommandError:
    """The error for a ``--model`` that transformers refuses."""
    remedy = "give a folder of save_pretrained with config.json and weights, or a name on the hub"
    is_folder = path.startswith((".", "/", "~")) or path.count("/") > 1  # a hub name has at most 1
    lost = is_folder and not Path(path).is_dir()
    why = ": no such folder" if lost else f" cannot be loaded: {first_line(error)}"
    return CommandError(f"--model {path}{why}; {remedy}")


def read_config(path: str, *configs: type[Any]) -> Any:
    """The configuration of the checkpoint of ``--model``, read before any work starts. The model
    must be of one of the classes `configs`, which the recipe trains, or of its stock class."""
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise unloadable(path, error) from None
    our_types = [config.model_type for config in configs]
    stock_types = [name.removeprefix("cape_") for name in our_types]
    allowed = [*(name for name in stock_types if name in CONFIG_MAPPING), *our_types]
    if config.model_type not in allowed:
        why = f"--model {path}: is of the type {config.model_type}; allowed: {', '.join(allowed)}"
        raise CommandError(why)
    return config


def read_beside(loader: type[Any], path: str) -> Any:
    """The tokenizer or processor in the folder of ``--model``, read by an auto class."""
    kind = loader.__name__.removeprefix("Auto").lower()
    try:
        return loader.from_pretrained(path)
    except Exception as error:  # without its files each tokenizer fails in a different way
        raise CommandError(
            f"--model {path}: has no {kind} that can be read ({first_line(error)}); put its files "
            f"there, as {kind}.save_pretrained writes them"
        ) from None


def load_model(loader: type[Any], path: str, settings: Mapping[str, Any], **more: Any) -> Any:
    """The checkpoint of ``--model`` with another position embedding. Weights are loaded as float32,
    unless `more` has another ``dtype``; transformers 5 would load weights in the stored
    precision."""
    try:
        # training needs weights in single precision, also with autocast and if they are stored in
        # half precision
        options = {"position_embedding": dict(settings), "dtype": torch.float32, **more}
        return loader.from_pretrained(path, **options)
    except UNREADABLE as error:
        raise unloadable(path, error) from None
