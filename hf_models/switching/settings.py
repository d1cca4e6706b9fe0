"""Settings of a position embedding in a configuration: changed as a whole, in the right place."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from cape_plugins.checkpoints.families import FIELD
from cape_plugins.settings.config import option_fields
from cape_plugins.settings.options import COUNTED


class CheckedSettings(dict):
    """Complete settings of one position embedding, changed as a whole only: a change of one setting
    would not be checked, and would not reach a model that was built from the settings."""

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"the settings {dict(self)} cannot be changed one by one, because a built model "
            "would not change. Set the whole field of a configuration before a model is built, "
            f'config.{FIELD} = {{"type": ..., ...}}, or load the model again by '
            f"from_pretrained(..., {FIELD}={{...}})."
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:  # transformers changes what it writes
        return dict(self)

    def __reduce__(self) -> Any:  # pickle would fill a dict key by key
        return type(self), (dict(self),)


def require_own_config(config: Any, model: str) -> None:
    """Checks the configuration that a model is about to be built from.

    Args:
        config: Configuration given by the caller.
        model: Name of the class of the model, for the message.

    Raises:
        ValueError: if `config` is a stock configuration, or if alpha has not been counted.
    """
    # isinstance may fail: transformers can load the code of a self-contained folder twice
    if not hasattr(config, "position_fields"):
        raise ValueError(
            f"config is a {type(config).__name__}, which has no {FIELD}; allowed: the config_class "
            f"of {model}. Make one by from_dict(config.to_dict(), "
            f"{FIELD}={{...}}), or give {FIELD}={{...}} to from_pretrained or from_config."
        )
    for field in config.position_fields:
        settings = config.position_settings(field)
        if settings.source_scale in COUNTED:
            raise ValueError(
                f"source_scale={settings.source_scale!r} of {field} {settings.type!r} cannot be "
                "counted by a model; allowed: a number > 0 or TARGET/SOURCE. Count the tokens of "
                "the training data with "
                "`cape-plugins alpha --text SOURCE TARGET --tokenizer MODEL`, and give "
                f'{field}={{"type": {settings.type!r}, "source_scale": ...}}, or 1.'
            )


def embeddings_in(
    arguments: Mapping[str, Any], config: Any, fields: Collection[str]
) -> dict[str, Any]:
    """The position embeddings of a call, by field. A value of None counts as not given.

    Args:
        arguments: Arguments of the call, by name.
        config: The stock configuration that the caller gives; None if there is none. A dict in one
            of the `fields` counts, other values belong to somebody else.
        fields: Names of position embeddings.
    """
    attributes = {} if config is None else vars(config)
    in_config = {k: v for k, v in attributes.items() if isinstance(v, Mapping)}
    of_call = {name: value for name, value in arguments.items() if value is not None}
    return {name: value for name, value in {**in_config, **of_call}.items() if name in fields}


def refuse_in_constructor(model: type, embeddings: Collection[str]) -> None:
    """Raises for position embeddings among the arguments of a constructor.

    Args:
        model: Class of the model, stock or of this package.
        embeddings: Fields of the position embeddings.

    Raises:
        ValueError: names the calls that take position embeddings.
    """
    if embeddings:
        field, name = min(embeddings), model.__name__
        stock = name.removeprefix("Cape")
        raise ValueError(
            f"{name}(config) takes no {field}; allowed: the arguments of the stock class. "
            f"Use hf_models.switch({stock}(config), {{...}}), or give {field} to "
            "from_pretrained or from_config."
        )


def refuse_misplaced(settings: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuses settings that transformers would accept or drop without a warning.

    Args:
        settings: Keys that a configuration does not know, or arguments of ``from_pretrained``.
        fields: Names of the configuration's fields for position embeddings.

    Raises:
        ValueError: for a misspelt field name, and for an option beside a field instead of inside
            the field.
    """
    option_names = {option.name for option in option_fields()}
    for name, value in settings.items():
        close_names = difflib.get_close_matches(name, fields, n=1, cutoff=0.9)
        if name not in fields and (close_names or name.endswith("_" + FIELD)):
            raise ValueError(
                f"{name}={value!r} is unknown; allowed: {', '.join(fields)}. "
                "Correct the name, or leave it out."
            )
        option = name.removeprefix("position_")
        if option in option_names:
            raise ValueError(
                f"{name}={value!r} stands beside the position embedding; options belong inside: "
                f'{FIELD}={{"type": ..., "{option}": {value!r}}}.'
            )
