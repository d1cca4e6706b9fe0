"""The acoustic model of CAPE (Appendix C): speech recognition with CTC."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCTC, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.marian.modeling_marian import MarianAttention, MarianEncoderLayer
from transformers.models.speech_to_text.modeling_speech_to_text import (
    Speech2TextAttention,
    Speech2TextEncoder,
    Speech2TextEncoderLayer,
    Speech2TextPreTrainedModel,
)
from transformers.utils import can_return_tuple

from cape_plugins import PRESETS, Draw
from cape_plugins.settings.options import choose
from cape_plugins.speech.ctc import ctc_loss
from hf_models.seams.frames import check_seconds, values_to_check
from hf_models.seams.speech import SpeechEncoder, Subsampler, encoder_lengths
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import FamilyClasses, add_parts
from hf_models.switching.modeling import PositionModelMixin, build_positions, draw_positions

# Settings of CAPE Appendix C.2, by corpus, that differ from the defaults. The defaults can never
# change, because checkpoints leave them out. Dropout acts on attention weights and hidden
# activations only; the learned table covers 13.8 s.
_PAPER = {"dropout": 0.0, "max_position_embeddings": 460}
CORPORA: dict[str, dict[str, Any]] = {
    corpus: {
        **_PAPER,
        **dict.fromkeys(("attention_dropout", "activation_dropout", "encoder_layerdrop"), rate),
        "position_embedding": {
            name: value for name, value in PRESETS[preset].items() if name != "domain"
        },
    }
    for corpus, rate, preset in (("wsj", 0.4, "cape_wsj"), ("tedlium3", 0.1, "cape_tedlium"))
}


@strict
class CapeSpeechConfig(PositionEmbeddingMixin, PreTrainedConfig):
    """Speech recognition with CTC from log-mel frames: convolution with GLU, Transformer layers,
    linear classifier (CAPE Appendix C). The defaults are the sizes of the paper's model of 36
    layers; :meth:`preset` adds the paper's dropout, layer drop and learned table.

    Positions are the centres of the frames in seconds.

    Args:
        vocab_size: Classes of the CTC head, blank included.
        num_mel_bins: Features of a frame.
        hop_seconds: Distance of frames in batches without `hop_nanoseconds`.
        window_seconds: Length of the analysis window.
        sampling_rate: Sampling rate of the audio, in Hz.
        conv_kernel_size: Kernel size of the convolution, odd.
        conv_stride: Frames per Transformer position.
        layer_norm: "post" (the paper) or "pre".
        max_position_embeddings: Rows of a learned table, which wraps around after the last row.
        pad_token_id: The CTC blank.
    """

    model_type = "cape_speech_ctc"
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 32
    num_mel_bins: int = 80
    hop_seconds: float | int = 0.01
    window_seconds: float | int = 0.025
    sampling_rate: int = 16000
    conv_kernel_size: int = 7
    conv_stride: int = 3
    d_model: int = 768
    encoder_layers: int = 36
    encoder_attention_heads: int = 4
    encoder_ffn_dim: int = 3072
    encoder_layerdrop: float | int = 0.0
    activation_function: str = "relu"
    layer_norm: str = "post"
    feature_dropout: float | int = 0.3
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.1
    init_std: float = 0.02
    initializer_range: float = 0.02
    max_position_embeddings: int = 1500
    ctc_loss_reduction: str = "mean"
    ctc_zero_infinity: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    position_embedding: dict | None = None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> CapeSpeechConfig:
        """The model of the paper for a corpus, "wsj" or "tedlium3" (CAPE Appendix C.2, and C.4 for
        the scale of the positions), with `changes` applied, such as the `vocab_size`.

        Raises:
            ValueError: for another name; lists the names that exist.
        """
        choose("preset", name, CORPORA)
        return cls(**{**CORPORA[name], **changes})

    def validate_sizes(self) -> None:
        """Part of strict validation."""
        check_seconds(self, "hop_seconds", "window_seconds")
        for name in ("num_mel_bins", "conv_stride", "sampling_rate", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; allowed: >= 1.")
        if self.conv_kernel_size < 1 or self.conv_kernel_size % 2 == 0:
            raise ValueError(
                f"conv_kernel_size={self.conv_kernel_size} is not allowed; allowed: odd and >= 1, "
                "so that the centre of a frame is defined."
            )
        for name, allowed in {
            "layer_norm": ("post", "pre"),
            "ctc_loss_reduction": ("mean", "sum", "none"),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}."
                )

    @property
    def conv_layers(self) -> list[tuple[int, int]]:
        """Kernel size and stride of each convolution."""
        return [(self.conv_kernel_size, self.conv_stride)]

    @property
    def inputs_to_logits_ratio(self) -> int:
        """Samples per output, for the speech recognition pipeline."""
        return round(self.hop_seconds * self.sampling_rate * self.conv_stride)


# Layers that normalise after each block (the paper) or before.
_LAYERS = {"post": MarianEncoderLayer, "pre": Speech2TextEncoderLayer}


class CapeSpeechModel(SpeechEncoder, PositionModelMixin, Speech2TextEncoder):
    """Log-mel frames to hidden states."""

    config_class = CapeSpeechConfig
    base_model_prefix = "encoder"
    input_modalities = ("audio",)
    _can_compile_fullgraph = True
    _no_split_modules: ClassVar = [layer.__name__ for layer in _LAYERS.values()]
    _can_record_outputs: ClassVar = {
        "hidden_states": list(_LAYERS.values()),
        "attentions": [MarianAttention, Speech2TextAttention],
    }

    def __init__(self, config: CapeSpeechConfig) -> None:
        Speech2TextPreTrainedModel.__init__(self, config)
        post = config.layer_norm == "post"
        # no dropout where the stock forward has one: the subsampler drops before it adds positions
        self.dropout, self.layerdrop = 0.0, config.encoder_layerdrop
        self.padding_idx = config.pad_token_id
        layers = [_LAYERS[config.layer_norm](config) for _ in range(config.encoder_layers)]
        self.layers = nn.ModuleList(layers)
        self.layer_norm = nn.Identity() if post else nn.LayerNorm(config.d_model)
        self.gradient_checkpointing = False
        self.install_positions(config, trained=False)
        self.post_init()

    def make_subsampler(
        self, config: CapeSpeechConfig, conv_layers: nn.ModuleList | None
    ) -> Subsampler:
        """One convolution, and dropout before positions are added."""
        return Subsampler(
            [config.num_mel_bins, config.d_model],
            config.conv_layers,
            scale=1.0,
            positions=build_positions(
                config, "encoder", config.max_position_embeddings, config.init_std
            ),
            dropout=config.feature_dropout,
            conv_layers=conv_layers,
        )

    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """See :meth:`~hf_models.seams.speech.SpeechEncoder.forward`; training draws random
        numbers if `draw` is None. Hidden states are ``[B, T', C]``, T' = ceil(T / conv_stride)."""
        if draw is None:
            draw = draw_positions(self.positions, input_features)
        return super().forward(
            input_features, attention_mask, hop_nanoseconds, draw, frame_nanoseconds, **kwargs
        )


class CapeSpeechForCTC(PositionModelMixin, PreTrainedModel):
    """A linear classifier on :class:`CapeSpeechModel`, trained with CTC; `pad_token_id` is the
    blank."""

    config_class = CapeSpeechConfig
    base_model_prefix = "encoder"
    main_input_name = "input_features"
    input_modalities = ("audio",)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = CapeSpeechModel._no_split_modules

    def __init__(self, config: CapeSpeechConfig) -> None:
        super().__init__(config)
        self.encoder = CapeSpeechModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def freeze_feature_encoder(self) -> None:
        """Does nothing; scripts for models with a pretrained feature encoder call this method."""

    def _get_feat_extract_output_lengths(self, input_lengths: Tensor) -> Tensor:
        return encoder_lengths(self.config, input_lengths)

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        hop_nanoseconds: Tensor | int | None = None,
        draw: Draw | None = None,
        frame_nanoseconds: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Scores of the classes at each position.

        Args:
            input_features: ``[B, T, bins]``, padded on the right.
            attention_mask: ``[B, T]``, 0 on padding.
            labels: ``[B, U]``, negative on padding.
            hop_nanoseconds: Distance of frames, a number or ``[B]`` integers, which no host casts
                to half precision; default from the configuration.
            draw: Random numbers for this forward; by default drawn in training.
            frame_nanoseconds: ``[B, T]`` integers, the centre of each frame since the beginning of
                the recording, if frames were skipped (:mod:`cape_plugins.speech.batching`).

        Returns:
            logits ``[B, T', classes]`` with T' = ceil(T / stride), and the loss if there are
            labels.

        Raises:
            ValueError: for a label that is no class.
        """
        output = self.encoder(
            input_features,
            attention_mask,
            hop_nanoseconds,
            draw,
            frame_nanoseconds,
            return_dict=True,
            **kwargs,
        )
        logits = self.lm_head(output.last_hidden_state)
        loss = None if labels is None else self._ctc_loss(logits, attention_mask, labels)
        return CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def _ctc_loss(self, logits: Tensor, mask: Tensor | None, labels: Tensor) -> Tensor:
        values = values_to_check(labels, self.training)
        if values is None and not torch.compiler.is_compiling():
            # the GPU checks, because the loss would write past the end of the GPU's memory
            torch._assert_async((labels < self.config.vocab_size).all())
        if values is not None and values.size and values.max() >= self.config.vocab_size:
            raise ValueError(
                f"label {values.max()} is not allowed; allowed: 0 to "
                f"{self.config.vocab_size - 1} (vocab_size), negative on padding. Does the "
                "tokenizer belong to this model?"
            )
        lengths = logits.new_full((len(logits),), logits.shape[1], dtype=torch.long)
        if mask is not None:
            lengths = encoder_lengths(self.config, mask.sum(-1)).long()
        return ctc_loss(
            logits.log_softmax(-1, dtype=torch.float32),
            lengths,
            labels,
            labels >= 0,
            self.config.pad_token_id,
            self.config.ctc_loss_reduction,
            self.config.ctc_zero_infinity,
        )


FAMILY = add_parts(
    FamilyClasses(
        CapeSpeechConfig,
        parts=(),
        auto={AutoModel: CapeSpeechModel, AutoModelForCTC: CapeSpeechForCTC},
    )
)
