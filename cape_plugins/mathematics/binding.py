"""Hands a value through a call of a host that has no argument for it."""

from __future__ import annotations

import threading
from typing import Any

import torch

# Values by the id of the module that they are bound to, separate for each thread. Modules cannot
# hold them: modules are copied, pickled and shared by threads.
_values_of_thread = threading.local()


class Bound:
    """Mixin for modules: holds a value, such as the draw of a forward, while a stock forward runs
    that has no argument for it. Threads that share the module do not see each other's values,
    unless torch.compile has compiled the part that reads the value but not the part that binds it.
    """

    bound_in_graph: Any = None

    @property
    def bound(self) -> Any:
        """The value; None if nothing is bound."""
        if torch.compiler.is_compiling():  # the compiler follows attributes, not thread locals
            return self.bound_in_graph
        return vars(_values_of_thread).get(id(self))

    def using(self, value: Any) -> Binding:
        """Binds `value`, for the body of a ``with`` statement only."""
        return Binding(self, value)


class Binding:
    """Context manager that binds a value to a module. Each step of generation makes two of them:
    speed is why this is no generator function, and why ``nn.Module.__setattr__``, which is six
    times as slow, is avoided."""

    def __init__(self, module: Bound, value: Any) -> None:
        self.module, self.value = module, value

    def __enter__(self) -> None:
        self.outer = self.module.bound
        self._set(self.value)

    def __exit__(self, *_: object) -> None:
        self._set(self.outer)

    def _set(self, value: Any) -> None:
        if torch.compiler.is_compiling():
            self.module.bound_in_graph = value
            return
        values = vars(_values_of_thread)
        if value is None:
            values.pop(id(self.module), None)
        else:
            values[id(self.module)] = value
        # for parts that are compiled separately: an attribute, because the replicas of
        # DataParallel would share a list
        vars(self.module)["bound_in_graph"] = value


# Functions that torch.compile should trace only inside a larger one. If it compiled them alone, as
# after a graph break, each module and each bound value would need another program, up to its limit.
TRACED_ONLY = (Bound.bound.fget, Bound.using, Binding.__init__)
TRACED_ONLY += (Binding.__enter__, Binding.__exit__, Binding._set)
