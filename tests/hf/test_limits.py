"""The length to which a tokenizer cuts follows the position embedding of the model beside it."""

import json
import re
import warnings

import pytest
import transformers
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

import hf_models
from hf_models.convert import convert
from tests.support.hf import STACK

ROWS, CHOSEN = 24, 11  # positions of the stock models; a limit that a user chose
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "four", "five"]
SIZES = {**STACK, "num_hidden_layers": 1, "vocab_size": 10, "pad_token_id": 0}
BERT = transformers.BertConfig(**SIZES, max_position_embeddings=ROWS)
# one row for the padding token
ROBERTA = transformers.RobertaConfig(**SIZES, max_position_embeddings=ROWS + 1)
MODELS = {
    "family with a file": (transformers.BertForTokenClassification, BERT),
    "generated family": (transformers.RobertaForTokenClassification, ROBERTA),
}
TEXT = " ".join(["one two three four five"] * 8)
each = pytest.mark.parametrize("name", MODELS)


def build(name, position_embedding):
    model_class, config = MODELS[name]
    model = model_class(config).eval()
    return hf_models.switch(model, position_embedding) if position_embedding else model


def tokenizer(limit=ROWS):
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    return transformers.BertTokenizer(vocab=vocabulary, model_max_length=limit)


def limit_in(folder):
    return json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]


@each
@pytest.mark.parametrize("tokenizer_first", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, ROWS),
        ({"type": "abspos"}, ROWS),
        ({"type": "cape"}, VERY_LARGE_INTEGER),
        ({"type": "nopos"}, VERY_LARGE_INTEGER),
        ({"type": "randpos", "max_position": 300}, 300),
    ],
)
def test_limit_follows_the_type(name, tokenizer_first, settings, expected, tmp_path):
    """In either order of saving; the tokenizer in use keeps its limit."""
    each_tokenizer = tokenizer()
    parts = [build(name, settings), each_tokenizer]
    for part in reversed(parts) if tokenizer_first else parts:
        part.save_pretrained(tmp_path)
    assert limit_in(tmp_path) == expected
    assert each_tokenizer.model_max_length == ROWS
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.model_max_length == expected


@each
def test_limits_that_a_user_chose_stay(name, tmp_path):
    build(name, {"type": "cape"}).save_pretrained(tmp_path)
    tokenizer(CHOSEN).save_pretrained(tmp_path)
    assert limit_in(tmp_path) == CHOSEN


@each
def test_pipelines_do_not_cut(name, tmp_path):
    """The pipeline of labels for words, which cuts a text to the limit of the tokenizer."""
    words = {}
    for type_name in ("abspos", "cape"):
        folder = tmp_path / type_name
        build(name, {"type": type_name}).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        labels = transformers.pipeline("token-classification", str(folder), ignore_labels=[])
        words[type_name] = len(labels(TEXT))
    special_tokens = 2
    assert words == {"abspos": ROWS - special_tokens, "cape": len(TEXT.split())}


def labels_of(model, each_tokenizer):
    """The pipeline of labels for words, and the warnings of making it."""
    options = {"tokenizer": each_tokenizer, "ignore_labels": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        labels = transformers.pipeline("token-classification", model, **options)
    return labels, [str(warning.message) for warning in caught]


@each
@pytest.mark.parametrize(
    ("settings", "allowed"),
    [({"type": "cape"}, "int(1e30)"), ({"type": "randpos", "max_position": 300}, "300")],
)
def test_pipelines_that_would_cut_say_what_to_do(name, settings, allowed):
    """With a switched model and the stock tokenizer in memory, which keeps its limit."""
    model, each_tokenizer = build(name, settings), tokenizer()
    labels, (message,) = labels_of(model, each_tokenizer)
    assert f"model_max_length={ROWS}, the limit of the stock model" in message
    assert len(labels(TEXT)) < len(TEXT.split())
    advised = re.search(r"set tokenizer\.model_max_length = (\S+) ", message)[1]
    assert advised == allowed
    each_tokenizer.model_max_length = 300 if advised == "300" else int(1e30)
    labels, messages = labels_of(model, each_tokenizer)
    assert (messages, len(labels(TEXT))) == ([], len(TEXT.split()))


@each
def test_pipelines_with_limits_that_hold_say_nothing(name):
    for settings, limit in ((None, ROWS), ({"type": "abspos"}, ROWS), ({"type": "cape"}, CHOSEN)):
        _, messages = labels_of(build(name, settings), tokenizer(limit))
        assert messages == []


@each
def test_conversion_brings_the_stock_limit_back(name, tmp_path):
    """Through a conversion to this package, a retrained tokenizer, and back."""
    stock, cape, back = (tmp_path / part for part in ("stock", "cape", "back"))
    build(name, None).save_pretrained(stock)
    tokenizer().save_pretrained(stock)
    convert(str(stock), str(cape), {"type": "abspos"})
    assert limit_in(cape) == ROWS
    convert(str(stock), str(tmp_path / "long"), {"type": "cape"})
    assert limit_in(tmp_path / "long") == VERY_LARGE_INTEGER
    changed = transformers.AutoTokenizer.from_pretrained(tmp_path / "long")
    build(name, {"type": "abspos"}).save_pretrained(back)
    changed.save_pretrained(back)
    assert limit_in(back) == ROWS
    build(name, None).save_pretrained(tmp_path / "as stock")
    changed.save_pretrained(tmp_path / "as stock")
    assert limit_in(tmp_path / "as stock") == ROWS
    saved = (tmp_path / "as stock" / "tokenizer_config.json").read_text()
    assert "stock_model_max_length" not in saved


def test_trainer_saves_the_limit(tmp_path):
    """A folder of another library stays as it is."""
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    tokenizer().save_pretrained(tmp_path)
    assert limit_in(tmp_path) == ROWS
    model = build("generated family", {"type": "cape"})
    arguments = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments, processing_class=tokenizer())
    trainer.save_model(str(tmp_path))
    assert limit_in(tmp_path) == VERY_LARGE_INTEGER


def test_limit_of_trained_lengths_stays(tmp_path):
    """Llama's limit is the length of its training, not the size of a table."""
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=ROWS)
    model = transformers.LlamaForCausalLM(config)
    hf_models.switch(model, {"type": "cape"}).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert limit_in(tmp_path) == ROWS
