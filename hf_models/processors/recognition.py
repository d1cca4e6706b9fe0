"""The recognition pipeline of transformers, for model types that stock code does not know."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from transformers import AutomaticSpeechRecognitionPipeline

_PIPELINES: dict[str, tuple[str, type]] = {}


def recognise_as(
    model_type: str, way: str, pipeline: type = AutomaticSpeechRecognitionPipeline
) -> None:
    """Registers how the recognition pipeline of transformers runs the models of a model type.

    The file of a family calls this function, because a self-contained folder loads that file alone.

    Args:
        model_type: Model type.
        way: The stock pipeline's name for the kind of model: "ctc", "seq2seq" or "seq2seq_whisper".
        pipeline: Class of the pipeline; a caller's subclass of the stock pipeline stays.
    """
    _PIPELINES[model_type] = way, pipeline


class BinsFirstPipeline(AutomaticSpeechRecognitionPipeline):
    """The recognition pipeline for features ``[B, bins, T]``, with recordings of different lengths
    in a batch. Stock code pads the first dimension of each recording, so time is the first
    dimension between the extractor and the model.
    """

    def preprocess(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """See transformers."""
        for item in super().preprocess(*args, **kwargs):
            yield _swap_time_and_bins(item)

    def _forward(self, model_inputs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super()._forward(_swap_time_and_bins(model_inputs), *args, **kwargs)


def _swap_time_and_bins(item: dict[str, Any]) -> dict[str, Any]:
    """``[B, bins, T]`` to ``[B, T, bins]`` and back."""
    return {**item, "input_features": item["input_features"].transpose(1, 2)}


def _with_registered_types(stock_parameters: Any) -> Any:
    """The first step of a pipeline that sees the model, extended by the types of `_PIPELINES`."""

    @functools.wraps(stock_parameters)
    def sanitize_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.config.model_type in _PIPELINES:
            self.type, pipeline = _PIPELINES[self.model.config.model_type]
            if type(self) is AutomaticSpeechRecognitionPipeline:  # not a subclass of the caller
                self.__class__ = pipeline
        return stock_parameters(self, *args, **kwargs)

    return sanitize_parameters


AutomaticSpeechRecognitionPipeline._sanitize_parameters = _with_registered_types(
    AutomaticSpeechRecognitionPipeline._sanitize_parameters
)
