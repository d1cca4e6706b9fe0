"""Limits of tokenizers for models that read longer texts than the stock table allows.

A tokenizer stores the length of the stock table. Pipelines, and callers who ask for truncation,
would cut texts that the model can read. A tokenizer that is saved beside a model takes the limit of
the model's position embedding, and the stock limit again beside a stock model. A limit that is not
the length of the stock table is a choice of the user, and stays. A tokenizer that is in use belongs
to the caller and keeps its limit; a pipeline that would cut texts to it warns.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, Pipeline, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from cape_plugins.checkpoints.families import find_family
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.registry import ROTARY
from cape_plugins.utils.files import editing_json

LIMIT = "model_max_length"
STOCK_LIMIT = f"stock_{LIMIT}"  # setting of a tokenizer whose limit follows a model
_FILE = "tokenizer_config.json"
_UNIT = "tokens"  # of domains whose inputs a tokenizer makes


def limit_of(config: Any) -> int | None:
    """Number of tokens that a model reads with another position embedding than the stock model: as
    many as memory holds, or as many as training draws positions for. None if the stock limit stays:
    in stock models, with stock types and tables, in models whose input is no text, and in models
    that turn queries and keys, where the limit is the length of training.

    Args:
        config: Configuration of any model.
    """
    limits = []
    sides = find_family(config.model_type).sides if hasattr(config, "position_fields") else {}
    for name, side in sides.items():
        settings = config.position_settings(side.field)
        if DOMAINS[side.domain].unit != _UNIT:
            continue
        is_stock = settings.type == config.stock_type(name)
        if is_stock or settings.encoding.counts or settings.architecture == ROTARY:
            return None
        limits.append(int(settings.max_position) if settings.sampling else VERY_LARGE_INTEGER)
    return min(limits, default=None)


def follow(settings: dict[str, Any], config: Any) -> None:
    """Changes the limit among the settings of a tokenizer, in place.

    Args:
        settings: Contents of a tokenizer_config.json.
        config: Configuration of the model beside the tokenizer.
    """
    limit, stock_limit = limit_of(config), settings.get(STOCK_LIMIT)
    if limit is None:
        if stock_limit is not None:
            settings[LIMIT] = settings.pop(STOCK_LIMIT)
    elif stock_limit is not None or settings.get(LIMIT) in _lengths_of_table(config):
        settings.setdefault(STOCK_LIMIT, settings[LIMIT])
        settings[LIMIT] = limit


def _lengths_of_table(config: Any) -> set[int]:
    """Numbers of tokens for which a stock model has rows: all rows, or the rows behind the
    padding token."""
    rows = _rows_of_table(config)
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    return set() if rows is None else {rows, rows - (padding or 0) - 1}


def _rows_of_table(config: Any) -> int | None:
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def follow_in_folder(folder: str | os.PathLike[str], config: Any) -> None:
    """Changes the limit of a tokenizer that lies in the folder of a model.

    Args:
        folder: Folder with or without a tokenizer.
        config: See :func:`follow`.
    """
    with editing_json(Path(folder) / _FILE) as settings:
        if settings:
            follow(settings, config)


def follow_table_in_folder(
    folder: str | os.PathLike[str], old_config: Any, new_config: Any
) -> None:
    """Lets the limit of a tokenizer grow with a learned table.

    Args:
        folder: Folder with or without a tokenizer.
        old_config: Configuration of the model before its table grew.
        new_config: Configuration of the model beside the tokenizer.
    """
    with editing_json(Path(folder) / _FILE) as settings:
        if settings and settings.get(LIMIT) in _lengths_of_table(old_config):
            settings[LIMIT] += _rows_of_table(new_config) - _rows_of_table(old_config)


def set_limit(folder: str | os.PathLike[str], limit: int) -> None:
    """Sets the limit of a tokenizer that lies in a folder, if there is one.

    Args:
        folder: Folder with or without a tokenizer.
        limit: Number of tokens.
    """
    with editing_json(Path(folder) / _FILE) as settings:
        if settings:
            settings[LIMIT] = limit


def let_tokenizers_follow() -> None:
    """Lets tokenizers that are saved beside a model take its limit, for the whole process."""
    stock_save = PreTrainedTokenizerBase.save_pretrained

    @functools.wraps(stock_save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        with _limit_for(self, save_directory):
            return stock_save(self, save_directory, *args, **kwargs)

    PreTrainedTokenizerBase.save_pretrained = save_pretrained


@contextmanager
def _limit_for(tokenizer: Any, folder: Any) -> Iterator[None]:
    """Gives a tokenizer the limit of the model in a folder while the tokenizer is saved."""
    if (config := _config_in(folder)) is None:
        yield
        return
    old_settings = dict(tokenizer.init_kwargs)
    old_limit = tokenizer.model_max_length
    settings = {**old_settings, LIMIT: old_limit}
    follow(settings, config)
    tokenizer.init_kwargs, tokenizer.model_max_length = settings, settings[LIMIT]
    try:
        yield
    finally:
        tokenizer.init_kwargs, tokenizer.model_max_length = old_settings, old_limit


def _config_in(folder: Any) -> Any:
    """The configuration of the model in a folder; None if there is none that loads."""
    if not (Path(folder) / "config.json").is_file():
        return None
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError):  # a folder of another library
        return None


def let_pipelines_warn() -> None:
    """Lets pipelines warn of a tokenizer with the stock limit, for the whole process."""
    stock_init = Pipeline.__init__

    @functools.wraps(stock_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        _warn_of_stock_limit(self.tokenizer, self.model.config)

    Pipeline.__init__ = __init__


def _warn_of_stock_limit(tokenizer: Any, config: Any) -> None:
    """Warns if a tokenizer has the limit of the stock table, and the model reads longer texts."""
    limit, stock_limit = limit_of(config), getattr(tokenizer, LIMIT, None)
    if limit is not None and stock_limit in _lengths_of_table(config) and stock_limit < limit:
        warnings.warn(
            f"the tokenizer of this pipeline has {LIMIT}={stock_limit}, the limit of the stock "
            f"model, so the pipeline may cut texts that the model can read; set tokenizer.{LIMIT} "
            f"= {_in_words(limit)} if texts are longer.",
            stacklevel=4,  # of the caller of the pipeline's class
        )


def _in_words(limit: int) -> str:
    """A limit for a message: "int(1e30)" where only memory limits the length."""
    return "int(1e30)" if limit == VERY_LARGE_INTEGER else str(limit)
