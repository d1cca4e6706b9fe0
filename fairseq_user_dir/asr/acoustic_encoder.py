"""The encoder of CAPE's acoustic model (Appendix C): log-mel frames, one convolution, positions in
time, Transformer layers. CTC (:mod:`~fairseq_user_dir.asr.ctc_model`) and a decoder
(:mod:`~fairseq_user_dir.asr.seq2seq_model`) read the same encoder."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder
from fairseq.modules import LayerDropModuleList, LayerNorm, TransformerEncoderLayer
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import Draw, PositionConfig, build_position_encoder
from cape_plugins.settings.arguments import positive
from cape_plugins.settings.domains import WINDOW_SECONDS
from cape_plugins.speech.subsampling import ConvSubsampler
from fairseq_user_dir.asr.positions import TimedEncoder
from fairseq_user_dir.attention import add_positions_to_attention
from fairseq_user_dir.flags import add_position_args, set_missing

# The paper's model: 36 layers of 768, dropout on attention weights and hidden activations only.
PAPER = {
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_layers": 36,
    "encoder_attention_heads": 4,
    "encoder_normalize_before": False,
    "encoder_layerdrop": 0.1,
    "dropout": 0.0,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "feature_dropout": 0.3,
    "activation_fn": "relu",
    "conv_kernel_size": 7,
    "conv_stride": 3,
    "input_feat_per_channel": 80,
    "abspos_frames": 460,
    # settings that the layers of fairseq read
    "quant_noise_pq": 0.0,
    "quant_noise_pq_block_size": 8,
    "no_scale_embedding": True,
}
SIZES = {
    "base": {"encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "encoder_layers": 18},
    "small": {
        "encoder_embed_dim": 256,
        "encoder_ffn_embed_dim": 1024,
        "encoder_layers": 12,
        "encoder_normalize_before": True,
        "feature_dropout": 0.1,
    },
    "tiny": {
        "encoder_embed_dim": 96,
        "encoder_ffn_embed_dim": 256,
        "encoder_layers": 3,
        "encoder_normalize_before": True,
        "encoder_layerdrop": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "dropout": 0.1,
        "feature_dropout": 0.0,
    },
}
_HELP = {
    "encoder_embed_dim": "channels of the layers",
    "encoder_ffn_embed_dim": "hidden channels of the feed-forward blocks",
    "encoder_layers": "number of layers",
    "encoder_attention_heads": "heads of each layer",
    "encoder_normalize_before": (
        "apply layer norm before each block; the paper applies it after each block"
    ),
    "encoder_layerdrop": "probability of dropping a layer",
    "dropout": "dropout on the output of each block",
    "attention_dropout": "dropout on attention weights",
    "activation_dropout": "dropout on the hidden activations of feed-forward blocks",
    "feature_dropout": "dropout after the convolution",
    "conv_kernel_size": "width of the convolution, an odd number of frames",
    "conv_stride": "stride of the convolution: frames per output",
    "input_feat_per_channel": "mel bins of a frame",
    "abspos_frames": (
        "rows of the learned table of type abspos; longer recordings begin again at the first row"
    ),
}


def add_encoder_args(parser: ArgumentParser, paper: dict[str, Any] = PAPER) -> None:
    """Adds sizes, dropout and the position flags; `paper` holds the values of the paper."""
    add_sizes(parser, paper, _HELP)
    names = utils.get_available_activation_fns()
    parser.add_argument(
        "--activation-fn",
        choices=names,
        help="activation of the feed-forward layers (default: relu)",
    )
    add_position_args(parser, "audio", architecture="encoder")


def add_sizes(parser: ArgumentParser, paper: dict[str, Any], helps: dict[str, str]) -> None:
    """Adds a flag for each name in `helps`, with the default of the paper."""
    for name, text in helps.items():
        flag, default = "--" + name.replace("_", "-"), paper[name]
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=text)
        else:
            range_of = _odd if name == "conv_kernel_size" else _RANGES[type(default)]
            parser.add_argument(flag, type=range_of, help=f"{text} (default: {default})")


def _probability(text: str) -> float:
    if not 0.0 <= (value := float(text)) <= 1.0:
        raise ArgumentTypeError(f"{text} is not allowed; allowed: 0 to 1")
    return value


def _odd(text: str) -> int:
    if (value := positive(text)) % 2 == 0:
        raise ArgumentTypeError(f"{text} is not allowed; allowed: odd numbers, such as {value + 1}")
    return value


_RANGES: dict[type, Any] = {int: positive, float: _probability}


def architecture(sizes: dict[str, Any]) -> Any:
    """Returns an architecture function of fairseq, which gives these values to arguments that have
    no value."""

    def arch(args: Any) -> None:
        for name, value in sizes.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
        set_missing(args)

    return arch


class AcousticEncoder(TimedEncoder, FairseqEncoder):
    """Computes states for the frames of recordings, with fairseq's layers: projections have biases,
    layer norm works per channel, and layer drop skips a layer. The code of CAPE differs in these
    three points.
    """

    def __init__(self, args: Any, config: PositionConfig, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        dim = args.encoder_embed_dim
        self.position_config = config
        self.subsample = ConvSubsampler(
            [args.input_feat_per_channel, dim], [(args.conv_kernel_size, args.conv_stride)]
        )
        self.feature_dropout = args.feature_dropout
        self.positions = build_position_encoder(
            config,
            dim,
            start=WINDOW_SECONDS / 2,
            layout="sin_cos_blocks",
            table_size=args.abspos_frames,
            table_std=0.02,
        )
        # without layer drop a plain list, because LayerDropModuleList draws in evaluation, too
        drop = args.encoder_layerdrop
        self.layers = LayerDropModuleList(drop) if drop else nn.ModuleList()
        self.layers.extend(TransformerEncoderLayer(args) for _ in range(args.encoder_layers))
        self.stack_attention = add_positions_to_attention(self.layers, config, self.positions)
        self.layer_norm = LayerNorm(dim) if args.encoder_normalize_before else nn.Identity()

    def encode(
        self,
        features: Tensor,
        lengths: Tensor,
        hop_nanoseconds: Tensor | None,
        frame_nanoseconds: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Draw | None]:
        """States after the last layer.

        Args:
            features: ``[B, T, bins]``, padded on the right.
            lengths: ``[B]`` frames.
            hop_nanoseconds: ``[B]`` distance between frames; default 10 ms.
            frame_nanoseconds: ``[B, T]`` centre of each frame, if frames were skipped.

        Returns:
            States ``[T', B, C]``, number of states ``[B]``, padding ``[B, T']``, and the draw of
            this forward in training.
        """
        hidden, lengths = self.subsample.subsample(features, lengths)
        hidden = F.dropout(hidden, self.feature_dropout, self.training)
        padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]
        mask = padding if padding.any() else None
        times = (hop_nanoseconds, frame_nanoseconds)
        with self.add_times(hidden, lengths, *times) as (hidden, draw):
            hidden = hidden.transpose(0, 1)
            for layer in self.layers:
                hidden = layer(hidden, mask)
        return self.layer_norm(hidden), lengths, padding, draw

    def max_positions(self) -> int:
        """No limit: positions are computed, or begin again at the first row of the table."""
        return int(1e6)
