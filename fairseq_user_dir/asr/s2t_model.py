"""fairseq's Speech2Text Transformer with any position embedding.

Stock checkpoints can be loaded: encoder steps are counted as in the stock model, from ``padding_idx
+ 1`` on, and settings in seconds are converted to encoder steps. The decoder has separate flags
(``--position-decoder-embedding`` and others). Without these flags the decoder has the type of the
encoder, with the defaults for text. CAPE (Appendix C.5) uses one decoder with relative positions
for all encoders.
"""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import lengths_to_padding_mask
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.speech_to_text.s2t_transformer import (
    S2TTransformerEncoder,
    S2TTransformerModel,
)
from torch import Tensor

from cape_plugins import PositionConfig, build_position_encoder
from cape_plugins.speech.features import HOP_SECONDS
from cape_plugins.speech.subsampling import ConvSubsampler
from fairseq_user_dir.asr.positions import TimedEncoder, TimedModel, encoder_output
from fairseq_user_dir.attention import add_positions_to_attention
from fairseq_user_dir.checkpoints import PositionalModel
from fairseq_user_dir.flags import (
    add_decoder_args,
    add_position_args,
    config_from_args,
    decoder_config_from_args,
    set_args,
    set_missing,
)
from fairseq_user_dir.models import check_stock_args, install, stock_values
from fairseq_user_dir.stacks import DecoderPositions

logger = logging.getLogger(__name__)

NAME, STOCK = "cape_s2t_transformer", "s2t_transformer"
ABSPOS_FRAMES = 1500


@register_model(NAME)
class CapeS2TTransformerModel(TimedModel, PositionalModel, S2TTransformerModel):
    """Recognition or translation of speech with encoder and decoder."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Adds the stock arguments and the position flags of both sides."""
        S2TTransformerModel.add_args(parser)
        add_position_args(parser, "audio", architecture="encoder")
        add_decoder_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> CapeS2TTransformerModel:
        """See fairseq.

        Raises:
            ValueError: for settings that are not allowed; names flag, value, range and remedy.
        """
        config = config_from_args(args, "encoder", "audio")
        text = decoder_config_from_args(args)
        check_stock_args(args, text)
        set_args(args, **stock_values(text, "decoder"))
        model = super().build_model(args, task)
        install(model.decoder, DecoderPositions, text, "target")
        model.position_config = config
        return model

    @classmethod
    def build_encoder(cls, args: Any) -> S2TTransformerEncoder:
        """The stock encoder with stock convolutions and layers, and with cape positions. Then loads
        ``--load-pretrained-encoder-from``, positions included."""
        encoder = S2TTransformerEncoder(args)
        encoder.__class__ = CapeS2TEncoder
        encoder.take_over(args, config_from_args(args, "encoder", "audio"))
        path = getattr(args, "load_pretrained_encoder_from", None)
        if path is None:
            return encoder
        if not os.path.exists(path):  # as when a trained model is loaded on another machine
            logger.warning("%s does not exist; the encoder is not initialised from it", path)
            return encoder
        return checkpoint_utils.load_pretrained_component_from_model(encoder, path)


class CapeS2TEncoder(TimedEncoder, S2TTransformerEncoder):
    """The stock encoder with positions in time."""

    def take_over(self, args: Any, config: PositionConfig) -> None:
        """Puts cape positions into a built stock encoder."""
        if self.conv_version != "s2t_transformer":
            raise ValueError(
                f"--conv-version {self.conv_version} is not allowed with {NAME}; allowed: "
                "s2t_transformer, whose outputs have a place in time."
            )
        stock = self.subsample
        layers = [(conv.kernel_size[0], conv.stride[0]) for conv in stock.conv_layers]
        self.subsample = ConvSubsampler((), layers, stock.conv_layers)
        self.positions = build_position_encoder(
            config,
            args.encoder_embed_dim,
            start=self.padding_idx + 1,
            unit=HOP_SECONDS * self.subsample.stride,
            frequencies="fairseq",
            layout="sin_cos_blocks",
            table_size=ABSPOS_FRAMES,
            table_std=0.02,
        )
        self.embed_positions = None
        self.position_config = config
        self.stack_attention = add_positions_to_attention(
            self.transformer_layers, config, self.positions
        )

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        return_all_hiddens: bool = False,
        hop_nanoseconds: Tensor | None = None,
        frame_nanoseconds: Tensor | None = None,
    ) -> dict[str, Any]:
        """See fairseq.

        Args:
            src_tokens: Features ``[B, T, bins]``, padded on the right.
            src_lengths: ``[B]`` frames.
            return_all_hiddens: Whether to return the outputs of all layers as well.
            hop_nanoseconds: ``[B]`` distance between frames; default 10 ms.
            frame_nanoseconds: ``[B, T]`` centre of each frame, if frames were skipped.
        """
        frozen = self.num_updates < self.encoder_freezing_updates
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return self._encode(
                src_tokens, src_lengths, return_all_hiddens, hop_nanoseconds, frame_nanoseconds
            )

    def _encode(
        self,
        features: Tensor,
        lengths: Tensor,
        return_all_hiddens: bool,
        hop_nanoseconds: Tensor | None,
        frame_nanoseconds: Tensor | None,
    ) -> dict[str, Any]:
        hidden, lengths = self.subsample.subsample(features, lengths)
        hidden = self.embed_scale * hidden
        mask, states = lengths_to_padding_mask(lengths), []
        times = (hop_nanoseconds, frame_nanoseconds)
        with self.add_times(hidden, lengths, *times) as (hidden, draw):
            hidden = self.dropout_module(hidden).transpose(0, 1)
            for layer in self.transformer_layers:
                hidden = layer(hidden, mask)
                if return_all_hiddens:
                    states.append(hidden)
        if self.layer_norm is not None:
            hidden = self.layer_norm(hidden)
        return encoder_output(hidden, mask, draw, states)


def _architecture(stock: Any) -> Any:
    def arch(args: Any) -> None:
        set_missing(args)
        stock(args)

    return arch


for _arch in ARCH_MODEL_INV_REGISTRY[STOCK]:
    _function = _architecture(ARCH_CONFIG_REGISTRY[_arch])
    register_model_architecture(NAME, f"cape_{_arch}")(_function)
