"""Whisper's stacks at the natural length of recordings: any number of frames, padding masked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from cape_plugins import Draw
from hf_models.host import drops_layer
from hf_models.seams.attention import add_positions_to_attention
from hf_models.seams.frames import (
    Frames,
    add_positions,
    attention_arguments,
    check_mask,
    check_seconds,
    hop_in_seconds,
    values_to_check,
)
from hf_models.seams.speech import MaskedOutput, RecognitionModel
from hf_models.switching.install import PositionHost, PositionSlot
from hf_models.switching.modeling import (
    InitializesPositions,
    build_positions,
    draw_positions,
)

STRIDE = 2  # frames per position of the encoder
# Weights of whole models in the folder of which an encoder alone is loaded.
_IN_WHOLE_MODELS = {r"^(?:model\.)?encoder\.": ""}
_BESIDE_ENCODER = {r"^(?:model\.)?decoder\.", r"^(?:proj_out|projector|classifier)\."}
_ROUNDING = 5e-3  # rounding of sinusoids stored in half precision
# Turn masks, 1 at frames and 0 on padding, into the numbers that transformers would add to scores:
# 0 at frames; on padding the least number (eager) or -inf (sdpa). A stack computes the numbers
# once; given a boolean mask, sdpa would compute them in each layer.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "eager": lambda valid: (valid - 1) * torch.finfo(valid.dtype).max,
    "sdpa": torch.log,
}


class NaturalLengthSettings:
    """Mixin over a configuration with the fields `natural_length` and `hop_seconds`."""

    def validate_natural_length(self) -> None:
        """Part of strict validation."""
        check_seconds(self, "hop_seconds")
        if self.natural_length not in (None, True, False):
            raise ValueError(
                f"natural_length={self.natural_length!r} is not allowed; allowed: true, false, or "
                "null for what fits the type of position embedding."
            )

    @property
    def at_natural_length(self) -> bool:
        """`natural_length`; by default true, except for the type of the stock model."""
        if self.natural_length is None:
            return self.position_embedding["type"] != self.stock_type("encoder")
        return self.natural_length

    @property
    def stock_difference(self) -> str:
        """See :class:`~hf_models.switching.configuration.PositionEmbeddingMixin`."""
        difference = "padding: masked where a mask is given, and no longer added up to 30 s"
        return difference if self.at_natural_length else ""


class NaturalLengthEncoder(PositionHost, InitializesPositions):
    """Mixin over Whisper's encoder, for recordings of any length. The forward of the encoder is the
    only stock forward that this package rewrites: Whisper's forward refuses all but 3000 frames,
    cuts its table to 3000 frames and takes no mask. This class therefore has to follow changes in
    transformers; a test compares both forwards bit for bit, in outputs and three updates.

    Attributes:
        alone: Whether the encoder is the outermost model, so that it has to draw for its forward.
    """

    alone: bool = False

    def finish(self) -> None:
        """See :class:`~hf_models.switching.modeling.PositionModelMixin`, which calls this method of
        an outermost model only."""
        super().finish()
        self.alone = True
        ignored = self._keys_to_ignore_on_load_unexpected or ()
        self._keys_to_ignore_on_load_unexpected = {*ignored, *_BESIDE_ENCODER}

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See transformers. A folder of a whole model gives the encoder in it."""
        names = {**_IN_WHOLE_MODELS, **(kwargs.pop("key_mapping", None) or {})}
        return super().from_pretrained(*args, key_mapping=names, **kwargs)

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`; the stock sinusoids are not
        kept."""
        rows = self.max_source_positions
        self.positions = build_positions(config, "encoder", rows, config.init_std)
        if trained:  # transformers makes the sinusoids of a loaded model trainable
            table = self.embed_positions.weight.detach().float()
            change = (table - sinusoids(*table.shape).to(table)).abs().max().item()
            if change > _ROUNDING:
                warnings.warn(
                    f"the sinusoids of the encoder were changed by training, by up to "
                    f"{change:.3g}; the new model has exact sinusoids, and other outputs until "
                    "it is fine-tuned",
                    stacklevel=2,
                )
        self.embed_positions = PositionSlot()
        self.stack_positions = add_positions_to_attention(
            (layer.self_attn for layer in self.layers), config.position_config, self.positions
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is not self:  # stock code writes sinusoids into the table of the encoder
            super()._init_weights(module)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedOutput:
        """Encodes frames. In another model the encoder augments only if it gets a `draw`; alone it
        draws in training mode.

        Args:
            input_features: ``[B, bins, T]``, padded on the right, perhaps with the mask as one more
                bin.
            attention_mask: ``[B, T]``, 0 on padding; without effect unless at natural length.
            hop_nanoseconds: See :meth:`hf_models.seams.speech.SpeechEncoder.forward`, also for the
                other arguments.
        """
        features, mask = split_mask(input_features, attention_mask, self.config, self.training)
        if draw is None and self.alone:
            draw = draw_positions(self.positions, features)
        if mask is not None:  # the first frame always counts, so that no sample is all padding
            mask = F.pad(mask[:, 1:].ne(0), (1, 0), value=True)
            # values on padding must not reach the last frames through a kernel
            features = features * mask[:, None]
        hidden = F.gelu(self.conv1(features))
        if mask is not None:
            hidden = hidden * mask[:, None]
            mask = mask[:, ::STRIDE]
        hidden = F.gelu(self.conv2(hidden)).permute(0, 2, 1)
        batch, length, _ = hidden.shape
        hop = hop_in_seconds(hop_nanoseconds, self.config.hop_seconds, batch, self.training)
        if mask is None:
            lengths = torch.full((batch,), length, device=features.device)
        else:
            lengths = mask.sum(-1)
        frames = Frames(lengths, hop, frame_nanoseconds, draw)
        hidden = add_positions(self.positions, hidden, frames, STRIDE)
        if self.stack_positions is not None:
            kwargs |= attention_arguments(self, frames, length, STRIDE)
        hidden = F.dropout(hidden, self.dropout, self.training)
        visible = None
        if mask is not None:
            visible = attention_mask_of(mask, self.config, hidden, self.training)
        for layer in self.layers:
            if not drops_layer(self):
                hidden = layer(hidden, visible, **kwargs)
        return MaskedOutput(self.layer_norm(hidden), attention_mask=mask)


class MaskedDecoderLayer:
    """Mixin over a layer of Whisper's decoder: takes a mask of the recording."""

    def __call__(self, *args: Any, cross_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See transformers. Stock code passes no mask to `forward`, so this method adds one."""
        kwargs["encoder_attention_mask"] = cross_mask
        return super().__call__(*args, **kwargs)


class MaskedDecoder:
    """Mixin over Whisper's decoder: takes a mask of the recording."""

    adds = ("encoder_attention_mask",)  # argument that the stock forward lacks

    def forward(self, encoder_attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """See transformers. The mask is ``[B, T']``; :class:`TargetStack` calls this forward with
        all inputs by name."""
        if encoder_attention_mask is not None:
            embeds, states = inputs["inputs_embeds"], inputs["encoder_hidden_states"]
            content = inputs["input_ids"] if embeds is None else embeds
            inputs["cross_mask"] = attention_mask_of(
                encoder_attention_mask, self.config, states, self.training, content
            )
        return super().forward(**inputs)


def attention_mask_of(
    valid: Tensor, config: Any, states: Tensor, training: bool, queries: Tensor | None = None
) -> Tensor | None:
    """Mask that hides padding from attention, in the form that the attention of a model takes.

    Args:
        valid: ``[B, S]`` bool, False on padding.
        config: Configuration of the model.
        states: ``[B, S, C]``, states that are attended to.
        training: Whether a step of training runs. transformers checks whether anything is padded,
            and each step would wait for the GPU.
        queries: ``[B, T, ...]`` of a decoder; default `states`.
    """
    if training and config._attn_implementation in _SCORES:
        scores = _SCORES[config._attn_implementation](valid.to(states.dtype))
        return scores[:, None, None]
    queries, states = (states, None) if queries is None else (queries, states)
    return create_bidirectional_mask(config, queries, valid, states)


def split_mask(
    features: Tensor, attention_mask: Tensor | None, config: Any, training: bool
) -> tuple[Tensor, Tensor | None]:
    """Splits features ``[B, bins, T]`` from their mask ``[B, T]``, 0 on padding, which may be one
    more bin (:func:`join_mask`). The mask is None if padding is not masked.

    Raises:
        ValueError: if features or mask have another shape.
    """
    bins, shape = config.num_mel_bins, tuple(features.shape)
    if features.dim() != 3 or shape[1] not in (bins, bins + 1) or 0 in shape:
        raise ValueError(
            f"input_features has shape {shape}; allowed: [batch, {bins}, frames], at least one "
            "frame. Give what the feature extractor of this model returned."
        )
    if shape[1] > bins:
        mask = features[:, bins]
        values = values_to_check(mask, training)
        if values is not None and not ((values == 0) | (values == 1)).all():
            raise ValueError(
                f"input_features has {shape[1]} bins, and the last is no mask; allowed: {bins}. "
                "Give what the feature extractor of this model returned."
            )
        return features[:, :bins], mask
    if attention_mask is None or not config.at_natural_length:
        return features, None
    check_mask(attention_mask, shape[0], shape[2], training)
    return features, attention_mask


def join_mask(features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns features ``[B, bins, T]`` with their mask ``[B, T]`` as one more bin, for stock code
    that cuts, picks and repeats features but not masks; and the mask as integers, by default 1."""
    mask = features.new_ones(features[:, 0].shape) if mask is None else mask
    return torch.cat((features, mask[:, None].to(features)), dim=1), mask.long()


class RecognisesRecordings(RecognitionModel):
    """Mixin over Whisper's model of encoder and decoder."""

    def frames_to_augment(self, features: Tensor, mask: Tensor | None) -> Tensor | None:
        """Frames masked with SpecAugment; None if the features hold a mask, as in generate()."""
        frames, mask = split_mask(features, mask, self.config, self.training)
        if frames.shape != features.shape:
            return None
        room = frames.shape[2] >= self.config.mask_time_length  # for one masked span
        return self._mask_input_features(frames, mask) if room else frames


class ClassifiesRecordings:
    """Mixin over Whisper's classifier: padding does not count in the mean over time."""

    adds = ("attention_mask",)  # argument that the stock forward lacks

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        encoder_outputs: Any | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        draw: Draw | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers; `draw` and other arguments as in
        :meth:`NaturalLengthEncoder.forward`."""
        if encoder_outputs is None:
            if draw is None:
                draw = draw_positions(self.encoder.positions, input_features)
            if self.config.use_weighted_layer_sum:
                kwargs["output_hidden_states"] = True
            encoder_outputs = self.encoder(
                input_features,
                attention_mask,
                hop_nanoseconds,
                draw,
                frame_nanoseconds,
                return_dict=True,
                **kwargs,
            )
        mask = getattr(encoder_outputs, "attention_mask", None)
        if mask is None or (not self.training and mask.all()):  # all() makes a GPU wait
            return super().forward(None, encoder_outputs, labels, return_dict=True)
        last, states = encoder_outputs.last_hidden_state, encoder_outputs.hidden_states
        means = states and tuple(_mean(state, mask) for state in states)
        averaged = BaseModelOutput(last_hidden_state=_mean(last, mask), hidden_states=means)
        output = super().forward(None, averaged, labels, return_dict=True)
        output.hidden_states, output.attentions = states, encoder_outputs.attentions
        return output


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """``[B, 1, C]``, the mean over frames that are no padding. Stock code projects frames before
    it takes the mean; the order does not matter, because the projection is linear."""
    valid = mask[..., None].to(hidden.dtype)
    return (hidden * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)
