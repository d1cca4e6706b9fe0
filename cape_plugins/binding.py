"""Hands a value through a call of a host that has no argument for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Bound:
    """Mixin over a module: holds a value, such as the draw of a forward, while a stock forward that
    cannot hand it on is running.

    It is assigned and not appended to a list, which the replicas of DataParallel would share.
    """

    bound: Any = None

    @contextmanager
    def using(self, value: Any) -> Iterator[None]:
        """Binds `value`, for this call only."""
        outer, self.bound = self.bound, value
        try:
            yield
        finally:
            self.bound = outer
