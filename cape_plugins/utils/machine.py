"""Facts about the machine, for the files of results."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_processor() -> str:
    """Name of the processor, and the number of cores that this process may use."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # not Linux
        cpuinfo = Path("/proc/cpuinfo").read_text("utf-8")
        model = next(iter(re.findall(r"model name\s*: (.*\S)", cpuinfo)), model)
    return f"{model}, {available_cores()} cores"
