"""Exports of families that are made from stock classes, one of each kind of seam: graphs for ONNX
Runtime, also beyond the stock sizes, and stock folders."""

import json

import pytest
import torch
import transformers

import hf_models
from tests.hf import (
    test_detection,
    test_grids,
    test_optional_grids,
    test_packed_grids,
    test_patch_angles,
    test_rows,
    test_sinusoids,
    test_spectrograms,
    test_two_towers,
    test_video,
    test_video_angles,
)
from tests.support.engines import export, program_of, refusal, run_program
from tests.support.generated import CAPE, mistral
from tests.support.onnx_graphs import assert_close, export_saved, run

# stock models by the kind of what knows positions, settings, and inputs longer or larger than the
# stock table
LONG = test_rows.TABLE + 20
ADDED = {"type": "cape", "max_global_shift": 3.0}
ONE_LAYER = {"num_hidden_layers": 1}  # an export takes as long as the model is deep
SEAMS = {
    "angles": (lambda: mistral(**ONE_LAYER), CAPE, {"input_ids": (2, LONG)}),
    "rows": (lambda: test_rows.build("roberta", **ONE_LAYER), ADDED, {"input_ids": (2, LONG)}),
    "causal rows": (lambda: test_rows.build("gpt2", **ONE_LAYER), ADDED, {"input_ids": (2, LONG)}),
    "sinusoids": (
        lambda: test_sinusoids.build("xglm", num_layers=1),
        ADDED,
        {"input_ids": (2, LONG)},
    ),
    "grid": (
        lambda: test_grids.build("vit_msn", **ONE_LAYER),
        ADDED,
        {"pixel_values": (2, 3, 48, 40)},
    ),
    "grid in a module": (
        lambda: test_grids.build("clip_vision_model", **ONE_LAYER),
        ADDED,
        {"pixel_values": (2, 3, 48, 40)},
    ),
    "detection": (
        lambda: test_detection.build(num_hidden_layers=2),  # tables stand between layers
        ADDED,
        {"pixel_values": (2, 3, 48, 40)},
    ),
    "optional grid": (
        lambda: test_optional_grids.build("table", **ONE_LAYER),
        ADDED,
        {"pixel_values": (2, 3, 48, 40)},
    ),
    "patch angles": (
        lambda: test_patch_angles.build(**ONE_LAYER),
        test_patch_angles.SCALED,
        {"pixel_values": (2, 3, 48, 40)},
    ),
    "spectrogram": (
        lambda: test_spectrograms.build(**ONE_LAYER),
        test_spectrograms.CAPE,
        {"input_values": (2, 2 * test_spectrograms.FRAMES, test_spectrograms.BANDS)},
    ),
    "video": (
        lambda: test_video.build("videomae", **ONE_LAYER),
        test_video.CAPE,
        {"pixel_values": (2, 7, 3, 24, 16)},
    ),
    "video with a table": (
        lambda: test_video.build("vivit", **ONE_LAYER),
        test_video.CAPE,
        {"pixel_values": (2, 7, 3, 24, 16)},
    ),
    "video angles": (
        lambda: test_video_angles.build(
            transformers.VJEPA2ForVideoClassification, num_hidden_layers=1, pred_num_hidden_layers=1
        ),
        test_video_angles.CAPE,
        {"pixel_values_videos": (2, 7, 3, 24, 16)},
    ),
    "two towers": (
        lambda: test_two_towers.build(**ONE_LAYER),
        ADDED,
        {"input_ids": (2, LONG), "pixel_values": (3, 3, 48, 40)},
    ),
}
each = pytest.mark.parametrize("seam", SEAMS)
GENERATES = {"angles", "causal rows", "sinusoids"}
SIZES = {
    "rows": ("--max-tokens", LONG),
    **dict.fromkeys(("grid", "detection"), ("--image-size", 48, 40)),
}


def build(seam):
    stock, settings, shapes = SEAMS[seam]
    fields = {"vision_position_embedding": ADDED} if seam == "two towers" else {}
    model = hf_models.switch(stock(), settings, **fields).eval()
    generator = torch.Generator().manual_seed(3)
    inputs = {
        name: torch.randint(5, 50, shape, generator=generator)
        if name == "input_ids"
        else torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    return model, inputs


def first(output):
    """Scores or states."""
    return next(value for value in output.values() if isinstance(value, torch.Tensor))


@each
def test_graphs_compute_the_same_beyond_the_stock_size(seam, tmp_path):
    model, inputs = build(seam)
    out = export_saved(model, tmp_path)
    with torch.no_grad():
        expected = first(model(**inputs))
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if getattr(model.config, "type_vocab_size", 0):
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if seam in GENERATES:
        inputs["cache_mask"] = inputs["input_ids"][:, :0]
        layers, config = range(model.config.num_hidden_layers), model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        empty = torch.zeros(2, heads, 0, 8)
        inputs |= {f"past_{layer}_{part}": empty for layer in layers for part in ("key", "value")}
    assert_close(next(iter(run(out, "model", **inputs).values())), expected)
    assert run_program(program_of(out), cwd=out)


@each
def test_stock_folders_compute_the_same(seam, tmp_path):
    """At the sizes that the stock class takes, or at the size that was asked for."""
    model, inputs = build(seam)
    model.save_pretrained(tmp_path / "model")
    out = export("stock", tmp_path / "model", tmp_path / "out", *SIZES.get(seam, ()))
    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    stock = getattr(transformers, name).from_pretrained(out).eval()
    assert type(stock.config).__module__.startswith("transformers.")
    if seam not in SIZES:
        sizes = {"input_ids": 12, "pixel_values": 32, "input_values": test_spectrograms.FRAMES}
        for key, value in inputs.items():
            inputs[key] = (
                value[:, :, : sizes[key], : sizes[key]]
                if value.dim() > 3
                else (value[:, : sizes[key]])
            )
    with torch.no_grad():
        assert_close(first(stock(**inputs)), first(model(**inputs)))


@pytest.mark.parametrize(
    ("seam", "flags", "message"),
    [
        ("sinusoids", ("--image-size", 48, 48), "reads no images"),
        ("grid", ("--max-tokens", 50), "no table of tokens"),
        ("rows", ("--image-size", 48, 48), "reads no images"),
        ("spectrogram", ("--image-size", 48, 48), "reads no images"),
    ],
)
def test_stock_folders_are_refused_with_the_reason(seam, flags, message, tmp_path, capsys):
    model, _ = build(seam)
    model.save_pretrained(tmp_path / "model")
    assert message in refusal(capsys, "stock", tmp_path / "model", tmp_path / "out", *flags)


@pytest.mark.parametrize("engine", ["stock", "onnx"])
def test_packed_patches_are_refused(engine, tmp_path, capsys):
    model = hf_models.switch(test_packed_grids.build_both(), {"type": "sinpos"})
    model.save_pretrained(tmp_path / "model")
    error = refusal(capsys, engine, tmp_path / "model", tmp_path / "out")
    assert "takes packed patches of images of different sizes" in error


def test_a_learned_table_of_patches_is_resized_before(tmp_path, capsys):
    model = hf_models.switch(test_grids.build("vit_msn"), {"type": "abspos"})
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    error = refusal(capsys, "stock", tmp_path / "model", out, "--image-size", 48, 40)
    assert "--position-table-size 48x40" in error
