"""Parts of models as ``cape-plugins export onnx`` traces them, and READMEs of graphs, without an
export: its check compares a graph with its part, and these tests the part with the model; and what
is refused."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_models import CapeMarianModel
from tests.support.engines import program_in
from tests.support.hf import EOS, FAMILIES, PAD
from tests.support.onnx_graphs import assert_close, small
from tests.support.whisper import switched

pytest.importorskip("onnxruntime")
from hf_models.serving import onnx
from hf_models.serving.onnx_graphs import draw
from hf_models.serving.onnx_readme import Described, readme

MODELS = {
    "marian": lambda: small("marian", "cape"),
    "marian, turned": lambda: small("marian", "rope"),
    "marian, biased": lambda: small("marian", "fire"),
    "speech_to_text": lambda: small("speech_to_text", "cape"),
    "whisper": lambda: switched("cape"),
    "whisper of segments": lambda: switched("cape", natural_length=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_encoder_and_decoder_have_the_scores_of_the_model(name):
    model = MODELS[name]().eval()
    if name.startswith("marian"):
        model.final_logits_bias.normal_()
    encoder, decoder = onnx.graphs(model)
    for padding in encoder.paddings:
        values = draw(encoder.inputs, encoder.sample, padding)
        tokens = torch.randint(3, 20, (2, 4))
        with torch.no_grad():
            mask, *cross = encoder.module(*values)
            assert mask.dtype == torch.int64
            past = [keys[:, :, :0] for keys in cross]
            logits, *_ = decoder.module(tokens, mask, *cross, *past)
            inputs = dict(zip(encoder.inputs, values, strict=True))
            expected = model(**inputs, decoder_input_ids=tokens).logits
        assert_close(logits, expected)
        assert mask.shape == (2, cross[0].shape[2])
        assert bool((mask == 0).any()) == (padding is not None)


def test_texts_with_types_of_tokens_have_the_scores_of_the_model():
    model = small("bert", "cape").eval()
    (graph,) = onnx.graphs(model)
    values = draw(graph.inputs, graph.sample, "right")
    inputs = dict(zip(graph.inputs, values, strict=True))
    assert inputs["token_type_ids"].unique().numel() > 1
    with torch.no_grad():
        assert_close(graph.module(*values)[0], model(**inputs).logits)


@pytest.mark.parametrize("wrong", ["with padding", "at one token"])
def test_check_sees_a_graph_that_is_right_at_times_only(wrong, refusal_of, export_of, monkeypatch):
    class Session:
        graph = None

        def __init__(self, path, providers):
            pass

        def get_inputs(self):
            return []

        get_outputs = get_inputs

        def run(self, names, feeds):
            values = {name: torch.from_numpy(value) for name, value in feeds.items()}
            if wrong == "with padding":
                values["attention_mask"] = torch.ones_like(values["attention_mask"])
            with torch.no_grad():
                outputs = [output.numpy() for output in Session.graph.module(*values.values())]
            spoilt = wrong == "at one token" and values["input_ids"].shape[1] == 1
            return [output * np.nan for output in outputs] if spoilt else outputs

    monkeypatch.setattr(onnx, "write", lambda graph, *more: setattr(Session, "graph", graph))
    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    monkeypatch.setattr(onnx, "readme", lambda *arguments: "")
    model = small("bert", "cape")
    error = refusal_of("onnx", model, "--check")
    assert {"with padding": "padding left", "at one token": "'length': 1}"}[wrong] in error
    assert "differs from the logits of the model" in error
    if wrong == "at one token":  # which the sample does not have
        export_of("onnx", model)


def test_half_precision_becomes_float32(tmp_path):
    """ONNX Runtime has not all operators of bfloat16."""
    small("bert", "cape").bfloat16().save_pretrained(tmp_path)
    assert {weight.dtype for weight in onnx.load(tmp_path).parameters()} == {torch.float32}


def test_program_of_the_readme_follows_the_settings_of_generation(monkeypatch, capsys):
    """With an engine that wants the tokens 7, 8, 9 and the end, in this order."""
    model = small("marian", "cape")
    settings = {"begin_suppress_tokens": [8], "bad_words_ids": [[7], [9, 9]]}
    model.generation_config.update(forced_bos_token_id=5, **settings)
    inputs = [("input_ids", "", []), ("past_0_key", "", ["batch", 4, "past", 8])]
    files = [Described("encoder.onnx", [("input_ids", "", [])], []), Described("d", inputs, [])]
    calls = []

    class Session:
        def __init__(self, file):
            self.inputs = inputs if file == "d" else []

        def get_inputs(self):
            return [SimpleNamespace(name=name, shape=axes) for name, _, axes in self.inputs]

        def get_outputs(self):
            return []

        def run(self, names, feeds):
            calls.append(feeds["input_ids"].tolist())
            logits = np.zeros((1, len(calls[-1][0]), 20), np.float32)
            logits[..., 7], logits[..., 8], logits[..., 9] = 3, 2, 1
            logits[..., EOS] = 5 * (len(calls) > 3)
            return logits, np.zeros((1, 4, len(calls), 8), np.float32)

    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Session))
    monkeypatch.setattr(sys, "argv", ["program"])
    exec(program_in(readme(model, files, 20)), {})
    assert calls[1:] == [[[PAD, 5]], [[9]], [[8]]]
    assert capsys.readouterr().out.split() == ["9", "8", str(EOS)]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (FAMILIES["vit"].build_stock, "holds a ViTForImageClassification, which is no model"),
        (
            lambda: CapeMarianModel(small("marian", "cape").config),
            "export onnx has no graph for CapeMarianModel; allowed: ",
        ),
        (
            lambda: small("dinov2_with_registers", "abspos"),
            "the learned table of CapeDinov2WithRegistersForImageClassification is smoothed",
        ),
        (
            lambda: small("beit", "cape"),
            "use_relative_position_bias=True is not allowed for export onnx; allowed: False",
        ),
        (
            lambda: small("bert", {"type": "randpos", "random_evaluation": True}),
            "draws positions in evaluation, too, and a graph draws none; allowed: models",
        ),
    ],
)
def test_models_without_a_graph_are_refused(make, told, refusal_of):
    assert told in refusal_of("onnx", make())


@pytest.mark.parametrize("opset", [17, 24])  # torch would write another
def test_other_opsets_are_refused(opset, refusal_of):
    error = refusal_of("onnx", small("bert", "cape"), "--opset", opset)
    assert "is not allowed; allowed: 18 to 23" in error
