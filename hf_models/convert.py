"""Converts stock checkpoints to cape checkpoints and back, without training.

    python -m hf_models.convert Helsinki-NLP/opus-mt-en-de opus-cape \\
        --position-embedding cape --position-source-scale train.en,train.de
    python -m hf_models.convert google/vit-base-patch16-224 vit-cape --position-embedding cape
    python -m hf_models.convert vit-cape vit-stock --stock

Weights, configuration, tokenizer and processor files go to a new folder. The command prints the
settings that change the results of the model until it is fine-tuned; with --neutral, no setting
changes the results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

import hf_models
from cape_plugins import PositionConfig
from cape_plugins.checkpoints.families import find_family
from cape_plugins.serving.output import complete_folder
from cape_plugins.settings.arguments import (
    TYPE_ARG,
    Parser,
    add_position_args,
    given_settings,
    text_in_flags,
)
from cape_plugins.settings.config import applies
from cape_plugins.settings.options import COUNTED
from cape_plugins.settings.registry import DEFAULT_TYPE, ROTARY_TYPES, TYPES, types_of
from hf_models.counting import alpha_of_argument
from hf_models.generated.families import make_if_known
from hf_models.generated.model import how_to_check
from hf_models.processors.feature_extraction import choose_extractor
from hf_models.processors.limits import follow_in_folder, follow_table_in_folder
from hf_models.seams.images import PatchEmbeddings
from hf_models.storage.loading import clear_errors, load_whole, require_place
from hf_models.storage.longer_tables import difference, extend_table
from hf_models.storage.other_files import copy_other_files, forget_code
from hf_models.storage.self_contained import make_self_contained
from hf_models.storage.stock_model import build_stock, fill_table, parts_of
from hf_models.storage.table_flags import add_table_args, given_table
from hf_models.switching.install import stock_class
from hf_models.switching.settings import FIELD

Settings = Mapping[str, PositionConfig]


def convert(
    source: str,
    target: str | os.PathLike[str],
    settings: dict[str, Any] | None,
    neutral: bool = False,
    table: tuple[str, str] | None = None,
) -> PreTrainedModel:
    """Writes the checkpoint `source` to the new folder `target` with another position embedding.
    Prints the settings that change the results of the model until it is fine-tuned.

    Args:
        source: Folder or hub name of a stock or cape checkpoint.
        target: Folder that does not exist yet.
        settings: ``{"type": ..., option: value}``; None for the stock model. Missing options are
            taken from `source` if `source` has this type, or if there is no "type".
        neutral: Take missing options from `source`, so the new model computes the same until it
            is trained: alpha is 1, there is no BOS hint, no mean is subtracted, and new relative
            embeddings begin at zero. Impossible if the learned table is dropped (ViT with any type
            but ``abspos``).
        table: Size and extension of a longer learned table, for
            :func:`~hf_models.storage.longer_tables.extend_table`.

    Returns:
        The model that was written.

    Raises:
        ValueError: if `source` has an unknown family or cannot be read, if a setting is wrong, or
            if the stock model, or with `neutral` the new model, would not give the same output.
    """
    require_place(source)
    with complete_folder(Path(target), "DST") as folder:
        with clear_errors(source):
            config = AutoConfig.from_pretrained(source)
        cape_class = own_class(source, config)
        if settings is None:
            model = _stock_model(source, cape_class, config)
        else:
            model = _cape_model(source, cape_class, config, settings, neutral, table)
            forget_code(vars(model.config))
        copy_other_files(source, folder)
        choose_extractor(folder, getattr(model.config, "at_natural_length", False))
        model.save_pretrained(folder)
        follow_in_folder(folder, model.config)  # of a stock model, too
        if table is not None:
            follow_table_in_folder(folder, config, model.config)
    return model


def own_class(source: str, config: Any) -> Any:
    """The class of this package for the class that saved a checkpoint."""
    stored_class = (config.architectures or [""])[0]
    make_if_known(config.model_type)
    cape_class = hf_models.MODELS.get(f"Cape{stored_class.removeprefix('Cape')}")
    if cape_class is None or config.model_type not in cape_class.config_class.model_types():
        raise ValueError(
            f"{source} holds a {stored_class or 'model without architecture'} (model type "
            f"{config.model_type!r}), which has no cape counterpart; allowed: the model types that "
            "docs/families.md lists. "
            f"{how_to_check(config.model_type)} Give such a model, or register its family by "
            "hf_models.register_family."
        )
    return cape_class


def _settings(config: Any) -> Settings:
    """Settings of each position embedding of a model with this configuration, stock or cape."""
    if not hasattr(config, "position_fields"):
        classes = hf_models.AUTO_CLASSES
        cape_config = next(cape for cape in classes if config.model_type in cape.model_types())
        return _stock_settings(cape_config, vars(config))
    return {field: config.position_settings(field) for field in config.position_fields}


def _stock_settings(config: Any, fields: Mapping[str, Any]) -> Settings:
    """Settings of the position embeddings of the stock model with this configuration."""
    family = find_family(config.model_type, fields)
    return {
        row.field: PositionConfig(family.stock_type(fields, side), row.domain, row.architecture)
        for side, row in family.sides.items()
    }


def _changes(before: Settings, after: Settings) -> dict[str, str]:
    """Differences outside of training, in words; the keys are "field option"."""
    option_names = {
        "source_scale": "alpha",
        "source_bos": "the BOS hint",
        "mean_normalize": "mean-normalised positions",
        "relative_context": "relative attention",
    }
    changes = {}
    for field, old_settings in before.items():
        for option, (old, new) in old_settings.changes(after[field]).items():
            change = f"{option_names.get(option, option)}: {_show(old)} -> {_show(new)}"
            if option == "type":
                change = f"position embedding {old!r} -> {new!r}"
                if old_settings.encoding.counts:
                    change += ", the learned table is dropped"
            if len(before) > 1:
                side = "encoder" if field == FIELD else field.removesuffix(f"_{FIELD}")
                change += f" ({side})"
            changes[f"{field} {option}"] = change
    return changes


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cape_model(
    source: str,
    cape_class: Any,
    config: Any,
    settings: dict[str, Any],
    neutral: bool,
    table: tuple[str, str] | None,
) -> PreTrainedModel:
    source_settings = _settings(config)
    domain_and_architecture = cape_class.config_class.fields_for(vars(config))[FIELD]
    stored = getattr(config, FIELD, None) or {"type": DEFAULT_TYPE}
    if settings.get("type", stored["type"]) == stored["type"]:
        settings = {**stored, **settings}
    settings = _complete(
        settings, source_settings[FIELD] if neutral else None, domain_and_architecture
    )
    model, new = _loaded(source, cape_class, config, settings)
    changes = _changes(source_settings, _settings(model.config))
    if table is not None:
        shorter, model = model, extend_table(model, *table)
        if change := difference(shorter, model, table[1]):
            if neutral:
                remedy = "Choose --position-table-extension copy"
                if difference(shorter, model, "copy"):  # a grid, which no extension keeps
                    remedy = "Leave out --position-table-size, so that the table stays"
                raise ValueError(
                    f"--neutral cannot keep the outputs of {source}: {change}. {remedy}, or leave "
                    "out --neutral and fine-tune."
                )
            changes["table"] = change
    if neutral:
        changes = _begin_relative_at_zero(model, new, changes)
        if changes:
            types = [
                name
                for name, row in types_of(domain_and_architecture[1]).items()
                if row.encoding == source_settings[FIELD].encoding_name
                and "relative_context" not in row.options
            ]
            remedy = f"Choose another type, of {', '.join(types)}"
            if settings["type"] in types:
                remedy = "Leave out the options for this"
            raise ValueError(
                f"--neutral cannot give {settings['type']!r} the outputs of {source}: "
                f"{'; '.join(changes.values())}. {remedy}, or leave out --neutral and fine-tune."
            )
    for key in new:
        print(f"new, not trained yet: {key}")
    notes = list(changes.values())
    if not hasattr(config, "position_fields") and model.config.stock_difference:
        notes.append(model.config.stock_difference)
    if notes:
        print(f"until it is fine-tuned, this model has other outputs than {source}:")
        print("\n".join(f"  {text}" for text in notes))
    else:
        print(f"until it is fine-tuned, this model has the same outputs as {source}")
    return model


def _complete(
    settings: dict[str, Any],
    source: PositionConfig | None,
    domain_and_architecture: tuple[str, str],
) -> dict[str, Any]:
    """Adds missing options from `source`, if there is one, to the settings.

    Raises:
        ValueError: for settings that this kind of model does not have, and where alpha is missing.
    """
    PositionConfig.from_dict(settings, *domain_and_architecture)
    if source is not None:
        source_options = {
            key: getattr(source, key)
            for key in ("source_scale", "source_bos", "mean_normalize", "gamma")
            if applies(key, settings["type"], domain_and_architecture[1])
        }
        settings = {**source_options, **settings}
    if PositionConfig.from_dict(settings, *domain_and_architecture).source_scale in COUNTED:
        raise ValueError(
            f"alpha of {settings['type']!r} is missing, target tokens per source token: give "
            "source_scale as a number such as 1.05, as TARGET/SOURCE, or as two raw texts, "
            "SOURCE.txt,TARGET.txt; or begin as the stock model by --neutral."
        )
    return settings


def _loaded(
    source: str, cape_class: Any, config: Any, settings: dict[str, Any]
) -> tuple[PreTrainedModel, list[str]]:
    """The model with its new position embedding, and the names of weights that are new."""
    if hasattr(config, "position_fields"):
        with clear_errors(source):
            return load_whole(cape_class, source, position_embedding=settings)
    with clear_errors(source):
        stock, _ = load_whole(stock_class(cape_class), source)
    weights = stock.state_dict()
    model = hf_models.switch(stock, settings)
    return model, _new_weights(weights, model)


def _new_weights(stock: Mapping[str, torch.Tensor], model: PreTrainedModel) -> list[str]:
    """Names of weights in a switched model that the stock model lacks."""
    stock_addresses = {tensor.data_ptr() for tensor in stock.values()}
    weights = model.state_dict().items()
    return sorted(
        n for n, value in weights if n not in stock and value.data_ptr() not in stock_addresses
    )


@torch.no_grad()
def _begin_relative_at_zero(
    model: PreTrainedModel, new: Sequence[str], changes: dict[str, str]
) -> dict[str, str]:
    """Sets new relative embeddings to zero, so that they add nothing; returns the other changes."""
    tables = {name: table for name, table in model.named_parameters() if ".relative." in name}
    if not tables or not tables.keys() <= set(new):
        return changes
    for table in tables.values():
        table.zero_()
    return {key: change for key, change in changes.items() if " relative_" not in key}


def _stock_model(source: str, cape_class: Any, config: Any) -> PreTrainedModel:
    name, stock = cape_class.__name__.removeprefix("Cape"), stock_class(cape_class)
    if not hasattr(config, "position_fields"):
        raise ValueError(f"{source} holds a stock {name} already; there is nothing to convert.")
    if stock is None:
        raise ValueError(f"{source} holds a Cape{name}, which transformers has no stock model for.")
    with clear_errors(source):
        cape, _ = load_whole(cape_class, source)
    patches = (module for module in cape.eval().modules() if isinstance(module, PatchEmbeddings))
    embeddings = next(patches, None)
    changes = _changes(_settings(cape.config), _stock_settings(cape.config, vars(cape.config)))
    in_attention = any(row.in_attention for row in _settings(cape.config).values())
    if embeddings is not None and not in_attention:
        # the table of one image size can hold all that is added
        table_options = ("type", "gamma", "mean_normalize")
        changes = {
            key: change for key, change in changes.items() if key.split()[1] not in table_options
        }
    if changes:
        raise ValueError(
            f"{source} cannot become a stock {name}, whose output would differ: "
            f"{'; '.join(changes.values())}. Keep the cape checkpoint; `cape-plugins export onnx` "
            "takes the checkpoint, and --self-contained writes the code of the model beside it."
        )
    model = build_stock(cape, stock)
    if embeddings is not None:
        fill_table(model, *parts_of(cape, model))
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; ends with status 2 and one line if something is wrong."""
    parser = Parser(prog="python -m hf_models.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", help="folder or hub name of a checkpoint")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--stock", action="store_true", help="write a stock checkpoint")
    parser.add_argument(
        "--self-contained",
        action="store_true",
        help="also write the code of the model, so that the folder loads without this package by "
        "trust_remote_code=True",
    )
    parser.add_argument(
        "--neutral",
        action="store_true",
        help="begin with the outputs of SRC: alpha, BOS hint and mean-normalisation come from SRC "
        "unless given, relative embeddings begin at zero",
    )
    add_table_args(parser)
    add_position_args(parser, "image", without=("source_scale",), types={**ROTARY_TYPES, **TYPES})
    parser.add_argument(
        "--position-source-scale",
        metavar="X|SOURCE.txt,TARGET.txt",
        help="alpha, multiplies source positions (CAPE 5.3): a number > 0, TARGET/SOURCE tokens, "
        "or two raw texts, one sentence a line, whose tokens are counted with the tokenizer of SRC "
        "(default: 1; cape has no default)",
    )
    args = parser.parse_args(argv)
    settings = given_settings(args, "image")
    position_type = getattr(args, TYPE_ARG)
    if position_type:
        settings["type"] = position_type
    try:
        table = given_table(args)
        if args.stock and (settings or table or args.self_contained or args.neutral):
            raise ValueError(
                "--stock converts back to a stock checkpoint, which has no type: leave out "
                "--position-..., --neutral and --self-contained"
            )
        if "source_scale" in settings:
            settings["source_scale"] = alpha_of_argument(settings["source_scale"], args.source)
        new_settings = None if args.stock else settings
        model = convert(args.source, args.target, new_settings, args.neutral, table)
        if args.self_contained:
            make_self_contained(args.target)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(text_in_flags(error).split())}", file=sys.stderr)
        return 2
    print(f"wrote {type(model).__name__} to {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
