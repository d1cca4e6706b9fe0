"""Models of Hugging Face that CTranslate2 has no engine for, or none that takes their positions."""

import json

import pytest

from tests.support.hf import FAMILIES, TEXT
from tests.support.served import Corpus, build, refusal

pytest.importorskip("ctranslate2")


def save(folder, settings):
    """A translation model with its tokenizer."""
    tokenizer = Corpus(folder.parent).tokenizer("marian")
    build("marian", tokenizer, settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (TEXT["cape+relative"], "adds nothing to the content where the first layer has relative"),
        (
            {"type": "relpos", "relative_context": 2, "relative_heads": "separate"},
            "whose heads share one table; allowed: 'shared'",
        ),
    ],
)
def test_positions_that_do_not_fit_are_refused(settings, told, tmp_path, capsys):
    save(tmp_path / "model", settings)
    error = refusal(capsys, tmp_path / "model", tmp_path / "out")
    assert told in error
    assert "allowed" in error
    assert not (tmp_path / "out").exists()


def test_dictionaries_of_fairseq_are_refused(tmp_path, capsys):
    save(tmp_path / "model", TEXT["cape"])
    error = refusal(capsys, tmp_path / "model", tmp_path / "out", "--data", "bin")
    assert "--data bin is not allowed" in error
    assert not (tmp_path / "out").exists()


def test_configuration_of_another_model_is_refused(tmp_path, capsys):
    """Whose table no file has: it would be drawn."""
    save(tmp_path / "model", TEXT["cape"])
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "position_embedding": TEXT["abspos"]}), "utf-8")
    error = refusal(capsys, tmp_path / "model", tmp_path / "out")
    assert "lacks weights of its positions, model." in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["bert", "llama", "vit", "speech_to_text", "speech_ctc"])
def test_other_families_are_refused_with_another_way(family, tmp_path, capsys):
    row = FAMILIES[family]
    row.build({"type": row.stock_type or "cape"}).save_pretrained(tmp_path / "model")
    error = refusal(capsys, tmp_path / "model", tmp_path / "out")
    assert row.model.__name__ in error
    assert "CapeMarianMTModel" in error
    assert "export onnx" in error
    assert "--stock" in error
