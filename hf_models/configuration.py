"""Configurations: the stock ones plus one field, ``position_embedding``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import MarianConfig, ViTConfig

from cape_plugins import PositionConfig
from cape_plugins.config import applies, options

FIELD = "position_embedding"


class PositionEmbeddingMixin:
    """Gives a configuration the field ``position_embedding``, a dict ``{"type": ..., option:
    value}`` with the options of :class:`~cape_plugins.PositionConfig`.

    The dict is checked and completed whenever it is set, so that a saved model keeps its settings
    should the defaults ever change. Options that are left out take the default of the type.

    Raises:
        ValueError: when it is set, naming option, value, allowed range and remedy.
    """

    position_domain: ClassVar[str]
    position_architecture: ClassVar[str]

    def __post_init__(self, **kwargs: Any) -> None:
        # a stock configuration brings the stock model type along; ours is that of the class
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == FIELD:
            value = self._complete(value)
        super().__setattr__(name, value)

    @property
    def position_config(self) -> PositionConfig:
        """All settings of the position embedding."""
        return self._parse(getattr(self, FIELD))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See transformers. A ``position_embedding`` without "type" changes single options of the
        one that is stored."""
        if kwargs.get(FIELD) is not None:
            changes, stored = kwargs.pop(FIELD), config_dict.get(FIELD)
            if isinstance(changes, Mapping) and "type" not in changes and stored:
                changes = {**stored, **changes}
            config_dict = {**config_dict, FIELD: changes}
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def _parse(cls, settings: Any) -> PositionConfig:
        if settings is None:
            settings = {}
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"{FIELD}={settings!r} is not allowed; allowed: a dict with 'type' and options, "
                'such as {"type": "cape", "max_global_shift": 5.0}.'
            )
        return PositionConfig.from_dict(settings, cls.position_domain, cls.position_architecture)

    @classmethod
    def _complete(cls, settings: Any) -> dict[str, Any]:
        config = cls._parse(settings)
        if config.source_scale == "auto":
            raise ValueError(
                f"source_scale='auto' of {FIELD} {config.type!r} cannot be counted by a "
                "configuration; allowed: a number > 0 or TARGET/SOURCE. "
                "Count the tokens of the training data (`cape-plugins alpha --text SOURCE TARGET` "
                'does so for tokenised text) and give {"source_scale": ...}, or 1.'
            )
        kept = {"type": config.type}
        for option in options(cls.position_domain):
            value = getattr(config, option.name)
            if applies(option.name, config.type) and (
                value != option.metadata["off"] or option.name in (settings or ())
            ):
                kept[option.name] = value
        return kept


@strict
class CapeMarianConfig(PositionEmbeddingMixin, MarianConfig):
    """Translation. Positions count tokens from 0; `bos_token_id`, or `eos_token_id` where there is
    none (Marian), is the BOS hint on the source."""

    model_type = "cape_marian"
    position_domain = "text"
    position_architecture = "seq2seq"

    position_embedding: dict | None = None


@strict
class CapeViTConfig(PositionEmbeddingMixin, ViTConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square."""

    model_type = "cape_vit"
    position_domain = "image"
    position_architecture = "encoder"

    position_embedding: dict | None = None
