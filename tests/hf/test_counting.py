"""Source scale alpha of raw text, counted by the tokenizer of a model, in both commands."""

import json
import sys

import pytest
import sentencepiece
from transformers import AutoTokenizer, MarianTokenizer

from cape_plugins.cli import main as cape_plugins_main
from hf_models.convert import main
from tests.support.hf import FAMILIES

TEXTS = {
    "train.en": "one two three four\nfive six\n\nseven eight nine zero one\n",
    "train.de": "eins zwei drei vier\nfünf sechs\nnull\nsieben acht neun null eins zwei\n",
}


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A stock Marian folder with its tokenizer, and two texts."""
    root = tmp_path_factory.mktemp("translator")
    for name, text in TEXTS.items():
        (root / name).write_text(text, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(str(root / name) for name in TEXTS), model_prefix=str(root / "spm"),
        vocab_size=50, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(root / "spm.model"))
    words = ["</s>", "<unk>", *(model.id_to_piece(i) for i in range(3, model.get_piece_size()))]
    vocabulary = {word: index for index, word in enumerate([*words, "<pad>"])}
    (root / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    spm, folder = str(root / "spm.model"), root / "stock"
    tokenizer = MarianTokenizer(source_spm=spm, target_spm=spm, vocab=str(root / "vocab.json"))
    tokenizer.save_pretrained(folder)
    FAMILIES["marian"].build_stock().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source, target = (text.splitlines() for text in TEXTS.values())
    counts = [sum(map(len, tokenizer(**side)["input_ids"]))
              for side in ({"text_target": target}, {"text": source})]  # fmt: skip
    assert counts[0] != counts[1]
    return folder, root / "train.en", root / "train.de", "/".join(map(str, counts))


def test_alpha_of_raw_text_is_counted_by_the_tokenizer(translator, capsys):
    folder, source, target, alpha = translator
    words = ["alpha", "--text", str(source), str(target)]
    assert cape_plugins_main([*words, "--tokenizer", str(folder)]) == 0
    assert f"--position-source-scale {alpha}\n" in capsys.readouterr().out
    cape_plugins_main(words)
    assert f"--position-source-scale {alpha}\n" not in capsys.readouterr().out


def test_convert_counts_alpha_from_two_texts(translator, tmp_path, capsys):
    folder, source, target, alpha = translator
    words = ["--position-embedding", "cape", "--position-source-scale", f"{source},{target}"]
    assert main([str(folder), str(tmp_path / "cape"), *words]) == 0
    assert f"alpha = {alpha} = " in capsys.readouterr().out
    saved = json.loads((tmp_path / "cape" / "config.json").read_text())
    assert saved["position_embedding"]["source_scale"] == alpha


@pytest.mark.parametrize("text", ["auto", "0", "1,2,3", "gone.en,gone.de"])
def test_bad_alpha_names_the_flag(text, translator, tmp_path, capsys):
    words = ["--position-embedding", "cape", "--position-source-scale", text]
    assert main([str(translator[0]), str(tmp_path / "cape"), *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    expected = "gone.en is not a file" if "gone" in text else f"--position-source-scale {text}"
    assert expected in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "SOURCE", "TARGET", "--tokenizer", "EMPTY"], "cannot be loaded"),
        (["--binarized", "EMPTY", "--tokenizer", "MODEL"], "--tokenizer"),
        (["--text", "SOURCE", "SHORT", "--tokenizer", "MODEL"], "has 4 sentences"),
        (["--text", "gone.en", "TARGET", "--tokenizer", "MODEL"], "gone.en is not a file"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_bad_texts_and_tokenizers_end_in_one_line(words, message, translator, tmp_path, capsys):
    folder, source, target, _ = translator
    (tmp_path / "short").write_text("one\n")
    (tmp_path / "empty").mkdir()
    places = {"SOURCE": source, "TARGET": target, "MODEL": folder}
    places |= {"SHORT": tmp_path / "short", "EMPTY": tmp_path / "empty"}
    with pytest.raises(SystemExit) as status:
        cape_plugins_main(["alpha", *(str(places.get(word, word)) for word in words)])
    assert status.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_tokenizer_without_transformers_says_what_to_install(translator, monkeypatch, capsys):
    folder, source, target, _ = translator
    monkeypatch.delitem(sys.modules, "hf_models.counting", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = ["alpha", "--text", str(source), str(target), "--tokenizer", str(folder)]
    with pytest.raises(SystemExit, match="2"):
        cape_plugins_main(words)
    assert "pip install 'cape-plugins[hf]'" in capsys.readouterr().err
