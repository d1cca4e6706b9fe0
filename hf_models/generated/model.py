"""The mixin over the stock models of generated families."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from cape_plugins import Draw
from cape_plugins.checkpoints.families import OWN_PREFIX, find_family
from cape_plugins.checkpoints.generated import GENERATED, row_for
from cape_plugins.mathematics.binding import Bound
from hf_models.generated.kinds import SEAMS
from hf_models.host import record_outputs
from hf_models.seams.attention import RunTimeMixin, mixed
from hf_models.seams.base import Seam, scope_of, seam_class
from hf_models.seams.scope import OpenScope, Scope
from hf_models.seams.stack_attention import PositionLayer, add_to_layers
from hf_models.switching.install import PARTS, PositionHost
from hf_models.switching.modeling import PositionModelMixin


def how_to_check(model_type: str) -> str:
    """What a user of a stock model of an unknown family can do."""
    return (
        f"`cape-plugins doctor {model_type or 'MODEL_TYPE'}` tells which stock models can have "
        "another position embedding, and why others cannot."
    )


class ScopedModel:
    """Base of the mixins over models of transformers that open a scope for the seams below them.

    Attributes:
        argument_names: Names of the arguments of the stock forward, in order.
        seam_paths: Paths of the seams below this model. Names, because replicas of a model hold
            other modules.
        layer_paths: Paths of the layers below this model that take positions in attention.
    """

    argument_names: tuple[str, ...]
    seam_paths: tuple[str, ...] = ()
    layer_paths: tuple[str, ...] = ()

    def find_seams(self) -> None:
        """Notes the seams below this model, and the layers that take positions in attention."""
        self.seam_paths, self.layer_paths = (
            tuple(path for path, module in self.named_modules() if isinstance(module, kind))
            for kind in (Seam, PositionLayer)
        )

    def seams(self) -> list[Seam]:
        """The seams below this model."""
        return [self.get_submodule(path) for path in self.seam_paths]

    def bound_modules(self) -> list[Bound]:
        """The seams, and the layers that take positions: an encoder that is a model has layers, but
        not always a seam."""
        return [*self.seams(), *(self.get_submodule(path) for path in self.layer_paths)]

    def run_in_scope(
        self,
        stock: Callable[..., Any],
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        draw: Draw | None = None,
    ) -> Any:
        """Runs a stock method with a scope for the seams below this model.

        Args:
            stock: The method.
            names: Names of the arguments that the method takes, in order.
            args: Arguments without names.
            kwargs: Arguments by name.
            draw: Random numbers for this forward; None to draw in training.
        """
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        seams, call_of_user, bound = self.seams(), dict(call), self.bound_modules()
        scope = Scope(names, call_of_user, scope_of(bound), draw)
        for seam in seams:
            seam.adapt_call(self, call)  # adds arguments of the forward, which others may not take
        taken = {*names, *call_of_user}
        call = {name: value for name, value in call.items() if name in taken}
        with OpenScope(bound, scope):
            return stock(**call)


class GeneratedModel(PositionHost, PositionModelMixin, ScopedModel):
    """Mixin over a stock model: opens a scope for the seams below it in each forward.

    Attributes:
        takes_any_forward: True: the seams find positions inside the model, so any stock forward
            fits; see :func:`~hf_models.switching.install.install`.
    """

    takes_any_forward: ClassVar[bool] = True

    def install_positions(self, config: Any, trained: bool) -> None:
        """Gives the stock modules that know positions the classes of the family's seams. Models
        inside this model find the seams that this model has found."""
        row = row_for(GENERATED[config.model_type.removeprefix(OWN_PREFIX)], vars(config))
        for side, row_of_side in row.sides.items():
            seam = SEAMS[row_of_side.seam]
            for path, module, keywords in list(seam.find(self)):
                module.__class__ = seam_class(seam, type(module), **keywords)
                module.side = side
                owner = self.get_submodule(path.rpartition(".")[0])
                module.prepare(owner, path, config, trained)
                if module.adds:
                    knows_positions = getattr(module, "patch_grid", module)
                    add_to_layers(self, path, knows_positions, row_of_side.only_adds)
        self.find_seams()
        for module in list(self.modules()):
            is_scoped = isinstance(module, ScopedModel) or self.part_for(module) is not None
            if isinstance(module, PreTrainedModel) and not is_scoped:
                _open_scopes_alone(module)
        # no warning about the tables of a stock checkpoint that this model does not have
        names = {re.escape(path.rpartition(".")[2]) for path in self.seam_paths}
        ignored = {rf"(^|\.){name}\.weight$" for name in names}
        old_ignored = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*old_ignored, *ignored}

    @classmethod
    def part_for(cls, module: nn.Module) -> type | None:
        """See :class:`~hf_models.switching.install.SwitchedModel`. Parts with the configuration of
        another family, such as the image tower of a language model, stay stock."""
        part = PARTS.get(type(module))
        if part is None or getattr(part, "config_class", None) is not cls.config_class:
            return None
        return part if isinstance(module.config, cls.config_class) else None

    def check_installed(self) -> None:
        """See :class:`~hf_models.switching.install.SwitchedModel`."""
        if not self.seam_paths:
            model_type = self.config.model_type.removeprefix(OWN_PREFIX)
            raise ValueError(
                f"{type(self).__name__} with this configuration has no part that knows positions "
                f"in the way of the other models of {model_type!r}, so a position embedding has no "
                f"effect; allowed: models with such a part. {how_to_check(model_type)}"
            )
        found_sides = {seam.side for seam in self.seams()}
        sides = find_family(self.config.model_type).sides
        for side, row in sides.items():
            field, stock = row.field, self.config.stock_type(side)
            name = self.config.position_settings(field).type
            if side not in found_sides and name != stock:
                others = (
                    sides[found_side].field for found_side in sides if found_side in found_sides
                )
                raise ValueError(
                    f"{field}={name!r} has no effect on {type(self).__name__}, which has no part "
                    f"for {field}; allowed: {stock!r}, the type of the stock model. Set {field} to "
                    f"{stock!r}, and give the type as {' or '.join(others)}."
                )

    def forward(self, *args: Any, draw: Draw | None = None, **kwargs: Any) -> Any:
        """See transformers.

        Args:
            *args: As the stock model.
            draw: Random numbers for this forward; by default drawn in training, but not in a step
                of generation (:class:`~hf_models.seams.scope.Scope`).
            **kwargs: As the stock model.
        """
        return self.run_in_scope(super().forward, self.argument_names, args, kwargs, draw)


class InnerModel(RunTimeMixin, ScopedModel):
    """Mixin over a stock model with the configuration of another family inside a switched model,
    such as the text model of CLIP. Users, and generation of some models, call it alone: then it
    opens the scope, and has positions, masks and draws as in the whole model. Inside a forward of
    the whole model it is the stock model, because the whole model knows the arguments of the user.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock_class = cls.__bases__[-1]
        # save_pretrained writes the name; a model of another module is "custom code", whose older
        # names of weights transformers does not translate
        cls.__name__, cls.__module__ = stock_class.__name__, stock_class.__module__
        stock = stock_class.forward
        cls.argument_names = tuple(inspect.signature(stock).parameters)[1:]

        @functools.wraps(stock)  # generation reads the names of the arguments
        def forward(self: InnerModel, *args: Any, **kwargs: Any) -> Any:
            if scope_of(self.bound_modules()) is not None:
                return stock(self, *args, **kwargs)
            forward_of_self = functools.partial(stock, self)
            return self.run_in_scope(forward_of_self, self.argument_names, args, kwargs)

        cls.forward = forward


def _open_scopes_alone(model: PreTrainedModel) -> None:
    """Lets a stock model inside a switched model open a scope if it is called alone."""
    if any(isinstance(module, Seam) for module in model.modules()):
        model.__class__ = mixed(InnerModel, type(model))
        record_outputs(model)
        model.find_seams()
