"""Keeps fairseq from running data as code.

* Settings and manifests hold lists or numbers as text, which fairseq runs as Python. With this
  module, fairseq reads only literals: numbers, quoted texts, lists, tuples, dicts, and sums and
  multiples of these.
* fairseq passes the names of protein files (fasta) to a shell, which would run code in a name.
* An archive that is given to the hub interface could write files outside of its folder.
"""

from __future__ import annotations

import functools
import shlex
import sys
import tarfile
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

from fairseq import file_utils
from fairseq.data.fasta_dataset import FastaDataset

from cape_plugins.checkpoints.fairseq_files import literal


def run_no_data() -> None:
    """Applies the repairs of this module."""
    _take_literals_only()
    FastaDataset._build_index = _with_quoted_path(FastaDataset._build_index)
    if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later
        file_utils.tarfile = SimpleNamespace(open=_Archive.open)


def _take_literals_only() -> None:
    """Replaces ``eval`` in the modules of fairseq, which use ``eval`` only to read data: a global
    name of a module hides the built-in name of Python."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fairseq":
            module.eval = literal
    sys.meta_path.insert(0, _LaterModules())


class _LaterModules(MetaPathFinder):
    """Replaces ``eval`` in modules of fairseq that are imported later, such as fairseq's examples.
    An example that is loaded by ``--user-dir`` counts as code of the user and does not change."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("fairseq.") else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                module.eval = literal
                execute(module)

            spec.loader.exec_module = exec_module
        return spec


def _with_quoted_path(stock: Any) -> Any:
    @functools.wraps(stock)
    def build_index(self: FastaDataset, path: str) -> Any:
        return stock(self, shlex.quote(path))

    return build_index


class _Archive(tarfile.TarFile):
    """Extracts no file to a place outside of the target folder."""

    extraction_filter = staticmethod(lambda *member: tarfile.data_filter(*member))
