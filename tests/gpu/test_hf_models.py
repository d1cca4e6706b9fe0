"""Models of transformers on a GPU: every family and type against the CPU, in float32 and in half
precision; generation; what steps wait for."""

import re

import pytest
import torch

from cape_plugins import TYPES
from cape_plugins.mathematics import encodings
from tests.hf.test_generation import ENDLESS, PAIRS, forced_logits, model_of
from tests.hf.test_generation import prompts as prompts_of
from tests.hf.test_in_attention import IN_ATTENTION
from tests.hf.test_operations import WAITS
from tests.support import whisper
from tests.support.gpu import (
    DEVICE,
    close,
    half_steps,
    moved,
    no_random_numbers,
    same_on_both,
    waits,
)
from tests.support.hf import (
    ALL,
    FAMILIES,
    OF_FAMILY,
    RANDOM,
    STACKS,
    answer,
    at_tokens,
    batch,
    loss,
    make,
    seam,
)

STACK_TYPES = [pair for pair in ALL if pair[0] in STACKS]
WHISPERS = [("whisper", name) for name in TYPES]
# of half precision, as a share of the largest output; models of images and of speech are deeper
SHARES = {torch.bfloat16: 0.1, torch.float16: 0.02}


def step(model, inputs):
    """Outputs at tokens, and the loss."""
    output = model(**inputs)
    return at_tokens(answer(output), inputs), loss(output)


def build(family, name):
    """A model with the attention function that users have."""
    return FAMILIES[family].build(OF_FAMILY[family][name])


def whisper_step(model, inputs):
    """Outputs and the loss; the mask belongs to frames, not to outputs."""
    output = model(**inputs)
    return output.logits, output.loss


def training_of(family, name):
    """Model, inputs and step; Whisper at natural length, with the type on both sides."""
    if family != "whisper":
        return build(family, name).train(), batch(family), step
    model = whisper.switched(name, decoder=name, natural_length=True).train()
    inputs = {"input_features": whisper.RAGGED, "attention_mask": whisper.MASK}
    return model, {**inputs, "labels": whisper.LABELS}, whisper_step


@pytest.mark.parametrize(("family", "name"), [*ALL, *WHISPERS])
def test_training_on_the_gpu_equals_the_cpu(family, name):
    """Outputs, loss and gradients, with the same random numbers."""
    same_on_both(*training_of(family, name))


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_evaluation_on_the_gpu_equals_the_cpu(family, name):
    """Of the types that draw in training; of the others it is as in training."""
    same_on_both(build(family, name).eval(), batch(family), step)


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize(("family", "name"), [*STACK_TYPES, *WHISPERS])
def test_autocast_is_near_float32(family, name, dtype):
    model, inputs, half_step = training_of(family, name)
    half_steps(model.to(DEVICE), moved(inputs), half_step, dtype, SHARES[dtype])


def long_batch(family):
    """A batch with sequences 300 times as long, where the family has sequences of tokens."""
    inputs = batch(family)
    if "input_ids" not in inputs:
        return inputs
    inputs.pop("labels", None)
    inputs = {name: value[:1].repeat(1, 300) for name, value in inputs.items()}
    if "decoder_layers" in FAMILIES[family].sizes:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :9]
    return inputs


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize(("family", "name"), STACK_TYPES)
def test_half_precision_positions_are_exact(family, name, dtype):
    """What is added by a half-precision model is what a float32 one adds, rounded, beyond position
    2048."""
    model, inputs, seen = build(family, name).to(DEVICE), moved(long_batch(family)), []
    encoder = seam(model)
    if encoder is None or not encoder.encoding or encoder.config.encoding.turns:
        pytest.skip("nothing computed is added")
    encoder.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(**inputs)
        output = model.to(dtype)(**moved(inputs, DEVICE, dtype))
    assert torch.isfinite(answer(output)).all()
    atol = 4e-3 if encoder.config.encoding.steps else 0
    torch.testing.assert_close(seen[-1], seen[0].to(dtype), atol=atol, rtol=3 * atol)


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize(("family", "name"), STACK_TYPES)
def test_half_precision_models_train(family, name, dtype):
    """Parameters in half precision: outputs and gradients are finite."""
    model, inputs = build(family, name).to(DEVICE, dtype).train(), moved(batch(family), dtype=dtype)
    outputs, value = step(model, inputs)
    value.float().backward()
    assert torch.isfinite(outputs).all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("family", "name"), ALL)
def test_evaluation_draws_nothing(family, name):
    model, inputs = build(family, name).to(DEVICE), moved(batch(family))
    with torch.no_grad(), no_random_numbers():
        first, second = (answer(model(**inputs)) for _ in range(2))
    close(second, first, 1e-5)


@pytest.mark.parametrize("mode", ["dynamic", "static"])
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_generation_equals_teacher_forcing(family, name, mode):
    """With a cache, beyond the last position of the stock model."""
    model, inputs = model_of(family, name).to(DEVICE), moved(prompts_of(family))
    cache = {"cache_implementation": "static"} if mode == "static" else {}
    out = model.generate(
        **inputs, **ENDLESS, **cache, max_new_tokens=14, num_beams=1, disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    forced = forced_logits(model, family, inputs, out.sequences)
    close(torch.stack(out.logits, dim=1), forced, 1e-3)


@pytest.mark.parametrize("name", ["cape", "sinpos"])
def test_whisper_writes_on_the_gpu_what_it_writes_on_the_cpu(name):
    model, inputs = whisper.switched(name), whisper.features(3, 50)
    mask = whisper.mask_of((50, 31, 20))
    ways = {"max_new_tokens": 8, "language": "en", "task": "transcribe"}
    expected = model.generate(inputs, attention_mask=mask, **ways)
    model.to(DEVICE)
    actual = model.generate(inputs.to(DEVICE), attention_mask=mask.to(DEVICE), **ways)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_gradient_checkpointing_does_not_draw_twice(family, name, reentrant):
    model, inputs = build(family, name).train().to(DEVICE), moved(batch(family))
    if "decoder_layers" in FAMILIES[family].sizes:
        inputs["use_cache"] = False

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        loss(model(**inputs)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    actual = gradients()
    assert actual.keys() <= expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for part, value in actual.items():
        difference = float((value - expected[part]).abs().max())
        assert difference < 1e-4 * largest, (part, difference)


@pytest.mark.parametrize("name", IN_ATTENTION)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_functions_agree(name, implementation):
    model, inputs = make("marian", name).to(DEVICE), moved(batch("marian"))
    expected = answer(model(**inputs))
    model.set_attn_implementation(implementation)
    close(answer(model(**inputs)), expected, 1e-3)


def training_waits(model, inputs):
    """Places where a training step waits, of the second step: the first may copy constants."""
    model = model.train().to(DEVICE)

    def call():
        loss(model(**inputs)).backward()

    call()
    return waits(call)


@pytest.mark.parametrize(("family", "name"), ALL)
def test_a_step_waits_no_more_often_than_the_stock_model(family, name, monkeypatch):
    monkeypatch.setattr(encodings, "_FREQUENCIES_AND_PHASES", {})
    inputs = moved(batch(family))
    ours = training_waits(build(family, name), inputs)
    if FAMILIES[family].stock_model is None:
        plain = next(iter(OF_FAMILY[family]))  # without positions
        stock = training_waits(build(family, plain), inputs)
        # the CTC loss of torch waits as well, and transformers where it makes masks
        in_package = [line for line in stock if re.search("cape_plugins|hf_models/", line)]
        assert len(in_package) <= sum(WAITS[family].values()), stock
    else:
        flags = FAMILIES[family].stock_call
        stock = training_waits(FAMILIES[family].build_stock(), {**inputs, **flags})
    assert len(ours) <= len(stock), (ours, stock)
