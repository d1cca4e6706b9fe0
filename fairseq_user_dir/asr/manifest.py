"""Reads recordings for fairseq's commands: manifests in a data folder, paths (one a line), and the
configuration file of fairseq's speech_to_text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml
from tqdm import tqdm

from cape_plugins.speech import manifest
from cape_plugins.speech.manifest import Unusable, Utterance, measured
from cape_plugins.utils.texts import read_text

logger = logging.getLogger(__name__)

_REMEDY = (
    " Give the data folder with train.tsv, valid.tsv ... (columns audio and tgt_text), and name "
    "other manifests by --gen-subset or --valid-subset. Training and validation need texts; "
    "recordings without texts are transcribed by fairseq-generate and fairseq-interactive."
)
_KEYS = ("vocab_filename", "audio_root", "input_feat_per_channel")


def read_manifest(path: str, audio_root: str | None = None, texts: bool = True) -> list[Utterance]:
    """Reads the usable lines of a manifest, see :func:`cape_plugins.speech.manifest.read_manifest`.
    Errors name the flags of fairseq."""
    bar = partial(tqdm, desc=os.path.basename(path), leave=False, delay=2, disable=None)
    try:
        return manifest.read_manifest(path, audio_root, texts, bar)
    except ValueError as error:
        raise ValueError(f"{error}{_REMEDY}") from None


def named_recordings(paths: Sequence[str]) -> list[Utterance]:
    """Recordings without texts, from paths relative to the current folder. Recordings that cannot
    be used are reported and get a duration of 0, with which :class:`SpeechDataset` leaves them
    out."""
    recordings = []
    for number, path in enumerate(paths):
        recording = Utterance(str(number), path.strip(), "")
        try:
            recordings.append(measured(recording, texts=False))
        except Unusable as error:
            logger.warning("skipped, %s: %s", error.reason, error)
            recordings.append(recording._replace(seconds=0.0))
    return recordings


def read_config(folder: str, name: str = "config.yaml") -> dict[str, Any]:
    """Settings from the configuration of fairseq's S2T data, if there is one: `vocab_filename`,
    `audio_root`, `input_feat_per_channel` and the sentencepiece model. A warning names all other
    settings of the file."""
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        return {}
    config = yaml.safe_load(read_text(path)) or {}
    settings = {key: config.pop(key) for key in _KEYS if key in config}
    bpe = config.get("bpe_tokenizer") or {}
    if bpe.get("bpe") == "sentencepiece":
        model = config.pop("bpe_tokenizer")["sentencepiece_model"]
        settings["subword_model"] = os.path.join(folder, model)
    if config:
        logger.warning(
            "%s: %s not used; recordings become log-mel features, normalised by recording, "
            "and are masked by the flags of the task",
            path,
            ", ".join(sorted(config)),
        )
    return settings
