"""Peak memory of a process. This module imports no host, so that programs without torch can be
measured."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def peak_resident(step: Callable[[], object]) -> tuple[float, float]:
    """Memory of this process in MiB, before a second call of `step` and at the peak of this call:
    the resident set, so pages that were never touched do not count. The first call warms up."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # memory that malloc keeps would hide the need of the next call
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, proc(5)
    before = _status("VmRSS")
    step()
    return before / 1024, _status("VmHWM") / 1024


def _status(key: str) -> int:
    """A line of this process's status, in KiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))
