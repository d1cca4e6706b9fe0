"""The program in the README of a translation model of Hugging Face: what it gives to the engine is
what the tokenizer makes of a text, and what it prints is the text of the target alone."""

import sys
from types import SimpleNamespace

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import MarianTokenizer

from recipes.lab.subwords import SentencePiece
from tests.support.served import Corpus

pytest.importorskip("ctranslate2")
from hf_models.serving.ctranslate2_loaders import write_tokenizer
from hf_models.serving.ctranslate2_programs import program

TEXTS = ["forty-one, three, seventy-seven.", "seventeen."]
ANSWER = "einundvierzig, drei."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


def marian(corpus):
    """With other pieces on the target side."""
    target = corpus.folder / "target.model"
    SentencePiece.train([corpus.text], target, 40)
    return MarianTokenizer(
        source_spm=str(corpus.spm), target_spm=str(target), vocab=corpus._vocabulary()
    )


def mbart(corpus):
    """That cuts texts where it is not told otherwise, as many that are saved after training."""
    tokenizer = corpus.tokenizer("mbart")
    tokenizer.backend_tokenizer.enable_truncation(4)
    return tokenizer


def run(text, folder, file, pieces, monkeypatch, capsys):
    """Sentences that the program gives to an engine, its options, and what it prints if every
    translation is `pieces` behind its prefix."""
    calls = []

    class Translator:
        def __init__(self, path):
            assert path == str(folder)

        def translate_batch(self, sentences, **options):
            calls.append((sentences, options))
            prefixes = options.get("target_prefix", [[]] * len(sentences))
            return [SimpleNamespace(hypotheses=[[*prefix, *pieces]]) for prefix in prefixes]

    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(Translator=Translator))
    monkeypatch.setattr(sys, "argv", ["program", str(folder), str(file)])
    capsys.readouterr()
    exec(text, {"__name__": "__main__"})
    ((sentences, options),) = calls
    return sentences, options, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (marian, []),
        (lambda corpus: corpus.tokenizer("m2m_100"), ["__de__"]),
        (mbart, ["de_DE"]),
    ],
    ids=["marian", "m2m_100", "mbart"],
)
def test_tokens_are_those_of_the_tokenizer(make, prefix, corpus, tmp_path, monkeypatch, capsys):
    tokenizer = make(corpus)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text").write_text("".join(f" {text}\n" for text in TEXTS), "utf-8")
    text = program(tokenizer, tmp_path, {"max_input_length": 0}, prefix)
    pieces = SentencePieceProcessor(model_file=str(corpus.spm)).encode(ANSWER, out_type=str)
    given, options, printed = run(text, tmp_path, tmp_path / "text", pieces, monkeypatch, capsys)
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert given == [tokenizer.convert_ids_to_tokens(row) for row in ids]
    assert options["max_input_length"] == 0
    assert options.get("target_prefix", [[], []]) == [prefix, prefix]
    assert printed == [ANSWER, ANSWER]


def test_fast_tokenizer_that_was_saved_without_its_file_gets_it(corpus, tmp_path):
    tokenizer, source, out = corpus.tokenizer("bart"), tmp_path / "source", tmp_path / "out"
    tokenizer.save_pretrained(source)
    (source / "tokenizer.json").unlink()
    write_tokenizer(source, out, tokenizer)
    saved = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert saved.encode(TEXTS[0]).ids == tokenizer(TEXTS[0])["input_ids"]
    assert "import tokenizers" in program(tokenizer, out, {}, [])
