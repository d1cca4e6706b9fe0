"""Configurations: the stock ones plus one field, ``position_embedding``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import (
    MarianConfig,
    PreTrainedConfig,
    Speech2TextConfig,
    ViTConfig,
)

from cape_plugins import PositionConfig
from cape_plugins.config import applies, options
from hf_models.settings import FIELD, CheckedSettings, refuse_misplaced

# transformers looks for the weights in the file that this key of config.json names
GUARD = {"transformers_weights": "needs the package cape-plugins: import hf_models"}
_OLD_GUARD = " (needs the package cape-plugins: import hf_models)"


class PositionEmbeddingMixin:
    """Gives a configuration the field ``position_embedding``, a dict ``{"type": ..., option:
    value}`` with the options of :class:`~cape_plugins.PositionConfig`.

    The dict is checked and completed whenever it is set, so that a saved model keeps its settings
    should the defaults ever change. Options that are left out take the default of the type. A
    source scale may stay "auto" here; a model needs a number. The settings of a configuration that
    a model was built from no longer change.

    A stock class that is named explicitly would load such a model with a mere warning and compute
    other positions. So the saved file sends it to weights that do not exist, by a key that only
    transformers reads; it is dropped again here.

    Attributes:
        position_fields: Domain and architecture of each such field; the first is the main one.
        stock_difference: What the model computes otherwise than stock with any settings, in words.

    Raises:
        ValueError: when a field is set, naming option, value, allowed range and remedy.
    """

    # beside the instance's dict, which is saved, compared and copied
    __slots__ = ("_in_use",)

    position_fields: ClassVar[dict[str, tuple[str, str]]]
    stock_difference: ClassVar[str] = ""

    def __post_init__(self, **kwargs: Any) -> None:
        # a stock configuration brings the stock model type along; ours is that of the class
        kwargs.pop("model_type", None)
        refuse_misplaced(kwargs, self.position_fields)
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.position_fields:
            value = self._complete(name, value)
            if getattr(self, "_in_use", False) and value != getattr(self, name):
                raise ValueError(
                    f"{name}={value!r} cannot be set: a model was built from this configuration "
                    f"with {getattr(self, name)} and would not change. Set it on a copy "
                    "(copy.deepcopy) before a model is built from that, or load the model again by "
                    f"from_pretrained(..., {name}=...)."
                )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:  # a copy is not in use
        return self.__dict__.copy()

    def mark_in_use(self) -> None:
        """Says that a model was built from this configuration."""
        self._in_use = True

    @property
    def position_config(self) -> PositionConfig:
        """All settings of the main position embedding."""
        return self.position_settings(FIELD)

    def position_settings(self, field: str) -> PositionConfig:
        """All settings of one of the `position_fields`."""
        return self._parse(field, getattr(self, field))

    @classmethod
    def model_types(cls) -> tuple[str, ...]:
        """Types of the checkpoints that this class takes: its own and that of the stock class."""
        types = (getattr(base, "model_type", "") for base in cls.__mro__)
        return tuple(dict.fromkeys(name for name in types if name))

    @classmethod
    def check_model_type(cls, settings: Mapping[str, Any], source: Any) -> None:
        """Refuses the configuration of another kind of model.

        Args:
            settings: What a config.json holds.
            source: Its place, for the message.

        Raises:
            ValueError: naming the model types that are allowed.
        """
        model_type = settings.get("model_type")
        if model_type and model_type not in cls.model_types():
            raise ValueError(
                f"{source} holds a model of type {model_type!r}; {cls.__name__} takes "
                f"{' and '.join(map(repr, cls.model_types()))} only: other weights would be left "
                "out or stay random. Give such a checkpoint, or the class for this type."
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See transformers; the type of a stock model becomes ours, any other is refused."""
        settings, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        cls.check_model_type(settings, pretrained_model_name_or_path)
        return {**settings, "model_type": cls.model_type}, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See transformers. A ``position_embedding`` without "type" changes single options of the
        one that is stored."""
        cls.check_model_type(config_dict, "config_dict")
        config_dict = _without_guard(config_dict)
        refuse_misplaced(kwargs, cls.position_fields)
        for name in cls.position_fields:
            changes, stored = kwargs.get(name), config_dict.get(name)
            if changes is not None:
                del kwargs[name]
                if isinstance(changes, Mapping) and "type" not in changes and stored:
                    changes = {**stored, **changes}
                config_dict = {**config_dict, name: changes}
        return super().from_dict(config_dict, **kwargs)

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """See transformers; the file is guarded."""
        saved = {**json.loads(self.to_json_string(use_diff=use_diff)), **GUARD}
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(saved, indent=2, sort_keys=True) + "\n")

    @classmethod
    def _parse(cls, field: str, settings: Any) -> PositionConfig:
        if settings is None:
            settings = {}
        if not isinstance(settings, Mapping):
            raise ValueError(
                f"{field}={settings!r} is not allowed; allowed: a dict with 'type' and options, "
                'such as {"type": "cape", "max_global_shift": 5.0}.'
            )
        return PositionConfig.from_dict(settings, *cls.position_fields[field])

    @classmethod
    def _complete(cls, field: str, settings: Any) -> dict[str, Any]:
        config = cls._parse(field, settings)
        kept: dict[str, Any] = {"type": config.type}
        for option in options(config.domain):
            value = getattr(config, option.name)
            if applies(option.name, config.type) and (
                value != option.metadata["off"] or option.name in (settings or ())
            ):
                kept[option.name] = value
        return CheckedSettings(kept)


def _without_guard(settings: dict[str, Any]) -> dict[str, Any]:
    """What is stored, also by earlier versions, which wrote one number as text."""
    kept = {key: value for key, value in settings.items() if GUARD.get(key, ...) != value}
    for key, value in kept.items():
        if isinstance(value, str) and value.endswith(_OLD_GUARD):
            kept[key] = int(value.removesuffix(_OLD_GUARD))
    return kept


@strict
class CapeMarianConfig(PositionEmbeddingMixin, MarianConfig):
    """Translation. Positions count tokens from 0; `bos_token_id`, or `eos_token_id` where there is
    none (Marian), is the BOS hint on the source."""

    model_type = "cape_marian"
    position_fields: ClassVar = {FIELD: ("text", "seq2seq")}
    position_embedding: dict | None = None


@strict
class CapeViTConfig(PositionEmbeddingMixin, ViTConfig):
    """Images of any height and width; positions are patch centres in the [-1, 1] square.

    Args:
        drop_path_rate: Stochastic depth in training: probability that a sample goes past a branch
            of the last layer; it grows linearly from 0 at the first layer.
    """

    model_type = "cape_vit"
    position_fields: ClassVar = {FIELD: ("image", "encoder")}

    drop_path_rate: float | int = 0.0
    position_embedding: dict | None = None

    def validate_drop_path_rate(self) -> None:
        """Part of strict validation."""
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(
                f"drop_path_rate={self.drop_path_rate} is not allowed; allowed: 0 to less than 1, "
                "such as 0.1."
            )


@strict
class CapeSpeechConfig(PositionEmbeddingMixin, PreTrainedConfig):
    """Speech recognition by CTC from log-mel frames: convolution with GLU, Transformer layers,
    linear classifier (CAPE Appendix C). The defaults are the paper's model of 36 layers.

    Positions are the centres of the frames in seconds.

    Args:
        vocab_size: Classes of the CTC head, blank included.
        num_mel_bins: Features of a frame.
        hop_seconds: Distance of frames where a batch does not say its own.
        window_seconds: Length of the analysis window.
        sampling_rate: Of the audio, in Hz.
        conv_kernel_size: Odd.
        conv_stride: Frames per Transformer position.
        layer_norm: "post" (the paper) or "pre".
        max_position_embeddings: Rows of a learned table, which then wraps around.
        pad_token_id: The CTC blank.
    """

    model_type = "cape_speech_ctc"
    position_fields: ClassVar = {FIELD: ("audio", "encoder")}
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

    def validate_sizes(self) -> None:
        """Part of strict validation."""
        for name in ("hop_seconds", "window_seconds"):
            value = getattr(self, name)
            if not 0 < value < 10:
                raise ValueError(
                    f"{name}={value} is not allowed; allowed: more than 0 and less than 10 "
                    "seconds, such as 0.01."
                )
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


@strict
class CapeSpeech2TextConfig(PositionEmbeddingMixin, Speech2TextConfig):
    """Speech recognition or translation with encoder and decoder.

    `position_embedding` is that of the encoder (seconds), `decoder_position_embedding` that of the
    decoder (tokens), by default of the same type; time and text do not share a draw.
    """

    model_type = "cape_speech_to_text"
    position_fields: ClassVar = {
        FIELD: ("audio", "encoder"),
        "decoder_position_embedding": ("text", "decoder"),
    }
    stock_difference: ClassVar = (
        "padding: no longer reaches the last frames of shorter recordings through a convolution"
    )

    hop_seconds: float | int = 0.01
    window_seconds: float | int = 0.025
    position_embedding: dict | None = None
    decoder_position_embedding: dict | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "decoder_position_embedding" and value is None:
            value = {"type": self.position_embedding["type"]}
        super().__setattr__(name, value)

    @property
    def decoder_position_config(self) -> PositionConfig:
        """All settings of the position embedding of the decoder."""
        return self.position_settings("decoder_position_embedding")

    @property
    def conv_layers(self) -> list[tuple[int, int]]:
        """Kernel size and stride of each convolution."""
        return [(kernel, 2) for kernel in self.conv_kernel_sizes]
