"""Inputs for models of any family and size: two samples of random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.switching.install import PARTS

LENGTHS = (9, 6)  # tokens of the two samples, if the table has enough rows
FRAMES = (50, 34)
_TARGETS = (7, 5)  # tokens of the transcripts
_MAIN = ("input_ids", "input_features")  # inputs that can be padded
_PICTURES = ("pixel_values", "pixel_values_videos")
_HIDDEN = "bool_masked_pos"  # argument that tells which tubelets are hidden from a model


class Samples(NamedTuple):
    """Inputs of a model.

    Attributes:
        rows: Each sample as a batch of one, without padding.
        padding: Padding value of each input; other inputs have one size.
        axis: Axis along which the main input is padded, not counting the batch.
    """

    rows: list[dict[str, Tensor]]
    padding: dict[str, float]
    axis: int = 0

    def batch(self, side: str = "right") -> dict[str, Tensor]:
        """All samples in one batch, with masks for padded inputs."""
        batch: dict[str, Tensor] = {}
        for name in self.rows[0]:
            rows = [row[name][0] for row in self.rows]
            if name in self.padding:
                axis = self.axis if name in _MAIN else 0
                mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
                ones = [torch.ones(row.shape[axis], dtype=torch.long) for row in rows]
                batch[mask] = _pad_and_stack(ones, side, 0)
                rows = [row.movedim(axis, 0) for row in rows]
                batch[name] = _pad_and_stack(rows, side, self.padding[name]).movedim(1, axis + 1)
            else:
                batch[name] = torch.stack(rows)
        return batch


def _pad_and_stack(rows: Sequence[Tensor], side: str, value: float) -> Tensor:
    """``[B, T, ...]`` of rows ``[t, ...]`` that are filled up on one side."""
    longest = max(map(len, rows))
    fillings = [row.new_full((longest - len(row), *row.shape[1:]), value) for row in rows]
    pairs = zip(rows, fillings, strict=True)
    return torch.stack([torch.cat(p if side == "right" else p[::-1]) for p in pairs])


def sample_inputs(model: Any, full_length: bool = True) -> Samples:
    """Two samples of random numbers for a model, in the form of the model's main input.

    Args:
        model: A stock model, or a model of this package.
        full_length: Whether recordings have the only length that a stock Whisper takes.

    Raises:
        ValueError: for a model with another main input than the families of this package.
    """
    generator = torch.Generator().manual_seed(1)
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        lengths = _text_lengths(config)
        rows = [{name: tokens(config, length, generator)} for length in lengths]
        padding, axis = {name: pad_token(config)}, 0
        targets: Sequence[int] = lengths  # classifiers look for EOS at source positions
    elif name in _PICTURES:
        shape = _picture(getattr(config, "vision_config", config))
        rows = [{name: torch.randn(shape, generator=generator)} for _ in LENGTHS]
        hidden = inspect.signature(type(model).forward).parameters.get(_HIDDEN)
        if hidden is not None and hidden.default is hidden.empty:
            rows = [{**row, _HIDDEN: _every_second_tubelet(config, shape)} for row in rows]
        return Samples(rows, {})
    elif name == "input_features":
        shapes, axis = _recordings(model, full_length)
        rows = [{name: torch.randn(shape, generator=generator)} for shape in shapes]
        padding = {name: 0.0} if len({*shapes}) > 1 else {}
        targets = _TARGETS
    else:
        raise ValueError(
            f"the main input of {type(model).__name__} is {name!r}; allowed: input_ids, "
            f"{', '.join(_PICTURES)}, input_features. For another input give "
            "inputs=hf_models.checks.samples.Samples(rows, padding)."
        )
    if config.is_encoder_decoder and takes_targets(model):
        for row, length in zip(rows, targets, strict=True):
            row["decoder_input_ids"] = tokens(config, length, generator)
            row["decoder_input_ids"][:, 0] = start_token(config)
        padding["decoder_input_ids"] = pad_token(config)
    return Samples(rows, padding, axis)


def _picture(sizes: Any) -> tuple[int, ...]:
    """Shape of an image, or of a video where the configuration has a number of frames."""
    size = getattr(sizes, "image_size", None) or sizes.crop_size
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(sizes, "num_channels", None) or sizes.in_chans
    frames = getattr(sizes, "num_frames", None) or getattr(sizes, "frames_per_clip", None)
    return (1, *([frames] if frames else []), channels, height, width)


def _every_second_tubelet(config: Any, shape: tuple[int, ...]) -> Tensor:
    """``[1, tubelets]``, the tubelets of a video of this shape that a model has to guess."""
    _, frames, _, height, width = shape
    side = config.patch_size
    tubelets = (frames // config.tubelet_size) * (height // side) * (width // side)
    return (torch.arange(tubelets) % 2 == 1)[None]


def _text_lengths(config: Any) -> tuple[int, int]:
    """:data:`LENGTHS`, or shorter lengths if the table of the model has too few rows."""
    longest = min(LENGTHS[0], getattr(config, "max_position_embeddings", None) or LENGTHS[0])
    return longest, max(1, LENGTHS[1] * longest // LENGTHS[0])


def _recordings(model: Any, full_length: bool) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of two recordings, and the axis of their frames, not counting the batch."""
    config = model.config
    parts = (PARTS.get(type(module), type(module)) for module in model.modules())
    if not any(issubclass(part, NaturalLengthEncoder) for part in parts):
        bins = getattr(config, "num_mel_bins", None)
        bins = bins or config.input_feat_per_channel * config.input_channels
        return [(1, frames, bins) for frames in FRAMES], 0
    # bins come first
    frames = 2 * config.max_source_positions  # the only length that a stock Whisper takes
    lengths = (frames, frames if full_length else 2 * frames // 3)
    return [(1, config.num_mel_bins, length) for length in lengths], 1


def takes_targets(model: Any) -> bool:
    """Whether the forward of a model takes the ids of its decoder."""
    return "decoder_input_ids" in inspect.signature(type(model).forward).parameters


def tokens(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """``[1, length]`` ids of words, EOS last."""
    special_tokens = {pad_token(config), *_special_tokens(config).values()}
    word_tokens = [token for token in range(config.vocab_size) if token not in special_tokens]
    word_tokens = word_tokens or [0]  # if all tokens are special
    ids = torch.randint(len(word_tokens), (1, length), generator=generator)
    ids = torch.tensor(word_tokens)[ids]
    if (end := _special_tokens(config).get("eos_token_id")) is not None:
        ids[:, -1] = end
    return ids


def _special_tokens(config: Any) -> Mapping[str, int | None]:
    """Ids of special tokens, by field; the first id of a field with several ids."""
    names = [name for name in vars(config) if name.endswith("_token_id")]
    values = {name: getattr(config, name) for name in names}
    return {name: v[0] if isinstance(v, list) and v else v for name, v in values.items()}


def pad_token(config: Any) -> int:
    """The padding token. Without one the token 0, because padding is masked."""
    token = _special_tokens(config).get("pad_token_id")
    return 0 if token is None else token


def start_token(config: Any) -> int:
    """The token that a decoder begins with."""
    tokens = _special_tokens(config)
    named = (tokens.get(f"{name}_token_id") for name in ("decoder_start", "bos", "eos"))
    return next((token for token in named if token is not None), pad_token(config))
