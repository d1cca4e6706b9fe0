"""Takes the working directory off the path when ``python -m hf_models.run`` begins.

Import this module before transformers, which looks for torchvision, torchcodec and the like when it
is imported. ``python -m`` puts the working directory on the path first, and a script's modules with
such names would break the import of transformers. ``python SCRIPT`` puts the folder of the script
on the path instead; hf_models.run does so later.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_begins = sys.argv[:1] == ["-m"]  # while Python looks for the module; afterwards its path
if (
    _begins
    and any(word.endswith("hf_models.run") for word in sys.orig_argv)
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] in ("", os.getcwd())
    and not Path(__file__).parents[1].samefile(os.getcwd())  # where this package is found
):
    del sys.path[0]
