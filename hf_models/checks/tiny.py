"""Tiny stock models of any family, derived from the stock configurations."""

from __future__ import annotations

from typing import Any

import torch

# Values for fields with these names, if a stock configuration has them. Large weights tell wrong
# positions from rounding.
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    **dict.fromkeys(("hidden_size", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "max_source_positions"), 40),
    "max_target_positions": 20,
    "image_size": 32,
    "patch_size": 8,
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel"), 8),
    "conv_channels": 24,
    "classifier_proj_size": 16,
    **dict.fromkeys(("init_std", "initializer_range"), 0.2),
}
# Ids for special tokens whose id is outside of the small vocabulary.
_TOKENS = {"pad": 59, "bos": 1, "eos": 0, "cls": 1, "sep": 0, "decoder_start": 59}


def tiny_config(config_class: Any) -> Any:
    """A configuration of a stock class with small sizes.

    Args:
        config_class: Class of transformers, or of a package that adds a family.
    """
    return config_class(**tiny_sizes(config_class))


def tiny_sizes(config_class: Any) -> dict[str, Any]:
    """The small sizes that a configuration has fields for; the value for a part is a dict."""
    default = config_class()
    sizes = {
        name: _like(size, vars(default)[name])
        for name, size in SIZES.items()
        if name in vars(default)
    }
    if "vocab_size" in sizes:
        for name, token in _TOKENS.items():
            stock = getattr(default, f"{name}_token_id", None)
            if isinstance(stock, int) and stock >= sizes["vocab_size"]:
                sizes[f"{name}_token_id"] = token
    for name, part in getattr(config_class, "sub_configs", {}).items():
        sizes[name] = tiny_sizes(part)
    return sizes


def _like(size: Any, default: Any) -> Any:
    """The size, repeated where the stock configuration has a list, such as height and width."""
    return [size] * len(default) if isinstance(default, list | tuple) else size


def tiny_model(stock_class: Any, seed: int = 0) -> Any:
    """A stock model with small sizes and random weights, in evaluation mode."""
    torch.manual_seed(seed)
    return fill_zeros(stock_class(tiny_config(stock_class.config_class)).eval())


@torch.no_grad()
def fill_zeros(model: Any) -> Any:
    """Draws, in place, the tables and special tokens that begin with zeros in some models, because
    positions that are zero cannot be wrong."""
    generator = torch.Generator().manual_seed(0)
    for name, table in model.named_parameters():
        if table.dim() > 1 and not table.any() and not name.endswith("bias"):
            table.copy_(torch.randn(table.shape, generator=generator) * 0.2)
    return model
