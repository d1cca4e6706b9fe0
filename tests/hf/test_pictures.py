"""Pictures of Hugging Face models: embeddings that are read from a folder equal the embeddings that
the model adds."""

import sys

import pytest
import torch
from torch import nn

from cape_plugins import PositionEncoder
from cape_plugins.checkpoints.stack import read_stack
from cape_plugins.cli import main
from cape_plugins.pictures.views import relative_views
from hf_models.seams.images import PatchEmbeddings
from hf_models.switching.install import LearnedTable
from tests.support.hf import ALL, FAMILIES, STACKS, VARIANTS, batch, config_of, left_out, make

pytest.importorskip("matplotlib")

PATCHES = (3, 5)  # of the images of batch("vit")


def added(model, inputs):
    """Side to what its position encoder returns for the first and longest sample, in a forward."""
    addends = {}

    def noting(side):
        def hook(module, args, output):
            addends[side] = output[0].detach()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, PositionEncoder):
            module.register_forward_hook(noting("decoder" if "decoder" in name else "encoder"))
    with torch.no_grad():
        model(**inputs)
    if not addends:
        for name, module in model.named_modules():
            if isinstance(module, PatchEmbeddings):
                rows = module.resized_table(*PATCHES)[0, len(module.special_tokens) :]
                addends["encoder"] = rows.detach()
            elif isinstance(module, LearnedTable):
                rows = module.weight[module.offset :][:9].detach()
                addends["decoder" if "decoder" in name else "encoder"] = rows
    return addends


ADDED = [
    (family, name)
    for family, name in ALL
    if config_of(family, name).encoding.adds
    and ("+" not in name or name == "rfs+table")
    and not left_out(family, "pictures")
]


@pytest.mark.parametrize(("family", "name"), ADDED)
def test_what_is_read_is_what_the_model_adds(family, name, tmp_path):
    model = make(family, name)
    model.save_pretrained(tmp_path)
    expected = added(model, batch(family))
    assert expected
    for side, rows in expected.items():
        stack = read_stack(tmp_path, side)
        size = PATCHES if "pixel_values" in batch(family) else len(rows)
        with torch.no_grad():
            embeddings = stack.encoder(stack.positions(size), random=False)[0]
        assert embeddings.shape == rows.shape
        assert torch.allclose(embeddings, rows, atol=1e-5), side
        assert rows.std() > 0.05
        settings = VARIANTS[family][name]
        assert stack.config.type == settings["type"]
    if len(expected) == 1:
        with pytest.raises(ValueError, match="--side decoder.*allowed: encoder"):
            read_stack(tmp_path, "decoder")


@pytest.mark.parametrize("family", [name for name in STACKS if "relpos" in VARIANTS[name]])
@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_relative_embeddings_come_from_the_layers(family, heads, tmp_path):
    """Ordered by layer, the heads of one side by side."""
    settings = {"type": "relpos", "relative_context": 3, "relative_heads": heads}
    model = FAMILIES[family].build({**settings, "relative_values": True})
    model.save_pretrained(tmp_path)
    tables = {
        name: table
        for name, table in model.named_parameters()
        if "relative" in name and "decoder" not in name
    }
    assert len(tables) == (8 if family == "vit" else 4)  # of two layers
    stack = read_stack(tmp_path)
    views = relative_views(stack)
    layers = [view.state.split(",")[0] for view in views]
    assert layers == sorted(layers)
    for view in views:
        _, layer, *words = view.state.replace(",", "").split()
        ending = ".".join(["relative", *words])
        (table,) = (t for n, t in tables.items() if f".{layer}." in n and n.endswith(ending))
        assert view.places[:, 0].tolist() == [-3, -2, -1, 0, 1, 2, 3]
        for row, expected in zip(view.embedding, table.detach().unbind(1), strict=True):
            assert row.tolist() == expected.flatten().tolist()
    assert stack.dim == views[0].embedding.shape[1]
    if family == "marian":  # whose decoder never sees the keys to the right
        for view in relative_views(read_stack(tmp_path, "decoder")):
            assert view.places[:, 0].tolist() == [-3, -2, -1, 0]


@pytest.mark.parametrize(("family", "name"), [("vit", "abspos"), ("marian", "sinpos")])
def test_stock_models_are_read_as_the_type_they_are(family, name, tmp_path):
    """Gives, without position settings, the type that the stock model is."""
    model = FAMILIES[family].build_stock()
    model.save_pretrained(tmp_path)
    stack = read_stack(tmp_path)
    assert stack.config.type == name
    size = stack.grid if family == "vit" else 11
    with torch.no_grad():
        embedding = stack.encoder(stack.positions(size), random=False)[0]
    if family == "vit":
        expected = model.vit.embeddings.position_embeddings[0, 1:]
    else:
        expected = model.model.encoder.embed_positions.weight[:11]
    assert torch.allclose(embedding, expected, atol=1e-5)


def test_learned_table_is_drawn_without_its_host(tmp_path, monkeypatch, figures):
    """A picture of a trained table; transformers is not imported for it."""
    model = make("vit", "abspos")
    table = model.vit.embeddings.position_embeddings
    nn.init.orthogonal_(table.data[0])  # of which the similarities are known
    model.save_pretrained(tmp_path / "vit")
    for host in ("transformers", "hf_models", "fairseq"):
        monkeypatch.setitem(sys.modules, host, None)
    monkeypatch.chdir(tmp_path)
    main(["plot", "similarity", "--model", "vit", "--output", "x.png"])
    (figure,) = figures
    # 16 patches, each similar to itself only; the picture of one patch has it once
    sums = [abs(float(a.images[0].get_array().sum())) for a in figure.axes if a.images]
    assert sums == pytest.approx([16, 1, 16, 1], abs=1e-2)
    assert figure.get_suptitle() == "similarity: abspos, image, vit"


def test_folder_without_its_weights_shows_sinusoids_and_refuses_tables(tmp_path, capsys, figures):
    """A sinusoid can be drawn without weights; a table cannot."""
    for name in ("abspos", "cape"):
        make("vit", name).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
    words = ["plot", "components", "--channels", "0", "--output", str(tmp_path / "x.png")]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--model", str(tmp_path / "abspos")])
    assert "not among its weights" in capsys.readouterr().err
    main([*words, "--model", str(tmp_path / "cape")])
    assert len(figures) == 1
    (tmp_path / "abspos" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--model", str(tmp_path / "abspos")])
    assert "model.safetensors cannot be read" in capsys.readouterr().err
