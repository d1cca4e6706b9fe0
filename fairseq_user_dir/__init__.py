"""fairseq user directory: registers the ``cape_<arch>`` architectures, speech recognition
and the optimizer ``radam``.

Load this package with ``--user-dir cape_plugins`` or ``--user-dir fairseq_user_dir`` in any fairseq
command, or import it in Python before building or loading a model.
"""

from __future__ import annotations

import os

import fairseq.utils

import cape_plugins
from fairseq_user_dir import asr
from fairseq_user_dir.checkpoints import watch_checkpoints
from fairseq_user_dir.host.all_repairs import repair_fairseq
from fairseq_user_dir.host.compat import allow_fairseq_checkpoints
from fairseq_user_dir.host.errors import print_without_traceback
from fairseq_user_dir.models import (
    CLASSES,
    CapeTransformerLanguageModel,
    CapeTransformerModel,
)
from fairseq_user_dir.radam import FairseqRAdam

__all__ = [
    "CLASSES",
    "CapeTransformerLanguageModel",
    "CapeTransformerModel",
    "FairseqRAdam",
    "asr",
]


def _accept_fallback_path() -> None:
    """Lets fairseq accept this package if Python has already imported the package. fairseq looks
    for an installed ``--user-dir NAME`` at ``<fairseq>/../NAME``. If NAME is imported already,
    fairseq accepts the package only if its ``__path__`` has exactly this spelling."""
    for name, paths in (("cape_plugins", cape_plugins.__path__), ("fairseq_user_dir", __path__)):
        spelling = os.path.join(os.path.dirname(fairseq.utils.__file__), "..", name)
        is_accepted = spelling in paths or not os.path.isdir(spelling)
        if not is_accepted and any(os.path.samefile(spelling, path) for path in paths):
            paths.append(spelling)


allow_fairseq_checkpoints()
repair_fairseq()
watch_checkpoints()
print_without_traceback()
_accept_fallback_path()
