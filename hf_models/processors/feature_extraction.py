"""Log-mel features for the speech models, in transformers' interface."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, SequenceFeatureExtractor, WhisperFeatureExtractor

from cape_plugins.speech.features import WINDOW_SECONDS, log_mel
from cape_plugins.utils.files import editing_json


class CapeSpeechFeatureExtractor(SequenceFeatureExtractor):
    """Waveforms to padded log-mel frames; see :func:`~cape_plugins.speech.features.log_mel`.

    Args:
        feature_size: Mel bins.
        sampling_rate: Sampling rate of recordings, in Hz.
        hop_seconds: Distance of frames in seconds, for calls without `hop_seconds`.
        window_seconds: Length of a frame in seconds.
        normalize: Whether each recording is normalised to mean 0 and standard deviation 1.
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
        hop_seconds: float | Sequence[float] | np.ndarray | torch.Tensor | None = None,
        padding: bool | str = True,
        return_tensors: str | None = None,
        max_length: int | None = None,
        truncation: bool = False,
        pad_to_multiple_of: int | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Features ``[B, T, bins]`` of one recording or of several.

        Args:
            raw_speech: ``[samples]`` in -1 to 1 (numpy, torch or list), or a list of recordings.
            sampling_rate: Sampling rate of the recordings, to be checked.
            hop_seconds: Distance of frames, one number or one for each recording. The result then
                holds `hop_nanoseconds` ``[B]`` for the model: integers, because hosts cast all
                floating-point inputs of a model in half precision.
            padding: As in transformers; by default to the longest recording.
            return_tensors: "pt" or "np".
            max_length: As in transformers, in frames; cuts with `truncation`.
            truncation: As in transformers.
            pad_to_multiple_of: As in transformers, in frames.

        Raises:
            ValueError: for another sampling rate, for values that are no waveform, and for
                recordings that are empty, too short, not finite, or of several channels.
        """
        if sampling_rate is not None and sampling_rate != self.sampling_rate:
            raise ValueError(
                f"sampling_rate={sampling_rate} is not allowed; allowed: {self.sampling_rate} "
                "(of this model). Resample the recording."
            )
        is_list = isinstance(raw_speech, list | tuple)
        is_single = not is_list or not len(raw_speech) or not np.ndim(raw_speech[0])
        if isinstance(raw_speech, np.ndarray | torch.Tensor) and raw_speech.ndim == 2:
            is_single, raw_speech = False, list(raw_speech)
        recordings = [raw_speech] if is_single else list(raw_speech)
        hop_or_hops = self.hop_seconds if hop_seconds is None else hop_seconds
        hops = torch.as_tensor(hop_or_hops, dtype=torch.float64)
        if hops.shape not in ((), (len(recordings),)):
            raise ValueError(
                f"hop_seconds has {hops.numel()} numbers for {len(recordings)} recordings; give "
                "one number, or one for each."
            )
        hops = hops.expand(len(recordings)).tolist()
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


class CapeWhisperFeatureExtractor(WhisperFeatureExtractor):
    """Whisper's log-mel frames at the natural length of recordings: by default padded to the
    longest of a batch, with a mask, and not cut.

    Frames of a recording equal the frames of the stock extractor with silence after the recording,
    whatever else is in the batch. ``padding="max_length"`` is the stock extractor.

    Args:
        return_attention_mask: Default of calls; for the other arguments see the stock extractor.
    """

    model_input_names = ("input_features", "attention_mask")

    def __init__(self, *args: Any, return_attention_mask: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, return_attention_mask=return_attention_mask, **kwargs)

    def __call__(
        self,
        raw_speech: Any,
        truncation: bool | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        padding: bool | str = "longest",
        max_length: int | None = None,
        sampling_rate: int | None = None,
        hop_seconds: float | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Features ``[B, bins, T]`` of one recording or of several.

        Args:
            raw_speech: ``[samples]`` in -1 to 1 (numpy, torch or list), or a list of recordings.
            truncation: Whether to cut at `max_length`; by default only if `max_length` is given or
                `padding` is "max_length".
            pad_to_multiple_of: As in transformers, in samples.
            return_tensors: "pt" or "np".
            return_attention_mask: As in transformers.
            padding: As in transformers; by default to the longest recording.
            max_length: As in transformers, in samples; default 30 s.
            sampling_rate: Sampling rate of the recordings, to be checked.
            hop_seconds: Distance of frames; the result then holds `hop_nanoseconds` ``[B]`` for the
                model. Default the hop of the extractor.
            kwargs: See transformers.

        Raises:
            ValueError: for another sampling rate, a hop of less than one sample, and values that
                are no waveform of one channel or have no sample.
        """
        if hop_seconds is not None:
            return self._with_hop(hop_seconds)(
                raw_speech,
                truncation,
                pad_to_multiple_of,
                return_tensors,
                return_attention_mask,
                padding,
                max_length,
                sampling_rate,
                **kwargs,
            )
        waves = _waveforms(raw_speech)
        kwargs |= {"return_tensors": return_tensors, "sampling_rate": sampling_rate}
        if return_attention_mask is None:
            return_attention_mask = self.return_attention_mask
        if padding not in (True, "longest"):
            truncation = padding == "max_length" if truncation is None else truncation
            batch = super().__call__(
                waves,
                truncation,
                pad_to_multiple_of,
                return_attention_mask=return_attention_mask,
                padding=padding,
                max_length=max_length,
                **kwargs,
            )
        else:
            if truncation or (truncation is None and max_length):
                waves = [wave[: max_length or self.n_samples] for wave in waves]
            batch = self._to_the_longest(waves, pad_to_multiple_of or 1, **kwargs)
            if not return_attention_mask:
                del batch["attention_mask"]
        if hop := getattr(self, "hop_nanoseconds", None):
            values = np.full(len(waves), hop)
            batch["hop_nanoseconds"] = (
                torch.from_numpy(values) if return_tensors == "pt" else values
            )
        return batch

    def _to_the_longest(
        self, waves: list[np.ndarray], multiple: int, **kwargs: Any
    ) -> BatchFeature:
        """Stock features of recordings with silence at the end, without frames of the silence."""
        longest = math.ceil(max(map(len, waves)) / multiple) * multiple
        frames = math.ceil(longest / self.hop_length)
        batch = super().__call__(
            waves,
            truncation=False,
            return_attention_mask=True,
            padding="max_length",
            max_length=(frames + math.ceil(self.n_fft / self.hop_length)) * self.hop_length,
            **kwargs,
        )
        for name in ("input_features", "attention_mask"):
            batch[name] = batch[name][..., :frames]
        return batch

    def _with_hop(self, hop_seconds: float) -> CapeWhisperFeatureExtractor:
        extractor = copy.copy(self)
        try:
            extractor.hop_length = round(float(hop_seconds) * self.sampling_rate)
        except (TypeError, ValueError, OverflowError):  # no number, several, or not finite
            extractor.hop_length = 0
        if extractor.hop_length < 1:
            raise ValueError(
                f"hop_seconds={hop_seconds!r} is not allowed; allowed: one number of at least one "
                f"sample, {1 / self.sampling_rate} s. Give the distance of frames in seconds, such "
                "as 0.01."
            )
        extractor.hop_nanoseconds = round(extractor.hop_length / self.sampling_rate * 1e9)
        return extractor

    def pad(self, processed_features: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """See transformers; pads waveforms and also features ``[bins, T]``, along time."""
        items = processed_features
        if isinstance(items, list | tuple) and len(items):
            items = {name: [item[name] for item in items] for name in items[0]}
        features = [np.asarray(item) for item in items["input_features"]]
        shapes = {item.shape for item in features}
        if {shape[:-1] for shape in shapes} != {(self.feature_size,)} or max(shapes)[-1] == 1:
            return super().pad(processed_features, *args, **kwargs)
        features = [item.T for item in features]
        batch = super().pad({**items, "input_features": features}, *args, **kwargs)
        padded = batch["input_features"]
        batch["input_features"] = (
            [item.T for item in padded] if isinstance(padded, list) else padded.swapaxes(1, 2)
        )
        return batch


def choose_extractor(folder: Path, at_natural_length: bool) -> None:
    """Writes the name of the extractor that fits a Whisper model into the files of a folder.

    Args:
        folder: Folder with the files of a feature extractor or processor; names of extractors of
            other models stay.
        at_natural_length: Whether to name the extractor for natural lengths, or the stock
            extractor.
    """
    extractors = (WhisperFeatureExtractor, CapeWhisperFeatureExtractor)
    for name in ("processor_config.json", "preprocessor_config.json"):
        with editing_json(folder / name) as saved:
            settings = saved.get("feature_extractor", saved)
            if settings.get("feature_extractor_type") in {row.__name__ for row in extractors}:
                settings["feature_extractor_type"] = extractors[at_natural_length].__name__
                settings["return_attention_mask"] = at_natural_length
                settings.pop("auto_map", None)


def _waveforms(raw_speech: Any) -> list[np.ndarray]:
    """One or several recordings, each ``[samples]``."""
    if not isinstance(raw_speech, list | tuple) or not raw_speech or not np.ndim(raw_speech[0]):
        is_batch = isinstance(raw_speech, np.ndarray | torch.Tensor) and raw_speech.ndim == 2
        raw_speech = list(raw_speech) if is_batch else [raw_speech]
    waves = [_waveform(recording).numpy() for recording in raw_speech]
    for wave in waves:
        if wave.ndim != 1 or not len(wave):
            raise ValueError(
                f"raw_speech holds a recording of shape {wave.shape}; allowed: [samples] of one "
                "channel, at least one. Leave out empty recordings, and mix channels to one."
            )
    return waves


def _waveform(recording: Any) -> torch.Tensor:
    try:
        if recording is None:  # numpy would turn None into NaN
            raise TypeError
        return torch.as_tensor(np.asarray(recording, dtype=np.float32))
    except (TypeError, ValueError):
        raise ValueError(
            f"raw_speech holds {str(recording)[:60]!r} ({type(recording).__name__}); allowed: "
            "waveforms of numbers in -1 to 1. Read a file first, for example by "
            "soundfile.read(path)[0]."
        ) from None
