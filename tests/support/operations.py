"""Counts what a step asks of a device: of a GPU, on whatever device it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that give a number to the program, or a result whose size depends on numbers: a program
# waits for them until a GPU has computed all that it was asked for before.
READING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "cape_plugins::sample_positions",  # as the table of exceptions says; its inside is not seen
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# Calls that copy to the host, which on a CPU are no operations; numpy() refuses a GPU.
COPYING = {"tolist", "cpu"}


class Operations(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        launched: Names of operations that are no views, each a kernel or more on a GPU.
        read: Names of operations and calls that wait for a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.calls = _Calls(self.read)

    def __enter__(self) -> Operations:
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.name().split(".")[0]
        if not function.is_view:
            self.launched[name] += 1
        if name in READING or (name in INDEXING and _by_mask(args[1])):
            self.read[name] += 1
        return function(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Counts the calls of :data:`COPYING`."""

    def __init__(self, read: Counter[str]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in COPYING:
            self.read[name] += 1
        return function(*args, **(kwargs or {}))


def _by_mask(indices: Any) -> bool:
    """Whether an index is a mask, whose number of elements has to be counted first."""
    kinds = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in kinds for index in indices)


def operations(call: Callable[[], Any]) -> Operations:
    """What a call asks for."""
    with Operations() as counted:
        call()
    return counted
