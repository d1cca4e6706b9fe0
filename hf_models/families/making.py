"""Makes the classes of a family from a row of data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_models.switching.configuration import position_config_class
from hf_models.switching.install import FamilyClasses, add_parts

_PREFIX = "Cape"


@dataclass(frozen=True)
class Part:
    """A class with an empty body that takes the place of a stock class.

    Attributes:
        doc: Docstring.
        mixins: Bases in front of the stock class.
        attributes: Class attributes.
    """

    doc: str
    mixins: Sequence[type]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def having(self, **attributes: Any) -> Part:
        """This part with these class attributes."""
        return replace(self, attributes=attributes)


@dataclass(frozen=True)
class Row:
    """A family whose classes are its stock classes with mixins.

    Attributes:
        prefix: Beginning of the names of the stock classes, such as "Bert".
        doc: Docstring of the configuration.
        parts: Parts by the rest of the name of their stock class, such as "ForMaskedLM".
        config_mixins: Bases of the configuration in front of all others.
    """

    prefix: str
    doc: str
    parts: Mapping[str, Part]
    config_mixins: Sequence[type] = ()

    @property
    def names(self) -> set[str]:
        """Names of the classes."""
        return {f"{_PREFIX}{self.prefix}{rest}" for rest in ("Config", *self.parts)}


def make_family(row: Row, package: str, module: str) -> FamilyClasses:
    """The classes of a row, which :func:`~hf_models.switching.install.install` knows from then on.

    Args:
        row: See :class:`Row`.
        package: Package of transformers that has the stock classes, such as "bert".
        module: Module in which pickle finds the classes by name.

    Raises:
        AttributeError: if the installed transformers lacks a stock class.
    """
    stock = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    stock_config = getattr(stock, f"{row.prefix}Config")
    config = position_config_class(stock_config, module, row.doc, row.config_mixins)
    parts = [
        _part(getattr(stock, row.prefix + rest), part, module) for rest, part in row.parts.items()
    ]
    return add_parts(FamilyClasses(config, parts))


def _part(stock: type, part: Part, module: str) -> type:
    namespace = {"__module__": module, "__doc__": part.doc, **part.attributes}
    return type(_PREFIX + stock.__name__, (*part.mixins, stock), namespace)
