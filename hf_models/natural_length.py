"""Whisper's stacks at the natural length of recordings: any number of frames, padding masked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
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
from cape_plugins.speech.subsampling import subsampled_lengths, subsampled_positions
from hf_models.modeling import (
    InitializesPositions,
    build_positions,
    draw_positions,
    embed_positions,
)
from hf_models.relative import add_relative_positions
from hf_models.speech import hop_in_seconds
from hf_models.switching import Addend, Seam

CONVOLUTIONS = [(3, 1), (3, 2)]  # kernel size and stride
STRIDE = 2  # frames per position of the encoder
_ROUNDING = 5e-3  # rounding of sinusoids stored in half precision


@dataclass
class MaskedOutput(BaseModelOutput):
    """Output of the encoder, for the decoder with its mask.

    Attributes:
        attention_mask: ``[B, T']`` bool, False on padding; None if padding is not masked.
    """

    attention_mask: Tensor | None = None


class NaturalLengthEncoder(Seam, InitializesPositions):
    """Mixin over Whisper's encoder, for recordings of any length."""

    def take_place(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.Seam`; the stock sinusoids are not kept."""
        rows = self.max_source_positions
        self.positions = build_positions(config, "encoder", rows, config.init_std)
        if trained:  # transformers makes the sinusoids of a loaded model trainable
            table = self.embed_positions.weight.detach().float()
            change = (table - sinusoids(*table.shape).to(table)).abs().max().item()
            if change > _ROUNDING:
                warnings.warn(
                    f"the sinusoids of the encoder were changed by training, by up to "
                    f"{change:.3g}; the new model has exact ones and computes otherwise until it "
                    "is fine-tuned",
                    stacklevel=2,
                )
        self.embed_positions = Addend()
        add_relative_positions((layer.self_attn for layer in self.layers), config.position_config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is not self:  # stock writes sinusoids into its table
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
        """Encodes frames; not augmented without a `draw`, also in training mode.

        Args:
            input_features: ``[B, bins, T]``, padded on the right; or with the mask as one more bin.
            attention_mask: ``[B, T]``, 0 on padding; without effect unless at natural length.
            hop_nanoseconds: Distance of frames, a number or ``[B]`` integers; default that of the
                configuration.
            draw: Random numbers from :meth:`~cape_plugins.PositionEncoder.draw`.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, where some were skipped (:mod:`cape_plugins.speech.batching`).
        """
        features, mask = split_mask(input_features, attention_mask, self.config)
        batch, _, length = features.shape
        if mask is None:
            lengths = torch.full((batch,), length, device=features.device)
        else:  # values on padding must not reach the last frames through a kernel
            lengths = mask.long().sum(-1).clamp(min=1)
            mask = torch.arange(length, device=mask.device) < lengths[:, None]
            features = features * mask[:, None].to(features.dtype)
        hidden = F.gelu(self.conv1(features))
        if mask is not None:
            hidden = hidden * mask[:, None].to(hidden.dtype)
            mask = mask[:, ::STRIDE]
        hidden = F.gelu(self.conv2(hidden)).permute(0, 2, 1)
        hop = hop_in_seconds(hop_nanoseconds, self.config.hop_seconds, batch)
        lengths = subsampled_lengths(CONVOLUTIONS, lengths)
        positions = subsampled_positions(lengths, hidden.shape[1], STRIDE, hop, frame_nanoseconds)
        if draw is None and not self.training:  # of a type that draws in evaluation, too
            draw = draw_positions(self.positions, hidden)
        addend = embed_positions(self.positions, positions, draw, hidden)
        hidden = hidden if addend is None else hidden + addend
        hidden = F.dropout(hidden, self.dropout, self.training)
        visible = None
        if mask is not None:
            visible = create_bidirectional_mask(self.config, hidden, mask)
        for layer in self.layers:
            if not self.training or not self.layerdrop or torch.rand([]) >= self.layerdrop:
                hidden = layer(hidden, visible, **kwargs)
        return MaskedOutput(self.layer_norm(hidden), attention_mask=mask)


class MaskedDecoderLayer:
    """Mixin over a layer of Whisper's decoder: can be given a mask of the recording."""

    def __call__(self, *args: Any, cross_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See transformers; not in `forward`, because stock code gives no mask there."""
        kwargs["encoder_attention_mask"] = cross_mask
        return super().__call__(*args, **kwargs)


class MaskedDecoder:
    """Mixin over Whisper's decoder: takes a mask of the recording."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers; the mask is ``[B, T']``."""
        if encoder_attention_mask is not None:
            kwargs["cross_mask"] = create_bidirectional_mask(
                self.config,
                input_ids if inputs_embeds is None else inputs_embeds,
                encoder_attention_mask,
                encoder_hidden_states,
            )
        return super().forward(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


def split_mask(
    features: Tensor, attention_mask: Tensor | None, config: Any
) -> tuple[Tensor, Tensor | None]:
    """Features ``[B, bins, T]`` and their mask ``[B, T]`` bool, which may be one more bin; None
    where padding is not masked.

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
        return features[:, :bins], features[:, bins] > 0.5
    if attention_mask is None or not config.at_natural_length:
        return features, None
    if tuple(attention_mask.shape) != (shape[0], shape[2]):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: "
            f"{(shape[0], shape[2])}, [batch, frames] of input_features. Give the mask that the "
            "feature extractor returned with them."
        )
    return features, attention_mask.bool()


class ClassifiesRecordings:
    """Mixin over Whisper's classifier: padding does not count in its mean over time."""

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        encoder_outputs: Any | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        draw: Draw | None = None,
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
                input_features, attention_mask, draw=draw, return_dict=True, **kwargs
            )
        mask = getattr(encoder_outputs, "attention_mask", None)
        if mask is None or mask.all():
            return super().forward(None, encoder_outputs, labels, return_dict=True)
        output = super().forward(
            None,
            BaseModelOutput(
                last_hidden_state=_mean_on_padding(encoder_outputs.last_hidden_state, mask),
                hidden_states=encoder_outputs.hidden_states
                and tuple(_mean_on_padding(h, mask) for h in encoder_outputs.hidden_states),
            ),
            labels,
            return_dict=True,
        )
        output.hidden_states = encoder_outputs.hidden_states
        output.attentions = encoder_outputs.attentions
        return output


def _mean_on_padding(hidden: Tensor, mask: Tensor) -> Tensor:
    """``[B, T', C]`` whose mean over time is that of what is no padding."""
    valid = mask[..., None].to(hidden.dtype)
    mean = (hidden * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True)
    return torch.where(mask[..., None], hidden, mean)
