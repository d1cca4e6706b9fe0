"""Checkpoints of fairseq under torch 2.6 and later, with ``weights_only`` left on.

From torch 2.6 on, ``torch.load`` refuses every type that has not been declared safe
(``add_safe_globals``). fairseq 0.12 stores a few container types beside the tensors, and sends a
few more between ranks. Therefore resuming, ``fairseq-generate``, ``-interactive``, ``-validate``,
``-eval-lm``, the hub interface and averaging all stop at ``torch.load``. Switching ``weights_only``
off would let any file run code. Instead, this module declares these containers, which hold data and
run no code from the file, as safe. Texts that fairseq would run later are refused when a file is
read (:func:`~cape_plugins.checkpoints.fairseq_files.read_checkpoint`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from cape_plugins.checkpoints.fairseq_files import allow_checkpoint_files

_FIRST_RESTRICTED_TORCH = (2, 6)

# Types that do not occur in checkpoint files: import path and names, with the place in fairseq that
# writes the type. A path or name that a version of a package lacks is skipped, because this version
# cannot write the type.
_CONTAINERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # resuming on several ranks: rank 0 sends the loaded state, in which cfg is an OmegaConf tree
    ("omegaconf", ("DictConfig", "ListConfig")),
    ("omegaconf.base", ("ContainerMetadata", "Metadata")),
    ("omegaconf.nodes", ("AnyNode",)),
    # types of the keys and values of the OmegaConf tree
    ("typing", ("Any",)),
    ("collections", ("defaultdict",)),
    ("builtins", ("dict", "list", "int")),
    # placeholders for tensors, which are sent separately
    ("fairseq.distributed.utils", ("_TensorPlaceholder",)),
)


def allow_fairseq_checkpoints() -> None:
    """Declares the container types of fairseq checkpoints as safe for
    ``torch.load(weights_only=True)``.

    Covers what fairseq 0.12 writes to a checkpoint (legacy, dataclass and hydra models,
    ``--eval-bleu``, EMA, fp16) and what it sends between ranks when several ranks resume. Must run
    before any checkpoint is loaded; importing the user dir calls this function. A second call
    changes nothing, and types that other code has declared stay declared.

    This project requires torch >= 2.6. An older torch does not restrict ``torch.load`` by default,
    and accepts no second name for a type; under an older torch this function does nothing.
    """
    if torch.__version__ < _FIRST_RESTRICTED_TORCH:
        return
    allow_checkpoint_files()
    torch.serialization.add_safe_globals(list(_containers()))


def _containers() -> Iterator[Any]:
    """The types of ``_CONTAINERS`` that the installed packages have."""
    for path, names in _CONTAINERS:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        yield from (getattr(module, name) for name in names if hasattr(module, name))
