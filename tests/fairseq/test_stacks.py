"""Proves that the built stacks are complete: relative attention in the layers that should have it
whatever the stock options, no limit of length, step-by-step decoding equal to one pass, and models
that can be copied and cast."""

import copy

import pytest
import torch

from fairseq_user_dir.attention import RelativeSelfAttention
from tests.support.expected import IN_ATTENTION
from tests.support.fairseq_models import (
    LIMIT,
    PAD,
    RELATIVE,
    VARIANTS,
    batch,
    build,
    build_lm,
    build_variant,
    differences,
    pad,
    sentences,
    step_by_step,
    train,
)

EACH_VARIANT = pytest.mark.parametrize("name", VARIANTS)
OPTIONS = [
    {},
    {"encoder_layerdrop": 0.7, "decoder_layerdrop": 0.7},
    {"checkpoint_activations": True},
    {"quant_noise_pq": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layers", ["all", "first"])
def test_relative_attention_is_in_the_layers_asked_for(layers, options):
    sizes = {"encoder_layers": 6, "decoder_layers": 6}
    model = train(build(position_layers=layers, **sizes, **options, **RELATIVE), updates=2).eval()
    for stack in (model.encoder, model.decoder):
        relative = [isinstance(layer.self_attn, RelativeSelfAttention) for layer in stack.layers]
        assert relative == [True] + [layers == "all"] * 5
        tables = [p for n, p in stack.named_parameters() if ".relative." in n]
        assert len(tables) == 2 * sum(relative)  # keys and values, in no cross-attention


@EACH_VARIANT
def test_step_by_step_equals_one_pass_beyond_the_stock_tables(name):
    model = build_variant(name).eval()
    assert min(*model.max_positions(), model.max_decoder_positions()) >= 100_000
    length = LIMIT + 10
    source = pad(sentences(1, (length + 5, 9)), left=True)
    previous = pad(sentences(2, (length, length)), left=False)
    encoded = model.encoder(source, source.ne(PAD).sum(1))
    whole, extra = model.decoder(previous, encoder_out=encoded)
    steps, extras = step_by_step(model.decoder, previous[:, :length], encoder_out=encoded)
    torch.testing.assert_close(steps, whole[:, :length], atol=2e-5, rtol=1e-4)
    attention = torch.cat([step["attn"][0] for step in extras], 1)
    torch.testing.assert_close(attention, extra["attn"][0][:, :length], atol=1e-5, rtol=1e-4)
    if name != "nopos":  # each step has another position
        last, _ = model.decoder(previous[:, 1 : length + 1], encoder_out=encoded)
        assert not torch.allclose(last[:, -2], whole[:, length - 1], atol=1e-4)


LANGUAGE_MODELS = [("--position-embedding", name) for name in ("abspos", *IN_ATTENTION)]
LANGUAGE_MODELS += [(), ("--position-relative-context", 3)]


@pytest.mark.parametrize("words", LANGUAGE_MODELS)
def test_language_model_step_by_step_equals_one_pass(words):
    model = build_lm(*words).eval()
    previous = pad(sentences(2, (LIMIT + 10,) * 2), left=False)
    whole, _ = model(previous)
    steps, _ = step_by_step(model.decoder, previous[:, : LIMIT + 10])
    torch.testing.assert_close(steps, whole[:, : LIMIT + 10], atol=2e-5, rtol=1e-4)


@EACH_VARIANT
def test_a_copy_is_a_model_of_its_own(name):
    """``--store-ema`` copies the model."""
    model = build_variant(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    twin = train(copy.deepcopy(model), updates=1)
    assert differences(model.state_dict(), before) == []
    assert differences(twin.state_dict(), before)
    for stack in (twin.encoder, twin.decoder):
        for layer in stack.layers:  # of types in attention
            assert (
                vars(layer).get("stack_attention", stack.stack_attention) is stack.stack_attention
            )
    source, previous = batch()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(*(m.eval()(source, None, previous)[0] for m in (twin, model)))


@EACH_VARIANT
def test_half_precision_rounds_the_embedding_not_the_position(name):
    model = build_variant(name).eval()
    source = pad(sentences(1, (600, 9)), left=True)
    half = copy.deepcopy(model).to(torch.bfloat16)
    if model.encoder.embed_positions is not None:
        exact, rounded = (m.encoder.embed_positions(source) for m in (model, half))
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, exact.to(torch.bfloat16))
    short, previous = batch()
    logits = half(short, None, previous)[0]
    assert logits.dtype == torch.bfloat16
    expected = model(short, None, previous)[0]
    torch.testing.assert_close(logits.float(), expected, atol=0.1, rtol=0.1)
