"""CAPE's acoustic model trained as sequence to sequence (Appendix C.5): the encoder of
:mod:`~fairseq_user_dir.asr.ctc_model`, and a decoder in place of classifier and CTC.

The paper keeps one decoder with relative positions for all encoders:
``--position-decoder-embedding relpos --position-decoder-relative-context 320``. Without these flags
the decoder has the type of the encoder. fairseq's S2T Transformer cannot take the place of this
model in a comparison of types: the two convolutions of the S2T Transformer with stride 2 show each
frame more neighbours, which helps a model without positions.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from fairseq.models import (
    FairseqEncoderDecoderModel,
    register_model,
    register_model_architecture,
)
from fairseq.models.speech_to_text.s2t_transformer import (
    S2TTransformerEncoder,
    TransformerDecoderScriptable,
)
from fairseq.models.transformer import Embedding
from torch import Tensor

from fairseq_user_dir.asr import acoustic_encoder
from fairseq_user_dir.asr.acoustic_encoder import (
    AcousticEncoder,
    add_encoder_args,
    add_sizes,
    architecture,
)
from fairseq_user_dir.asr.positions import TimedModel, encoder_output
from fairseq_user_dir.checkpoints import PositionalModel
from fairseq_user_dir.flags import (
    add_decoder_args,
    config_from_args,
    decoder_config_from_args,
    set_args,
)
from fairseq_user_dir.models import install, stock_values
from fairseq_user_dir.stacks import DecoderPositions

NAME = "cape_seq2seq_transformer"

# Sizes and dropout of Appendix C.5, which gives dropout 0.2 for the decoder only. Hidden channels
# and the dropout of encoder and convolution come from the released runs.
PAPER = {
    **acoustic_encoder.PAPER,
    "encoder_layerdrop": 0.2,
    "attention_dropout": 0.2,
    "activation_dropout": 0.2,
    "feature_dropout": 0.1,
    "decoder_embed_dim": 256,
    "decoder_ffn_embed_dim": 1024,
    "decoder_layers": 6,
    "decoder_attention_heads": 4,
    "decoder_normalize_before": False,
    "decoder_layerdrop": 0.2,
    "no_scale_embedding": False,
}
SIZES = {
    "base": {"decoder_layers": 4},
    "small": {"decoder_layers": 3, "decoder_normalize_before": True},
    "tiny": {
        "decoder_embed_dim": 96,
        "decoder_ffn_embed_dim": 192,
        "decoder_layers": 1,
        "decoder_normalize_before": True,
        "decoder_layerdrop": 0.0,
    },
}
_HELP = {
    "decoder_embed_dim": "channels of the layers of the decoder",
    "decoder_ffn_embed_dim": "hidden channels of the feed-forward blocks of the decoder",
    "decoder_layers": "number of layers of the decoder",
    "decoder_attention_heads": "attention heads of each layer of the decoder",
    "decoder_normalize_before": (
        "apply layer norm before each block of the decoder (default: after each block)"
    ),
    "decoder_layerdrop": "probability of dropping a layer of the decoder",
}
_DIMS = ("decoder_input_dim", "decoder_output_dim")  # widths of the input and output embeddings


@register_model(NAME)
class CapeSeq2SeqTransformerModel(TimedModel, PositionalModel, FairseqEncoderDecoderModel):
    """Speech recognition with CAPE's acoustic encoder and a decoder."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Adds sizes, dropout and the position flags of both sides."""
        add_encoder_args(parser, PAPER)
        add_sizes(parser, PAPER, _HELP)
        add_decoder_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> CapeSeq2SeqTransformerModel:
        """See fairseq.

        Raises:
            ValueError: for settings that are not allowed; names flag, value, range and remedy.
        """
        config = config_from_args(args, "encoder", "audio")
        text = decoder_config_from_args(args)
        dim, dictionary = args.decoder_embed_dim, task.target_dictionary
        set_args(args, **stock_values(text, "decoder"), **dict.fromkeys(_DIMS, dim))
        encoder = CapeSeq2SeqEncoder(args, config, None)
        embedding = Embedding(len(dictionary), dim, dictionary.pad())
        model = cls(encoder, TransformerDecoderScriptable(args, dictionary, embedding))
        install(model.decoder, DecoderPositions, text, "target")
        model.position_config = config
        return model


class CapeSeq2SeqEncoder(AcousticEncoder):
    """The acoustic encoder, with an output in the form of fairseq's encoders."""

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        hop_nanoseconds: Tensor | None = None,
        frame_nanoseconds: Tensor | None = None,
    ) -> dict[str, list[Any]]:
        """See fairseq; for the arguments see
        :meth:`~fairseq_user_dir.asr.acoustic_encoder.AcousticEncoder.encode`."""
        hidden, _, padding, draw = self.encode(
            src_tokens, src_lengths, hop_nanoseconds, frame_nanoseconds
        )
        return encoder_output(hidden, padding, draw)

    reorder_encoder_out = S2TTransformerEncoder.reorder_encoder_out


register_model_architecture(NAME, NAME)(architecture(PAPER))
for _name, _sizes in SIZES.items():
    _values = {**acoustic_encoder.SIZES[_name], **_sizes}
    register_model_architecture(NAME, f"{NAME}_{_name}")(architecture({**PAPER, **_values}))
