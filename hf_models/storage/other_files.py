"""Files beside a model in the folder of a checkpoint: tokenizer, processor, generation."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from cape_plugins.utils.files import editing_json

# Files that the new folder gets anyway, or that belong to a training that has ended.
LEFT_BEHIND = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.ckpt",
    "*.ot",
    "*.onnx",
    "*.index.json",
    "config.json",
    "README.md",
    "trainer_state.json",
    ".*",
    "*.py",
    "*_results.json",
    "*_results.txt",
    "generated_predictions.txt",
    "events.out.tfevents.*",
)


def copy_other_files(source: str | os.PathLike[str], target: Path) -> None:
    """Copies the files of a checkpoint that a model does not write: files of tokenizer and feature
    extractor, and settings of generation. The copies name no code that is left behind."""
    folder = (
        source
        if os.path.isdir(source)
        else snapshot_download(str(source), ignore_patterns=[*LEFT_BEHIND])
    )
    shutil.copytree(
        folder,
        target,
        dirs_exist_ok=True,
        ignore=lambda path, names: {
            *shutil.ignore_patterns(*LEFT_BEHIND)(path, names),
            *(name for name in names if os.path.isdir(os.path.join(path, name))),
        },
    )
    for path in target.glob("*_config.json"):
        with editing_json(path) as saved:
            for settings in (saved, *saved.values()):
                if isinstance(settings, dict):
                    forget_code(settings)


def forget_code(settings: dict[str, Any]) -> None:
    """Removes names of code beside a checkpoint; keeps ``REPOSITORY--MODULE.CLASS``, code on the
    hub."""
    if "--" not in str(settings.get("auto_map")):
        settings.pop("auto_map", None)
