"""Hands a value through a call of a host that has no argument for it."""

from __future__ import annotations

import threading
from typing import Any

import torch

# Values by the id of the module that they are bound to, for each thread its own; not in the
# modules, which are copied, pickled and shared by threads.
_held = threading.local()


class Bound:
    """Mixin over a module: holds a value, such as the draw of a forward, while a stock forward that
    cannot hand it on is running. Threads that share the module do not see each other's values,
    unless torch.compile has compiled the reading part but not the part that binds.
    """

    bound_in_graph: Any = None

    @property
    def bound(self) -> Any:
        """The value; None if nothing is bound."""
        if torch.compiler.is_compiling():  # follows attributes, but not what is held by thread
            return self.bound_in_graph
        return vars(_held).get(id(self))

    def using(self, value: Any) -> Binding:
        """Binds `value`, for the body of a ``with`` statement only."""
        return Binding(self, value)


class Binding:
    """A value that a module holds for a while; each step of generation makes two, so it is neither
    a generator nor assigned by ``nn.Module.__setattr__``, which is slow."""

    def __init__(self, module: Bound, value: Any) -> None:
        self.module, self.value = module, value

    def __enter__(self) -> None:
        self.outer = self.module.bound
        self._hold(self.value)

    def __exit__(self, *_: object) -> None:
        self._hold(self.outer)

    def _hold(self, value: Any) -> None:
        if torch.compiler.is_compiling():
            self.module.bound_in_graph = value
            return
        held = vars(_held)
        if value is None:
            held.pop(id(self.module), None)
        else:
            held[id(self.module)] = value
        # for parts that are compiled on their own: an attribute, in whose place a list would be
        # shared by the replicas of DataParallel
        vars(self.module)["bound_in_graph"] = value


# Functions that torch.compile should trace as parts of a larger one only. On their own, as behind a
# graph break, each module and value that is bound would be another program.
TRACED_ONLY = (Bound.bound.fget, Bound.using, Binding.__init__)
TRACED_ONLY += (Binding.__enter__, Binding.__exit__, Binding._hold)
