"""Makes the classes of families that are stock classes with mixins, from rows of data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_models.switching.configuration import position_config_class
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin

_PREFIX = "Cape"


class Part:
    """A class with an empty body that takes the place of a stock class.

    Args:
        doc: Docstring.
        mixins: Bases in front of the stock class.
        attributes: Class attributes.
    """

    def __init__(self, doc: str | None, *mixins: type, **attributes: Any) -> None:
        self.doc, self.mixins, self.attributes = doc, mixins, attributes

    def having(self, **attributes: Any) -> Part:
        """A copy of this part with these class attributes in place of the old ones."""
        return Part(self.doc, *self.mixins, **attributes)


@dataclass(frozen=True)
class Row:
    """A family whose classes are its stock classes with mixins.

    Attributes:
        package: Package of transformers that has the stock classes, such as "bert".
        prefix: Beginning of the names of the stock classes, such as "Bert".
        doc: Docstring of the configuration.
        parts: Parts by the rest of the name of their stock class, such as "Model". Public stock
            models that are not among them, most of them heads, need no part; the classes of such
            models are the stock classes with
            :class:`~hf_models.switching.modeling.PositionModelMixin`.
        config_mixins: Bases of the configuration in front of all others.
    """

    package: str
    prefix: str
    doc: str
    parts: Mapping[str, Part]
    config_mixins: Sequence[type] = ()


class Families:
    """The families of some rows. A family is made when one of its classes is asked for, so that a
    self-contained folder makes only the family of its model.

    Args:
        rows: See :class:`Row`.
        module: Module in which pickle finds the classes by name.
    """

    def __init__(self, rows: Sequence[Row], module: str) -> None:
        self.rows, self.module = rows, module
        self.of_package = functools.cache(self.of_package)

    def of_package(self, package: str) -> FamilyClasses:
        """The family with stock classes from a package of transformers.

        Raises:
            AttributeError: if the installed transformers lacks a stock class.
        """
        return self._make(next(row for row in self.rows if row.package == package))

    def all(self) -> list[FamilyClasses]:
        """The families of all rows."""
        return [self.of_package(row.package) for row in self.rows]

    def class_of_name(self, name: str) -> type:
        """A class by its name, for the ``__getattr__`` of the module.

        Raises:
            AttributeError: if no row has a class of this name.
        """
        # longest first, because the names of another family may begin with a prefix
        for row in sorted(self.rows, key=lambda row: -len(row.prefix)):
            if name.startswith(_PREFIX + row.prefix):
                family = self.of_package(row.package)
                for cls in (family.config, *family.parts):
                    if cls.__name__ == name:
                        return cls
        raise AttributeError(f"module {self.module!r} has no attribute {name!r}")

    def _make(self, row: Row) -> FamilyClasses:
        stock = importlib.import_module(f"transformers.models.{row.package}.modeling_{row.package}")
        stock_config = getattr(stock, f"{row.prefix}Config")
        config = position_config_class(stock_config, self.module, row.doc, row.config_mixins)
        parts = {getattr(stock, row.prefix + rest): part for rest, part in row.parts.items()}
        for head in _public_models(stock, stock_config):
            parts.setdefault(head, Part(head.__doc__, PositionModelMixin))
        classes = [self._part(stock_class, part) for stock_class, part in parts.items()]
        return add_parts(FamilyClasses(config, classes))

    def _part(self, stock: type, part: Part) -> type:
        namespace = {"__module__": self.module, "__doc__": part.doc, **part.attributes}
        return type(_PREFIX + stock.__name__, (*part.mixins, stock), namespace)


def _public_models(module: Any, config: type) -> list[type]:
    """The stock models that a module of transformers offers for a configuration class, without
    their base, which has no forward."""
    values = (getattr(module, name) for name in module.__all__)
    models = (value for value in values if getattr(value, "config_class", None) is config)
    return [model for model in models if model.forward is not nn.Module.forward]
