"""Small values for the fields of stock configurations, by the names of the fields. Data only:
:mod:`hf_models.checks.small` applies them."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 128
HEADS, KEY_HEADS, HEAD_WIDTH, WIDTH = 4, 2, 8, 32
LAYERS = 2
PATCHES = 4  # on each side of an image
SCALED_LENGTH = 32  # trained length of scaled RoPE
LARGE = 512  # from this value on, a width without a rule is made small

_RULES = (
    (VOCABULARY, r"(^|_)vocab_size(_|$)|_vocab_size|codebook_size|num_embeddings$|^num_buckets"),
    (VOCABULARY, r"^vocabulary_size$"),
    (HEADS, r"^(num_attention_heads|n_heads?|num_heads|attention_heads|n_head|num_head)$"),
    (HEADS, r"^((encoder|decoder)_(num_)?attention_heads|num_(encoder|decoder)_heads)$"),
    (KEY_HEADS, r"num_key_value_heads|num_kv_heads|multi_query_group_num|n_kv_heads"),
    (KEY_HEADS, r"num_query_groups"),
    (HEAD_WIDTH, r"^(\w+_)?head_dim$|^kv_channels$|^d_kv$|^attention_head_size$|^head_size$"),
    (16, r"q_lora_rank|kv_lora_rank|lora_rank|_lora_dim"),
    (LAYERS, r"num_hidden_layers|^n_layers?$|^num_layers$|(encoder|decoder)_layers$|^layers$"),
    (LAYERS, r"^depth$|num_(encoder|decoder)_layers|num_block\w*$"),
    (LAYERS, r"(encoder|decoder)_num_(hidden_)?layers"),
    (2, r"num_experts_per_tok|moe_topk|moe_top_k|^top_?k$|num_experts_per_token|moe_k"),
    (2, r"router_top_k|num_selected_experts|top_k_experts"),
    (1, r"(n_group|topk_group)$"),
    (4, r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_router_experts)$"),
    (1, r"n_shared_experts|first_k_dense_replace|moe_num_shared_experts"),
    (64, r"intermediate_size|ffn_dim|^d_ff$|n_inner|ffn_hidden_size|mlp_dim|expert_dim"),
    (64, r"feed_?forward\w*(dim|size)|ffn_embed_dim|ffn_layers_dim|mlp_hidden_size|_ff_size"),
    (64, r"hidden_dim_mlp"),
    (WIDTH, r"(^|_)(hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|model_dim)$"),
    (WIDTH, r"(^|_)(embedding_size|embedding_dim|embed_size|emb_dim|d_embed|hidden_units)$"),
    (WIDTH, r"(^|_)(projection_dim|proj_dim|word_embed_proj_dim|output_dim|input_dim|kv_dim)$"),
    (WIDTH, r"(^|_)(width|conv_dim|lru_width|hidden_size_per_layer_input)$"),
    (64, r"^(max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions)$"),
    (64, r"^(max_seq_len|max_sequence_length|seq_length|max_seq_length|model_max_length)$"),
    (64, r"^(max_pos|max_2d_position_embeddings|max_text_len|max_length)$"),
    (64, r"^original_max_position_embeddings$"),
    (16, r"^(sliding_window|local_attention|attention_window_size|attention_chunk_size)$"),
    (16, r"^(window_size|max_window_layers)$"),
    (4, r"^frames_per_clip$"),
    (8, r"^(mamba_d_state|ssm_state_size|state_size|mamba_d_head|mamba_headdim)$"),
    (8, r"^(mamba_d_ssm|time_step_rank)$"),
    (4, r"^(mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads)$"),
)
# The first rule whose pattern is found in the name of a field gives its largest value.
RULES = tuple((re.compile(pattern), value) for value, pattern in _RULES)
# Fields that keep their value, because the value depends on other fields or on data.
KEPT = re.compile(
    r"patch|kernel|stride|conv_depth|token|_ids?$|dilation|num_labels|num_channels|offset|num_mel|pad"
)
WIDTHS = re.compile(r"(hidden_sizes|embed_dims?|dims|conv_dim|channels|neck_hidden_sizes)$")
DEPTHS = re.compile(r"depths|layers$")
# Fields that the step "layers only" of hf_models.checks.small makes small.
NEEDED = re.compile(r"layer|vocab|token|image_size|depth")
TOKEN = re.compile(r"token_(id|index|idx)$|_token$|_id$")
# Ids for special tokens whose id is outside of the small vocabulary. Special tokens that are not
# listed get the last ids of the vocabulary.
TOKENS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 3, "sep": 4, "cls": 5}

# Values for fields that are None by default, for models that need a value.
FILLED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    **dict.fromkeys(("head_dim", "global_head_dim"), HEAD_WIDTH),
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
    "pad_token_id": 0,
    "sliding_window": 16,
    "prediction_length": 4,
    "context_length": 12,
}

_SERIES = {
    "prediction_length": 4,
    "context_length": 10,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
# Values that no rule gives, by model type.
BY_TYPE: dict[str, dict[str, Any]] = {
    "autoformer": {**_SERIES, "label_length": 4, "moving_average": 3},
    "bamba": _MAMBA,
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "clap": {
        "audio_config": {
            "patch_embeds_hidden_size": 8,
            "hidden_size": 64,  # doubled three times from the width of a patch
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "spec_size": 128,
            "num_mel_bins": 32,
            "window_size": 4,
        }
    },
    "data2vec-vision": {"use_relative_position_bias": True},
    "deberta": {"relative_attention": False},
    "esm": {"pad_token_id": 1, "mask_token_id": 5},
    "fsmt": {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "intermediate_size": 64,
        "window_size": 8,
    },
    "granitemoehybrid": _MAMBA,
    "informer": _SERIES,
    "layoutlmv3": {
        "hidden_size": 48,  # four coordinates and two sizes of boxes, side by side
        "coordinate_size": 8,
        "shape_size": 8,
        "input_size": 32,
        "patch_size": 8,
    },
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48, "intermediate_size": 64},
    "longcat_flash": {"head_dim": 8},
    "longformer": {"attention_window": [4, 4]},
    "mistral4": {"head_dim": 8, "qk_rope_head_dim": 8},
    "mobilebert": {
        "intra_bottleneck_size": 32,
        "embedding_size": 32,
        "true_hidden_size": 32,
        "hidden_size": 32,
    },
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 8},
    "time_series_transformer": _SERIES,
    "vjepa2": {"crop_size": 32, "pred_num_attention_heads": 4, "num_pooler_layers": 1},
    "xlnet": {"d_inner": 64},
    "vivit": {"image_size": 32, "num_frames": 8, "tubelet_size": [2, 8, 8]},
}
