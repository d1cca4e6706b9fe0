"""Parts of a model as graphs with tensors only: inputs with names and axes, caches taken apart.

Axes have names: batch, length (tokens of a source or given now), past (tokens in the cache), states
(encoder states that a decoder sees), frames, height, width; numbers are sizes that do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from hf_models.host import cache_name
from hf_models.seams.bos_hint import place_hint, with_hint
from hf_models.seams.images import PatchEmbeddings
from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.switching.install import stock_class

Axes = tuple[str | int, ...]
LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class Input:
    """An input of a graph.

    Attributes:
        axes: Name of each axis with any size, or size of the axis.
        draw: Function that makes values of a shape, for a check.
        paddings: Sides on which a mask marks padding; empty for other inputs.
    """

    axes: Axes
    draw: Callable[[Sequence[int], torch.Generator], Tensor]
    paddings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A file to write.

    Attributes:
        name: Name of the file.
        module: Takes the inputs in order, and returns a tuple of tensors.
        inputs: Inputs by name.
        outputs: Names of the returned tensors, in order.
        sample: Sizes of the axes of the inputs for tracing the module: at least 2, because
            torch.export keeps a 1, and no size for which the module takes a special branch.
        others: Sizes for checks, the smallest sizes included.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Input]
    outputs: list[str]
    sample: dict[str, int]
    others: list[dict[str, int]] = field(default_factory=list)

    @property
    def paddings(self) -> list[str | None]:
        """Sides on which inputs may be padded, and None."""
        return [None, *dict.fromkeys(side for row in self.inputs.values() for side in row.paddings)]


def draw(
    inputs: dict[str, Input], sizes: dict[str, int], padding: str | None = None
) -> tuple[Tensor, ...]:
    """Values for inputs with axes of these `sizes`, the same in each call.

    Args:
        inputs: Inputs of a graph.
        sizes: Sizes of the named axes.
        padding: Side on which masks mark padding in all samples but the first; None for none.
    """
    generator = torch.Generator().manual_seed(sum(sizes.values()))
    values = []
    for port in inputs.values():
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in port.axes]
        value = port.draw(shape, generator)
        values.append(_padded(value, padding) if padding in port.paddings else value)
    return tuple(values)


def _padded(mask: Tensor, side: str) -> Tensor:
    """A mask ``[B, T]`` with zeros on a side: more in each next sample, but one 1 stays."""
    batch, length = mask.shape
    num_ones = (length - 2 * torch.arange(batch)).clamp(min=1)[:, None]
    number = torch.arange(length)
    return mask * (number < num_ones if side == RIGHT else number >= length - num_ones)


# ---- inputs --------------------------------------------------------------------------------------


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _ones(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def _numbers(low: int, high: int) -> Callable[[Sequence[int], torch.Generator], Tensor]:
    return lambda shape, generator: torch.randint(low, high, tuple(shape), generator=generator)


def _tokens(embedding: nn.Embedding) -> Input:
    return Input(("batch", "length"), _numbers(0, embedding.num_embeddings))


def _mask(axis: str, *paddings: str) -> Input:
    return Input(("batch", axis), _ones, paddings)


def _each_layer(count: int, prefix: str, axes: Axes) -> dict[str, Input]:
    """Keys and values of attention in each layer."""
    return {
        f"{prefix}_{layer}_{part}": Input(axes, _normal)
        for layer in range(count)
        for part in ("key", "value")
    }


# ---- models of one graph -------------------------------------------------------------------------

LENGTHS = "lengths"  # outputs of each recording that are no padding
_SIZES = ((1, 1), (3, 2), (2, 7), (1, 97), (3, 260))


class _OneGraph(nn.Module):
    """A model with outputs that are picked by name."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model, tuple(inputs), tuple(outputs)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(self.inputs, values, strict=True))
        output = dict(self.model(**arguments, return_dict=True))
        if LENGTHS in self.outputs:
            lengths = arguments["attention_mask"].sum(-1)
            output[LENGTHS] = self.model._get_feat_extract_output_lengths(lengths)
        return tuple(output[name] for name in self.outputs)


def _one_graph(
    model: Any, inputs: dict[str, Input], sample: dict[str, int], others: list[dict[str, int]]
) -> Graph:
    """A graph of a whole model, with all tensors that it returns."""
    values = draw(inputs, sample)
    with torch.no_grad():
        output = model(**dict(zip(inputs, values, strict=True)), return_dict=True)
    outputs = [name for name, value in output.items() if isinstance(value, Tensor)]
    if not outputs:
        raise ValueError(
            f"export onnx has no graph for {type(model).__name__}, which returns tuples of tensors "
            "alone; allowed: models that return scores or states. transformers.exporters have "
            "more ways to export a model."
        )
    if "hop_nanoseconds" in inputs:
        outputs.append(LENGTHS)
    return Graph("model", _OneGraph(model, inputs, outputs), inputs, outputs, sample, others)


def image_graph(model: Any) -> Graph:
    """Images of any height and width.

    Raises:
        ValueError: for relative biases, and for a table that the stock model smooths.
    """
    for name in ("use_relative_position_bias", "use_shared_relative_position_bias"):
        if getattr(model.config, name, False):
            raise ValueError(
                f"{name}=True is not allowed for export onnx; allowed: False, because transformers "
                "computes these biases in a way that an exporter fixes to sizes of images. Train "
                "without them, with relative positions of this package (type relpos) if need be."
            )
    for module in model.modules():
        if isinstance(module, PatchEmbeddings) and module.antialias and module.table is not None:
            raise ValueError(
                f"the learned table of {type(model).__name__} is smoothed where it gets smaller, "
                "which ONNX Runtime does otherwise at some sizes; allowed for export onnx: types "
                "without a table, such as cape. Convert the model to one and fine-tune it."
            )
    sizes = getattr(model.config, "vision_config", model.config)
    patch, whole = (
        size if isinstance(size, int) else max(size)
        for size in (sizes.patch_size, sizes.image_size)
    )
    inputs = {"pixel_values": Input(("batch", sizes.num_channels, "height", "width"), _normal)}
    other = whole + patch  # not the size of the table, because the table must be resized
    shapes = (
        *((1, patch, patch), (3, patch, 3 * patch), (1, 2 * patch, patch)),
        *((1, whole, whole), (2, whole, 2 * patch), (3, whole + patch, whole + 2 * patch - 1)),
    )
    names = ("batch", "height", "width")
    others = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return _one_graph(model, inputs, {"batch": 2, "height": other, "width": other + patch}, others)


def frames_graph(model: Any) -> Graph:
    """Recordings of any length, with a score for each class at each position."""
    inputs = {
        "input_features": Input(("batch", "frames", model.config.num_mel_bins), _normal),
        "attention_mask": _mask("frames", RIGHT),
        "hop_nanoseconds": Input(("batch",), _numbers(5_000_000, 20_000_000)),
    }
    others = [{"batch": batch, "frames": frames} for batch, frames in _SIZES]
    return _one_graph(model, inputs, {"batch": 2, "frames": 50}, others)


def tokens_graph(model: Any) -> Graph:
    """Texts of any length, with an output for each token or for the text."""
    words = model.get_input_embeddings()
    inputs = {"input_ids": _tokens(words), "attention_mask": _mask("length", LEFT, RIGHT)}
    if getattr(model.config, "type_vocab_size", 0):
        types = _numbers(0, model.config.type_vocab_size)
        inputs["token_type_ids"] = Input(("batch", "length"), types)
    others = [{"batch": batch, "length": length} for batch, length in _SIZES]
    return _one_graph(model, inputs, {"batch": 2, "length": 9}, others)


# ---- encoder and decoder -------------------------------------------------------------------------


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
    mask = _mask("states", LEFT, RIGHT)
    cross = _each_layer(layers, "cross", ("batch", heads, "states", width))
    past = _each_layer(layers, "past", ("batch", heads, "past", width))
    tokens = {"input_ids": _tokens(decoder.embed_tokens), "encoder_attention_mask": mask}
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
        self.cache_name = cache_name(type(model).forward)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        input_ids, mask, cache_mask, *past = values
        cache, whole = _cache(past), torch.cat((cache_mask, mask), dim=1)
        position = (whole.cumsum(1) - 1).clamp(min=0)[:, cache_mask.shape[1] :]
        output = self.model(
            input_ids=input_ids,
            attention_mask=whole,
            position_ids=position,
            use_cache=True,
            return_dict=True,
            **{self.cache_name: cache},
        )
        return output.logits, *_pairs(cache)


def language_model_graph(model: Any) -> Graph:
    """A model that continues a text."""
    layers = model.get_decoder().layers
    attention = layers[0].self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    past = _each_layer(len(layers), "past", ("batch", heads, "past", attention.head_dim))
    inputs = {
        "input_ids": _tokens(model.get_input_embeddings()),
        "attention_mask": _mask("length"),
        "cache_mask": _mask("past", LEFT),
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


def _source_inputs(model: Any) -> tuple[dict[str, Input], dict[str, int], list[dict[str, int]]]:
    """Inputs of an encoder, sizes for tracing the encoder, and other sizes."""
    config, encoder = model.config, model.get_encoder()
    if model.main_input_name == "input_ids":
        inputs = {
            "input_ids": _tokens(encoder.embed_tokens),
            "attention_mask": _mask("length", LEFT, RIGHT),
        }
        others = [{"batch": batch, "length": length} for batch, length in _SIZES]
        return inputs, {"batch": 2, "length": 9}, others
    bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    bins_first = isinstance(encoder, NaturalLengthEncoder)
    axes = ("batch", bins, "frames") if bins_first else ("batch", "frames", bins)
    inputs = {"input_features": Input(axes, _normal)}
    if getattr(config, "at_natural_length", True):
        inputs["attention_mask"] = _mask("frames", RIGHT)
    inputs["hop_nanoseconds"] = Input(("batch",), _numbers(5_000_000, 20_000_000))
    others = [{"batch": batch, "frames": frames} for batch, frames in _SIZES]
    return inputs, {"batch": 2, "frames": 50}, others
