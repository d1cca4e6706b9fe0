"""The README of a folder for ONNX Runtime: inputs and outputs, conventions, and a complete
program."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cape_plugins.serving.templates import fill
from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.seams.video import VideoSeam
from hf_models.serving.source_folder import banned_tokens, listed

TEMPLATE = Path(__file__).with_name("onnx.md")
LONGEST = 256  # tokens that the program generates at most
Ports = Sequence[tuple[str, str, Sequence[Any]]]


class Described(NamedTuple):
    """A file as ONNX Runtime sees it: name, type and axes of inputs and outputs."""

    file: str
    inputs: Ports
    outputs: Ports

    @property
    def names(self) -> list[str]:
        """Names of the inputs."""
        return [name for name, _, _ in self.inputs]


def readme(model: Any, files: Sequence[Described], opset: int) -> str:
    """Markdown for the folder of a model.

    Args:
        model: The exported model.
        files: Graphs of the model.
        opset: Version of the operators.
    """
    settings = (
        f"{name} = `{json.dumps(getattr(model.config, name), sort_keys=True)}`"
        for name in model.config.position_fields
    )
    first, *others = files
    generates = "cache_mask" in first.names or bool(others)
    names, axes = {*first.names}, {name: axes for name, _, axes in first.inputs}
    # [batch, frames, channels, height, width]
    video = next((name for name, sizes in axes.items() if len(sizes) == 5), None)
    images, recordings = "pixel_values" in names and not video, "input_features" in names
    texts, sounds = "input_ids" in names and not generates, "input_values" in names
    values = {
        "images": images and not texts,
        "video": video,
        "ctc": recordings and not generates,
        "texts": texts and not images,
        "texts_and_images": texts and images,
        "sounds": sounds,
        "generates": generates,
    }
    if images:
        values |= _of_example(axes["pixel_values"])
    if video:
        values |= _of_example(axes[video], frames=16)
        (seam, *_) = (module for module in model.modules() if isinstance(module, VideoSeam))
        values["tubelet"] = " x ".join(map(str, seam.kernel))
    if sounds:
        values |= _of_example(axes["input_values"], frames=300)
    if recordings:
        values |= _of_frames(model, first)
    if generates:
        values |= _of_search(model)
        values |= {"language_model": not others, "decoder": files[-1].file}
        values["source_of_frames"] = recordings
        values["source_of_tokens"] = not recordings and bool(others)
    return fill(
        TEMPLATE,
        model=type(model).__name__,
        opset=opset,
        settings="; ".join(settings),
        tables="\n\n".join(map(_table, files)),
        file=first.file,
        **values,
    )


def _table(description: Described) -> str:
    """Inputs and outputs of a file; all layers are alike and share one row."""
    rows = [f"| `{description.file}` | name | type | axes |", "|---|---|---|---|"]
    for direction, ports in (("takes", description.inputs), ("gives", description.outputs)):
        for name, dtype, axes in ports:
            layer = re.search(r"_(\d+)_(?=key|value)", name)
            if layer and layer[1] != "0":
                continue
            shown_name = f"`{name.replace('_0_', '_N_')}`"
            if layer:
                shown_name += " of layer N = 0, 1, ..."
            rows.append(f"| {direction} | {shown_name} | {dtype} | [{', '.join(map(str, axes))}] |")
    return "\n".join(rows)


def _of_example(axes: Sequence[Any], **sizes: int) -> dict[str, Any]:
    """The axes of an image, video or sound in words, and a shape that the graph takes, for the
    program."""
    sizes |= {"height": 96, "width": 128}
    shape = tuple(sizes.get(axis, axis) for axis in axes[1:])
    return {"shape": ", ".join(map(str, axes[1:])), "example": shape}


def _of_frames(model: Any, file: Described) -> dict[str, Any]:
    """Values of a model of recordings."""
    config = model.config
    bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    values = {
        "hop": round(config.hop_seconds * 1e9),
        "bins": bins,
        "blank": config.pad_token_id,
        "masked": "attention_mask" in file.names,
    }
    if model.can_generate() and isinstance(model.get_encoder(), NaturalLengthEncoder):
        return {**values, "axes": f"1, {bins}, frames", "example": (1, bins, 100), "time": 2}
    return {**values, "axes": f"1, frames, {bins}", "example": (1, 100, bins), "time": 1}


def _of_search(model: Any) -> dict[str, Any]:
    """Values of a model that generates."""
    settings = model.generation_config
    never, not_first = banned_tokens(settings)
    ends = listed(settings.eos_token_id)
    values = {
        "ends": ends,
        "end_set": {*ends},
        "longest": LONGEST,
        "left_out": _left_out(settings),
        "never": never,
        "not_first": not_first,
    }
    if model.config.is_encoder_decoder:
        values["prompt"] = first_tokens(model)
        values["eos"] = next(iter(listed(model.config.eos_token_id)), None)
        values["hint"] = getattr(model.get_encoder(), "has_hint", False)
    return values


def first_tokens(model: Any) -> list[int]:
    """Beginning of a target: the start token, and the tokens of language and task."""
    settings = model.generation_config
    starts = (settings.decoder_start_token_id, model.config.decoder_start_token_id)
    (start, *_) = listed(next(token for token in starts if token is not None))
    tokens = [start, *listed(settings.forced_bos_token_id)]
    languages = getattr(settings, "lang_to_id", None)
    if languages and getattr(settings, "is_multilingual", False):
        language = getattr(settings, "language", None)
        candidates = (languages.get(name) for name in (language, f"<|{language}|>", "<|en|>"))
        first_language = min(languages.values())
        tokens.append(next((token for token in candidates if token is not None), first_language))
        tokens.append(settings.task_to_id[getattr(settings, "task", None) or "transcribe"])
    return [*tokens, *listed(getattr(settings, "no_timestamps_token_id", None))]


# Settings that change the result and that a greedy program of ten lines lacks.
_MORE = (
    "num_beams",
    "do_sample",
    "min_length",
    "min_new_tokens",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "sequence_bias",
    "exponential_decay_length_penalty",
    "forced_decoder_ids",
)


def _left_out(settings: Any) -> str:
    """Settings of generation that the program does not apply, in words."""
    values = {name: getattr(settings, name, None) for name in _MORE}
    not_applied = [f"{name}={value}" for name, value in values.items() if value not in (None, 0, 1)]
    if not not_applied:
        return ""
    return f", except that generation_config.json has {', '.join(not_applied)}, which it leaves out"
