"""The commands run and convert, on folders made here."""

import json
import re

import pytest
import torch

from hf_models import CapeMarianMTModel, run
from hf_models.convert import convert, main
from tests.support.hf import FAMILIES, batch, targets


@pytest.fixture
def stock(tmp_path):
    """The folder of a stock checkpoint."""
    FAMILIES["marian"].build_stock(seed=1).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def logits(model, family):
    inputs = batch(family)
    inputs.pop("labels")
    if family == "marian":
        inputs["decoder_input_ids"] = targets()
    else:
        inputs["pixel_values"] = torch.randn(
            2, 3, 32, 32, generator=torch.Generator().manual_seed(8)
        )
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("marian", {"type": "cape", "source_scale": 1, "source_bos": False}),
        ("vit", {"type": "cape", "gamma": 0.7}),
        ("vit", {"type": "nopos"}),
    ],
)
def test_back_to_stock_gives_the_same_output(family, settings, tmp_path):
    row = FAMILIES[family]
    model = row.build(settings, seed=3)
    model.save_pretrained(tmp_path / "cape")
    convert(str(tmp_path / "cape"), tmp_path / "stock", None)
    back, report = row.stock_model.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(logits(back, family), logits(model, family), atol=1e-6, rtol=1e-5)
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["model_type"] == row.stock_config.model_type
    assert "position_embedding" not in config


SCALED = {"type": "cape", "source_scale": 2, "source_bos": False}
NO_STOCK = [
    ("speech_to_text", {"type": "sinpos"}, "'nopos' -> 'sinpos' (decoder)"),
    ("speech_to_text", {"type": "cape"}, "positions: true -> false (encoder)"),
    ("marian", SCALED, "alpha"),
    ("marian", {"type": "cape", "source_scale": 1}, "BOS hint"),
    ("marian", {"type": "relpos"}, "relative attention"),
    ("marian", {"type": "abspos"}, "'abspos'"),
]


@pytest.mark.parametrize(("family", "settings", "reason"), NO_STOCK)
def test_what_stock_cannot_do_is_refused(family, settings, reason, tmp_path):
    decoder = {"type": "nopos" if settings["type"] == "sinpos" else "sinpos"}
    sides = {"decoder_position_embedding": decoder} if family != "marian" else {}
    FAMILIES[family].build(settings, **sides).save_pretrained(tmp_path / "cape")
    with pytest.raises(ValueError, match=re.escape(reason)):
        convert(str(tmp_path / "cape"), tmp_path / "stock", None)
    assert not (tmp_path / "stock").exists()


@pytest.mark.parametrize("family", ["marian", "vit"])
def test_stock_loader_fails_loudly(family, tmp_path):
    row = FAMILIES[family]
    row.build({"type": "nopos"}).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"needs the package cape-plugins: import hf_models"):
        row.stock_model.from_pretrained(tmp_path)
    again = row.model.from_pretrained(tmp_path)
    assert not hasattr(again.config, "transformers_weights")


def test_a_failure_leaves_nothing_behind(stock, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(CapeMarianMTModel, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(str(stock), tmp_path / "cape", {"type": "sinpos"})
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


BAD = [
    (["SRC", "DST"], "or as two raw texts, SOURCE.txt,TARGET.txt"),
    (["SRC", "DST", "--position-embedding", "rotary"], "'rotary'"),
    (["SRC", "SRC", "--position-embedding", "sinpos"], "exists already"),
    (["SRC", "DST", "--stock", "--position-embedding", "cape"], "leave out"),
    (
        ["SRC", "DST", "--position-embedding", "sinpos", "--position-max-offset", "3"],
        "--position-max-offset 3",
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[-50:])
def test_bad_input_writes_nothing_and_says_why(words, message, stock, tmp_path, capsys):
    places = {"SRC": str(stock), "DST": str(tmp_path / "DST")}
    words = [places.get(word, word) for word in words]
    try:
        status = main(words)
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "DST").exists()


SCRIPT = """
import sys, torchvision
from transformers import AutoModelForSeq2SeqLM, ViTImageProcessor
print("ARGUMENTS", sys.argv[1:], __name__)
print("CLASS", type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])).__name__)
print("STAND-IN", torchvision.MARK, sys.path[0])
print("PROCESSOR", type(ViTImageProcessor(size={"height": 8, "width": 8})).__name__)
"""


@pytest.mark.slow
def test_scripts_know_the_models_and_what_stands_beside_them(run_cli, stock, tmp_path):
    """A stand-in of torchvision is seen by the script alone, which is run in the folder that holds
    it: `python -m` puts this folder on the path."""
    convert(str(stock), tmp_path / "cape", {"type": "cape", "source_scale": 1.1})
    (tmp_path / "torchvision.py").write_text("MARK = 'beside the script'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("python", "-m", "hf_models.run", "./script.py", "cape", "--flag")
    output = run_cli(*words, cwd=tmp_path, fresh=True).stdout
    assert "ARGUMENTS ['cape', '--flag'] __main__" in output
    assert "CLASS CapeMarianMTModel" in output
    assert f"STAND-IN beside the script {tmp_path.resolve()}" in output
    assert "PROCESSOR ViTImageProcessorPil" in output


def test_missing_script_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(["gone.py"])
    assert "gone.py: no such script" in capsys.readouterr().err
