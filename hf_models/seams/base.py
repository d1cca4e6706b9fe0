"""Seams: modules of stock models that know positions, and the classes that take their place."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from cape_plugins import PositionConfig, PositionEncoder, StackPositions
from cape_plugins.checkpoints.families import find_family
from cape_plugins.mathematics.binding import Bound
from hf_models.seams.scope import Scope


class Seam(Bound):
    """Base of the mixins that take the place of stock modules in generated families.

    A kind of seam is a subclass in ``hf_models/seams`` and a row of
    :data:`hf_models.generated.kinds.SEAMS`; rows of :mod:`cape_plugins.checkpoints.generated` name
    its key. Nothing else has to change. The subclass defines

    * :meth:`find`, which finds the stock modules by their structure, never by the name of a model;
    * :meth:`prepare`, which builds ``self.positions``, a :class:`~cape_plugins.PositionEncoder`,
      and puts stock tables aside;
    * ``forward`` or other methods of the stock module. There ``self.bound`` is the
      :class:`~hf_models.seams.scope.Scope` of the forward: masks, sizes and draws. ``self.bound``
      is None if the module is called outside of a model, and then nothing is drawn;
    * if needed :meth:`adapt_call`, which changes arguments before the model sees them;
    * if needed :meth:`bases_and_attributes`, for a class that is more than the mixin over the
      stock class, such as one whose stock class comes first.

    Instances are pickled and copied by the recipe of their class, because no module has its name.

    Attributes:
        positions: Built by :meth:`prepare`.
        side: Side in the row of the family, such as "encoder" or "decoder", known before
            :meth:`prepare`.
        adds: Whether the stock model adds positions to the content, so that positions in attention
            are new to its layers; see :mod:`hf_models.seams.stack_attention`.
        stack_positions: What computes positions in attention; None if nothing has to be computed.
        without_table: For errors: what the stock model does instead of adding a table in which
            position embeddings could be stored.
        layer_key: Key under which the layers find the positions in the scope; None if the type
            does not act in attention.
    """

    positions: PositionEncoder
    side: str
    adds: ClassVar[bool] = False
    stack_positions: StackPositions | None  # no default: it would hide the submodule
    without_table: ClassVar[str] = "computes its positions and ignores tables in its file"
    layer_key: str | None = None
    recipe: ClassVar[tuple[Any, ...]]

    @classmethod
    def find(cls, model: nn.Module) -> Iterable[tuple[str, nn.Module, dict[str, Any]]]:
        """The modules of a model that this seam takes the place of.

        Args:
            model: The outermost model, whose seams of this kind may have been found already.

        Returns:
            path and module, and keywords for :meth:`bases_and_attributes`, which can be hashed.
        """
        raise NotImplementedError

    def prepare(self, owner: nn.Module, path: str, config: Any, trained: bool) -> None:
        """Builds the position encoder, and changes the stock module where needed.

        Args:
            owner: The module that holds this module.
            path: Path of this module in the outermost model.
            config: Configuration of the model, with its position embedding.
            trained: Whether the weights come from a trained stock model.

        Raises:
            ValueError: if the model cannot have this position embedding.
        """
        raise NotImplementedError

    def settings_in(self, config: Any) -> PositionConfig:
        """The position embedding of the side of this module in the configuration of a model."""
        return config.position_settings(find_family(config.model_type).sides[self.side].field)

    def stock_table(self, path: str) -> str | None:
        """Name of the parameter of the stock model that can hold what is added; None if there is
        none.

        Args:
            path: Path of this module in the outermost model.
        """
        return None

    def other_stock_tables(self, path: str) -> tuple[str, ...]:
        """Names of further stock tables in which the stock model keeps positions, and which this
        module may have dropped. For `path` see :meth:`stock_table`."""
        return ()

    def adapt_call(self, model: nn.Module, call: dict[str, Any]) -> None:
        """Changes the arguments of a model around this seam, in place.

        Args:
            model: The model, which may be inside another model.
            call: Arguments of the call by name; only those that are given.
        """

    @classmethod
    def bases_and_attributes(
        cls, stock: type[nn.Module], **keywords: Any
    ) -> tuple[tuple[type, ...], dict[str, Any]]:
        """Bases and attributes of the class that takes the place of a stock class. Seams with
        several kinds of modules give the class for a module as the keyword `part`."""
        if (part := keywords.pop("part", None)) is not None:
            return part.bases_and_attributes(stock, **keywords)
        return (cls, stock), keywords

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot find a class that is made at run time
        return _rebuilt, type(self).recipe, self.__dict__


@functools.cache
def seam_class(seam: type[Seam], stock: type[nn.Module], **keywords: Any) -> type[nn.Module]:
    """The class of a seam over a stock class, made once.

    Args:
        seam: Kind of seam.
        stock: Class of the stock module.
        **keywords: See :meth:`Seam.bases_and_attributes`.
    """
    bases, attributes = seam.bases_and_attributes(stock, **keywords)
    recipe = (seam, stock, tuple(keywords.items()))
    # a seam over a class of this package keeps the name of the class
    name = f"Cape{stock.__name__.removeprefix('Cape')}"
    return type(name, bases, {**attributes, "recipe": recipe})


def _rebuilt(seam: type[Seam], stock: type[nn.Module], keywords: Iterable[Any]) -> nn.Module:
    cls = seam_class(seam, stock, **dict(keywords))
    return cls.__new__(cls)


def scope_of(modules: Iterable[Bound]) -> Scope | None:
    """The scope that is bound to the seams and layers of a model; None outside of a forward."""
    return next((module.bound for module in modules), None)
