"""Translation models of Hugging Face as folders for CTranslate2: the same tokens and scores, at any
length, in an interpreter that has the engine alone."""

import hashlib
import json
import re
import shutil

import pytest
import torch
from sacrebleu import corpus_bleu
from transformers import AutoTokenizer

from cape_plugins.cli import main
from tests.support.engines import engine_python, program_of, run_program
from tests.support.hf import FAMILIES, TEXT
from tests.support.served import FAMILIES_OF_TEXT, Corpus, build, pairs, refusal, train

ctranslate2 = pytest.importorskip("ctranslate2")

from cape_plugins.serving.ctranslate2_check import translate  # noqa: E402
from hf_models.serving import ctranslate2 as exporter  # noqa: E402
from hf_models.serving.ctranslate2_loaders import TranslationLoader  # noqa: E402

ROWS, LONGEST = 300, 100  # of a table; tokens of a translation
FIT = [name for name, row in TEXT.items() if not {"type", "relative_context"} < row.keys()]
FIT += ["relpos+first"]
STOCK = {"m2m_100": "sinpos", "bart": "abspos", "mbart": "abspos", "pegasus": "sinpos"}
NORMS_FIRST = ("m2m_100", "mbart", "pegasus")  # these have relative keys beside cape
SHORT, LONG = (1, 2), (3, 7)  # numbers of a list: of training, and longer than those of training


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """Folder of a model of one family and type. A family is trained once, with cape; other types
    have its weights, and draw those that it does not have."""
    models = {}

    def folder(family, name="cape"):
        place = tmp_path_factory.mktemp("model") / f"{family}-{name}"
        tokenizer = corpus.tokenizer(family)
        if family not in models:
            model = build(family, tokenizer, TEXT["cape"])
            steps = 350 if family == "marian" else 150
            models[family] = train(model, tokenizer, corpus.train, steps)
        model = build(family, tokenizer, TEXT[name])
        model.load_state_dict(models[family].state_dict(), strict=False)
        if hasattr(model, "final_logits_bias") and name != "cape":
            torch.manual_seed(3)
            model.final_logits_bias.normal_(std=0.3)
        pad = model.config.pad_token_id
        model.generation_config.update(bad_words_ids=[[pad]], max_length=None)
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        return place

    return folder


@pytest.fixture(scope="module")
def marian(trained, tmp_path_factory):
    """A trained cape_marian and its export."""
    source = trained("marian")
    return source, export(source, tmp_path_factory.mktemp("export") / "out")


def export(source, out, *options):
    rows = ["--max-source-tokens", str(ROWS), "--max-target-tokens", str(ROWS)]
    assert main(["export", "ctranslate2", str(source), str(out), *rows, *options]) in (0, None)
    return out


def loaded(source):
    """The model, and its tokenizer."""
    model = exporter._load(source)
    return exporter.Translation(model, AutoTokenizer.from_pretrained(source))


def sentences(each):
    """English lists, half of them longer than those of training."""
    return [text for numbers in (SHORT, LONG) for text, _ in pairs(7, each, *numbers)]


def both(source, out, texts, **options):
    """Translations by the host and by the engine."""
    translation = loaded(source)
    tokenizer = translation.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in texts]
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    engine = translate(
        ctranslate2.Translator(str(out)), tokens, LONGEST, tokenizer.eos_token, **options
    )
    return exporter.translate_by_host(translation, ids, LONGEST), engine


def assert_same(host, engine, least):
    ended = [pair for pair in zip(host, engine, strict=True) if pair[0].ended or pair[1].ended]
    assert len(ended) >= least
    assert [ours.tokens for ours, _ in ended] == [theirs.tokens for _, theirs in ended]
    assert max(abs(ours.score - theirs.score) for ours, theirs in ended) < 1e-5
    assert len({ours.tokens for ours, _ in ended}) > least / 2  # they say different things


# ---- the same translations -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FIT)
def test_tokens_and_scores_are_those_of_generate(name, trained, tmp_path):
    source = trained("marian", name)
    out = export(source, tmp_path / "out")
    assert_same(*both(source, out, sentences(110)), least=200)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_OF_TEXT[1:])
def test_other_families_translate_the_same(family, trained, tmp_path):
    both_kinds = ["cape+relative"] if family in NORMS_FIRST else []
    for name in ("cape", STOCK[family], *both_kinds):
        source = trained(family, name)
        out = export(source, tmp_path / name)
        assert_same(*both(source, out, sentences(30)), least=50)


def test_settings_of_generation_are_options_in_the_readme(trained, tmp_path):
    source = trained("m2m_100")
    tokenizer = AutoTokenizer.from_pretrained(source)
    german, hyphen = tokenizer.convert_tokens_to_ids(["__de__", "▁f"])
    path = source / "generation_config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"forced_bos_token_id": german, "no_repeat_ngram_size": 2, "length_penalty": 0.6}
    settings |= {"bad_words_ids": [[hyphen], [1, hyphen]], "min_length": 9}
    settings |= {"repetition_penalty": 1.2}
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


def test_banned_tokens_are_never_chosen(trained, tmp_path):
    source = trained("marian", "sinpos")
    tokenizer = AutoTokenizer.from_pretrained(source)
    path = source / "generation_config.json"
    settings = json.loads(path.read_text("utf-8"))
    word = tokenizer.convert_tokens_to_ids("zig")
    for banned in ([], [[word]]):
        path.write_text(json.dumps({**settings, "bad_words_ids": banned or None}), "utf-8")
        out = export(source, tmp_path / f"out{len(banned)}")
        host, engine = both(source, out, sentences(10))
        assert_same(host, engine, least=15)
        assert any("zig" in hypothesis.tokens for hypothesis in engine) == (not banned)


def test_source_and_target_may_have_vocabularies_of_their_own(corpus, tmp_path):
    tokenizer = corpus.tokenizer("marian")
    source = tmp_path / "model"
    tokenizer.save_pretrained(source)
    target = {token: i for i, token in enumerate(sorted(tokenizer.get_vocab()))}
    (source / "target_vocab.json").write_text(json.dumps(target), "utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    (source / "tokenizer_config.json").write_text(
        json.dumps({**settings, "separate_vocabs": True}), "utf-8"
    )
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
    model.save_pretrained(source)
    out = export(source, tmp_path / "out")
    names = json.loads((out / "target_vocabulary.json").read_text("utf-8"))
    assert names[: len(target)] == sorted(target)
    assert len(names) == len(set(names)) == len(target) + 5
    tokens = ["▁f", "ty", "</s>"]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    words = ["zig", "▁", "f"]
    labels = torch.tensor([[target[word] for word in words]])
    start = torch.tensor([[target["<pad>"]]])
    with torch.no_grad():
        logits = model(ids, decoder_input_ids=torch.cat((start, labels), dim=1)).logits
    scores = logits.log_softmax(-1)[0, torch.arange(3), labels[0]]
    translator = ctranslate2.Translator(str(out))
    (result,) = translator.score_batch([tokens], [words])
    torch.testing.assert_close(torch.tensor(result.log_probs[:3]), scores, atol=1e-5, rtol=0)


# ---- length --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cape", "abspos", "relpos"])
def test_scores_of_thousands_of_tokens_are_those_of_the_model(name, trained, tmp_path):
    source = trained("marian", name)
    rows = ("--max-source-tokens", "2001", "--max-target-tokens", "1501")
    out = export(source, tmp_path / "out", *rows)
    model, tokenizer = loaded(source)
    generator = torch.Generator().manual_seed(0)
    eos, start = model.config.eos_token_id, model.config.decoder_start_token_id
    ids = [torch.randint(4, 60, (size,), generator=generator) for size in (1999, 1500)]
    ids = [torch.cat((row, torch.tensor([eos]))) for row in ids]
    with torch.no_grad():
        given = torch.cat((torch.tensor([start]), ids[1][:-1]))
        logits = model(ids[0][None], decoder_input_ids=given[None]).logits[0]
    bias = torch.zeros(logits.shape[1])
    bias[model.config.pad_token_id] = -torch.inf
    expected = (logits + bias).log_softmax(-1)[torch.arange(len(given)), ids[1]]
    texts = [[tokenizer.convert_ids_to_tokens(row.tolist())] for row in ids]
    texts[1] = [texts[1][0][:-1]]  # the engine adds EOS
    translator = ctranslate2.Translator(str(out))
    (result,) = translator.score_batch(*texts, max_input_length=0)
    torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-5, rtol=1e-5)
    (cut,) = translator.score_batch(*texts)  # both sides, without a word
    assert len(cut.log_probs) == 1024
    assert (torch.tensor(cut.log_probs[:1000]) - expected[:1000]).abs().max() > 1e-3


def test_a_table_ends_with_an_error(marian):
    _, out = marian
    translator = ctranslate2.Translator(str(out))
    longest = ROWS - 1  # and the BOS hint
    for length in (longest, longest + 1):
        source = [*["▁f"] * (length - 1), "</s>"]
        options = {"max_input_length": 0, "max_decoding_length": 5}
        if length == longest:
            assert translator.translate_batch([source], **options)
            continue
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.translate_batch([source], **options)
    endless = {"beam_size": 1, "min_decoding_length": ROWS}
    for length in (ROWS, ROWS + 1):
        if length == ROWS:
            (result,) = translator.translate_batch([["▁f"]], max_decoding_length=length, **endless)
            assert len(result.hypotheses[0]) == ROWS
            continue
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.translate_batch([["▁f"]], max_decoding_length=length, **endless)


# ---- the folder ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "package"), [("marian", "sentencepiece"), ("mbart", "tokenizers")]
)
def test_the_program_of_the_readme_runs_with_the_engine_alone(
    family, package, trained, run_cli, tmp_path
):
    source, out, file = trained(family), tmp_path / "out", tmp_path / "text"
    if family == "marian":
        run_cli("python", "-m", "cape_plugins", "export", "ctranslate2", source, out, fresh=True)
    else:
        export(source, out)
    texts = sentences(10)
    file.write_text("\n".join(texts) + "\n", "utf-8")
    python = engine_python(tmp_path / "python", "ctranslate2", package)
    translations = run_program(python, program_of(out), out, file).splitlines()
    tokenizer = AutoTokenizer.from_pretrained(out)
    host, _ = both(source, out, texts)
    for translation, hypothesis in zip(translations, host, strict=True):
        ids = tokenizer.convert_tokens_to_ids(list(hypothesis.tokens))
        assert translation == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(set(translations)) > 10


def test_readme_says_what_the_engine_would_get_wrong(marian):
    readme = (marian[1] / "README.md").read_text("utf-8")
    for text in (f"table of {ROWS} positions", "max_input_length=0", "early_stopping=True",
                 "`</s>` before the source, the BOS hint", "starts the target with `<pad>`",
                 "min_decoding_length=0", "bias of -10000"):  # fmt: skip
        assert text in readme


def test_the_tokenizer_loads_from_the_folder(marian):
    source, out = marian
    text = sentences(1)[0]
    assert type(AutoTokenizer.from_pretrained(out)) is type(AutoTokenizer.from_pretrained(source))
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(source)(text)
    assert {"model.bin", "config.json", "README.md", "source.spm"} < {p.name for p in out.iterdir()}
    assert not list(out.glob("*.safetensors"))


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


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_models_in_half_precision_become_folders_in_float32(precision, marian, tmp_path, capsys):
    """Which the engine has everywhere; the host would translate otherwise in half precision."""
    source = tmp_path / "model"
    shutil.copytree(marian[0], source)
    loaded(source).model.to(getattr(torch, precision)).save_pretrained(source)
    (tmp_path / "text").write_text("\n".join(sentences(20)), "utf-8")
    out = export(source, tmp_path / "out", "--check", str(tmp_path / "text"))
    report = re.search(r"check: (\d+) of (\d+) translations", capsys.readouterr().out)
    assert report[1] == report[2]
    assert int(report[1]) >= 35
    sizes = [(folder / "model.bin").stat().st_size for folder in (out, marian[1])]
    assert sizes[0] > 0.99 * sizes[1]


def test_quantization_is_checked_but_not_refused(marian, tmp_path, capsys):
    source, out = marian
    files = {path: hashlib.sha256(path.read_bytes()).digest() for path in source.iterdir()}
    (tmp_path / "text").write_text("\n".join(sentences(10)), "utf-8")
    check = ("--check", str(tmp_path / "text"))
    small = export(source, tmp_path / "out", "--quantization", "int8", *check)
    assert re.search(r"check: \d+ of 20 translations of sources", capsys.readouterr().out)
    assert "weights int8" in (small / "README.md").read_text("utf-8")
    sizes = [(folder / "model.bin").stat().st_size for folder in (small, out)]
    assert sizes[0] < 0.8 * sizes[1]
    assert files == {p: hashlib.sha256(p.read_bytes()).digest() for p in source.iterdir()}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_check_shows_how_far_it_is_on_terminals(terminal, marian, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    both(*marian, sentences(10))
    # Not "100%": tqdm leaves the last value out where it comes within a tenth of a second.
    assert ("check by the host:" in capsys.readouterr().err) == terminal


# ---- refusals ------------------------------------------------------------------------------------


def test_a_folder_that_computes_something_else_is_not_written(
    marian, tmp_path, capsys, monkeypatch
):
    source, _ = marian
    (tmp_path / "text").write_text("\n".join(sentences(5)), "utf-8")
    table = TranslationLoader.table
    monkeypatch.setattr(
        TranslationLoader, "table", lambda *arguments: table(*arguments).roll(1, dims=0)
    )
    error = refusal(capsys, source, tmp_path / "out", "--check", tmp_path / "text")
    assert "has not been written" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_stock_models_damaged_ones_and_those_without_tokenizer_are_refused(
    marian, tmp_path, capsys
):
    stock = tmp_path / "stock"
    FAMILIES["marian"].build_stock().save_pretrained(stock)
    assert "ct2-transformers-converter" in refusal(capsys, stock, tmp_path / "out")
    bare = tmp_path / "bare"
    shutil.copytree(marian[0], bare)
    for name in ("source.spm", "vocab.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert "tokenizer.save_pretrained" in refusal(capsys, bare, tmp_path / "out")
    (bare / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refusal(capsys, bare, tmp_path / "out")


def test_sentences_longer_than_the_table_are_not_checked(marian, tmp_path, capsys):
    (tmp_path / "text").write_text(" ".join(sentences(5)), "utf-8")
    check = ("--check", tmp_path / "text", "--max-source-tokens", "20")
    error = refusal(capsys, marian[0], tmp_path / "out", *check)
    assert "give --max-source-tokens" in error


def test_int8_is_within_one_bleu(marian, tmp_path):
    source, whole = marian
    small = export(source, tmp_path / "small", "--quantization", "int8")
    tokenizer = AutoTokenizer.from_pretrained(source)
    examples = pairs(8, 200, *SHORT)
    tokens = [[*tokenizer.tokenize(text), "</s>"] for text, _ in examples]
    scores = []
    for out in (whole, small):
        hypotheses = translate(ctranslate2.Translator(str(out)), tokens, LONGEST)
        texts = [tokenizer.convert_tokens_to_string(list(row.tokens)) for row in hypotheses]
        scores.append(corpus_bleu(texts, [[target for _, target in examples]]).score)
    assert scores[0] > 30
    assert abs(scores[0] - scores[1]) < 1
