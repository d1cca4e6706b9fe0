"""rope, alibi and fire in models of transformers: properties that the tests of all types do not
cover."""

import copy
import re
from operator import attrgetter

import pytest
import torch
from torch import nn
from transformers import SmolLM3Config
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.llama import modeling_llama as llama

from cape_plugins import (
    PositionConfig,
    build_position_encoder,
    build_stack_positions,
    patch_positions,
    token_position_at,
)
from hf_models import switch
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.seams import attention
from hf_models.seams.attention import mixed
from hf_models.seams.rotary import UnturnedAttention
from tests.hf.conftest import copies
from tests.support.expected import types_whose
from tests.support.hf import FAMILIES, answer, batch, loss, make

IN_ATTENTION = types_whose(attrgetter("in_attention"))
SHARED_BIAS = types_whose(lambda row: row.in_attention and row.biases and not row.learned)


def projected(turn, length):
    """Queries and keys of random states, turned; gradients of the states and of the projections
    through the weights of attention."""
    torch.manual_seed(0)
    states = torch.randn(2, length, 64, requires_grad=True)
    projections = [nn.Linear(64, 64) for _ in range(2)]
    heads = [layer(states).unflatten(-1, (4, 16)).transpose(1, 2) for layer in projections]
    query, key = turn(*heads)
    weights = (query @ key.mT / 4).softmax(-1)
    loss = (weights * torch.randn(weights.shape)).sum()
    leaves = [states, *(part for layer in projections for part in layer.parameters())]
    return (query, key), torch.autograd.grad(loss, leaves)


def ours(settings, positions):
    """The function that turns queries and keys."""
    encoder = build_position_encoder(settings, 64).eval()
    return build_stack_positions(settings, 16, 4)(encoder, positions).turn


def test_rope_turns_as_llama_does():
    """Bit for bit, given the same positions; gradients, too."""
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4)
    module, length = llama.LlamaRotaryEmbedding(config), 200

    def stock(query, key):
        return llama.apply_rotary_pos_emb(query, key, *module(query, torch.arange(length)[None]))

    settings = PositionConfig(
        "rope", "text", "decoder", rotary_base=config.rope_parameters["rope_theta"]
    )
    turned, gradients = projected(ours(settings, token_position_at(0, length=length)), length)
    expected, expected_gradients = projected(stock, length)
    assert all(map(torch.equal, turned, expected))
    assert all(gradient.abs().max() > 1e-3 for gradient in expected_gradients)
    torch.testing.assert_close(gradients, expected_gradients)


def test_rope_of_images_turns_as_dinov3_does():
    """With class token and registers in front, on a grid that is no square; gradients, too."""
    config = dinov3.DINOv3ViTConfig(hidden_size=64, num_attention_heads=4, patch_size=4)
    module = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()
    rows, columns, front = 6, 10, 5
    angles = module(torch.zeros(2, 3, 4 * rows, 4 * columns))

    def stock(query, key):
        return dinov3.apply_rotary_pos_emb(query, key, *angles)

    length, patches = front + rows * columns, patch_positions(rows, columns)
    turned, gradients = projected(ours(PositionConfig("rope", "image"), patches), length)
    expected, expected_gradients = projected(stock, length)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_smollm3_is_a_preset():
    """The base of the rotations, and the layers without positions."""
    stock, ours = SmolLM3Config(), PositionConfig.preset("rope_smollm3")
    assert (ours.type, ours.architecture) == ("rope", "decoder")
    assert ours.rotary_base == stock.rope_parameters["rope_theta"]
    turned = [ours.in_layer(index) for index in range(stock.num_hidden_layers)]
    assert turned == list(map(bool, stock.no_rope_layers))
    assert not ours.random


@pytest.mark.parametrize(("family", "stacks"), [("bert", 1), ("vit", 1), ("marian", 2)])
@pytest.mark.parametrize("name", SHARED_BIAS)
def test_the_layers_of_a_stack_share_one_mask(family, stacks, name, monkeypatch):
    """A mask for each layer would take as many times the memory."""
    masks, combine = [], attention._biased_mask
    monkeypatch.setattr(
        attention, "_biased_mask", lambda *parts: masks.append(parts) or combine(*parts)
    )
    model = make(family, name).eval()
    assert model.config.num_hidden_layers > 1
    model(**batch(family))
    assert len(masks) == stacks


def gradients(model, family):
    torch.manual_seed(5)
    model.zero_grad()
    loss(model(**batch(family))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", IN_ATTENTION)
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_reentrant_checkpointing_gives_the_same_gradients(family, name):
    """A layer that is called again in the backward pass has its positions, moved as before.
    test_models.py tests the other way of checkpointing."""
    no_dropout = dict.fromkeys(FAMILIES[family].noise, 0.0)  # checkpointing draws it anew
    settings = {"type": name, "max_local_shift": 0.5, "max_global_scale": 1.5}
    model = switch(make(family, name, **no_dropout), settings).train()
    plain = gradients(model, family)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    checkpointed = gradients(model, family)
    assert plain.keys() == checkpointed.keys()
    assert any("layer_bias" in part for part in plain) == (name == "fire")
    for part, gradient in plain.items():
        torch.testing.assert_close(checkpointed[part], gradient, rtol=1e-4, atol=1e-6, msg=part)


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_layers_without_positions_are_stock_layers(name):
    model = switch(make("vit", "nopos"), {"type": name, "layers": "not:2"})
    attentions = [type(m).__name__ for m in model.modules() if hasattr(m, "q_proj")]
    with_positions = [kind.startswith("PositionAttention") for kind in attentions]
    assert with_positions == [number % 2 == 0 for number in range(len(attentions))]
    assert torch.isfinite(answer(model(**batch("vit")))).all()


def test_biases_refuse_attention_functions_that_ignore_them():
    model = make("marian", "alibi")
    model.config._attn_implementation = "flex_attention"
    eager = torch.compiler.set_stance("force_eager")  # flex_attention compiles the mask for long
    with eager, pytest.raises(ValueError, match=r"flex_attention.*biases.*allowed: eager, sdpa"):
        model(**batch("marian"))


def test_a_layer_alone_says_what_is_missing():
    model = make("vit", "rope")
    attention = next(m for m in model.modules() if hasattr(m, "q_proj"))
    with pytest.raises(ValueError, match=r"got no positions.*attention_positions"):
        attention(torch.zeros(1, 3, model.config.hidden_size))


@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_rotary_models_leave_layers_unturned(family, tmp_path):
    """As with types without positions in all layers, and after saving, copying and pickling."""
    model = make(family, "rope")
    nopos = answer(switch(copy.deepcopy(model), {"type": "nopos"})(**batch(family)))
    turned = answer(model(**batch(family)))
    none = switch(copy.deepcopy(model), {"type": "rope", "layers": "first"})
    (attention,) = (p for n, p in none.named_modules() if re.search(r"\.0\.\w*attn$", n))
    attention.__class__ = mixed(UnturnedAttention, type(attention))
    torch.testing.assert_close(answer(none(**batch(family))), nopos, rtol=1e-5, atol=1e-6)
    first = switch(model, {"type": "rope", "layers": "first"})
    expected = answer(first(**batch(family)))
    assert not torch.allclose(expected, nopos, atol=1e-4)
    assert not torch.allclose(expected, turned, atol=1e-4)
    for other in copies(first, tmp_path):
        other.set_attn_implementation("eager")
        assert torch.equal(answer(other(**batch(family))), expected)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("modernbert", {}),
        ("vjepa2", {}),
        ("vit", {}),
        ("bert", {}),
        # the encoder has the layer, and the decoder does not
        ("marian", {"encoder_layers": 3, "decoder_layers": 2}),
    ],
)
def test_layers_that_a_stack_lacks_are_refused(family, sizes):
    if family in FAMILIES:
        model = make(family, "rope", **sizes)
    else:
        model = next(tiny_stock_models(family)).model
    unknown = f"every:{sizes.get('encoder_layers', model.config.num_hidden_layers + 1)}"
    with pytest.raises(ValueError, match=rf"layers='{unknown}' names no layer of .*allowed.*nopos"):
        switch(model, {"type": "rope", "layers": unknown})


@pytest.mark.parametrize("family", ["speech_ctc", "speech_to_text"])
def test_layers_that_a_stack_of_speech_lacks_are_refused(family):
    with pytest.raises(ValueError, match=r"layers='every:9' names no layer of .*allowed.*nopos"):
        FAMILIES[family].build({"type": "rope", "layers": "every:9"})


def test_slopes_of_causal_stacks_are_not_directed():
    """The mask of a decoder hides what follows; directed slopes would only be steeper there."""
    plain, directed = (
        switch(make("marian", "nopos"), {"type": "alibi", "directed": is_directed})
        for is_directed in (False, True)
    )
    given = batch("marian")
    encoded = given["input_ids"], given["attention_mask"]
    assert not torch.equal(*(m.get_encoder()(*encoded)[0] for m in (plain, directed)))
    states = plain.get_encoder()(*encoded)
    inputs = {"attention_mask": encoded[1], "decoder_input_ids": given["labels"].clamp(min=0)}
    outputs = [m(encoder_outputs=states, **inputs).logits for m in (plain, directed)]
    assert torch.equal(*outputs)
