"""Image classifiers of random weights, saved in folders."""

import torch
from transformers import ViTConfig, ViTForImageClassification

from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.vit.data import make_processor

NAMES = [f"class {number}" for number in range(7)]
SIZES = {
    "image_size": 16, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
SHAPES = ((8, 8), (12, 20), (21, 13), (12, 20), (30, 9), (8, 8), (33, 40))


def save(folder, position="cape", names=NAMES, seed=0, channels=3, **settings):
    """A small model of random weights, large enough to tell images apart."""
    torch.manual_seed(seed)
    labels = {"id2label": dict(enumerate(names)), "num_channels": channels, **SIZES}
    if position == "stock":
        model = ViTForImageClassification(ViTConfig(**labels))
    else:
        settings = {"type": position, **settings}
        model = CapeViTForImageClassification(CapeViTConfig(**labels, position_embedding=settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape) * (3 if "projection" in name else 0.5))
    model.save_pretrained(folder)
    make_processor(None, 16, channels).save_pretrained(folder)
    return str(folder)
