"""Whisper as a file for whisper.cpp: header, filters, words and tensors as a reader finds them; the
texts of the engine at natural length, where pywhispercpp is installed."""

import struct

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

import hf_models
from hf_models.convert import convert
from hf_models.serving.ggml_file import special_tokens
from tests.support.engines import program_of
from tests.support.whisper import save_with_processor
from tests.support.whisper_full import TOKENS, WORDS, save_full

FILE = "ggml-model.bin"
ROWS = 300
CAPE = {"type": "cape", "mean_normalize": False}
# places of the special tokens in OpenAI's tokenizers: of English alone, of 99 and of 100 languages
PLACES = {
    51864: (50256, 50257, None, 50357, 50358, 50362),
    51865: (50257, 50258, 50259, 50358, 50359, 50363),
    51866: (50257, 50258, 50259, 50359, 50360, 50364),
}
NAMES = ("endoftext", "startoftranscript", "en", "translate", "transcribe", "notimestamps")
LAYER = {"mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm"}
LAYER |= {"attn.query": "self_attn.q_proj", "attn.key": "self_attn.k_proj"}
LAYER |= {"attn.value": "self_attn.v_proj", "attn.out": "self_attn.out_proj"}
LAYER["attn_ln"] = "self_attn_layer_norm"
CROSS = {
    f"cross_{name}": other.replace("self_attn", "encoder_attn")
    for name, other in LAYER.items()
    if name.startswith("attn")
}


def read(path):
    """Header, filters, words and tensors of a file, with the type of each tensor."""
    data, start = path.read_bytes(), 0

    def take(count):
        nonlocal start
        start += count
        assert start <= len(data)
        return data[start - count : start]

    def numbers(count):
        return struct.unpack(f"<{count}i", take(4 * count))

    def values(shape, kind):
        kind = np.dtype(kind)
        return np.frombuffer(take(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)

    assert numbers(1) == (0x67676D6C,)
    header, sizes = numbers(11), numbers(2)
    filters = values(sizes, "<f4")
    words = [take(*numbers(1)) for _ in range(*numbers(1))]
    tensors = {}
    while start < len(data):
        dims, length, kind = numbers(3)
        shape = numbers(dims)[::-1]
        name = take(length).decode()
        tensors[name] = values(shape, ("<f4", "<f2")[kind])
    return header, filters, words, tensors


def expected_tensors(model):
    """Weights of a model by the names in the file, without tables of positions."""
    weights = model.model.state_dict()
    pairs = {f"encoder.{name}": f"encoder.{name}" for name in ("conv1", "conv2")}
    pairs |= {"encoder.ln_post": "encoder.layer_norm", "decoder.ln": "decoder.layer_norm"}
    pairs["decoder.token_embedding"] = "decoder.embed_tokens"
    for side, parts in (("encoder", LAYER), ("decoder", {**LAYER, **CROSS})):
        for layer in range(model.config.num_hidden_layers):
            for ggml_name, other in parts.items():
                pairs[f"{side}.blocks.{layer}.{ggml_name}"] = f"{side}.layers.{layer}.{other}"
    return {
        f"{ggml_name}.{kind}": weights[f"{other}.{kind}"]
        for ggml_name, other in pairs.items()
        for kind in ("weight", "bias")
        if f"{other}.{kind}" in weights
    }


def added(model, rows):
    """What the encoder adds to the convolutions of a recording, as its first layer shows."""
    encoder, seen = model.get_encoder(), []
    hook = encoder.layers[0].register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    silence = torch.zeros(1, 80, 2 * rows)
    with torch.no_grad():
        encoder(silence)
        hidden = torch.nn.functional.gelu(encoder.conv1(silence))
        hidden = torch.nn.functional.gelu(encoder.conv2(hidden))
    hook.remove()
    return (seen[0] - hidden.transpose(1, 2))[0]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper") / "stock"
    save_full(folder)
    return folder


@pytest.fixture
def make(stock, tmp_path):
    """Writes a model with these positions, changed by a function."""

    def save(settings=CAPE, change=None, **fields):
        model = WhisperForConditionalGeneration.from_pretrained(stock)
        model = hf_models.switch(model, settings, **fields)
        AutoProcessor.from_pretrained(stock).save_pretrained(tmp_path / "model")
        if change is not None:
            change(model)
        model.eval().save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"

    return save


@pytest.mark.parametrize("settings", [CAPE, {"type": "nopos"}, {"type": "abspos"}])
def test_file_has_every_weight_and_the_positions_in_a_table(settings, make, export_of):
    model, source = make(settings, decoder_position_embedding={"type": "sinpos"})
    out = export_of("ggml", source, "--max-source-tokens", ROWS)
    header, filters, words, tensors = read(out / FILE)
    assert header == (TOKENS, ROWS, 64, 2, 2, 448, 64, 2, 2, 80, 1)
    processor = AutoProcessor.from_pretrained(source)
    assert np.array_equal(filters, processor.feature_extractor.mel_filters.T.astype("f4"))
    assert len(words) == WORDS
    assert words[66:69] == [b"c", b"d", b"e"]
    assert b" " in words
    assert tensors["encoder.conv1.bias"].shape == (64, 1)  # a column
    for name, weight in expected_tensors(model).items():
        stored = torch.from_numpy(tensors.pop(name).copy())
        assert stored.dtype == (
            torch.float32 if name.endswith("bias") or weight.dim() < 2 else torch.float16
        )
        assert torch.equal(stored.squeeze(), weight.to(stored.dtype).squeeze()), name
    assert tensors.keys() == {f"{side}.positional_embedding" for side in ("encoder", "decoder")}
    table = torch.from_numpy(tensors["encoder.positional_embedding"].copy())
    assert torch.allclose(table, added(model, ROWS), atol=1e-6)
    assert table.count_nonzero().bool() == (settings["type"] != "nopos")
    assert tensors["decoder.positional_embedding"].shape == (448, 64)


@pytest.mark.parametrize("tokens", PLACES)
def test_special_tokens_equal_openai(tokens):
    places = {f"<|{name}|>": token for name, token in zip(NAMES, PLACES[tokens], strict=True)}
    assert special_tokens(tokens) == {name: n for name, n in places.items() if n is not None}
    with pytest.raises(ValueError, match="the model has 51863 tokens.*allowed: 51864 tokens or"):
        special_tokens(51863)


def untie(model):
    model.config.tie_word_embeddings = False
    model.proj_out.weight = torch.nn.Parameter(model.proj_out.weight + 1)


def grow(model):
    model.get_decoder().layers[0].fc1.weight.data.mul_(1e9)


REFUSED = {
    "angles": ({"type": "rope"}, {}, None, "no place for positions in attention"),
    "keys": ({**CAPE, "relative_context": 3}, {}, None, "no place for positions in attention"),
    "drawn": ({"type": "randpos", "random_evaluation": True}, {}, None, "the same positions in"),
    "hop": (CAPE, {"hop_seconds": 0.005}, None, "hop_seconds=0.005 is not allowed"),
    "untied": (CAPE, {}, untie, "tie_word_embeddings=False is not allowed"),
    "large": (CAPE, {}, grow, "has values beyond 65504"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_format_has_no_place_for_is_refused(name, make, refusal_of):
    settings, fields, change, told = REFUSED[name]
    _, source = make(settings, change, **fields)
    assert told in refusal_of("ggml", source)


def test_more_rows_than_whisper_cpp_reads_at_once_are_refused(make, refusal_of):
    error = refusal_of("ggml", make()[1], "--max-source-tokens", 1501)
    assert "--max-source-tokens 1501 is not allowed for ggml; allowed: up to 1500" in error


def test_other_sizes_and_tokens_are_refused(make, tmp_path, refusal_of):
    save_with_processor(tmp_path / "stock")
    convert(str(tmp_path / "stock"), tmp_path / "narrow", CAPE)
    error = refusal_of("ggml", tmp_path / "narrow")
    assert "encoder_ffn_dim=64 is not allowed for ggml" in error
    _, source = make(change=lambda model: model.resize_token_embeddings(TOKENS + 1))
    error = refusal_of("ggml", source)
    assert "token <|translate|> has number 50358, but with 51866 tokens" in error


def test_features_that_the_engine_does_not_compute_are_refused(make, refusal_of):
    _, source = make()
    extractor = AutoProcessor.from_pretrained(source).feature_extractor
    extractor.hop_length = 80
    (source / "processor_config.json").unlink(missing_ok=True)
    extractor.save_pretrained(source)
    error = refusal_of("ggml", source)
    assert "hop_length=80 of the feature extractor is not allowed" in error


def test_an_encoder_alone_is_refused(make, refusal_of):
    error = refusal_of("ggml", hf_models.CapeWhisperEncoder.from_pretrained(make()[1]))
    assert "holds a CapeWhisperEncoder; allowed for export ggml" in error


@pytest.mark.parametrize("settings", [CAPE, {"type": "cape"}, {"type": "sinpos"}])
def test_readme_tells_which_recordings_fit(settings, make, export_of):
    """With the table that Whisper has."""
    out = export_of("ggml", make(settings)[1])
    assert read(out / FILE)[-1]["encoder.positional_embedding"].shape == (1500, 64)
    readme = (out / "README.md").read_text("utf-8")
    assert ("audio_ctx=min(1500, -(-len(samples) // 320))" in readme) == (settings is CAPE)
    assert ("from the middle of a recording" in readme) == (settings == {"type": "cape"})
    compile(program_of(out), "README.md", "exec")
