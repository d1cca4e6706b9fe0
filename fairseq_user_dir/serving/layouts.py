"""Writes Hugging Face folders for translation models of fairseq, if a stock class has the same
layers. The folders hold plain weights and JSON; transformers is not imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from safetensors.torch import save_file
from torch import Tensor, nn

from cape_plugins.serving.output import Exported
from cape_plugins.serving.templates import fill

TEMPLATE = Path(__file__).with_name("layouts.md")
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Layout:
    """Properties of the layers of a stock class.

    Attributes:
        model_type: Model type in the configuration of the class.
        name: Name of the class.
        pre_norm: Whether there are norms before the sub-layers and after the last layer.
        embedding_norm: Whether there is a norm on the embeddings.
        first_row: Number of rows in the table before the row of the first position.
        drops_tables: Whether ``save_pretrained`` of the class leaves the tables out.
    """

    model_type: str
    name: str
    pre_norm: bool
    embedding_norm: bool
    first_row: int = 0
    drops_tables: bool = False


# one layout for each combination of `pre_norm` and `embedding_norm`
LAYOUTS = (
    Layout("bart", "BartForConditionalGeneration", False, True, first_row=2),
    Layout("mbart", "MBartForConditionalGeneration", True, True, first_row=2),
    Layout("blenderbot", "BlenderbotForConditionalGeneration", True, False),
    Layout("marian", "MarianMTModel", False, False, drops_tables=True),
)
# Maps fairseq's names of activation functions to the names in transformers.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "swish": "silu",
    "tanh": "tanh",
}
# parameters that have the same name in transformers, after the prefix "model."
_SAME = re.compile(
    r"(encoder|decoder)\.(layers\.\d+\.((self_attn|encoder_attn)\.(q|k|v|out)_proj|fc1|fc2"
    r"|\w+_layer_norm)|layer_norm|layernorm_embedding)\.(weight|bias)"
)
# parts that are stored under other names, or that have no weights
_ELSEWHERE = re.compile(
    r"(encoder|decoder)\.(version|embed_tokens\.weight|embed_positions\.weight)"
    r"|decoder\.output_projection\.weight"
)


def write_hugging_face(
    plain: nn.Module, arguments: Mapping[str, Any], dictionary: Dictionary, rows: int, folder: Path
) -> Exported:
    """Writes weights, configuration and a tokenizer of segmented text.

    Args:
        plain: Result of :func:`~fairseq_user_dir.serving.folding.folded`, with tables of `rows`
            rows.
        arguments: Arguments of the model in fairseq.
        dictionary: Dictionary of both sides.
        rows: Positions of either side.
        folder: Empty folder.

    Raises:
        ValueError: if no stock class has these layers.
    """
    layout = _layout(plain)
    config = _config(layout, plain, arguments, dictionary, rows)
    weights = _weights(layout, plain, rows)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    hint = plain.position_config.source_bos
    for name, content in (
        ("config.json", config),
        ("generation_config.json", _generation(dictionary, rows)),
        ("tokenizer.json", _tokenizer(dictionary, hint)),
        ("tokenizer_config.json", _tokenizer_config(dictionary, rows)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    report = f"{WEIGHTS}: {layout.name} of transformers, tables of {rows} positions"
    readme = fill(
        TEMPLATE,
        model=layout.name,
        trained=plain.position_config.type,
        file=WEIGHTS,
        hint=hint,
        drops_tables=layout.drops_tables,
        rows=rows,
        max_length=_max_length(rows),
        most=rows + 1,
    )
    return Exported(readme, report)


def _layout(plain: nn.Module) -> Layout:
    """The stock class that has the layers of the model."""
    if not hasattr(plain, "encoder"):
        _refuse("it is a language model")
    encoder, decoder = plain.encoder, plain.decoder
    embedding = encoder.embed_tokens.weight
    tied = (decoder.embed_tokens.weight, getattr(decoder.output_projection, "weight", None))
    if any(other is not embedding for other in tied):
        _refuse(
            "its embeddings of source, target and output are not one (--share-all-embeddings), or "
            "ADMIN has scaled them"
        )
    stacks = (encoder, decoder)
    norms = {
        (stack.layers[0].normalize_before, stack.layernorm_embedding is not None)
        for stack in stacks
    }
    if len(norms) > 1:
        _refuse("encoder and decoder have their norms in other places")
    (places,) = norms
    layout = next(row for row in LAYOUTS if (row.pre_norm, row.embedding_norm) == places)
    if any((stack.layer_norm is not None) != layout.pre_norm for stack in stacks):
        _refuse("it has no norm behind its last layer (--no-decoder-final-norm)")
    return layout


def _refuse(reason: str) -> None:
    raise ValueError(
        f"--to hugging-face has no stock class with these layers: {reason}. Allowed: translation "
        "models with shared embeddings and plain layers. Leave --to out for a stock checkpoint of "
        "fairseq, or use `cape-plugins export ctranslate2`."
    )


def _config(
    layout: Layout,
    plain: nn.Module,
    arguments: Mapping[str, Any],
    dictionary: Dictionary,
    rows: int,
) -> dict[str, Any]:
    activation = arguments.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        _refuse(f"its activation function is {activation}")
    width = plain.encoder.embed_tokens.embedding_dim
    sizes = {}
    for side in ("encoder", "decoder"):
        layers = getattr(plain, side).layers
        sizes |= {
            f"{side}_layers": len(layers),
            f"{side}_attention_heads": layers[0].self_attn.num_heads,
            f"{side}_ffn_dim": layers[0].fc1.out_features,
        }
    return {
        "model_type": layout.model_type,
        "architectures": [layout.name],
        "is_encoder_decoder": True,
        "vocab_size": len(dictionary),
        "decoder_vocab_size": len(dictionary),
        "d_model": width,
        **sizes,
        "num_hidden_layers": sizes["encoder_layers"],
        "activation_function": ACTIVATIONS[activation],
        "scale_embedding": plain.encoder.embed_scale != 1.0,
        "max_position_embeddings": rows,
        "dropout": arguments.get("dropout") or 0.0,
        "attention_dropout": arguments.get("attention_dropout") or 0.0,
        "activation_dropout": arguments.get("activation_dropout") or 0.0,
        "tie_word_embeddings": True,
        "share_encoder_decoder_embeddings": True,
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
        "decoder_start_token_id": dictionary.eos(),
        "forced_eos_token_id": dictionary.eos(),
        "dtype": "float32",
    }


def _generation(dictionary: Dictionary, rows: int) -> dict[str, Any]:
    """Generation settings with the defaults of fairseq-generate: five beams, at least one word, no
    padding, EOS at the limit of 200 tokens."""
    return {
        "bos_token_id": dictionary.bos(),
        "pad_token_id": dictionary.pad(),
        "eos_token_id": dictionary.eos(),
        "decoder_start_token_id": dictionary.eos(),
        "forced_eos_token_id": dictionary.eos(),
        "num_beams": 5,
        "early_stopping": True,
        "length_penalty": 1.0,
        "min_new_tokens": 1,
        "max_length": _max_length(rows),
        "suppress_tokens": [dictionary.pad()],
    }


def _max_length(rows: int) -> int:
    """Largest number of token ids in a translation: the start, 200 tokens and EOS, or the number of
    rows of the table."""
    return min(202, rows + 1)


def _weights(layout: Layout, plain: nn.Module, rows: int) -> dict[str, Tensor]:
    """The parameters under the names of transformers."""
    weights = {"model.shared.weight": plain.encoder.embed_tokens.weight}
    for name, value in plain.state_dict().items():
        if _SAME.fullmatch(name):
            weights[f"model.{name}"] = value
        elif not _ELSEWHERE.fullmatch(name):
            _refuse(f"it has the parameter {name}")
    width = plain.encoder.embed_tokens.embedding_dim
    for side in ("encoder", "decoder"):
        table, first = getattr(plain, side).embed_positions, layout.first_row
        rows_of_side = plain.encoder.embed_tokens.weight.new_zeros(first + rows, width)
        if table is not None:
            rows_of_side[first:] = table.weight[-rows:]
        weights[f"model.{side}.embed_positions.weight"] = rows_of_side
    # copies: safetensors writes no tensors that share memory
    return {name: value.detach().float().clone() for name, value in weights.items()}


# ---- the tokenizer: segmented text, split at white space, as fairseq splits it -------------------


def _tokenizer(dictionary: Dictionary, hint: bool) -> dict[str, Any]:
    bos, eos, pad = (
        dictionary[index] for index in (dictionary.bos(), dictionary.eos(), dictionary.pad())
    )
    special = {
        symbol: {"id": symbol, "ids": [dictionary.index(symbol)], "tokens": [symbol]}
        for symbol in (bos, eos)
    }

    def token(symbol: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": symbol, "type_id": 0}}

    single = [
        *([token(bos)] if hint else []),
        {"Sequence": {"id": "A", "type_id": 0}},
        token(eos),
    ]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, token(eos)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": dictionary.index(symbol), "content": symbol, **flags, "special": True}
            for symbol in (bos, pad, eos)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": special,
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {symbol: index for index, symbol in enumerate(dictionary.symbols)},
            "unk_token": dictionary[dictionary.unk()],
        },
    }


def _tokenizer_config(dictionary: Dictionary, rows: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": dictionary[dictionary.bos()],
        "eos_token": dictionary[dictionary.eos()],
        "pad_token": dictionary[dictionary.pad()],
        "model_max_length": rows,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
