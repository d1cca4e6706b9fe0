"""Makes the classes of families that are stock classes with mixins, from rows of data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_models.switching.configuration import position_config_class
from hf_models.switching.install import FamilyClasses, add_parts

_PREFIX = "Cape"


class Part:
    """A class with an empty body that takes the place of a stock class.

    Args:
        doc: Docstring.
        mixins: Bases in front of the stock class.
        attributes: Class attributes.
    """

    def __init__(self, doc: str, *mixins: type, **attributes: Any) -> None:
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
        parts: Parts by the rest of the name of their stock class, such as "ForMaskedLM".
        config_mixins: Bases of the configuration in front of all others.
    """

    package: str
    prefix: str
    doc: str
    parts: Mapping[str, Part]
    config_mixins: Sequence[type] = ()

    @property
    def names(self) -> set[str]:
        """Names of the classes."""
        return {f"{_PREFIX}{self.prefix}{rest}" for rest in ("Config", *self.parts)}


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
        for row in self.rows:
            if name in row.names:
                family = self.of_package(row.package)
                classes = (family.config, *family.parts)
                return next(cls for cls in classes if cls.__name__ == name)
        raise AttributeError(f"module {self.module!r} has no attribute {name!r}")

    def _make(self, row: Row) -> FamilyClasses:
        stock = importlib.import_module(f"transformers.models.{row.package}.modeling_{row.package}")
        config = position_config_class(
            getattr(stock, f"{row.prefix}Config"), self.module, row.doc, row.config_mixins
        )
        parts = [
            self._part(getattr(stock, row.prefix + rest), part) for rest, part in row.parts.items()
        ]
        return add_parts(FamilyClasses(config, parts))

    def _part(self, stock: type, part: Part) -> type:
        namespace = {"__module__": self.module, "__doc__": part.doc, **part.attributes}
        return type(_PREFIX + stock.__name__, (*part.mixins, stock), namespace)
