"""Parts of a model that generates as graphs: an encoder and a decoder, or a decoder alone. See
onnx_graphs.py for the names of axes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from hf_models.host import cache_name
from hf_models.seams.bos_hint import place_hint, with_hint
from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.serving.known_inputs import known_inputs
from hf_models.serving.onnx_graphs import (
    COMMAND,
    LEFT,
    RIGHT,
    SIZES,
    Graph,
    Input,
    layer_inputs,
    mask_input,
    normal_values,
    token_input,
    whole_numbers,
)
from hf_models.switching.install import stock_class


class _Encoder(nn.Module):
    """Keys and values of the decoder's attention to the source, which are the same at each step."""

    def __init__(self, model: Any, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs = model, tuple(inputs)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(self.inputs, values, strict=True))
        encoder, mask = self.model.get_encoder(), arguments.get("attention_mask")
        output = encoder(**arguments, return_dict=True)
        if getattr(encoder, "has_hint", False):
            output, _ = with_hint(output)
            mask = place_hint(mask).mask
        states = output.last_hidden_state
        if "attention_mask" in output:
            mask = output.attention_mask.long()
        elif mask is None:
            mask = torch.ones_like(states[..., 0], dtype=torch.int64)
        elif "input_features" in arguments:
            mask = encoder._get_feature_vector_attention_mask(states.shape[1], mask)
        pairs = []
        for layer in self.model.get_decoder().layers:
            attention = layer.encoder_attn
            for projection in (attention.k_proj, attention.v_proj):
                heads = projection(states).unflatten(-1, (-1, attention.head_dim))
                pairs.append(heads.transpose(1, 2))
        return mask, *pairs


class _Decoder(nn.Module):
    """Scores of the next token after each token of the input, and the cache with these tokens."""

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.cache_name = cache_name(stock_class(type(model.get_decoder())).forward)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        input_ids, mask, *pairs = values
        cross, past = pairs[: 2 * self.layers], pairs[2 * self.layers :]
        cache = EncoderDecoderCache(_cache(past), _cache(cross))
        output = self.model.get_decoder()(
            input_ids=input_ids,
            # the keys are known: the decoder looks only at the shape of the states
            encoder_hidden_states=cross[0].transpose(1, 2).flatten(2),
            encoder_attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{self.cache_name: cache},
        )
        logits = self.model.get_output_embeddings()(output.last_hidden_state)
        bias = getattr(self.model, "final_logits_bias", None)
        logits = logits if bias is None else logits + bias
        return logits, *_pairs(cache.self_attention_cache)


def _cache(pairs: Sequence[Tensor]) -> DynamicCache:
    """A cache that holds keys and values unchanged, even empty keys and values."""
    cache = DynamicCache()
    for keys, values in zip(pairs[::2], pairs[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _pairs(cache: DynamicCache) -> list[Tensor]:
    """Keys and values of each layer."""
    return [value for layer in cache.layers for value in (layer.keys, layer.values)]


def generation_graphs(model: Any) -> list[Graph]:
    """Encoder and decoder of a model that generates, from texts or recordings."""
    decoder = model.get_decoder()
    layers, attention = len(decoder.layers), decoder.layers[0].encoder_attn
    heads, width = attention.num_heads, attention.head_dim
    inputs, sample, others = _source_inputs(model)
    mask = mask_input("states", LEFT, RIGHT)
    cross = layer_inputs(layers, "cross", ("batch", heads, "states", width))
    past = layer_inputs(layers, "past", ("batch", heads, "past", width))
    tokens = {
        "input_ids": token_input(decoder.embed_tokens.num_embeddings),
        "encoder_attention_mask": mask,
    }
    steps = ((1, 1, 0, 1), (1, 1, 1, 9), (3, 4, 0, 5), (2, 1, 30, 40), (1, 3, 7, 2))
    names = ("batch", "length", "past", "states")
    return [
        Graph(
            "encoder",
            _Encoder(model, inputs),
            inputs,
            ["encoder_attention_mask", *cross],
            sample,
            others,
        ),
        Graph(
            "decoder",
            _Decoder(model, layers),
            {**tokens, **cross, **past},
            ["logits", *(name.replace("past", "present") for name in past)],
            dict(zip(names, (2, 3, 5, 7), strict=True)),
            [dict(zip(names, sizes, strict=True)) for sizes in steps],
        ),
    ]


class _LanguageModel(nn.Module):
    """Scores of the next token after each token of the input, and the cache with these tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        stock = stock_class(type(model)).forward
        self.cache_name = cache_name(stock)
        self.takes_positions = "position_ids" in inspect.signature(stock).parameters

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        input_ids, mask, cache_mask, *past = values
        cache, whole = _cache(past), torch.cat((cache_mask, mask), dim=1)
        positions = {}
        if self.takes_positions:
            number = (whole.cumsum(1) - 1).clamp(min=0)
            positions["position_ids"] = number[:, cache_mask.shape[1] :]
        output = self.model(
            input_ids=input_ids,
            attention_mask=whole,
            use_cache=True,
            return_dict=True,
            **positions,
            **{self.cache_name: cache},
        )
        return output.logits, *_pairs(cache)


def language_model_graph(model: Any) -> Graph:
    """A model that continues a text.

    Raises:
        ValueError: for a model whose cache is more than keys and values.
    """
    past = {}
    for layer, keys in enumerate(_keys_of_layers(model)):
        _, heads, _, width = keys.shape
        for part in ("key", "value"):
            past[f"past_{layer}_{part}"] = Input(("batch", heads, "past", width), normal_values)
    inputs = {
        "input_ids": token_input(model.get_input_embeddings().num_embeddings),
        "attention_mask": mask_input("length"),
        "cache_mask": mask_input("past", LEFT),
        **past,
    }
    names = ("batch", "length", "past")
    steps = ((1, 1, 0), (1, 1, 1), (3, 4, 0), (2, 1, 30), (1, 3, 7), (3, 80, 2))
    return Graph(
        "model",
        _LanguageModel(model),
        inputs,
        ["logits", *(name.replace("past", "present") for name in past)],
        dict(zip(names, (2, 3, 5), strict=True)),
        [dict(zip(names, sizes, strict=True)) for sizes in steps],
    )


@torch.no_grad()
def _keys_of_layers(model: Any) -> list[Tensor]:
    """Keys ``[B, H, T, D]`` in the cache after a short text, by layer."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with known_inputs(model, COMMAND, (Exception,)):  # stock code raises any error
        cache = model(input_ids=tokens, use_cache=True, return_dict=True).get("past_key_values")
    keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
    is_plain = all(isinstance(key, Tensor) and key.dim() == 4 for key in keys)
    if not keys or not is_plain:
        raise ValueError(
            f"export onnx has no graph for the cache of {type(model).__name__}; allowed: models "
            "that keep a key and a value for each token. transformers.exporters.OnnxExporter "
            "exports others."
        )
    return keys


def _source_inputs(model: Any) -> tuple[dict[str, Input], dict[str, int], list[dict[str, int]]]:
    """Inputs of an encoder, sizes for tracing the encoder, and other sizes."""
    config, encoder = model.config, model.get_encoder()
    if model.main_input_name == "input_ids":
        inputs = {
            "input_ids": token_input(encoder.embed_tokens.num_embeddings),
            "attention_mask": mask_input("length", LEFT, RIGHT),
        }
        others = [{"batch": batch, "length": length} for batch, length in SIZES]
        return inputs, {"batch": 2, "length": 9}, others
    bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    bins_first = isinstance(encoder, NaturalLengthEncoder)
    axes = ("batch", bins, "frames") if bins_first else ("batch", "frames", bins)
    inputs = {"input_features": Input(axes, normal_values)}
    if getattr(config, "at_natural_length", True):
        inputs["attention_mask"] = mask_input("frames", RIGHT)
    inputs["hop_nanoseconds"] = Input(("batch",), whole_numbers(5_000_000, 20_000_000))
    others = [{"batch": batch, "frames": frames} for batch, frames in SIZES]
    return inputs, {"batch": 2, "frames": 50}, others
