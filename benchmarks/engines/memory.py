"""Prints the MiB that this process needs at its peak while it translates, program and model
included: ``python -m benchmarks.engines.memory MAKE FOLDER SEARCH``, where MAKE is the
``module:function`` that makes the translator and SEARCH the fields of a Search in JSON."""

import json
import pkgutil
import sys
from pathlib import Path

from benchmarks.engines.task import Search
from benchmarks.memory import peak_resident


def main(make: str, folder: str, search: str) -> None:
    step = pkgutil.resolve_name(make)(Path(folder), Search(**json.loads(search)))
    print(peak_resident(step)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
