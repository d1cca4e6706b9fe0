"""Reads checkpoints without running code from them, and refuses checkpoints of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY as ARCHS
from fairseq.models import MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from cape_plugins.checkpoints import fairseq_files
from cape_plugins.checkpoints.fairseq_files import fairseq_arguments
from fairseq_user_dir.host.compat import allow_fairseq_checkpoints
from fairseq_user_dir.host.errors import SettingsError


def read_checkpoint(path: str | Path, remedy: str = "") -> dict[str, Any]:
    """:func:`~cape_plugins.checkpoints.fairseq_files.read_checkpoint`, with errors that fairseq's
    commands print in one line.

    Raises:
        SettingsError: if the file cannot be read, or has a setting that fairseq would run as code;
            names a remedy.
    """
    # Declares the types again: when torch.serialization.safe_globals, which transformers uses to
    # resume, ends, types that other code has declared are removed, too.
    allow_fairseq_checkpoints()
    try:
        return fairseq_files.read_checkpoint(path, remedy)
    except fairseq_files.CheckpointError as error:
        raise SettingsError(str(error)) from error.__cause__


def task_name(state: Mapping[str, Any]) -> str:
    """The task that a checkpoint was trained in."""
    arguments = fairseq_arguments(state, "task")
    return arguments.get("_name") or arguments.get("task") or "translation"


def check_registered(state: Mapping[str, Any], path: str | Path) -> None:
    """Refuses a checkpoint with a model or task that another user directory defines.

    Raises:
        SettingsError: names the model or task, and what to do.
    """
    model = fairseq_arguments(state)
    names = {
        "architecture": (model.get("_name") or model.get("arch"), {*MODEL_REGISTRY, *ARCHS}),
        "task": (task_name(state), TASK_REGISTRY),
    }
    for what, (name, registry) in names.items():
        if name is not None and name not in registry:
            raise SettingsError(
                f"{path} has the {what} {name}, which neither fairseq nor this package defines: it "
                "needs the --user-dir of its training. Use the commands of fairseq, which take "
                "that folder."
            )
