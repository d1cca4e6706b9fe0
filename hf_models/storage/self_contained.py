"""Checkpoints with a copy of the code of their models.

transformers loads code from a folder if the files stand side by side and import each other
relatively. The sources of both packages are copied under flat names; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import cape_plugins
import hf_models
from cape_plugins.utils.files import editing_json, write_json
from hf_models.generated.families import make_if_known
from hf_models.switching.modeling import model_card

# Names, in the flat folder, of modules that a model does not need.
_COMMANDS = (
    *(
        "cape_plugins_cli",
        "cape_plugins___main__",
        "cape_plugins_models*",
        "cape_plugins_pictures*",
    ),
    "cape_plugins_speech",
    "cape_plugins_speech_audio",
    "cape_plugins_speech_batching",
    "cape_plugins_speech_ctc_decoder",
    *(
        "hf_models_run",
        "hf_models_stand_ins",
        "hf_models_convert",
        "hf_models_counting",
        "hf_models_storage_self_contained",
    ),
    "hf_models_storage_loading",
    "hf_models_serving*",
    "cape_plugins_serving*",
)
_IMPORT = re.compile(r"^(\s*)from ((?:cape_plugins|hf_models)(?:\.\w+)*) import ", re.MULTILINE)


def make_self_contained(folder: str | os.PathLike[str]) -> None:
    """Adds code and ``auto_map`` to a saved cape checkpoint. The checkpoint then loads with
    ``AutoModel.from_pretrained(folder, trust_remote_code=True)`` if this package is missing.

    Args:
        folder: A folder written by ``save_pretrained``.

    Raises:
        ValueError: if the folder holds no model of this package.
    """
    folder = Path(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    make_if_known(config.get("model_type"))
    entries = [e for e in hf_models.AUTO_CLASSES if e.model_type == config.get("model_type")]
    if not entries:
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}; only models of this "
            "package can carry its code. Convert it first."
        )
    (config_class,) = entries
    if config_class.__module__.partition(".")[0] != hf_models.__name__:
        raise ValueError(
            f"{folder} holds a model of {config_class.__module__}, which is not part of this "
            "package and would not be copied. Load it where that module is installed."
        )
    for package in (cape_plugins, hf_models):
        root = Path(package.__file__).parent
        for source in root.rglob("*.py"):
            name = _flat_name(".".join(source.relative_to(root.parent).with_suffix("").parts))
            if not any(fnmatch(name, command) for command in _COMMANDS):
                text = _IMPORT.sub(_flattened, source.read_text(encoding="utf-8"))
                (folder / f"{name}.py").write_text(text, encoding="utf-8")
    config["auto_map"] = {
        "AutoConfig": _reference(config_class),
        **{
            auto.__name__: _reference(model)
            for auto, model in hf_models.AUTO_CLASSES[config_class].items()
        },
    }
    write_json(path, config)
    _map_processors(folder)
    _change_card(folder, config)


def _map_processors(folder: Path) -> None:
    """Names the code of this package's feature extractor and tokenizer in files that use them."""
    extractors = (hf_models.CapeSpeechFeatureExtractor, hf_models.CapeWhisperFeatureExtractor)
    for name in ("processor_config.json", "preprocessor_config.json"):
        with editing_json(folder / name) as saved:
            settings = saved.get("feature_extractor", saved)
            for extractor in extractors:
                if settings.get("feature_extractor_type") == extractor.__name__:
                    settings["auto_map"] = {"AutoFeatureExtractor": _reference(extractor)}
    tokenizer = hf_models.CapeSpeechTokenizer
    with editing_json(folder / "tokenizer_config.json") as saved:
        if saved.get("tokenizer_class") == tokenizer.__name__:
            saved["auto_map"] = {"AutoTokenizer": [_reference(tokenizer), None]}


def _change_card(folder: Path, config: dict[str, Any]) -> None:
    """Updates the loading instructions in a model card that has not been edited."""
    path, settings = folder / "README.md", config["position_embedding"]
    name = (config.get("architectures") or [""])[0]
    autos = [
        auto for auto, reference in config["auto_map"].items() if reference.endswith(f".{name}")
    ]
    if name and autos and path.is_file():
        text = path.read_text(encoding="utf-8")
        if text == model_card(name, settings):
            path.write_text(model_card(name, settings, autos[0]), encoding="utf-8")


def _flat_name(module: str) -> str:
    return module.removesuffix(".__init__").replace(".", "_")


def _flattened(match: re.Match[str]) -> str:
    indent, module = match.groups()
    return f"{indent}from .{_flat_name(module)} import "


def _reference(cls: type) -> str:
    return f"{_flat_name(cls.__module__)}.{cls.__name__}"
