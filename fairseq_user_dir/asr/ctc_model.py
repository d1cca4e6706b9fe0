"""The acoustic model of CAPE (Appendix C): an encoder and a linear classifier, trained with CTC."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import FairseqEncoderModel, register_model, register_model_architecture
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins import PositionConfig
from fairseq_user_dir.asr.acoustic_encoder import (
    PAPER,
    SIZES,
    AcousticEncoder,
    add_encoder_args,
    architecture,
)
from fairseq_user_dir.checkpoints import PositionalModel
from fairseq_user_dir.flags import config_from_args

NAME = "cape_ctc_transformer"


@register_model(NAME)
class CapeCtcTransformerModel(PositionalModel, FairseqEncoderModel):
    """Speech recognition with CTC and any position embedding."""

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        """Adds sizes, dropout and the position flags."""
        add_encoder_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> CapeCtcTransformerModel:
        """See fairseq.

        Raises:
            ValueError: for settings that are not allowed; names flag, value, range and remedy.
        """
        config = config_from_args(args, "encoder", "audio")
        return cls(CapeCtcEncoder(args, config, task.target_dictionary))

    def get_normalized_probs(
        self, net_output: dict[str, Any], log_probs: bool, sample: Any | None = None
    ) -> Tensor:
        """``[T, B, V]`` in float32."""
        normalize = F.log_softmax if log_probs else F.softmax
        return normalize(net_output["encoder_out"].float(), dim=-1)

    def max_positions(self) -> int:
        """The limit of the encoder."""
        return self.encoder.max_positions()


class CapeCtcEncoder(AcousticEncoder):
    """See :class:`CapeCtcTransformerModel`."""

    def __init__(self, args: Any, config: PositionConfig, dictionary: Dictionary) -> None:
        super().__init__(args, config, dictionary)
        self.classifier = nn.Linear(args.encoder_embed_dim, len(dictionary))

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        hop_nanoseconds: Tensor | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Scores of the units; for the arguments see
        :meth:`~fairseq_user_dir.asr.acoustic_encoder.AcousticEncoder.encode`.

        Returns:
            encoder_out ``[T', B, V]``, lengths ``[B]`` and padding mask ``[B, T']``.
        """
        hidden, lengths, padding, _ = self.encode(
            src_tokens, src_lengths, hop_nanoseconds, frame_nanoseconds
        )
        return {
            "encoder_out": self.classifier(hidden),
            "lengths": lengths,
            "encoder_padding_mask": padding,
        }


register_model_architecture(NAME, NAME)(architecture(PAPER))
for _name, _sizes in SIZES.items():
    register_model_architecture(NAME, f"{NAME}_{_name}")(architecture({**PAPER, **_sizes}))
