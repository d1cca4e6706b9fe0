"""Log-mel features for the speech models, in transformers' interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, SequenceFeatureExtractor

from cape_plugins.speech.features import WINDOW_SECONDS, log_mel


class CapeSpeechFeatureExtractor(SequenceFeatureExtractor):
    """Waveforms to padded log-mel frames; see :func:`~cape_plugins.speech.features.log_mel`.

    Args:
        feature_size: Mel bins.
        sampling_rate: In Hz.
        hop_seconds: Distance of frames where a call does not say its own.
        window_seconds: Length of a frame.
        normalize: Per recording, to mean 0 and standard deviation 1.
    """

    model_input_names = ("input_features", "attention_mask")

    def __init__(
        self,
        feature_size: int = 80,
        sampling_rate: int = 16000,
        hop_seconds: float = 0.01,
        window_seconds: float = WINDOW_SECONDS,
        normalize: bool = True,
        padding_value: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            feature_size=feature_size,
            sampling_rate=sampling_rate,
            padding_value=padding_value,
            **kwargs,
        )
        self.hop_seconds = hop_seconds
        self.window_seconds = window_seconds
        self.normalize = normalize
        self.return_attention_mask = True

    def __call__(
        self,
        raw_speech: Any,
        sampling_rate: int | None = None,
        hop_seconds: float | Sequence[float] | None = None,
        padding: bool | str = True,
        return_tensors: str | None = None,
        max_length: int | None = None,
        truncation: bool = False,
        pad_to_multiple_of: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Features of one recording or of several.

        Args:
            raw_speech: ``[samples]`` in -1 to 1 (numpy, torch or list), or a list of such.
            sampling_rate: That of the recordings, to be checked.
            hop_seconds: Distance of frames, one number or one for each recording; then the result
                holds `hop_nanoseconds` ``[B]`` for the model: integers, because hosts cast all
                floating-point inputs of a model in half precision.
            padding: As in transformers; default to the longest.
            return_tensors: "pt" or "np".
            max_length: As in transformers, in frames; it cuts with `truncation`.
            truncation: As in transformers.
            pad_to_multiple_of: As in transformers, in frames.

        Raises:
            ValueError: for another sampling rate, for what is no waveform, and for empty, too
                short, many-channel or non-finite recordings.
        """
        if sampling_rate is not None and sampling_rate != self.sampling_rate:
            raise ValueError(
                f"sampling_rate={sampling_rate} is not allowed; allowed: {self.sampling_rate} "
                "(of this model). Resample the recording."
            )
        many = isinstance(raw_speech, list | tuple)
        single = not many or not len(raw_speech) or not np.ndim(raw_speech[0])
        if isinstance(raw_speech, np.ndarray | torch.Tensor) and raw_speech.ndim == 2:
            single, raw_speech = False, list(raw_speech)
        recordings = [raw_speech] if single else list(raw_speech)
        hops = self.hop_seconds if hop_seconds is None else hop_seconds
        hops = list(hops) if isinstance(hops, Sequence) else [hops] * len(recordings)
        if len(hops) != len(recordings):
            raise ValueError(
                f"hop_seconds has {len(hops)} numbers for {len(recordings)} recordings; give one "
                "number, or one for each."
            )
        features = [
            log_mel(
                _waveform(recording),
                self.sampling_rate,
                self.feature_size,
                hop,
                self.window_seconds,
                self.normalize,
            ).numpy()
            for recording, hop in zip(recordings, hops, strict=True)
        ]
        batch = self.pad(
            BatchFeature({"input_features": features}),
            padding=padding,
            max_length=max_length,
            truncation=truncation,
            pad_to_multiple_of=pad_to_multiple_of,
            return_attention_mask=True,
            return_tensors=return_tensors,
        )
        if hop_seconds is not None:
            values = np.asarray([round(hop * 1e9) for hop in hops], dtype=np.int64)
            batch["hop_nanoseconds"] = (
                torch.from_numpy(values) if return_tensors == "pt" else values
            )
        return batch


def _waveform(recording: Any) -> torch.Tensor:
    try:
        if recording is None:  # numpy would make it a NaN
            raise TypeError
        return torch.as_tensor(np.asarray(recording, dtype=np.float32))
    except (TypeError, ValueError):
        raise ValueError(
            f"raw_speech holds {str(recording)[:60]!r} ({type(recording).__name__}); allowed: "
            "waveforms of numbers in -1 to 1. Read a file first, for example by "
            "soundfile.read(path)[0]."
        ) from None
