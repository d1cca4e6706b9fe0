"""READMEs of exported folders: how templates are filled, and what the one for ctranslate2 says."""

import sys
from types import SimpleNamespace

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import MarianTokenizer

from cape_plugins.serving.ctranslate2_readme import (
    LANGUAGE_MODEL,
    TRANSLATION,
    precision_notes,
    readme,
)
from cape_plugins.serving.templates import fill
from cape_plugins.settings.arguments import FAIRSEQ, HUGGING_FACE
from recipes.lab.subwords import SentencePiece
from tests.support.engines import program_in
from tests.support.served import Corpus

pytest.importorskip("ctranslate2")
from hf_models.serving.ctranslate2 import of_program
from hf_models.serving.ctranslate2_loaders import write_tokenizer

SECTIONS = """a $first
<!-- if outer -->
b
<!-- if not inner -->
c $second
<!-- end -->
<!-- end -->
d {first}
"""
OF_TRANSLATION = {
    "title": "A model",
    "hint": False,
    "bos": "<s>",
    "eos": "</s>",
    "pad": "<pad>",
    "start": "</s>",
    "biased": False,
    "without_option": "",
}
TEXTS = ["forty-one, three, seventy-seven.", "seventeen."]
ANSWER = "einundvierzig, drei."


def test_sections_and_values_of_a_template(tmp_path):
    template = tmp_path / "template.md"
    template.write_text(SECTIONS, "utf-8")
    values = {"first": "{1}", "second": 2}
    assert fill(template, outer=1, inner=0, **values) == "a {1}\nb\nc 2\nd {first}\n"
    assert fill(template, outer=1, inner=1, **values) == "a {1}\nb\nd {first}\n"
    assert fill(template, outer=None, first=1) == "a 1\nd {first}\n"
    for missing in ({"outer": True, **values}, {"outer": True, "inner": False, "first": 1}):
        with pytest.raises(KeyError):
            fill(template, **missing)


# ---- the README for ctranslate2 ------------------------------------------------------------------


def test_a_precision_that_the_processor_does_not_have_is_told():
    """CTranslate2 computes in int16 by MKL alone, and elsewhere in int8, which rounds more."""
    without, with_mkl = {"float32", "int8"}, {"float32", "int8", "int16"}
    (note,) = precision_notes("int16", without)
    assert "int16 is computed in int8 on this machine" in note
    (note,) = precision_notes("int8_bfloat16", without)
    assert "int8_bfloat16 is converted" in note
    assert precision_notes("int16", with_mkl) == precision_notes("int8", without) == []
    assert precision_notes(None, without) == precision_notes("float32", without) == []


@pytest.mark.parametrize("quantization", [None, "float32", "int8", "int16", "float16"])
def test_readme_tells_what_rounding_changes_and_where_int16_is_int8(quantization):
    words = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "start": "</s>"}
    more = {"title": "A model", "packages": "ctranslate2", **words}
    text = readme(FAIRSEQ, LANGUAGE_MODEL, {"target": 9}, quantization, **more)
    assert f"weights {quantization or 'float32'}." in text
    assert ("Weights are rounded" in text) == (quantization not in (None, "float32"))
    assert ("without MKL" in text) == (quantization == "int16")


# ---- its program, for translation models of Hugging Face: it gives the engine what the tokenizer
# makes of a text, and prints the text of the target alone


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


def program_of(tokenizer, folder, options, prefix):
    values = {**OF_TRANSLATION, **of_program(tokenizer, folder, options, prefix)}
    return program_in(readme(HUGGING_FACE, TRANSLATION, {"source": 9, "target": 9}, **values))


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
        (marian, None),
        (lambda corpus: corpus.tokenizer("m2m_100"), "__de__"),
        (mbart, "de_DE"),
    ],
    ids=["marian", "m2m_100", "mbart"],
)
def test_tokens_are_those_of_the_tokenizer(make, prefix, corpus, tmp_path, monkeypatch, capsys):
    tokenizer = make(corpus)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text").write_text("".join(f" {text}\n" for text in TEXTS), "utf-8")
    text = program_of(tokenizer, tmp_path, {"max_input_length": 0}, prefix)
    pieces = SentencePieceProcessor(model_file=str(corpus.spm)).encode(ANSWER, out_type=str)
    given, options, printed = run(text, tmp_path, tmp_path / "text", pieces, monkeypatch, capsys)
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert given == [tokenizer.convert_ids_to_tokens(row) for row in ids]
    assert options["max_input_length"] == 0
    assert options.get("target_prefix") == (prefix and [[prefix], [prefix]])
    assert printed == [ANSWER, ANSWER]


def test_fast_tokenizer_that_was_saved_without_its_file_gets_it(corpus, tmp_path):
    tokenizer, source, out = corpus.tokenizer("bart"), tmp_path / "source", tmp_path / "out"
    tokenizer.save_pretrained(source)
    (source / "tokenizer.json").unlink()
    write_tokenizer(source, out, tokenizer)
    saved = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert saved.encode(TEXTS[0]).ids == tokenizer(TEXTS[0])["input_ids"]
    assert "import tokenizers" in program_of(tokenizer, out, {"beam_size": 5}, None)
