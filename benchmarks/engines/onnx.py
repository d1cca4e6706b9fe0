"""Greedy search with ONNX Runtime and the graphs of an exported Hugging Face model."""

from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.engines.task import EOS, PAD, Search, Step, source_ids

FOLDER = "onnx"


def translator(folder: Path, search: Search) -> Step:
    """The loop over tokens that the README of an exported folder shows, for batches.

    Raises:
        ValueError: for a beam, which the graphs leave to the caller.
    """
    if search.beam != 1:
        raise ValueError(f"beam {search.beam} is not implemented for ONNX Runtime; allowed: 1.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = search.threads
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / FOLDER / f"{name}.onnx", options)
        for name in ("encoder", "decoder")
    )
    ids = source_ids(folder, search)
    names = [output.name for output in encoder.get_outputs()]
    past = {port.name: port.shape for port in decoder.get_inputs() if port.name.startswith("past")}
    empty = [np.zeros((len(ids), shape[1], 0, shape[3]), np.float32) for shape in past.values()]

    def translate() -> np.ndarray:
        inputs = {"input_ids": ids, "attention_mask": (ids != PAD).astype(np.int64)}
        states = dict(zip(names, encoder.run(None, inputs), strict=True))
        tokens, cache = [np.full((len(ids), 1), EOS)], empty
        for _ in range(search.length):
            inputs = {"input_ids": tokens[-1], **states, **dict(zip(past, cache, strict=True))}
            logits, *cache = decoder.run(None, inputs)
            logits[:, -1, EOS] = -np.inf
            tokens.append(logits[:, -1].argmax(-1)[:, None])
        return np.concatenate(tokens[1:], axis=1)

    return translate
