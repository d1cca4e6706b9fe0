"""Peak memory of a translator, measured in a process that holds only this translator."""

import json
import logging
import pkgutil
from pathlib import Path

from benchmarks.engines.task import Search
from benchmarks.memory import peak_resident


def print_peak(make: str, folder: str, search: str) -> None:
    """Prints the peak memory of this process in MiB while it translates, program and model
    included.

    Args:
        make: ``module:function`` that makes the translator.
        folder: See benchmarks.engines.task.
        search: Fields of a Search in JSON.
    """
    logging.disable(logging.INFO)
    step = pkgutil.resolve_name(make)(Path(folder), Search(**json.loads(search)))
    print(peak_resident(step)[1])
