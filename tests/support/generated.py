"""Tiny stock models of families that are generated, each of which is odd in its way."""

import contextlib
import copy

import torch
import transformers

import hf_models
from cape_plugins.checkpoints.families import add_generated_row, remove_generated_row
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.generated.families import forget

CAPE = {"type": "cape", "max_global_scale": 2.0, "max_local_shift": 0.5}
TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.2,
    "pad_token_id": 59,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}
M_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
IMAGE_TOKEN = 57


def stock_model(name, **sizes):
    """A tiny stock model by its class, in evaluation mode."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    if config_class.sub_configs:
        sizes = {"image_token_id": IMAGE_TOKEN, **sizes}
    else:
        sizes = {**TEXT, **sizes}
    return model_class(config_class(**sizes)).eval()


def mistral(**sizes):
    return stock_model("MistralForCausalLM", **sizes)


def mixtral():
    return stock_model("MixtralForCausalLM", num_local_experts=4)


def gemma3(**sizes):
    """One layer in six has the other theta."""
    return stock_model("Gemma3ForCausalLM", num_hidden_layers=6, sliding_window=16, **sizes)


def qwen2_vl():
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    tokens = {"video_token_id": 56, "vision_start_token_id": 55, "vision_end_token_id": 54}
    text = {**TEXT, "rope_parameters": M_ROPE}
    return stock_model(
        "Qwen2VLForConditionalGeneration", text_config=text, vision_config=tower, **tokens
    )


def llava():
    text, tower = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **TOWER}
    return stock_model("LlavaForConditionalGeneration", text_config=text, vision_config=tower)


def mistral3():
    text, tower = {"model_type": "mistral", **TEXT}, {"model_type": "pixtral", **TOWER}
    return stock_model("Mistral3ForConditionalGeneration", text_config=text, vision_config=tower)


BUILDERS = {
    builder.__name__: builder for builder in (mistral, mixtral, gemma3, qwen2_vl, llava, mistral3)
}


def drawn(model):
    """The model in evaluation mode, with weights that let positions show."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def switched(model, **position_embedding):
    """A copy of a stock model, switched."""
    return hf_models.switch(copy.deepcopy(model), position_embedding).eval()


def batch(left=True):
    """``[2, 9]`` ids, of which the second text has three tokens less."""
    ids = torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if left else slice(6, 9)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 59), "attention_mask": mask}


def logits(model, seed=None, **inputs):
    if seed is not None:
        torch.manual_seed(seed)
    return model(**inputs, use_cache=False).logits


@contextlib.contextmanager
def without_row(model_type):
    """Lets the table lack the row of a model type for a while; gives the row."""
    row = GENERATED[model_type]
    forget(model_type)
    remove_generated_row(model_type)
    try:
        yield row
    finally:
        forget(model_type)
        add_generated_row(model_type, row)
