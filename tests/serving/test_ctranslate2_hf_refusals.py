"""Models of Hugging Face that CTranslate2 has no engine for, or none that takes their positions."""

import pytest

from tests.support.hf import FAMILIES, TEXT
from tests.support.served import Corpus, build, refusal

pytest.importorskip("ctranslate2")


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
    tokenizer = Corpus(tmp_path).tokenizer("marian")
    build("marian", tokenizer, settings).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    error = refusal(capsys, tmp_path / "model", tmp_path / "out")
    assert told in error
    assert "allowed" in error
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
