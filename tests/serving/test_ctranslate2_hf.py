"""Translation models of Hugging Face as folders for CTranslate2: the same tokens and scores, at any
length, in an interpreter that has the engine alone; and what is refused."""

import json
import re
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.support import engines
from tests.support.engines import program_of, run_program
from tests.support.hf import FAMILIES, TEXT, config_of
from tests.support.served import build, pairs

pytest.importorskip("ctranslate2")
import ctranslate2

from cape_plugins.serving.ctranslate2_check import translate
from hf_models.serving import ctranslate2 as exporter
from hf_models.serving.ctranslate2_loaders import TranslationLoader, write_tokenizer

ROWS, LONGEST = 300, 40  # of a table; tokens of a translation
FIT = [
    name
    for name, row in TEXT.items()
    if not {"type", "relative_context"} < row.keys()
    and not config_of("marian", name).encoding.biases
]
FIT += ["relpos+first"]
# families with norms before their blocks have relative keys beside cape
OTHERS = [("bart", "cape"), *((name, "cape+relative") for name in ("m2m_100", "mbart", "pegasus"))]


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    """Function that writes a model of one family and type, with its tokenizer."""

    def save(family, settings, **sizes):
        folder = tmp_path_factory.mktemp("model") / family
        tokenizer = corpus.tokenizer(family)
        build(family, tokenizer, settings, **sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def marian(saved, tmp_path_factory):
    """A cape_marian and its export."""
    source = saved("marian", TEXT["cape"])
    return source, export(source, tmp_path_factory.mktemp("export") / "out")


def export(source, out, *options):
    """The folder for tables of :data:`ROWS`."""
    rows = ("--max-source-tokens", ROWS, "--max-target-tokens", ROWS)
    return engines.export("ctranslate2", source, out, *rows, *options)


def loaded(source):
    """The model, and its tokenizer."""
    model = exporter._load(source)
    return exporter.Translation(model, AutoTokenizer.from_pretrained(source))


def sentences(each):
    """English lists, short and long ones."""
    return [text for size in ((1, 2), (3, 7)) for text, _ in pairs(7, each, *size)]


def both(source, out, texts, **options):
    """Translations by the host and by the engine."""
    translation = loaded(source)
    tokenizer = translation.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in texts]
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    options |= {"no_repeat_ngram_size": 2}
    translator = ctranslate2.Translator(str(out))
    engine = translate(translator, tokens, LONGEST, tokenizer.eos_token, **options)
    return exporter.translate_by_host(translation, ids, LONGEST), engine


def assert_same(host, engine, least):
    ended = [pair for pair in zip(host, engine, strict=True) if pair[0].ended or pair[1].ended]
    assert len(ended) >= least
    assert [ours.tokens for ours, _ in ended] == [theirs.tokens for _, theirs in ended]
    assert max(abs(ours.score - theirs.score) for ours, theirs in ended) < 1e-5
    assert len({ours.tokens for ours, _ in ended}) > least / 2  # they say different things


@pytest.mark.parametrize(("family", "name"), [*(("marian", name) for name in FIT), *OTHERS])
def test_tokens_and_scores_equal_generate(family, name, saved, tmp_path):
    source = saved(family, TEXT[name])
    out = export(source, tmp_path / "out")
    assert_same(*both(source, out, sentences(16)), least=12)


def test_settings_of_generation_are_options_in_the_readme(saved, tmp_path):
    source = saved("m2m_100", TEXT["cape"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    german, hyphen = tokenizer.convert_tokens_to_ids(["__de__", "▁f"])
    path = source / "generation_config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"forced_bos_token_id": german, "no_repeat_ngram_size": 2, "length_penalty": 0.6}
    settings |= {"bad_words_ids": [[hyphen], [1, hyphen]], "repetition_penalty": 1.2}
    settings["min_length"] = 9
    path.write_text(json.dumps(settings), "utf-8")
    (tmp_path / "text").write_text("\n".join(sentences(20)), "utf-8")
    out = export(source, tmp_path / "out", "--check", str(tmp_path / "text"))
    readme = (out / "README.md").read_text("utf-8")
    for option in ("no_repeat_ngram_size=2", "length_penalty=0.6", "min_decoding_length=8"):
        assert option in readme
    assert "no counterpart here: `repetition_penalty=1.2`" in readme
    assert readme.count("repetition_penalty") == 1
    assert "target_prefix=[['__de__']] * len(sentences)" in readme
    assert "suppress_sequences=[['<pad>', '▁f']]" in readme


def test_source_and_target_may_have_vocabularies_of_their_own(corpus, tmp_path):
    tokenizer = corpus.tokenizer("marian")
    source = tmp_path / "model"
    tokenizer.save_pretrained(source)
    target = {token: i for i, token in enumerate(sorted(tokenizer.get_vocab()))}
    (source / "target_vocab.json").write_text(json.dumps(target), "utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    settings["separate_vocabs"] = True
    (source / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    model = build(
        *("marian", tokenizer, TEXT["cape"]),
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        decoder_vocab_size=len(target) + 5,
        decoder_attention_heads=2,
        eos_token_id=target["</s>"],
        decoder_start_token_id=target["<pad>"],
        pad_token_id=target["<pad>"],
    )
    model.generation_config.bad_words_ids = None
    model.save_pretrained(source)
    out = export(source, tmp_path / "out")
    names = json.loads((out / "target_vocabulary.json").read_text("utf-8"))
    assert names[: len(target)] == sorted(target)
    assert len(names) == len(set(names)) == len(target) + 5
    tokens, words = ["▁f", "ty", "</s>"], ["zig", "▁", "f"]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    labels = torch.tensor([[target[word] for word in ("<pad>", *words)]])
    with torch.no_grad():
        logits = model(ids, decoder_input_ids=labels).logits
    scores = logits.log_softmax(-1)[0, torch.arange(3), labels[0, 1:]]
    (result,) = ctranslate2.Translator(str(out)).score_batch([tokens], [words])
    torch.testing.assert_close(torch.tensor(result.log_probs[:3]), scores, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "m2m_100", "mbart"])
def test_the_program_of_the_readme_runs_with_the_engine_alone(family, saved, tmp_path):
    """With pieces of sentencepiece, a prefix of the target, and tokenizers."""
    source, file = saved(family, TEXT["cape"]), tmp_path / "text"
    translation, options = loaded(source), {}
    tokenizer, german = translation.tokenizer, "__de__"
    if family == "m2m_100":
        code = tokenizer.convert_tokens_to_ids(german)
        generation = translation.model.generation_config
        generation.bad_words_ids.remove([code])
        generation.forced_bos_token_id = code
        generation.min_length = 3  # the engine ends right behind a prefix only if EOS is the best
        generation.save_pretrained(source)
        options["target_prefix"] = [[german]] * 20
    out = export(source, tmp_path / "out", "--max-target-tokens", str(LONGEST))
    assert not list(out.glob("*.safetensors"))
    texts = sentences(10)
    file.write_text("\n".join(texts) + "\n", "utf-8")
    printed = run_program(program_of(out), out, file).splitlines()
    host, _ = both(source, out, texts, **options)
    ended = [pair for pair in zip(printed, host, strict=True) if pair[1].ended]
    for line, hypothesis in ended:
        tokens = hypothesis.tokens[len(options) :]  # without the prefix
        ids = tokenizer.convert_tokens_to_ids(list(tokens))
        assert line == tokenizer.decode(ids, skip_special_tokens=True)
    assert len({line for line, _ in ended}) > 4


def test_fast_tokenizer_that_was_saved_without_its_file_gets_it(corpus, tmp_path):
    tokenizer, source, out = corpus.tokenizer("bart"), tmp_path / "source", tmp_path / "out"
    tokenizer.save_pretrained(source)
    (source / "tokenizer.json").unlink()
    write_tokenizer(source, out, tokenizer)
    saved = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert saved.encode("forty-one.").ids == tokenizer("forty-one.")["input_ids"]


def test_conversion_to_int8_leaves_the_model_as_it_was(marian, tmp_path):
    source, _ = marian
    translation = loaded(source)
    before = {name: value.clone() for name, value in translation.model.state_dict().items()}
    config = translation.model.config.to_dict()
    rows = {"source": 50, "target": 50}
    exporter.write_model(translation, tmp_path, rows, "int8")
    assert translation.model.config.to_dict() == config
    for name, value in translation.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(weight.requires_grad for weight in translation.model.parameters())


def test_models_in_half_precision_become_folders_in_float32(marian, tmp_path, capsys):
    """Which the engine has everywhere; the host would translate otherwise in half precision."""
    source = tmp_path / "model"
    shutil.copytree(marian[0], source)
    loaded(source).model.bfloat16().save_pretrained(source)
    (tmp_path / "text").write_text("\n".join(sentences(20)), "utf-8")
    out = export(source, tmp_path / "out", "--check", str(tmp_path / "text"))
    report = re.search(r"check: (\d+) of (\d+) translations", capsys.readouterr().out)
    assert report[1] == report[2]
    assert int(report[1]) >= 12
    sizes = [(folder / "model.bin").stat().st_size for folder in (out, marian[1])]
    assert sizes[0] > 0.99 * sizes[1]


def test_a_folder_that_computes_something_else_is_not_written(
    marian, tmp_path, refusal_of, monkeypatch
):
    (tmp_path / "text").write_text("\n".join(sentences(5)), "utf-8")
    table = TranslationLoader.table
    monkeypatch.setattr(TranslationLoader, "table", lambda *words: table(*words).roll(1, dims=0))
    error = refusal_of("ctranslate2", marian[0], "--check", tmp_path / "text")
    assert "has not been written" in error


def test_stock_models_damaged_ones_and_those_without_tokenizer_are_refused(
    marian, tmp_path, refusal_of
):
    stock = FAMILIES["marian"].build_stock()
    assert "ct2-transformers-converter" in refusal_of("ctranslate2", stock)
    bare = tmp_path / "bare"
    shutil.copytree(marian[0], bare)
    for name in ("source.spm", "vocab.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert "tokenizer.save_pretrained" in refusal_of("ctranslate2", bare)
    (bare / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refusal_of("ctranslate2", bare)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (TEXT["cape+relative"], "adds nothing to the content where the first layer has relative"),
        (
            {"type": "relpos", "relative_context": 2, "relative_heads": "separate"},
            "whose heads share one table; allowed: 'shared'",
        ),
        *(
            (row, f"--position-embedding {row['type']} is not allowed")
            for name, row in TEXT.items()
            if config_of("marian", name).encoding.biases
        ),
    ],
)
def test_positions_that_do_not_fit_are_refused(settings, told, saved, refusal_of):
    error = refusal_of("ctranslate2", saved("marian", settings))
    assert told in error
    assert "allowed" in error


def test_configuration_of_another_model_is_refused(marian, tmp_path, refusal_of):
    """Whose table no file has: it would be drawn."""
    shutil.copytree(marian[0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "position_embedding": TEXT["abspos"]}), "utf-8")
    error = refusal_of("ctranslate2", tmp_path / "model")
    assert "lacks weights of its positions, model." in error


def test_other_families_are_refused_with_another_way(refusal_of):
    row = FAMILIES["bert"]
    error = refusal_of("ctranslate2", row.build({"type": "cape"}))
    for told in (row.model.__name__, "CapeMarianMTModel", "export onnx", "--stock"):
        assert told in error
