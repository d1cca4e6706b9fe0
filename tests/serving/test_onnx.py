"""``cape-plugins export onnx``: graphs of images, recordings and texts at sizes that the export has
not seen, in a process without torch; and what is refused."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from cape_plugins.cli import main
from cape_plugins.mathematics import positions
from hf_models import CapeMarianModel
from hf_models.serving import onnx
from tests.support.engines import engine_python, program_of, run_program
from tests.support.onnx_graphs import assert_close, export, run, small

pytestmark = pytest.mark.slow
PATCH = 8
IMAGE_SIZES = (
    *((8, 8), (8, 40), (56, 8), (32, 32), (9, 17), (16, 8)),
    *((24, 96), (97, 50), (128, 128), (40, 41)),
)
FRAMES = (1, 2, 3, 4, 7, 20, 61, 100, 299, 300)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    model = small("vit", "cape")
    return model, export(model, tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def ctc(tmp_path_factory):
    model = small("speech_ctc", "cape")
    return model, export(model, tmp_path_factory.mktemp("ctc"))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return engine_python(tmp_path_factory.mktemp("engine"), "onnxruntime")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", IMAGE_SIZES)
def test_images_of_any_size(vit, size, batch):
    model, out = vit
    images = torch.randn(batch, 3, *size)
    with torch.no_grad():
        expected = model(images).logits
    assert_close(run(out, "model", pixel_values=images)["logits"], expected)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("frames", FRAMES)
def test_recordings_of_any_length(ctc, frames):
    """Alone and in a batch with padding, at the hop of each."""
    model, out = ctc
    features, hop = torch.randn(3, frames, 8), torch.tensor([10_000_000, 12_500_000, 8_000_000])
    lengths = torch.tensor([frames, max(1, frames - 5), max(1, frames // 2)])
    mask = (torch.arange(frames) < lengths[:, None]).long()
    given = {"input_features": features, "attention_mask": mask, "hop_nanoseconds": hop}
    for rows in (3, 1):
        given = {name: value[:rows] for name, value in given.items()}
        with torch.no_grad():
            expected = model(**given).logits
        actual = run(out, "model", **given)
        assert_close(actual["logits"], expected)
        assert actual["lengths"].tolist() == [-(-int(n) // 3) for n in lengths[:rows]]
    if frames > 3:
        other = run(out, "model", **{**given, "hop_nanoseconds": hop[1:2]})
        assert (other["logits"] - actual["logits"]).abs().max() > 1e-3


def test_programs_of_the_readme_need_nothing_but_the_engine(vit, ctc, python, tmp_path):
    model, out = vit
    image = np.random.default_rng(1).normal(size=(3, 24, 56)).astype(np.float32)
    np.save(tmp_path / "image.npy", image)
    printed = run_program(python, program_of(out), tmp_path / "image.npy", cwd=out)
    with torch.no_grad():
        assert int(printed) == model(torch.from_numpy(image)[None]).logits.argmax().item()
    model, out = ctc
    frames = np.random.default_rng(1).normal(size=(1, 61, 8)).astype(np.float32)
    np.save(tmp_path / "frames.npy", frames)
    printed = run_program(python, program_of(out), tmp_path / "frames.npy", cwd=out)
    with torch.no_grad():
        best = model(torch.from_numpy(frames)).logits[0].argmax(-1)
    best = [token for token in torch.unique_consecutive(best).tolist() if token != 0]
    assert best
    assert [int(token) for token in printed.split()] == best
    assert run_program(python, program_of(out), cwd=out)  # as it stands


@pytest.mark.parametrize("family", ["bert", "speech_to_text"])
def test_check_runs_both_at_other_sizes(family, tmp_path, capsys):
    out = export(small(family, "cape"), tmp_path, "--check")
    report = capsys.readouterr().out
    for path in out.glob("*.onnx"):
        assert f"{path.name}: differs by at most" in report
        assert not any(name in path.read_bytes() for name in (b".py", b"stack_trace"))
    assert "in 18 batches" in report or "in 12 batches" in report


def test_check_finds_a_graph_that_holds_at_some_sizes_only(tmp_path, monkeypatch, capsys):
    """With a branch that an export fixes: one patch is wrong then."""
    whole = positions._axis

    def branching(size, device):
        if size == 1:
            return torch.zeros(1, device=device)
        return whole(size, device) * torch.sym_max(size - 1, 1) / (size - 1)

    monkeypatch.setattr(positions, "_axis", branching)
    with pytest.raises(SystemExit, match="2"):
        export(small("vit", "cape"), tmp_path, "--check")
    error = capsys.readouterr().err
    assert "error: the model at {'batch': 1, 'height': 8, 'width': 8}" in error
    assert "that differs from that of the model by nan; allowed: 0.0001" in error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("route", ["torch", "transformers"])
def test_plain_exporters_take_models_with_relative_positions(route, tmp_path):
    """Of torch and of transformers, with absolute and relative positions of patches."""
    model, sample = small("vit", "cape+relative"), torch.randn(2, 3, 24, 40)
    path = tmp_path / "model.onnx"
    if route == "torch":
        sizes = {0: "batch", 2: "height", 3: "width"}
        torch.onnx.export(
            *(model, (sample,), path), dynamo=True, dynamic_shapes={"pixel_values": sizes}
        )
    else:
        exporters = pytest.importorskip("transformers.exporters")
        settings = exporters.OnnxConfig(dynamic=True)
        exported = exporters.OnnxExporter().export(model, {"pixel_values": sample}, settings)
        exported.save_pretrained(tmp_path)
    session = onnxruntime.InferenceSession(path)
    for size in IMAGE_SIZES:
        images = torch.randn(1, 3, *size)
        (actual, *_) = session.run(None, {"pixel_values": images.numpy()})
        with torch.no_grad():
            assert_close(torch.from_numpy(actual), model(images).logits)


def test_large_weights_stand_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "ONE_FILE", 0)
    model = small("vit", "sinpos")
    out = export(model, tmp_path)
    assert {path.name for path in out.iterdir()} == {"README.md", "model.onnx", "model.onnx.data"}
    images = torch.randn(1, 3, 40, 8)
    with torch.no_grad():
        expected = model(images).logits
    assert_close(run(out, "model", pixel_values=images)["logits"], expected)


def refuse(source, out, *options):
    with pytest.raises(SystemExit, match="2"):
        main(["export", "onnx", str(source), str(out), *options])
    assert not out.exists()


@pytest.mark.parametrize("opset", [17, 24])
def test_opset_that_would_become_another_is_refused(opset, vit, tmp_path, capsys):
    _, out = vit
    refuse(out.parent / "checkpoint", tmp_path / "out", "--opset", str(opset))
    assert f"error: --opset {opset} is not allowed; allowed: 18 to 23" in capsys.readouterr().err


def stock_model():
    sizes = {"image_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
    return ViTForImageClassification(
        ViTConfig(**sizes, patch_size=8, num_attention_heads=1, intermediate_size=8)
    )


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (stock_model, "holds a ViTForImageClassification, which is no model of this package"),
        (
            lambda: CapeMarianModel(small("marian", "cape").config),
            "export onnx has no graph for CapeMarianModel; allowed: ",
        ),
        (
            lambda: small("dinov2_with_registers", "abspos"),
            "the learned table of CapeDinov2WithRegistersForImageClassification is smoothed",
        ),
        (
            lambda: small("beit", "cape"),
            "use_relative_position_bias=True is not allowed for export onnx; allowed: False",
        ),
    ],
)
def test_models_without_a_graph_are_refused(make, told, tmp_path, capsys):
    make().save_pretrained(tmp_path / "source")
    refuse(tmp_path / "source", tmp_path / "out")
    assert told in capsys.readouterr().err


def test_positions_that_are_drawn_in_evaluation_are_refused(tmp_path, capsys):
    small("bert", "randpos").save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["position_embedding"]["random_evaluation"] = True
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    refuse(tmp_path / "source", tmp_path / "out")
    error = capsys.readouterr().err
    assert "draws positions in evaluation, too, and a graph draws none; allowed: models" in error
