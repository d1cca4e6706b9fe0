"""Hugging Face models: a training step and generation, cape classes against the stock class.

Models of one family share the parameters that they have in common.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MarianMTModel,
    Speech2TextForConditionalGeneration,
    ViTForImageClassification,
)

from benchmarks.hosts import share_parameters
from benchmarks.measure import Setup, Step, interleave, peak_memory
from benchmarks.report import Report
from hf_models import (
    CapeMarianMTModel,
    CapeSpeech2TextForConditionalGeneration,
    CapeViTForImageClassification,
)
from recipes.lab.tables import markdown

SECONDS = 60.0
LIMIT = 1.02
SETTINGS = {name: {"type": name} for name in ("sinpos", "shape", "cape")}
NO_BOS = {"type": "cape", "source_scale": 1, "source_bos": False}
TINY_TEXT = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100}
TINY = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
RESOLUTIONS = (64, 128, 224, 320, 384)
TEXT = (
    f"""\
Forward, loss and backward (no optimizer) of Marian (6L-6L, 512/2048, 10000 symbols, 8 x 50
tokens), Speech2Text (small: 12L-6L, 256, 4 x 400 frames, 30 tokens) and ViT-Ti (8 images of 224
pixels), and generation with beam 4 (Marian: 8 sentences of 25 tokens; Speech2Text: the 4 x 400
frames; exactly 25 tokens decoded). `stock` is the class of transformers, the reference; the others
are the cape class with the defaults of the type (Marian: source scale 1). Speech2Text runs with
eager attention, the only one that stock has. All take turns in one process and share their
parameters. To reach: at most {LIMIT}.""",
    """\
`cape` puts a BOS token before each source of Marian: its encoder and the attention to it work on
one position more. `cape, no BOS` shows what the positions alone cost.""",
    """\
The last tables are ViT-Ti with cape in evaluation, one batch of 8: images per second and peak
memory of a forward pass by resolution, without any change of the model.""",
)


def run(setup: Setup) -> Report:
    """Times all families."""
    report = Report("Hugging Face models", TEXT)
    with torch.device(setup.device):
        cases = {
            "Marian, training": marian_training,
            "Marian, beam search": marian_generation,
            "Speech2Text, training": speech_training,
            "Speech2Text, beam search": speech_generation,
            "ViT-Ti, training": vit_training,
        }
        for case, make in cases.items():
            timings = interleave(make(setup), setup, setup.seconds(SECONDS), case)
            report.add({"case": case}, timings)
    report.compare("case", LIMIT)
    resolution_table(setup, report)
    return report


# ---- steps -------------------------------------------------------------------------------------


def marian_training(setup: Setup) -> dict[str, Step]:
    inputs = marian_inputs(setup, 50)
    return training_steps(marian_models(setup), {**inputs, "labels": inputs["input_ids"].flip(1)})


def marian_generation(setup: Setup) -> dict[str, Step]:
    return generation_steps(setup, marian_models(setup), marian_inputs(setup, 25))


def marian_inputs(setup: Setup, length: int) -> dict[str, torch.Tensor]:
    size = (2, length // 5) if setup.quick else (8, length)
    ids = torch.randint(3, 100 if setup.quick else 10_000, size)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def speech_training(setup: Setup) -> dict[str, Step]:
    inputs = speech_inputs(setup)
    length = 5 if setup.quick else 30
    inputs["labels"] = torch.randint(3, 10_000, (len(inputs["input_features"]), length))
    return training_steps(speech_models(setup, use_cache=False), inputs)


def speech_generation(setup: Setup) -> dict[str, Step]:
    return generation_steps(setup, speech_models(setup), speech_inputs(setup))


def speech_inputs(setup: Setup) -> dict[str, torch.Tensor]:
    batch, frames = (2, 40) if setup.quick else (4, 400)
    return {
        "input_features": torch.randn(batch, frames, 80, dtype=setup.dtype),
        "attention_mask": torch.ones(batch, frames, dtype=torch.long),
    }


def vit_training(setup: Setup) -> dict[str, Step]:
    batch, size = (2, 32) if setup.quick else (8, 224)
    sizes = vit_sizes(setup) | {"image_size": size}
    inputs = {
        "pixel_values": torch.randn(batch, 3, size, size, dtype=setup.dtype),
        "labels": torch.zeros(batch, dtype=torch.long),
    }
    classes = (ViTForImageClassification, CapeViTForImageClassification)
    return training_steps(make_models(setup, *classes, sizes), inputs)


def training_steps(models: dict[str, nn.Module], inputs: dict[str, Any]) -> dict[str, Step]:
    return {name: partial(training_step, model, inputs) for name, model in models.items()}


def generation_steps(
    setup: Setup,
    models: dict[str, nn.Module],
    inputs: dict[str, Any],
    beams: int = 4,
    length: int = 25,
) -> dict[str, Step]:
    length = 5 if setup.quick else length
    options = {"num_beams": beams, "min_new_tokens": length, "max_new_tokens": length}
    options |= {"max_length": None, "min_length": None}  # else Whisper warns of two limits
    return {
        name: partial(model.eval().generate, **inputs, **options, do_sample=False)
        for name, model in models.items()
    }


def training_step(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Forward, loss and backward."""
    model(**inputs).loss.backward()
    model.zero_grad(set_to_none=True)


# ---- models ------------------------------------------------------------------------------------


def marian_models(setup: Setup) -> dict[str, nn.Module]:
    sizes = {
        "vocab_size": 10_000,
        "d_model": 512,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048,
    }
    special = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 0}
    sizes |= special | (TINY_TEXT if setup.quick else {})
    settings = {**SETTINGS, "cape": {"type": "cape", "source_scale": 1}, "cape, no BOS": NO_BOS}
    return make_models(setup, MarianMTModel, CapeMarianMTModel, sizes, settings)


def speech_models(setup: Setup, **sizes: Any) -> dict[str, nn.Module]:
    sizes["attn_implementation"] = "eager"
    sizes |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1} if setup.quick else {}
    classes = (Speech2TextForConditionalGeneration, CapeSpeech2TextForConditionalGeneration)
    return make_models(setup, *classes, sizes)


def vit_sizes(setup: Setup) -> dict[str, Any]:
    ti = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3}
    return (TINY if setup.quick else ti) | {"patch_size": 16, "num_labels": 1000}


def vit(sizes: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    return build(CapeViTForImageClassification, sizes, position_embedding=settings)


def build(model: type[nn.Module], sizes: dict[str, Any], **positions: Any) -> nn.Module:
    return model(model.config_class(**sizes, **positions))


def make_models(
    setup: Setup,
    stock: type[nn.Module],
    cape: type[nn.Module],
    sizes: dict[str, Any],
    settings: dict[str, dict[str, Any]] = SETTINGS,
) -> dict[str, nn.Module]:
    """The stock model and a cape model for each of the `settings`, on shared parameters."""
    types = {name: build(cape, sizes, position_embedding=row) for name, row in settings.items()}
    return share({"stock": build(stock, sizes), **types}, setup)


def share(models: dict[str, nn.Module], setup: Setup) -> dict[str, nn.Module]:
    """Makes all models use the parameters of the first, in training mode."""
    for model in models.values():
        model.to(setup.dtype).train()
    share_parameters(models.values())
    return models


# ---- resolution --------------------------------------------------------------------------------


def forward_step(setup: Setup, size: int, batch: int) -> Step:
    """A forward pass of ViT in evaluation."""
    model = vit(vit_sizes(setup) | {"image_size": 224}, {"type": "cape"}).to(setup.dtype).eval()
    model.to(setup.device)
    images = torch.randn(batch, 3, size, size, dtype=setup.dtype, device=setup.device)

    @torch.no_grad()
    def step() -> object:
        return model(images).logits

    return step


def resolution_table(setup: Setup, report: Report) -> None:
    """Images per second and peak memory by resolution."""
    batch, sizes = (2, (32, 64)) if setup.quick else (8, RESOLUTIONS)
    cells = []
    for size in sizes:
        name = f"{size} x {size}"
        step = {name: forward_step(setup, size, batch)}
        timing = interleave(step, setup, setup.seconds(SECONDS / 10), name)[name]
        mib = peak_memory(setup, forward_step, setup, size, batch)
        per_second = 1000 * batch / timing.milliseconds
        cells.append([name, f"{per_second:.1f}", f"{mib:.0f}"])
    report.tables["ViT-Ti with cape by resolution, batch 8"] = markdown(
        ["", "images per second", "peak MiB"], cells
    )
