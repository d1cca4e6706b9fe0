"""rope, alibi and fire in fairseq: properties that the tests of all types do not cover."""

import pytest
import torch

from cape_plugins import ENCODINGS, TYPES, token_position_at
from cape_plugins.mathematics.biases import alibi_slopes
from fairseq_user_dir import attention as fairseq_attention
from fairseq_user_dir.attention import CoordinateLayer, CoordinateSelfAttention
from tests.support.fairseq_models import PAD, build

IN_ATTENTION = [name for name, row in TYPES.items() if ENCODINGS[row.encoding].in_attention]
WITHOUT_LEARNED_BIAS = [n for n in IN_ATTENTION if not ENCODINGS[TYPES[n].encoding].learned]
AUGMENTED = {"position_max_local_shift": 0.5, "position_max_global_scale": 1.5}
STILL = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
SOURCE = torch.tensor([[PAD, PAD, 5, 6, 2], [7, 8, 9, 10, 2]])
TARGET = torch.tensor([[2, 5, 6, 7], [2, 9, 8, PAD]])
BATCH = (SOURCE, SOURCE.ne(PAD).sum(1), TARGET)


def gradients(model):
    torch.manual_seed(5)
    scores, _ = model(*BATCH)
    scores[TARGET != PAD].square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_activation_checkpointing_gives_the_same_gradients(name):
    """A layer that is called again in the backward pass has its positions, moved as before."""
    settings = {"position_embedding": name, **AUGMENTED, **STILL}
    plain, checkpointed = (
        gradients(build(checkpoint_activations=on, **settings)) for on in (False, True)
    )
    assert plain.keys() == checkpointed.keys()
    assert any("layer_bias" in part for part in plain) == (name == "fire")
    for part, gradient in plain.items():
        torch.testing.assert_close(checkpointed[part], gradient, msg=part)


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_weights_of_attention_equal_the_fused_kernel(name):
    model = build(position_embedding=name).eval()
    layer = model.encoder.layers[0].self_attn
    assert isinstance(layer, CoordinateSelfAttention)
    attention = model.encoder.stack_attention
    x, padding = torch.randn(5, 2, 32), SOURCE == PAD
    with layer.using(attention.of_tokens(SOURCE, None)):
        fused, none = layer(x, x, x, padding, need_weights=False)
        explicit, weights = layer(x, x, x, padding, need_head_weights=True)
    assert none is None
    torch.testing.assert_close(explicit, fused, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not weights[:, 0, :, :2].any()


@pytest.mark.parametrize("name", WITHOUT_LEARNED_BIAS)
def test_the_layers_of_a_stack_share_one_mask(name, monkeypatch):
    """A mask for each layer would take as many times the memory."""
    masks, combine = [], fairseq_attention._combined_mask
    monkeypatch.setattr(
        fairseq_attention, "_combined_mask", lambda *parts: masks.append(parts) or combine(*parts)
    )
    model = build(position_embedding=name).eval()
    assert len(model.encoder.layers) == len(model.decoder.layers) == 2
    model(*BATCH)
    assert len(masks) == 2  # of the encoder and of the decoder
    model.half()(*BATCH)
    assert len(masks) == 4


def slow_alibi(layer, x):
    """``[T, B, C]``: ALiBi by its formula, one query after another, head by head."""
    heads, width = layer.num_heads, layer.head_dim
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    query, key, value = (part(x).unflatten(-1, (heads, width)) for part in projections)
    slopes, places = alibi_slopes(heads), torch.arange(len(x))
    rows = []
    for i in range(len(x)):
        distance = (places - i).abs()[:, None, None, None]
        scores = (query[i] * key).sum(-1, keepdim=True) * width**-0.5
        weights = (scores - slopes[:, None] * distance).softmax(0)
        rows.append((weights * value).sum(0).flatten(1))
    return layer.out_proj(torch.stack(rows))


@pytest.mark.parametrize("need_weights", [False, True])
def test_alibi_has_the_gradients_of_its_formula(need_weights):
    """Gradients of the inputs and of all projections, fused and not."""
    model = build(position_embedding="alibi", **STILL).eval()
    layer, x = model.encoder.layers[0].self_attn, torch.randn(5, 2, 32, requires_grad=True)
    with layer.using(model.encoder.stack_attention.of_tokens(SOURCE[1:].repeat(2, 1), None)):
        actual, _ = layer(x, x, x, need_weights=need_weights)
    readout, leaves = torch.randn(actual.shape), [x, *layer.parameters()]
    results = [
        [output, *torch.autograd.grad((output * readout).sum(), leaves)]
        for output in (actual, slow_alibi(layer, x))
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


DECODERS = [
    ("cape_transformer", True, {}),
    ("cape_levenshtein_transformer", False, {"share_all_embeddings": True}),
]


@pytest.mark.parametrize(("arch", "is_causal", "options"), DECODERS)
def test_only_causal_decoders_have_causal_positions(arch, is_causal, options):
    """A causal mask leaves directed slopes nothing to tell apart, and gives FIRE the longest
    distance of each query; non-autoregressive decoders see all tokens."""
    model = build(arch, **options, position_embedding="fire")
    biases = [layer.self_attn.layer_bias for layer in model.decoder.layers]
    assert [bias.causal for bias in biases] == [is_causal] * len(biases)
    directed = build(arch, **options, position_embedding="alibi", position_directed=True).eval()
    plain = build(arch, **options, position_embedding="alibi").eval()
    encoder, decoder, undirected = (
        stack.stack_attention.of(token_position_at(0, length=4), None).bias
        for stack in (directed.encoder, directed.decoder, plain.decoder)
    )
    assert torch.equal(decoder, undirected) == is_causal
    assert torch.equal(decoder, encoder) != is_causal


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_half_precision_has_no_nan_where_a_query_has_no_key(name):
    """A target padded on the left has queries that may look at padding only."""
    model = build(position_embedding=name).half().eval()
    target = torch.tensor([[PAD, PAD, 2, 5], [2, 9, 8, 7]])
    scores, _ = model(*BATCH[:2], target)
    assert torch.isfinite(scores).all()


def test_layers_without_positions_are_stock_layers():
    model = build(position_embedding="rope", position_layers="not:2").eval()
    for stack in (model.encoder, model.decoder):
        kinds = [isinstance(layer, CoordinateLayer) for layer in stack.layers]
        assert kinds == [number % 2 == 0 for number in range(len(kinds))]
    assert torch.isfinite(model(*BATCH)[0]).all()


def test_a_layer_alone_says_what_is_missing():
    model = build(position_embedding="alibi").eval()
    x = torch.randn(5, 2, 32)
    with pytest.raises(ValueError, match="got no positions"):
        model.encoder.layers[0](x, None)
