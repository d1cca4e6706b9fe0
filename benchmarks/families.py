"""Families of Hugging Face models: a training step and generation, against the stock class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)

import hf_models
from benchmarks.huggingface import build, generation_steps, share, training_steps
from benchmarks.measure import Setup, Step, interleave
from benchmarks.report import Report, distinct, legend_below, plot_ratios, ratio_cell
from cape_plugins.checkpoints.families import find_family
from recipes.lab.tables import markdown

SECONDS = 45.0
LIMIT = 1.02
VOCABULARY = 10_000
TEXT = (
    f"""\
Forward, loss and backward (no optimizer) of models of 4 layers (4 + 4 with a decoder) and 256
channels: 4 texts of 50 tokens, 4 images of 112 pixels in patches of 8, or 4 recordings of 4 s with
50 tokens each, which is all that Whisper's encoder takes here; and greedy generation of 12 tokens.
Steps are short, so that there are many rounds and less noise. `stock` is the class of transformers,
the reference; `stock type` is the class of this package with the type that computes the same;
`cape` is the same class with the defaults of `cape` (source scale 1, no BOS hint, which would make
each source one token longer). All take turns in one process and share their parameters. To reach:
at most {LIMIT}.""",
)
TWO_SIDES = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 4, "attention_heads": 4, "ffn_dim": 1024}.items()
}
ONE_SIDE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
QUICK = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), 1),
    **dict.fromkeys(("hidden_size", "d_model", "intermediate_size", "image_size"), 32),
    "vocab_size": 100,
}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


@dataclass(frozen=True)
class Group:
    """Families that are built and called alike.

    Attributes:
        models: Configuration to stock class, of transformers.
        sizes: Settings of the configuration.
        cape: Settings of the position embedding `cape`.
        generates: Whether generation is timed, too.
    """

    models: Any
    sizes: dict[str, Any]
    cape: dict[str, Any] = field(default_factory=dict)
    generates: bool = False


TEXT_SIZES = {**ONE_SIDE, **SPECIAL, "vocab_size": VOCABULARY}
SEQ2SEQ = Group(
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    {
        **TWO_SIDES,
        **SPECIAL,
        "d_model": 256,
        "vocab_size": VOCABULARY,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    {"source_scale": 1, "source_bos": False},
    generates=True,
)
CAUSAL = Group(
    MODEL_FOR_CAUSAL_LM_MAPPING, {**TEXT_SIZES, "num_key_value_heads": 4}, generates=True
)
MASKED = Group(MODEL_FOR_MASKED_LM_MAPPING, {**TEXT_SIZES, "cls_token_id": 0, "sep_token_id": 2})
IMAGE_SIZES = {**ONE_SIDE, "image_size": 112, "patch_size": 8}
IMAGES = Group(MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, IMAGE_SIZES)
SPEECH = Group(
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    {
        **SEQ2SEQ.sizes,
        "num_mel_bins": 80,
        "max_source_positions": 200,  # positions, each of two frames
        "begin_suppress_tokens": None,
    },
    generates=True,
)
FAMILIES = {
    "m2m_100": SEQ2SEQ,
    "bart": SEQ2SEQ,
    "mbart": SEQ2SEQ,
    "pegasus": SEQ2SEQ,
    "llama": CAUSAL,
    "qwen2": CAUSAL,
    "bert": MASKED,
    "modernbert": MASKED,
    "deit": IMAGES,
    "dinov2": IMAGES,
    "dinov2_with_registers": IMAGES,
    "beit": IMAGES,
    "whisper": SPEECH,
}


def run(setup: Setup) -> Report:
    """Times all families."""
    report = Report("Families of Hugging Face models", TEXT)
    with torch.device(setup.device):
        for name, group in FAMILIES.items():
            models = make_models(setup, name, group)
            inputs = make_inputs(setup, group.sizes)
            cases = {f"{name}, training": training_steps(models, inputs)}
            time_cases(setup, report, cases)
            if group.generates:
                inputs.pop("labels")
                cases = {
                    f"{name}, generation": generation_steps(
                        setup, models, inputs, beams=1, length=12
                    )
                }
                time_cases(setup, report, cases)
    show(report)
    return report


def show(report: Report) -> None:
    """Makes tables and plot of the added rows; cases stand below each other, because there are
    many."""
    cases, names = distinct(report.rows, "case"), distinct(report.rows, "variant")

    def table(cell: Callable[[Mapping], str]) -> list[str]:
        cells = {(row["case"], row["variant"]): cell(row) for row in report.rows}
        lines = ([case, *(cells[case, name] for name in names)] for case in cases)
        return markdown(["", *names], lines)

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        plot_ratios(axes, report.rows, "case", LIMIT)
        axes.set_xticks(range(len(cases)), cases, rotation=45, ha="right")
        legend_below(figure, axes)

    report.tables["Time / time of the reference"] = table(ratio_cell)
    report.tables["Milliseconds"] = table(lambda row: f"{row['milliseconds']:#.4g}")
    report.plot = plot


def time_cases(setup: Setup, report: Report, cases: dict[str, dict[str, Step]]) -> None:
    """Adds the times of each case to the report."""
    for case, steps in cases.items():
        report.add({"case": case}, interleave(steps, setup, setup.seconds(SECONDS), case))


def make_models(setup: Setup, name: str, group: Group) -> dict[str, nn.Module]:
    """The stock model and two models of this package, on shared parameters."""
    config = CONFIG_MAPPING[name]
    stock_class = group.models[config]
    stock_class = stock_class[0] if isinstance(stock_class, tuple) else stock_class
    cape_class = getattr(hf_models, f"Cape{stock_class.__name__}")
    family = find_family(name)
    stock_type = family.stock_type({}, next(iter(family.sides)))
    sizes = {key: QUICK.get(key, n) if setup.quick else n for key, n in group.sizes.items()}
    models = {
        "stock": build(stock_class, sizes),
        "stock type": build(cape_class, sizes, position_embedding={"type": stock_type}),
        "cape": build(cape_class, sizes, position_embedding={"type": "cape", **group.cape}),
    }
    return share(models, setup)


def make_inputs(setup: Setup, sizes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A batch with labels."""
    batch, length = (2, 12) if setup.quick else (4, 50)
    if "image_size" in sizes:
        size = 32 if setup.quick else 112
        images = torch.randn(batch, 3, size, size, dtype=setup.dtype)
        return {"pixel_values": images, "labels": torch.zeros(batch, dtype=torch.long)}
    ids = torch.randint(3, 100, (batch, length))
    if "num_mel_bins" in sizes:
        frames = 2 * sizes["max_source_positions"]
        features = torch.randn(batch, sizes["num_mel_bins"], frames, dtype=setup.dtype)
        return {"input_features": features, "labels": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
