"""Hands a value through a call of a host that has no argument for it."""

from __future__ import annotations

from typing import Any

import torch


class Bound:
    """Mixin over a module: holds a value, such as the draw of a forward, while a stock forward that
    cannot hand it on is running.

    It is assigned and not appended to a list, which the replicas of DataParallel would share.
    """

    bound: Any = None

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
        if torch.compiler.is_compiling():  # follows attributes, not what is in __dict__
            self.module.bound = value
        else:
            vars(self.module)["bound"] = value
