"""Configurations: stock configurations plus one field, ``position_embedding``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from cape_plugins import PositionConfig
from cape_plugins.checkpoints.families import OWN_PREFIX, find_family, known_types
from cape_plugins.settings.config import applies, option_fields
from cape_plugins.settings.options import AUGMENT_PROBABILITY
from cape_plugins.utils.files import write_json
from hf_models.switching.settings import FIELD, CheckedSettings, refuse_misplaced

# Fields for the kinds of attention and of experts, which are not saved.
_IMPLEMENTATIONS = ("_attn_implementation_internal", "_experts_implementation_internal")


def copy_implementations(source: Any, target: Any) -> None:
    """Copies the names of the kernels for attention and experts from one configuration to another,
    including all parts: other kernels would round differently."""
    for name in _IMPLEMENTATIONS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    for name in target.sub_configs:
        parts = getattr(source, name, None), getattr(target, name, None)
        if None not in parts:
            copy_implementations(*parts)


class _PositionFields:
    """The attribute ``position_fields`` of configurations: see
    :meth:`PositionEmbeddingMixin.fields_for`. A class gives the fields of the first kind of model
    that its model type has, an instance the fields of its kind."""

    def __get__(self, config: Any, config_class: Any) -> dict[str, tuple[str, str]]:
        return config_class.fields_for({} if config is None else vars(config))


# transformers looks for the weights in the file that this key of config.json names
GUARD = {"transformers_weights": "needs the package cape-plugins: import hf_models"}


class PositionEmbeddingMixin:
    """Gives a configuration the field ``position_embedding``, a dict ``{"type": ..., option:
    value}`` with the options of :class:`~cape_plugins.PositionConfig`.

    The dict is checked and completed whenever it is set, so a saved model keeps its settings if the
    defaults ever change. Missing options take the default of the type. A source scale may stay
    "auto" in a configuration, because peft and others load bare configurations; a model needs a
    number. The settings of a configuration that a model was built from no longer change: a change
    would be saved without having acted on the model.

    Each family has a separate model type, so that Auto classes refuse a checkpoint if this package
    is missing. An explicitly named stock class would load the checkpoint with a mere warning and
    compute other positions. Therefore config.json gets a key, read only by transformers, that names
    weights that do not exist; this class drops the key when it reads the file.

    Attributes:
        position_fields: Domain and architecture of each field for a position embedding; the first
            field is the main one. See :meth:`fields_for`.
        stock_difference: How the model differs from stock with any settings, in words.

    Raises:
        ValueError: when a field is set; names option, value, allowed range and remedy.
    """

    # not in the instance's dict, which is saved, compared and copied
    __slots__ = ("_in_use",)

    position_fields: ClassVar[Any] = _PositionFields()
    stock_difference: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if find_family(cls.model_type) is None:
            raise ValueError(
                f"model_type={cls.model_type!r} of {cls.__name__} is unknown; allowed: "
                f"{known_types(OWN_PREFIX)}. Say what a checkpoint of "
                "it stores by cape_plugins.checkpoints.families.add_family_row before the class is "
                "made."
            )

    @classmethod
    def fields_for(cls, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Domain and architecture of each field for a position embedding, from the row of the
        family in cape_plugins.checkpoints.families.

        Args:
            settings: Settings of a model of the family, stock or of this package.
        """
        sides = find_family(cls.model_type, settings).sides.values()
        return {side.field: (side.domain, side.architecture) for side in sides}

    def __post_init__(self, **kwargs: Any) -> None:
        # a stock configuration brings the stock model type along; the class sets another type
        kwargs.pop("model_type", None)
        refuse_misplaced(kwargs, self.position_fields)
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.position_fields:
            if name != FIELD:
                value = self._with_encoder_defaults(name, value)
            value = self._complete(name, value)
            if getattr(self, "_in_use", False) and value != getattr(self, name):
                raise ValueError(
                    f"{name}={value!r} cannot be set: a model was built from this configuration "
                    f"with {getattr(self, name)} and would not change. Set it on a copy "
                    "(copy.deepcopy) and build a model from the copy, or load the model again by "
                    f"from_pretrained(..., {name}=...)."
                )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.position_fields and getattr(self, "_in_use", False):
            raise ValueError(
                f"{name} cannot be deleted: a model was built from this configuration with "
                f"{getattr(self, name)}, and reads it. Delete it from a copy (copy.deepcopy)."
            )
        super().__delattr__(name)

    def _with_encoder_defaults(self, field: str, settings: Any) -> Any:
        """Settings of a decoder beside an encoder with separate settings. By default the decoder
        has the encoder's type and `augment_probability`."""
        if settings is None:
            sides = find_family(self.model_type).sides.values()
            default = next(side.default for side in sides if side.field == field)
            settings = {"type": default or self.position_embedding["type"]}
        share = self.position_embedding.get(AUGMENT_PROBABILITY)
        if share is None or not self._parse(field, settings).augments:
            return settings
        return {AUGMENT_PROBABILITY: share, **settings}

    def __getstate__(self) -> dict[str, Any]:  # a copy is not in use
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the settings of a copy read-only, too, because transformers loads models with a
        copy. The copy that transformers uses to size caches lacks the fields of the other side."""
        names = self.position_fields.keys() & state.keys()
        settings = {name: CheckedSettings(state[name]) for name in names}
        self.__dict__.update({**state, **settings})

    def mark_in_use(self) -> None:
        """Notes that a model was built from this configuration."""
        self._in_use = True

    @property
    def position_config(self) -> PositionConfig:
        """All settings of the main position embedding."""
        return self.position_settings(FIELD)

    def position_settings(self, field: str) -> PositionConfig:
        """All settings of one of the `position_fields`."""
        return self._parse(field, getattr(self, field))

    def stock_type(self, side: str) -> str | None:
        """Type of position embedding that the "encoder" or "decoder" of the stock model has."""
        return find_family(self.model_type).stock_type(vars(self), side)

    @classmethod
    def model_types(cls) -> tuple[str, ...]:
        """Types of checkpoints that this class takes: this type and the type of the stock class."""
        types = (getattr(base, "model_type", "") for base in cls.__mro__)
        return tuple(dict.fromkeys(name for name in types if name))

    @classmethod
    def check_model_type(cls, settings: Mapping[str, Any], source: Any) -> None:
        """Refuses the configuration of another kind of model. transformers would only warn, and
        leave out the weights that do not fit.

        Args:
            settings: Contents of a config.json.
            source: Place of the config.json, for the message.

        Raises:
            ValueError: names the model types that are allowed.
        """
        model_type = settings.get("model_type")
        if model_type and model_type not in cls.model_types():
            raise ValueError(
                f"{source} holds a model of type {model_type!r}; {cls.__name__} takes "
                f"{' and '.join(map(repr, cls.model_types()))} only: other weights would be left "
                "out or stay random. Give such a checkpoint, or the class for this type."
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See transformers; turns the type of a stock model into this type, refuses other types."""
        settings, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        cls.check_model_type(settings, pretrained_model_name_or_path)
        return {**settings, "model_type": cls.model_type}, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See transformers. A ``position_embedding`` without "type" changes single options of the
        stored position embedding, and None changes nothing."""
        cls.check_model_type(config_dict, "config_dict")
        config_dict = {k: v for k, v in config_dict.items() if GUARD.get(k, ...) != v}
        refuse_misplaced(kwargs, cls.position_fields)
        for name in cls.position_fields:
            changes, stored_settings = kwargs.pop(name, None), config_dict.get(name)
            if changes is not None:
                if isinstance(changes, Mapping) and "type" not in changes and stored_settings:
                    changes = {**stored_settings, **changes}
                config_dict = {**config_dict, name: changes}
        if not config_dict.get(FIELD) and cls._has_other_part(config_dict):
            main_side = next(iter(find_family(cls.model_type).sides))
            stock_type = find_family(cls.model_type).stock_type(config_dict, main_side)
            config_dict = {**config_dict, FIELD: {"type": stock_type}}
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def _has_other_part(cls, settings: Mapping[str, Any]) -> bool:
        """Whether settings choose the positions of a part of another domain than the main one, such
        as the images beside texts. A caller who chooses only such positions wants the positions
        of the main domain to stay."""
        main_domain, _ = cls.position_fields[FIELD]
        others = (
            name for name, (domain, _) in cls.position_fields.items() if domain != main_domain
        )
        return any(settings.get(name) for name in others)

    @classmethod
    def of_stock(cls, config: Any, **fields: Any) -> Any:
        """The configuration of this package for the model of a stock configuration.

        Args:
            config: Configuration of a stock model; stays unchanged.
            fields: Position embeddings, and other fields that the stock configuration lacks.
        """
        cape_config = cls.from_dict({**config.to_dict(), **fields})
        copy_implementations(config, cape_config)
        return cape_config

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """See transformers; the file is guarded."""
        saved = {**json.loads(self.to_json_string(use_diff=use_diff)), **GUARD}
        write_json(Path(json_file_path), saved)

    def _parse(self, field: str, settings: Any) -> PositionConfig:
        if settings is None:
            settings = {}
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"{field}={settings!r} is not allowed; allowed: a dict with 'type' and options, "
                'such as {"type": "cape", "max_global_shift": 5.0}.'
            )
        try:
            return PositionConfig.from_dict(settings, *self.position_fields[field])
        except ValueError as error:
            if field == FIELD or not str(error).startswith(f"{FIELD}="):
                raise
            raise ValueError(f"{field}{str(error).removeprefix(FIELD)}") from None

    def _complete(self, field: str, settings: Any) -> dict[str, Any]:
        config = self._parse(field, settings)
        complete: dict[str, Any] = {"type": config.type}
        for option in option_fields(config.domain):
            value = getattr(config, option.name)
            if applies(option.name, config.type, config.architecture) and (
                value != option.metadata["off"] or option.name in (settings or ())
            ):
                complete[option.name] = value
        return CheckedSettings(complete)


def position_config_class(
    stock: Any, module: str, doc: str | None, mixins: Sequence[type] = ()
) -> type:
    """The configuration class of a family: the stock class with its fields of positions.

    Args:
        stock: Stock class, whose family has a row in cape_plugins.checkpoints.families.
        module: Name of an imported module in which pickle finds the class by name.
        doc: Docstring.
        mixins: Further bases, in front of :class:`PositionEmbeddingMixin`.
    """
    fields = [side.field for side in find_family(stock.model_type).sides.values()]
    namespace = {
        "__module__": module,
        "__doc__": doc,
        # a string, which strict does not check: the mixin checks, with a clear error
        "__annotations__": dict.fromkeys(fields, "dict | None"),
        **dict.fromkeys(fields),
        "model_type": OWN_PREFIX + stock.model_type,
    }
    bases = (*mixins, PositionEmbeddingMixin, stock)
    return strict(type(f"Cape{stock.__name__}", bases, namespace))
