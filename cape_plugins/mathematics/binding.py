"""Passes a value through a call of a host that has no argument for the value."""

from __future__ import annotations

import threading
from typing import Any

import torch

# Values, separate for each thread, by the id of the module that a value is bound to. Modules cannot
# hold the values: modules are copied, pickled and shared by threads.
_values_of_thread = threading.local()


class Bound:
    """Mixin for modules: holds a value, such as a draw, while a stock forward without an argument
    for the value runs. Threads that share the module do not see each other's values, unless
    torch.compile has compiled the part that reads the value but not the part that binds it.
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
    """Context manager that binds a value to a module. Each step of generation makes two of these
    context managers, so the code is written for speed: a class is faster than a generator function,
    and ``vars(module)`` avoids ``nn.Module.__setattr__``, which takes six times as long."""

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
        # For parts that are compiled separately, which read `bound_in_graph`. An attribute, not an
        # entry of a list or dict, because the replicas of DataParallel would share the container.
        vars(self.module)["bound_in_graph"] = value


# Functions that torch.compile should trace only inside a larger function. Compiled alone, as after
# a graph break, each module and each bound value would need another program, up to torch's limit.
TRACED_ONLY = (Bound.bound.fget, Bound.using, Binding.__init__)
TRACED_ONLY += (Binding.__enter__, Binding.__exit__, Binding._set)
