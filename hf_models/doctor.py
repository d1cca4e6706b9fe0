"""``cape-plugins doctor`` for Hugging Face models."""

from __future__ import annotations

import argparse
import os
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.utils import logging

import hf_models
from cape_plugins import PositionConfig
from cape_plugins.checkpoints.families import OWN_PREFIX
from cape_plugins.checkpoints.generated import GENERATED
from cape_plugins.doctor.check import NOTE, SKIPPED, Check, wishes
from hf_models.calls.switching import build_stock, stock_settings
from hf_models.checks.family import check_family
from hf_models.checks.model import model_checks
from hf_models.checks.proof import prove
from hf_models.checks.stock_models import stock_types
from hf_models.checks.tiny import tiny_model, tiny_sizes
from hf_models.convert import own_class
from hf_models.generated.families import make_if_known
from hf_models.releases import is_tested, tested_releases
from hf_models.serving.source_folder import refuse_data
from hf_models.storage.loading import clear_errors, load_whole, require_place
from hf_models.switching.install import PARTS, stock_class
from hf_models.switching.settings import FIELD

LARGE = 200  # million parameters; only the first layers of larger models are checked
LAYERS = 2
_STAGES = ("stage_names", "out_features", "out_indices")  # fields that name layers of a backbone
_NOTE = 160  # characters of a warning
_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
Rows = Iterator[tuple[str, Check]]


def doctor(args: argparse.Namespace, settings: Mapping[str, Any] | None) -> Rows:
    """Checks a model, a tiny model of a model type, or a tiny model of each registered family.

    Args:
        args: Arguments of ``cape-plugins doctor``.
        settings: ``{"type": ..., option: value}`` to train with; None for the defaults of
            :func:`~hf_models.check_family`.

    Raises:
        ValueError: if the model has no registered family, cannot be read, or cannot have these
            settings.
    """
    refuse_data(args)
    yield "transformers", Check("release", NOTE, _tested())
    with torch.random.fork_rng(), _quiet() as messages:
        torch.manual_seed(0)
        if args.model is None:
            yield from _family_checks(settings)
        elif args.model in stock_types() and not os.path.isdir(args.model):
            yield from _type_checks(args.model, settings)
        else:
            yield from _source_checks(args.model, settings)
    for text in sorted(messages):
        yield "transformers", Check("warning", NOTE, text)


def _tested() -> str:
    release = transformers.__version__
    tested = ", ".join(row["transformers"] for row in tested_releases())
    return f"{release} is {'tested' if is_tested(release) else 'untested'}; tested: {tested}"


@contextmanager
def _quiet() -> Iterator[set[str]]:
    """Silences logs, warnings and progress bars; collects warnings of deprecated or future code."""
    verbosity, messages = logging.get_verbosity(), set()

    def collect(message: Any, category: type, *_: Any, **__: Any) -> None:
        if issubclass(category, FutureWarning | DeprecationWarning):
            # some warnings hold the values of tensors
            messages.add(textwrap.shorten(f"{category.__name__}: {message}", _NOTE))

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = collect
            yield messages
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


# ---- built-in models -----------------------------------------------------------------------------


def _family_checks(settings: Mapping[str, Any] | None) -> Rows:
    """Checks one tiny model of each registered family. A generated family is checked if its row
    says so, whether or not this process has made its classes."""
    unchecked = set()
    for name, row in GENERATED.items():
        if row.checked:
            make_if_known(name)
        else:
            unchecked.add(f"{OWN_PREFIX}{name}")
    for config, autos in hf_models.AUTO_CLASSES.items():
        if config.model_type in unchecked:
            continue
        name, domain_and_architecture = config.model_type, config.position_fields[FIELD]
        if settings is not None:
            try:
                PositionConfig.from_dict(settings, *domain_and_architecture)
            except ValueError as error:
                yield name, Check("settings", SKIPPED, str(error))
                continue
        if (stock := head_of(config)) is None:
            yield from _checks_without_stock(name, config, list(autos.values())[-1], settings)
            continue
        try:
            rows = check_family(tiny_model(stock), settings)
        except ValueError as error:
            rows = [Check("settings", SKIPPED, str(error))]
        for row in rows:
            yield name, row


def head_of(config: type) -> Any:
    """The first stock model of a family that generates, else the first with a head; None if the
    family has no stock models.

    Args:
        config: Class of the configuration of this package.
    """
    models = [stock for stock, part in PARTS.items() if getattr(part, "config_class", 0) is config]
    generating = (model for model in models if model.can_generate())
    return next(generating, models[min(1, len(models) - 1)]) if models else None


def _checks_without_stock(
    name: str, config: Any, model_class: Any, settings: Mapping[str, Any] | None
) -> Rows:
    for wish in wishes(settings, *config.position_fields[FIELD]):
        torch.manual_seed(0)
        model = model_class(config(**tiny_sizes(config), position_embedding=wish)).eval()
        for row in model_checks(model, None, f"{wish['type']}: "):
            yield name, row


# ---- a model type --------------------------------------------------------------------------------


def _type_checks(model_type: str, settings: Mapping[str, Any] | None) -> Rows:
    """Checks of a tiny model of a model type, whether it has a family or not."""
    text = (
        "a tiny model of this model type is checked; for a checkpoint give its folder or full name"
    )
    yield model_type, Check("model type", NOTE, text)
    proof = prove(model_type, settings)
    for row in proof.checks:
        yield model_type, row
    if proof.is_proved and proof.is_new:
        text = (
            "all checks pass with this release, but the table of families has no row for it; to "
            "use it, call cape_plugins.checkpoints.families.add_generated_row("
            f"{model_type!r}, {proof.row}) after the import of hf_models"
        )
        yield model_type, Check("family", NOTE, text)


# ---- the model of a user -------------------------------------------------------------------------


def _source_checks(source: str, settings: Mapping[str, Any] | None) -> Rows:
    require_place(source)
    with clear_errors(source):
        config = AutoConfig.from_pretrained(source)
    cape_class = own_class(source, config)
    stock, is_cape = stock_class(cape_class), hasattr(config, "position_fields")
    if stock is not None and (size := _millions(config, stock)) > LARGE:
        config = _first_layers(config)
        text = f"the first {LAYERS} of each stack, because the model has {size} million parameters"
        yield source, Check("layers", NOTE, text)
    model_class = cape_class if is_cape else stock
    with clear_errors(source):
        model, _ = load_whole(model_class, source, config=config)
    model = model.float().eval()
    if is_cape:
        stock_model = None if stock is None else build_stock(model, stock)
        prefix = f"{model.config.position_embedding['type']} of the checkpoint: "
        for row in model_checks(model, stock_model, prefix):
            yield source, row
        if stock is None:
            return
        model = stock_model
    for row in check_family(model, settings):
        yield source, row


def _millions(config: Any, stock: Any) -> int:
    """Millions of parameters of a model, counted without building the model."""
    if hasattr(config, "position_fields"):
        config = stock.config_class(**stock_settings(config, stock.config_class))
    with torch.device("meta"):
        model = stock(config)
    return sum(parameter.numel() for parameter in model.parameters()) // 10**6


def _first_layers(config: Any) -> Any:
    """A configuration of the first layers of each stack; the vocabulary and the width stay."""
    settings = config.to_dict()
    for part in (settings, *(settings[name] for name in config.sub_configs)):
        for name in _DEPTHS:
            if isinstance(part.get(name), int):
                part[name] = min(LAYERS, part[name])
        if part.get("layer_types"):
            part["layer_types"] = part["layer_types"][:LAYERS]
        for name in _STAGES:
            part.pop(name, None)
    return type(config).from_dict(settings)
