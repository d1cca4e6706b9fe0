"""``cape-plugins export stock`` of Hugging Face models: the stock class, loaded from the folder,
gives the same, and the programs of the READMEs do without this package."""

import io
import json
import re
import sys

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import MarianMTModel

import hf_models
from hf_models import convert
from hf_models.calls.switching import build_stock
from tests.support.engines import export, program_of
from tests.support.hf import ALPHA, FAMILIES, IMAGE, TEXT, answer, config_of
from tests.support.stock import run_without_package
from tests.support.translation_models import TinyModels
from tests.support.whisper import SEGMENT, features, switched

# every family, and all types of one stack of tokens, one of patches and one beside words
CASES = [
    *((family, "cape") for family in ("bart", "mbart", "pegasus", "bert")),
    *(("marian", name) for name in TEXT if not config_of("marian", name).in_attention),
    *((family, "cape") for family in ("deit", "dinov2", "dinov2_with_registers", "beit")),
    ("siglip_vision_model", "cape"),
    *(("vit", name) for name in IMAGE if not config_of("vit", name).in_attention),
    *((family, "cape") for family in ("llama", "qwen2", "modernbert")),
    ("m2m_100", "shape"),
    ("speech_to_text", "shape"),
]
PROGRAMS = ("vit", "bert", "llama", "bart")
SETTINGS = {**TEXT, **IMAGE}
# of images convert --stock writes what is added, too
IN_ATTENTION = [
    (family, name)
    for family, names in (("marian", TEXT), ("vit", IMAGE))
    for name in names
    if config_of(family, name).encoding.in_attention
]


def settings_of(family, name):
    if name == "cape" and "pixel_values" not in FAMILIES[family].batch():
        alpha = {"source_scale": ALPHA} if family in ("marian", "bart", "mbart", "pegasus") else {}
        return {"type": "cape", **alpha}
    return SETTINGS[name]


def inputs_of(model):
    """Inputs of the model, and of its stock class, to which the caller gives the BOS hint."""
    torch.manual_seed(5)
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.rand(2, 3, 32, 32)}
    elif model.main_input_name == "input_features":
        inputs = {"input_features": torch.randn(2, 24, 8)}
    else:
        inputs = {"input_ids": torch.randint(4, 30, (3, 9))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(4, 30, (len(next(iter(inputs.values()))), 7))
    stock = dict(inputs)
    if model.config.position_embedding.get("source_bos"):
        bos = torch.full((3, 1), model.get_encoder().bos_token)
        stock["input_ids"] = torch.cat((bos, inputs["input_ids"]), dim=1)
    return inputs, stock


def stock_in(folder):
    """The model in a folder, which is one of transformers."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    stock = getattr(transformers, name).from_pretrained(folder, dtype="auto").eval()
    assert type(stock.config).__module__.startswith("transformers.")
    return stock


@torch.no_grad()
def assert_same(out, for_stock, model, inputs):
    """The model in a folder computes what the model of this package does."""
    actual, expected = answer(stock_in(out)(**for_stock)), answer(model(**inputs))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda name: name)
def test_stock_class_computes_the_same(family, name, tmp_path):
    model = FAMILIES[family].build(settings_of(family, name))
    model.save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    out = export("stock", tmp_path / "model", tmp_path / "out")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    inputs, for_stock = inputs_of(model)
    assert_same(out, for_stock, model, inputs)


@pytest.mark.parametrize("name", ["cape", "abspos"])
def test_images_of_another_size(name, tmp_path):
    """Their image processor makes them."""
    model, folder = FAMILIES["vit"].build(SETTINGS[name]), tmp_path / "model"
    model.save_pretrained(folder)
    square = {"height": 32, "width": 32}
    settings = {"image_processor_type": "ViTImageProcessor", "size": square, "crop_size": square}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    out = export("stock", folder, tmp_path / "out", "--image-size", 24, 40)
    assert json.loads((out / "config.json").read_text())["image_size"] == [24, 40]
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
    size = {"height": 24, "width": 40}
    saved = json.loads((out / "preprocessor_config.json").read_text())
    assert saved == {**settings, "size": size, "crop_size": size}
    images = {"pixel_values": torch.rand(2, 3, 24, 40)}
    assert_same(out, images, model, images)


def test_recordings_of_one_length(tmp_path, export_of):
    """With the stock feature extractor."""
    model, folder = switched("cape", "cape").eval(), tmp_path / "model"
    model.save_pretrained(folder)
    settings = {"feature_extractor_type": "CapeWhisperFeatureExtractor", "feature_size": 8}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    out = export_of("stock", folder, "--max-tokens", 30)
    assert json.loads((out / "config.json").read_text())["max_target_positions"] == 30
    extractor = transformers.AutoFeatureExtractor.from_pretrained(out)
    assert type(extractor) is transformers.WhisperFeatureExtractor
    words = torch.randint(4, 50, (2, 9))
    inputs = {"input_features": features(2, SEGMENT), "decoder_input_ids": words}
    assert_same(out, inputs, model, inputs)


def test_tokenizer_cuts_to_the_exported_table(tmp_path):
    """The tokenizer of the source has no limit; the table of the stock model has one again."""
    source = tmp_path / "source"
    FAMILIES["bert"].build({"type": "cape"}).save_pretrained(source)
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    rows = FAMILIES["bert"].build_stock().config.max_position_embeddings
    transformers.BertTokenizer(vocab=words, model_max_length=rows).save_pretrained(source)
    assert transformers.AutoTokenizer.from_pretrained(source).model_max_length > 10**9
    for limit, options in ((rows, ()), (30, ("--max-tokens", 30))):
        folder = tmp_path / str(limit)
        export("stock", source, folder, *options)
        assert transformers.AutoTokenizer.from_pretrained(folder).model_max_length == limit


@pytest.mark.slow
def test_programs_of_readmes_run_without_this_package(tmp_path):
    """One translates with its tokenizer as generate does."""
    models = TinyModels(tmp_path / "marian")
    source, lines = models.hf("cape"), models.sources()
    model = hf_models.CapeMarianMTModel.from_pretrained(source).eval()
    model.generation_config.update(num_beams=5, max_length=30, early_stopping=True)
    model.generation_config.save_pretrained(source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(lines, padding=True, return_tensors="pt")
    expected = tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    programs = [
        (export("stock", source, tmp_path / "translator", "--max-tokens", 200), "\n".join(lines))
    ]
    others = {family: FAMILIES[family].build(settings_of(family, "cape")) for family in PROGRAMS}
    for family, model in {**others, "whisper": switched("cape", "cape")}.items():
        model.save_pretrained(tmp_path / family)
        out = export("stock", tmp_path / family, tmp_path / f"{family}-out")
        programs.append((out, "5 6 7 8\n9 10 11 12"))
    jobs = [(out, program_of(out), text) for out, text in programs]
    translations, *printed = run_without_package(jobs, tmp_path)
    assert translations.splitlines() == expected
    assert len(set(expected)) > 12
    assert all(text.startswith(("tensor(", "[[")) for text in printed), printed


def test_program_goes_on_with_prompts_of_several_lengths(tmp_path, monkeypatch, capsys):
    """As the model goes on with each of them alone."""
    model = FAMILIES["llama"].build({"type": "cape"}).eval()
    model.generation_config.update(max_new_tokens=6, max_length=None, do_sample=False)
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(WordLevel({f"{n}": n for n in range(model.config.vocab_size)}, "3"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = ["5 6 7 8 9 10 11 12", "13", "14 15 16"]
    with torch.no_grad():
        alone = [model.generate(**tokenizer(line, return_tensors="pt"))[0] for line in lines]
    out = export("stock", tmp_path / "model", tmp_path / "out")
    capsys.readouterr()
    monkeypatch.chdir(out)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    exec(program_of(out), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == tokenizer.batch_decode(alone, skip_special_tokens=True)
    assert len(set(printed)) == 3


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("marian", "bfloat16"), ("dinov2", "float16"), ("siglip_vision_model", "bfloat16")],
)
def test_half_precision_stays(family, dtype, export_of, capsys):
    """The stock model computes the same in it, bit for bit: both round the same positions."""
    dtype = getattr(torch, dtype)
    model = FAMILIES[family].build(settings_of(family, "cape")).to(dtype).eval()
    stock = stock_in(export_of("stock", model))
    arguments, for_stock = (
        {key: v.to(dtype) if v.is_floating_point() else v for key, v in inputs.items()}
        for inputs in inputs_of(model)
    )
    assert {weight.dtype for weight in stock.parameters()} == {dtype}
    with torch.no_grad():
        expected, got = answer(model(**arguments)), answer(stock(**for_stock))
    assert torch.equal(got, expected)
    assert expected.abs().max() > 0.1
    assert "of model, both in float32\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "head", "name"),
    [
        ("bart", "BartForSequenceClassification", "shape"),
        *(("beit", "BeitBackbone", "cape"), ("vit", "ViTModel", "cape")),
    ],
)
def test_other_heads_are_exported(family, head, name, tmp_path, capsys, monkeypatch):
    row = FAMILIES[family]
    config = row.config(**row.sizes, position_embedding=settings_of(family, name))
    getattr(hf_models, f"Cape{head}")(config).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    out = export("stock", ".", tmp_path / "out")
    report = capsys.readouterr().out
    assert f"{head} of transformers, tables: " in report
    assert re.search(r"within \S+ of model\n", report)
    assert json.loads((out / "config.json").read_text())["architectures"] == [head]


@pytest.mark.parametrize(
    ("family", "settings", "options", "told"),
    [
        ("bert", None, (), "a stock BertForMaskedLM already"),
        ("marian", TEXT["cape+relative"], (), "relative_context=3 is not allowed for a MarianMT"),
        ("m2m_100", TEXT["cape"], (), "ignores tables in its file"),
        ("speech_ctc", {"type": "cape"}, (), "no stock class"),
        ("bert", {"type": "cape", "mean_normalize": True}, (), "texts of other lengths"),
        ("bert", {"type": "randpos", "random_evaluation": True}, (), "random positions"),
        ("vit", {"type": "cape"}, ("--max-tokens", 9), "no table of tokens"),
        ("llama", {"type": "rope"}, ("--max-tokens", 9), "computes its positions"),
        ("bert", {"type": "cape"}, ("--image-size", 8, 8), "reads no images"),
        ("vit", {"type": "cape"}, ("--image-size", 4, 8), "smaller than a patch"),
        ("beit", {"type": "cape"}, ("--image-size", 48, 32), "height = width"),
        ("bert", {"type": "cape"}, ("--to", "fairseq"), "--to fairseq is not allowed"),
        ("bert", {"type": "cape"}, ("--data", "x"), "--data x is not allowed"),
    ],
)
def test_refusals(family, settings, options, told, refusal_of):
    row = FAMILIES[family]
    model = row.build(settings) if settings else row.build_stock()
    error = refusal_of("stock", model, *options)
    assert told in error.replace("--position-relative-context 3", "relative_context=3")


@pytest.mark.parametrize(("family", "name"), IN_ATTENTION)
def test_positions_in_attention_are_refused(family, name, tmp_path, refusal_of, capsys):
    """As convert refuses them; with the ways that work."""
    error = refusal_of("stock", FAMILIES[family].build(SETTINGS[name]))
    assert f"position_embedding {SETTINGS[name]['type']!r} is not allowed for a" in error
    assert convert.main([str(tmp_path / "model"), str(tmp_path / "out"), "--stock"]) == 2
    assert not (tmp_path / "out").exists()
    for told in (error, capsys.readouterr().err):
        assert "export onnx" in told
        assert "--self-contained" in told


def test_a_head_that_cannot_be_given_the_hint_is_refused(refusal_of):
    row = FAMILIES["bart"]
    config = row.config(**row.sizes, position_embedding=settings_of("bart", "cape"))
    model = hf_models.CapeBartForSequenceClassification(config)
    assert "heads that a caller can give the BOS hint" in refusal_of("stock", model)


def test_weights_that_were_untied_by_hand_are_refused(refusal_of):
    """transformers saves and loads them, but builds a stock model with one for both."""
    model = FAMILIES["marian"].build({"type": "sinpos"})
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    told = refusal_of("stock", model)
    assert re.search(r"differs from the weight.*config\.tie_word_embeddings = False", told)


def test_weights_that_the_configuration_unties_are_kept():
    model = FAMILIES["marian"].build({"type": "sinpos"}, tie_word_embeddings=False)
    inputs, _ = inputs_of(model)
    stock = build_stock(model, MarianMTModel)
    assert not torch.equal(model.lm_head.weight, model.model.shared.weight)
    torch.testing.assert_close(stock(**inputs).logits, model(**inputs).logits)
