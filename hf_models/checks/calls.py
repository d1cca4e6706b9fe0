"""Inputs for any stock model, by the names of the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_models.checks.samples import Samples, pad_token
from hf_models.checks.sizes import PATCHES

BATCH, LENGTH, TARGETS = 2, 9, 5  # samples, tokens, tokens of the decoder
PADDING = 3  # tokens of the second sample that are padding in a padded batch
SIDES = ("right", "left")
_WORDS = (10, 90)  # ids that are no special tokens in small configurations
_FRAMES = 64
_WAVE = 4000
_IMAGE = 32
Batch = dict[str, Tensor]


class _Model(NamedTuple):
    """The sources of inputs for a model.

    Attributes:
        config: Configuration of the model.
        form: Number of the form, for inputs that have several forms.
        generator: Random numbers.
    """

    config: Any
    form: int
    generator: torch.Generator

    def part(self, *names: str) -> Any:
        """Configuration of the first of these parts that the model has; without one, the
        configuration of the whole model."""
        parts = (getattr(self.config, name, None) for name in names)
        return next(filter(None, parts), self.config)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=self.generator)

    def words(self, length: int) -> Tensor:
        return torch.randint(*_WORDS, (BATCH, length), generator=self.generator)


def calls_of(model: Any) -> Iterator[Batch]:
    """Inputs to try, in order; the caller skips inputs for which the stock model raises an error.
    The first inputs are the main input and the arguments without a default, the later ones all
    known arguments. Sounds, images and series have several forms."""
    arguments = dict(inspect.signature(type(model).forward).parameters)
    needed = [model.main_input_name]
    needed += [name for name, row in arguments.items() if row.default is row.empty]
    needed += [name for name in _COMPANIONS if not _COMPANIONS[name].isdisjoint(needed)]
    for names in (needed, arguments):
        for form in range(_FORMS):
            source = _Model(model.config, form, torch.Generator().manual_seed(3))
            makers = {
                name: _MAKERS[name] for name in names if name in arguments and name in _MAKERS
            }
            try:
                batch = {name: make(source) for name, make in makers.items()}
            except (AttributeError, TypeError):  # the configuration lacks what this form needs
                continue
            if batch := {name: value for name, value in batch.items() if value is not None}:
                yield batch


def padded(model: Any, batch: Mapping[str, Tensor], side: str) -> Batch | None:
    """The batch with padding in the second sample, and a mask; None if the model takes no mask or
    no tokens.

    Args:
        model: A stock model, or a model of this package.
        batch: Inputs without padding.
        side: "right" or "left".
    """
    names = inspect.signature(type(model).forward).parameters
    if "attention_mask" not in names or "input_ids" not in batch:
        return None
    mask = torch.ones_like(batch["input_ids"])
    mask[1, slice(-PADDING, None) if side == "right" else slice(PADDING)] = 0
    pad = pad_token(getattr(model.config, "text_config", model.config))
    ids = batch["input_ids"].masked_fill(mask == 0, max(0, pad))
    return {**batch, "input_ids": ids, "attention_mask": mask}


def unpadded(model: Any, batch: Mapping[str, Tensor]) -> Samples:
    """The samples of :func:`padded` alone, without their padding."""
    texts = {name for name, value in batch.items() if value.shape[1] == LENGTH}
    rows = [
        {name: value[number : number + 1] for name, value in batch.items()} for number in (0, 1)
    ]
    for name in texts:
        rows[1][name] = rows[1][name][:, :-PADDING]
    pad = max(0, pad_token(getattr(model.config, "text_config", model.config)))
    return Samples(rows, {name: pad if name == "input_ids" else 0 for name in texts})


def _image(model: _Model) -> Tensor:
    if model.form == _PACKED_FORM:
        return _padded_patches(model)
    sizes = model.part("vision_config", "backbone_config", "encoder")
    size = getattr(sizes, "image_size", None) or _IMAGE
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = () if model.form == 0 else (sizes.num_frames,)
    return model.numbers(*frames, getattr(sizes, "num_channels", 3), height, width)


def _video(model: _Model) -> Tensor:
    sizes = model.part("vision_config")
    size = getattr(sizes, "crop_size", None) or getattr(sizes, "image_size", _IMAGE)
    return model.numbers(getattr(sizes, "frames_per_clip", 4), 3, size, size)


def _wave(model: _Model) -> Tensor:
    if model.form == 0:
        return model.numbers(_WAVE)
    return model.numbers(model.config.max_length, model.config.num_mel_bins)


def _spectrum(model: _Model) -> Tensor:
    sizes = model.part("encoder_config", "audio_config")
    bins = getattr(sizes, "num_mel_bins", 80)
    if model.form == 0:
        return model.numbers(_FRAMES, bins)
    if model.form == 1:
        return model.numbers(bins, 2 * getattr(sizes, "max_source_positions", _FRAMES))
    return model.numbers(1, sizes.spec_size * (sizes.spec_size // bins), bins)


def _series_length(model: _Model) -> int:
    config = model.config
    return config.context_length + max(getattr(config, "lags_sequence", None) or [0])


def _series(model: _Model) -> Tensor:
    if model.form == 0:
        return model.numbers(_series_length(model))
    return model.numbers(model.config.context_length, model.config.num_input_channels)


def _boxes(model: _Model) -> Tensor:
    boxes = torch.randint(0, 30, (BATCH, LENGTH, 1), generator=model.generator)
    return boxes.expand(-1, -1, 4).contiguous()  # equal corners, as in special tokens


def _packed_patches(model: _Model) -> Tensor:
    """``[patches of all images, numbers of a patch]``."""
    config = model.config
    channels = getattr(config, "in_channels", getattr(config, "in_chans", 3))
    times = getattr(config, "temporal_patch_size", 1)
    numbers = channels * times * config.patch_size**2
    return torch.randn(BATCH * PATCHES**2, numbers, generator=model.generator)


def _padded_patches(model: _Model) -> Tensor:
    """``[B, patches, numbers of a patch]``, patches of images of different sizes."""
    sizes = model.part("vision_config")
    return model.numbers(_patches_of(sizes), sizes.num_channels * sizes.patch_size**2)


def _patches_of(sizes: Any) -> int:
    """Patches of a packed image in a batch; raises AttributeError where patches are not packed."""
    return min(sizes.num_patches, PATCHES**2)


def _patch_mask(model: _Model) -> Tensor:
    """``[B, patches]``, 0 on padding."""
    shapes = _image_shapes(model)
    length = _patches_of(model.part("vision_config"))
    return (torch.arange(length) < shapes.prod(1, keepdim=True)).long()


def _image_shapes(model: _Model) -> Tensor:
    """``[B, 2]``, rows and columns of patches; the second image has fewer patches."""
    if model.form != _PACKED_FORM:
        raise TypeError("only packed images have sizes")
    _patches_of(model.part("vision_config"))
    return torch.tensor([[PATCHES, PATCHES], [PATCHES // 2, PATCHES + 1]])


_FORMS = 3
_PACKED_FORM = 2
# Makes an input; raises AttributeError or TypeError if the configuration has no such form.
_MAKERS: dict[str, Callable[[_Model], Tensor | None]] = {
    "input_ids": lambda model: model.words(LENGTH),
    "decoder_input_ids": lambda model: model.words(TARGETS),
    "bbox": _boxes,
    "pixel_values": _image,
    "pixel_attention_mask": _patch_mask,
    "spatial_shapes": _image_shapes,
    "pixel_values_videos": _video,
    "input_values": _wave,
    "input_features": _spectrum,
    "query_embeds": lambda model: model.numbers(PATCHES, model.config.hidden_size),
    "grid_thw": lambda _: torch.tensor([[1, PATCHES, PATCHES]] * BATCH),
    "hidden_states": _packed_patches,
    "visual_feats": lambda model: model.numbers(PATCHES, model.config.visual_feat_dim),
    "visual_pos": lambda model: torch.rand(BATCH, PATCHES, 4, generator=model.generator),
    "past_values": _series,
    "past_time_features": lambda model: model.numbers(
        _series_length(model), model.config.num_time_features
    ),
    "past_observed_mask": lambda model: torch.ones(BATCH, _series_length(model)),
    "future_values": lambda model: model.numbers(model.config.prediction_length),
    "future_time_features": lambda model: model.numbers(
        model.config.prediction_length, model.config.num_time_features
    ),
}
# Inputs that a model with one of the other inputs needs, although they have a default.
_COMPANIONS = {
    "decoder_input_ids": {"input_ids", "input_features", "input_values"},
    "bbox": {"input_ids"},
    "future_values": {"past_values"},
    "future_time_features": {"past_values"},
}
