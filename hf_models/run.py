"""Runs any script with the models of this package known to the Auto classes.

python -m hf_models.run run_translation.py --model_name_or_path ...
accelerate launch -m hf_models.run run_translation.py ...
torchrun --nproc_per_node 2 -m hf_models.run run_translation.py ...
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import hf_models  # noqa: F401, registers the models


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a script as ``python SCRIPT ...`` does, with this package's models registered.

    Args:
        argv: Path of the script and its arguments (default: the arguments of the process).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m hf_models.run SCRIPT [ARGUMENTS ...]\n\n{__doc__}")
        raise SystemExit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"error: {script}: no such script; give the path of a Python file", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
