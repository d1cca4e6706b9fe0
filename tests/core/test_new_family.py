"""A family of models that is new to this package needs one row, with which pictures read its
checkpoints without its host."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from cape_plugins import PositionConfig, build_position_encoder
from cape_plugins.checkpoints import stack as checkpoint
from cape_plugins.checkpoints.families import FAMILY_ROWS, Family, Side, add_family_row
from cape_plugins.checkpoints.stack import read_stack
from cape_plugins.cli import main

WIDTH, PADDING = 12, 3


@pytest.fixture(autouse=True)
def _owl(monkeypatch):
    """A model "owl", which reads frames at an unusual step and writes tokens, whose positions are
    counted after padding."""
    before = dict(FAMILY_ROWS)
    hearing = Side(
        domain="audio",
        architecture="encoder",
        dim="ear_width",
        start=1.0,
        spacing=lambda settings: settings["blink"] * 2,
        unit=lambda settings: settings["blink"] * 2,
        frequencies="marian",
        table="ears.places",
        table_first=2,
    )
    saying = Side(
        domain="text",
        architecture="decoder",
        dim="beak_width",
        field="beak_positions",
        start=lambda settings: settings["pad_token_id"] + 1,
    )
    add_family_row(Family("owl", {"encoder": hearing, "decoder": saying}, "sinpos"))
    yield
    FAMILY_ROWS.clear()
    FAMILY_ROWS.update(before)


def save(folder, model_type="cape_owl", **settings):
    sizes = {"ear_width": WIDTH, "beak_width": WIDTH, "blink": 0.02, "pad_token_id": PADDING}
    saved = {"model_type": model_type, **sizes, **settings}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


def test_each_side_has_its_settings_and_places(tmp_path):
    shift = {"type": "cape", "max_global_shift": 2.0, "mean_normalize": False}
    folder = save(tmp_path / "owl", position_embedding=shift, beak_positions={"type": "shape"})
    ear, beak = (read_stack(folder, side) for side in ("encoder", "decoder"))
    assert ear.config == PositionConfig.from_dict(shift, "audio")
    assert beak.config == PositionConfig("shape", "text", "decoder")
    assert ear.spacing == ear.encoder.unit == 0.04
    rows, _ = ear.encoder.rows_and_step(ear.positions(3))
    assert rows.flatten().tolist() == [1.0, 2.0, 3.0]
    rows, _ = beak.encoder.rows_and_step(beak.positions(3))
    assert rows.flatten().tolist() == [4.0, 5.0, 6.0]
    alike = {"frequencies": "marian", "layout": "sin_cos_blocks", "start": 1.0, "unit": 0.04}
    expected = build_position_encoder(ear.config, WIDTH, **alike).eval()
    assert torch.equal(ear.encoder.eval()(ear.positions(5)), expected(ear.positions(5)))


def test_the_stock_model_is_what_the_row_says(tmp_path):
    assert read_stack(save(tmp_path / "stock", "owl")).config == PositionConfig("sinpos", "audio")


def test_its_learned_table_is_found(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    folder = save(tmp_path / "owl", position_embedding={"type": "abspos"})
    weights = {"ears.places": torch.randn(9, WIDTH), "other": torch.zeros(2)}
    safetensors.save_file(weights, folder / "model.safetensors")
    stack = read_stack(folder)
    assert torch.equal(stack.encoder.encoding.weight, weights["ears.places"][2:])


def test_it_is_drawn_and_errors_name_it(figures, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = save(tmp_path / "owl", position_embedding={"type": "cape"})
    words = ["plot", "coverage", "--model", str(folder), "--draws", "5"]
    main([*words, "--output", str(tmp_path / "x.png")])
    assert "cape, audio" in figures[0].get_suptitle()
    words = ["plot", "components", "--model", str(save(tmp_path / "crow", "crow"))]
    with pytest.raises(SystemExit):
        main(words)
    assert "'crow' is unknown; allowed: marian," in (error := capsys.readouterr().err)
    assert "owl" in error
    assert "cape_plugins.checkpoints.families.add_family_row" in error


def test_a_package_adds_its_rows_by_an_entry_point(tmp_path, monkeypatch):
    folder = save(tmp_path / "wren", "wren", position_embedding={"type": "cape"})
    row = dataclasses.replace(FAMILY_ROWS["owl"], model_type="wren")
    groups = {"cape_plugins.families": [SimpleNamespace(load=lambda: add_family_row(row))]}
    monkeypatch.setattr(checkpoint, "entry_points", lambda group: groups[group])
    assert read_stack(folder).config == PositionConfig("cape", "audio")
