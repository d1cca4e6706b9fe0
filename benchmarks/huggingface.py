"""Hugging Face models: a training step and generation, cape classes against the stock class.

Models of one family share their parameters, as far as they have the same ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MarianConfig,
    MarianMTModel,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.measure import Setup, Step, interleave, peak_memory
from benchmarks.report import (
    Report,
    legend_below,
    plot_ratios,
    ratio_tables,
    timing_columns,
)
from hf_models import (
    CapeMarianConfig,
    CapeMarianMTModel,
    CapeSpeech2TextConfig,
    CapeSpeech2TextForConditionalGeneration,
    CapeViTConfig,
    CapeViTForImageClassification,
)
from recipes.lab.tables import markdown

SECONDS = 60.0
LIMIT = 1.02
SETTINGS = {
    "sinpos": {"type": "sinpos"},
    "shape": {"type": "shape"},
    "cape": {"type": "cape"},
}
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
            for name, timing in timings.items():
                report.rows.append({"case": case, "variant": name} | timing_columns(timing))
    report.tables = ratio_tables(report.rows, "case")
    resolution_rows(setup, report)
    report.plot = partial(_plot, report)
    return report


# ---- steps -------------------------------------------------------------------------------------


def marian_training(setup: Setup) -> dict[str, Step]:
    batch, length, vocabulary = (2, 10, 100) if setup.quick else (8, 50, 10_000)
    ids = torch.randint(3, vocabulary, (batch, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)}
    return {
        name: partial(training_step, model.train(), inputs)
        for name, model in marian_models(setup).items()
    }


def marian_generation(setup: Setup) -> dict[str, Step]:
    batch, length, vocabulary = (2, 5, 100) if setup.quick else (8, 25, 10_000)
    ids = torch.randint(3, vocabulary, (batch, length))
    options = {"num_beams": 4, "min_new_tokens": length, "max_new_tokens": length}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
    return {
        name: partial(model.eval().generate, **inputs, **options)
        for name, model in marian_models(setup).items()
    }


def speech_training(setup: Setup) -> dict[str, Step]:
    words = 5 if setup.quick else 30
    inputs = speech_inputs(setup)
    inputs["labels"] = torch.randint(3, 10_000, (len(inputs["input_features"]), words))
    models = speech_models(setup, use_cache=False)
    return {name: partial(training_step, model, inputs) for name, model in models.items()}


def speech_generation(setup: Setup) -> dict[str, Step]:
    length = 5 if setup.quick else 25
    options = {"num_beams": 4, "min_new_tokens": length, "max_new_tokens": length}
    inputs = {**speech_inputs(setup), "do_sample": False}
    return {
        name: partial(model.eval().generate, **inputs, **options)
        for name, model in speech_models(setup).items()
    }


def speech_inputs(setup: Setup) -> dict[str, torch.Tensor]:
    batch, frames = (2, 40) if setup.quick else (4, 400)
    return {
        "input_features": torch.randn(batch, frames, 80, dtype=setup.dtype),
        "attention_mask": torch.ones(batch, frames, dtype=torch.long),
    }


def vit_training(setup: Setup) -> dict[str, Step]:
    batch, size = (2, 32) if setup.quick else (8, 224)
    sizes = vit_sizes(setup) | {"image_size": size}
    models = {
        "stock": ViTForImageClassification(ViTConfig(**sizes)),
        **{name: vit(sizes, settings) for name, settings in SETTINGS.items()},
    }
    share(models, setup)
    inputs = {
        "pixel_values": torch.randn(batch, 3, size, size, dtype=setup.dtype),
        "labels": torch.zeros(batch, dtype=torch.long),
    }
    return {name: partial(training_step, model, inputs) for name, model in models.items()}


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
    settings = dict(SETTINGS, cape={"type": "cape", "source_scale": 1})
    settings["cape, no BOS"] = NO_BOS
    models = {
        "stock": MarianMTModel(MarianConfig(**sizes)),
        **{
            name: CapeMarianMTModel(CapeMarianConfig(**sizes, position_embedding=setting))
            for name, setting in settings.items()
        },
    }
    return share(models, setup)


def speech_models(setup: Setup, **sizes: Any) -> dict[str, nn.Module]:
    sizes["attn_implementation"] = "eager"
    sizes |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1} if setup.quick else {}
    models = {
        "stock": Speech2TextForConditionalGeneration(Speech2TextConfig(**sizes)),
        **{
            name: CapeSpeech2TextForConditionalGeneration(
                CapeSpeech2TextConfig(**sizes, position_embedding=settings)
            )
            for name, settings in SETTINGS.items()
        },
    }
    return share(models, setup)


def vit_sizes(setup: Setup) -> dict[str, Any]:
    ti = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3}
    return (TINY if setup.quick else ti) | {"patch_size": 16, "num_labels": 1000}


def vit(sizes: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    return CapeViTForImageClassification(CapeViTConfig(**sizes, position_embedding=settings))


def share(models: dict[str, nn.Module], setup: Setup) -> dict[str, nn.Module]:
    """Gives all models the parameters of the first, so that none is slower for its memory."""
    first, *others = (model.to(setup.dtype).train() for model in models.values())
    own = dict(first.named_parameters())
    for model in others:
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.data = own[name].data
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


def resolution_rows(setup: Setup, report: Report) -> None:
    """Images per second and peak memory by resolution."""
    batch, sizes = (2, (32, 64)) if setup.quick else (8, RESOLUTIONS)
    cells = []
    for size in sizes:
        name = f"{size} x {size}"
        step: Callable[[], object] = forward_step(setup, size, batch)
        timing = interleave({name: step}, setup, setup.seconds(SECONDS / 10), name)[name]
        mib = peak_memory(setup, forward_step, setup, size, batch)
        per_second = 1000 * batch / timing.milliseconds
        cells.append([name, f"{per_second:.1f}", f"{mib:.0f}"])
    report.tables["ViT-Ti with cape by resolution, batch 8"] = markdown(
        ["", "images per second", "peak MiB"], cells
    )


def _plot(report: Report, figure: Any) -> None:
    axes = figure.subplots()
    plot_ratios(axes, report.rows, "case", LIMIT)
    legend_below(figure, axes)
