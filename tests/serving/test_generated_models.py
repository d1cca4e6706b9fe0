"""Exports of families that are made from stock classes, one of each kind of seam: graphs for ONNX
Runtime, also beyond the stock sizes, and stock folders."""

import json

import pytest
import torch
import transformers

import hf_models
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.serving import onnx
from hf_models.serving.onnx_readme import Described, readme
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
from tests.support.engines import program_of, run_program
from tests.support.generated import CAPE, mistral
from tests.support.onnx_graphs import assert_close, export_saved, run

# stock models by the kind of what knows positions, settings, and inputs longer or larger than the
# stock table
LONG = test_rows.TABLE + 20
TOKENS, IMAGES = {"input_ids": (2, LONG)}, {"pixel_values": (2, 3, 48, 40)}
VIDEOS = {"pixel_values": (2, 7, 3, 24, 16)}
ADDED = {"type": "cape", "max_global_shift": 3.0}
ONE_LAYER = {"num_hidden_layers": 1}  # an export takes as long as the model is deep
SEAMS = {
    "angles": (lambda: mistral(**ONE_LAYER), CAPE, TOKENS),
    "rows": (lambda: test_rows.build("roberta", **ONE_LAYER), ADDED, TOKENS),
    "causal rows": (lambda: test_rows.build("gpt2", **ONE_LAYER), ADDED, TOKENS),
    "sinusoids": (lambda: test_sinusoids.build("xglm", num_layers=1), ADDED, TOKENS),
    "grid": (lambda: test_grids.build("vit_msn", **ONE_LAYER), ADDED, IMAGES),
    "grid in a module": (
        *(lambda: test_grids.build("clip_vision_model", **ONE_LAYER), ADDED, IMAGES),
    ),
    # tables stand between layers
    "detection": (lambda: test_detection.build(num_hidden_layers=2), ADDED, IMAGES),
    "optional grid": (lambda: test_optional_grids.build("table", **ONE_LAYER), ADDED, IMAGES),
    "patch angles": (
        *(lambda: test_patch_angles.build(**ONE_LAYER), test_patch_angles.SCALED, IMAGES),
    ),
    "spectrogram": (
        lambda: test_spectrograms.build(**ONE_LAYER),
        test_spectrograms.CAPE,
        {"input_values": (2, 2 * test_spectrograms.FRAMES, test_spectrograms.BANDS)},
    ),
    "video": (lambda: test_video.build("videomae", **ONE_LAYER), test_video.CAPE, VIDEOS),
    "video with a table": (
        *(lambda: test_video.build("vivit", **ONE_LAYER), test_video.CAPE, VIDEOS),
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


def stock_in(folder):
    """The model of transformers in a folder."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder).eval()


@pytest.mark.parametrize("seam", SEAMS)
def test_graphs_compute_the_same_beyond_the_stock_size(seam, tmp_path):
    model, inputs = build(seam)
    out = export_saved(model, tmp_path)
    with torch.no_grad():
        expected = first(model(**inputs))
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if getattr(model.config, "type_vocab_size", 0):
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if seam in ("angles", "causal rows", "sinusoids"):  # which generate
        inputs["cache_mask"] = inputs["input_ids"][:, :0]
        layers, config = range(model.config.num_hidden_layers), model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        empty = torch.zeros(2, heads, 0, 8)
        inputs |= {f"past_{layer}_{part}": empty for layer in layers for part in ("key", "value")}
    assert_close(next(iter(run(out, "model", **inputs).values())), expected)
    assert run_program(program_of(out), cwd=out)


@pytest.mark.parametrize(
    ("stock", "axes"),
    [
        (lambda: test_grids.build("vit_msn", **ONE_LAYER), ("batch", 3, 32, 32)),
        (lambda: test_video.build("vivit", **ONE_LAYER), ("batch", 4, 3, 16, 16)),
        (
            lambda: test_spectrograms.build(**ONE_LAYER),
            ("batch", test_spectrograms.FRAMES, test_spectrograms.BANDS),
        ),
        (lambda: test_video.build("videomae"), ("batch", "frames", 3, "height", "width")),
        (lambda: test_detection.build(), ("batch", 3, "height", "width")),
    ],
)
def test_a_stock_table_of_one_size_fixes_the_size_of_inputs(stock, axes):
    model = hf_models.switch(stock(), {"type": "abspos"}).eval()
    (graph,) = onnx.graphs(model)
    ((name, graph_input),) = graph.inputs.items()
    assert graph_input.axes == axes
    text = readme(model, [Described("model.onnx", [(name, "float", axes)], [])], 20)
    sizes = map({"frames": 16, "height": 96, "width": 128}.get, axes[1:], axes[1:])
    assert f"np.zeros({tuple(sizes)})" in text


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam != "video"])
def test_stock_folders_compute_the_same(seam, export_of):
    """At the sizes that the stock class takes, or at the size that was asked for."""
    model, inputs = build(seam)
    stock = stock_in(export_of("stock", model, *SIZES.get(seam, ())))
    assert type(stock.config).__module__.startswith("transformers.")
    if seam not in SIZES:
        sizes = {"input_ids": 12, "pixel_values": 32, "input_values": test_spectrograms.FRAMES}
        for key, value in inputs.items():
            if value.dim() == 5:
                side = test_video.SIZE
                inputs[key] = value[:, : test_video.FRAMES, :, :side, :side]
            elif value.dim() == 4:
                inputs[key] = value[:, :, : sizes[key], : sizes[key]]
            else:
                inputs[key] = value[:, : sizes[key]]
    with torch.no_grad():
        assert_close(first(stock(**inputs)), first(model(**inputs)))


@pytest.mark.parametrize(
    "stock",
    [
        lambda: test_rows.build("opt", **ONE_LAYER),  # its class of tables chooses the rows
        lambda: test_two_towers.build(**ONE_LAYER),  # the table of the images stays
    ],
)
def test_stock_folders_have_the_table_of_a_text(stock, export_of):
    model = hf_models.switch(stock(), ADDED).eval()
    loaded = stock_in(export_of("stock", model))
    inputs = {"input_ids": torch.randint(5, 50, (2, 12))}
    if not loaded.can_generate():
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(first(loaded(**inputs)), first(model(**inputs)))


def test_a_stock_folder_of_videos_has_another_size_of_frames(export_of):
    out = export_of("stock", build("video with a table")[0], "--image-size", 24, 24)
    stock = transformers.VivitForVideoClassification.from_pretrained(out)
    assert stock.config.image_size == 24
    assert stock.vivit.embeddings.position_embeddings.shape[1] == 1 + 2 * 3 * 3
    assert "Videos of 4 frames of 24 x 24 pixels" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("seam", "flags", "message"),
    [
        ("grid", ("--max-tokens", 50), "no table of tokens"),
        ("spectrogram", ("--image-size", 48, 48), "reads no images"),
    ],
)
def test_stock_folders_are_refused_with_the_reason(seam, flags, message, refusal_of):
    assert message in refusal_of("stock", build(seam)[0], *flags)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("videomae", "which computes its positions and ignores tables in its file"),
        ("timesformer", "which adds a row for the patch to a row for the frame"),
    ],
)
def test_stock_folders_of_videos_are_refused_with_the_reason(name, message, refusal_of):
    model = hf_models.switch(test_video.build(name, **ONE_LAYER), ADDED)
    error = refusal_of("stock", model)
    assert message in error
    assert "onnx" in error


UNKNOWN = {
    "moonshine": "whose forward takes input_values",
    "layoutlmv3": "whose forward takes input_ids, bbox, pixel_values",
    "clap": "whose forward takes input_ids, input_features, is_longer",
    "vision-encoder-decoder": "whose forward takes pixel_values",
    "vit_mae": "draws random numbers (such as masks) in evaluation",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_models_with_other_inputs_are_refused_in_one_sentence(name, refusal_of):
    model = hf_models.switch(next(tiny_stock_models(name)).model, {"type": "cape"})
    for engine in ("stock", "onnx"):
        error = refusal_of(engine, model)
        assert UNKNOWN[name] in error
        assert error.startswith(f"error: export {engine} ")
        assert "hf_models.convert SOURCE NEW --self-contained" in error


@pytest.mark.parametrize("engine", ["stock", "onnx"])
def test_packed_patches_are_refused(engine, refusal_of):
    model = hf_models.switch(test_packed_grids.build_both(), {"type": "sinpos"})
    assert "takes packed patches of images of different sizes" in refusal_of(engine, model)


def test_a_learned_table_of_patches_is_resized_before(refusal_of):
    model = hf_models.switch(test_grids.build("vit_msn"), {"type": "abspos"})
    assert "--position-table-size 48x40" in refusal_of("stock", model, "--image-size", 48, 40)
