"""The thesis's equations of attention, residual connections and decisions, against torch's own."""

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("soundfile")
from cape_plugins import PositionConfig
from recipes.phones.data import BANDS, Example
from recipes.phones.train import CONDITIONS, PhoneClassifier, Sizes, predict

SIZES = Sizes(dim=8, layers=1, heads=4, ffn=16, dropout=0.0)
WIDTH = SIZES.dim + BANDS


def make_model():
    torch.manual_seed(1)
    return PhoneClassifier(5, PositionConfig("sinpos", "audio"), SIZES, 30).eval()


def torch_layer(layer):
    """torch's layer with the same parameters; its layer norms follow the residual connections."""
    shape = {"nhead": SIZES.heads, "dim_feedforward": SIZES.ffn, "dropout": 0.0}
    reference = torch.nn.TransformerEncoderLayer(WIDTH, **shape, batch_first=True).eval()
    parameters = {name: value.detach().clone() for name, value in layer.named_parameters()}
    names = {
        "self_attn.in_proj_": "query_key_value.",
        "self_attn.out_proj.": "mix.",
        "linear1.": "expand.",
        "linear2.": "contract.",
        "norm1.": "attention_norm.",
        "norm2.": "ffn_norm.",
    }
    state = {
        f"{ours}{part}": parameters[f"{theirs}{part}"]
        for ours, theirs in names.items()
        for part in ("weight", "bias")
    }
    reference.load_state_dict(state)
    return reference


@pytest.mark.parametrize("need_weights", [False, True])
def test_layer_follows_equations_2_1_to_2_5(need_weights):
    layer = make_model().layers[0]
    for norm in (layer.attention_norm, layer.ffn_norm):
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 7, WIDTH)
    reference = torch_layer(layer)
    output, weights = layer(x, None, need_weights)
    torch.testing.assert_close(output, reference(x), atol=1e-5, rtol=1e-4)
    if need_weights:
        _, expected = reference.self_attn(x, x, x, average_attn_weights=False)
        torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-4)


def test_the_class_is_the_most_likely_one_as_in_equation_4_1():
    model = make_model()
    utterance = Example("one", torch.randn(20, BANDS), torch.zeros(20, dtype=torch.long))
    (classes,) = predict(model, [utterance], CONDITIONS["inc"])
    probabilities = model(utterance.features[None]).logits[0].softmax(-1)
    assert classes.tolist() == [row.tolist().index(row.max()) for row in probabilities]
    assert len({*classes.tolist()}) > 1
