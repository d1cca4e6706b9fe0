"""Folders that ``cape-plugins export onnx`` writes, and what their graphs compute."""

from functools import cache

import numpy as np
import onnxruntime
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests.support.engines import export
from tests.support.hf import FAMILIES, OF_FAMILY

# torch makes its table of operators, which never changes, for each export anew
ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))


def small(family, name, **sizes):
    """A model of one layer, by the name of its settings or by these."""
    settings = OF_FAMILY[family][name] if isinstance(name, str) else name
    layers = ("num_hidden_layers", "encoder_layers", "decoder_layers")
    sizes |= {key: 1 for key in layers if key in FAMILIES[family].sizes}
    return FAMILIES[family].build(settings, **sizes)


def export_saved(model, folder, *options):
    """The folder with the graphs of a model, whose checkpoint stands beside it."""
    model.save_pretrained(folder / "checkpoint")
    return export("onnx", folder / "checkpoint", folder / "out", *options)


def run(out, name, **inputs):
    """Outputs of a graph by name, for tensors."""
    session = onnxruntime.InferenceSession(out / f"{name}.onnx")
    values = session.run(None, {key: value.numpy() for key, value in inputs.items()})
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, values), strict=True))


def greedy(out, inputs, prompt, end, steps, never=()):
    """Tokens behind the prompt, up to `end`, of each sample: with a cache that begins empty."""
    states = {name: value.numpy() for name, value in run(out, "encoder", **inputs).items()}
    decoder = onnxruntime.InferenceSession(out / "decoder.onnx")
    past = [put for put in decoder.get_inputs() if put.name.startswith("past")]
    batch = len(states["encoder_attention_mask"])
    cache = [np.zeros((batch, put.shape[1], 0, put.shape[3]), np.float32) for put in past]
    names = [put.name for put in past]
    new, chosen = np.tile(prompt, (batch, 1)), []
    for _ in range(steps):
        feeds = {"input_ids": new, **states, **dict(zip(names, cache, strict=True))}
        logits, *cache = decoder.run(None, feeds)
        logits[:, -1, list(never)] = -np.inf
        new = logits[:, -1].argmax(-1)[:, None]
        chosen.append(new)
    return [up_to(row, end) for row in np.concatenate(chosen, 1).tolist()]


def up_to(tokens, end):
    """Tokens before the first `end`."""
    return tokens[: tokens.index(end)] if end in tokens else tokens


def assert_close(actual, expected):
    """Within 1e-5 of the largest value, or of 1."""
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, atol=1e-5 * scale, rtol=0)
