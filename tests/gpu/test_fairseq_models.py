"""Models of fairseq on a GPU: every type against the CPU, in float32 and in half precision."""

import pytest

pytest.importorskip("soundfile")
import torch

from cape_plugins import TYPES
from fairseq_user_dir.asr.criterion import CapeCtcCriterion
from tests.fairseq.test_asr_models import EACH
from tests.fairseq.test_asr_models import batch as speech_batch
from tests.fairseq.test_in_attention import STILL
from tests.support.fairseq_models import PAD, VARIANTS, batch, build, build_lm, build_variant, pad
from tests.support.fairseq_speech import CTC, durations, make_model, write_manifest
from tests.support.gpu import (
    DEVICE,
    ON_GPU,
    close,
    half_steps,
    moved,
    no_random_numbers,
    peak_memory,
    same_on_both,
    waits,
)

SHARES = {torch.bfloat16: 0.1, torch.float16: 0.02}
SPEECH = {"encoder_embed_dim": 32, "decoder_embed_dim": 32}


def loss_at_tokens(logits, previous):
    """A loss that depends on all outputs at real tokens."""
    weight = torch.linspace(-1, 1, logits.shape[-1], device=logits.device)
    return (logits.float().log_softmax(-1) * weight)[previous.ne(PAD)].sum()


def scores(model, inputs):
    """Logits of a translation model or of a language model."""
    source, previous = inputs
    if hasattr(model, "encoder"):
        return model(source, source.ne(PAD).sum(1), previous)[0]
    return model(previous)[0]


def translate(model, inputs):
    """A step of a translation model or of a language model."""
    logits, previous = scores(model, inputs), inputs[1]
    return logits[previous.ne(PAD)], loss_at_tokens(logits, previous)


def recognise(model, sample):
    """A step of a speech model; of a CTC model with the package's loss."""
    inputs = sample["net_input"]
    if not hasattr(model, "decoder"):
        outputs = model(**inputs)
        probabilities = outputs["encoder_out"].float().log_softmax(-1)
        lengths = outputs["lengths"], sample["target_lengths"]
        loss = torch.nn.functional.ctc_loss(
            probabilities, sample["target"], *lengths, reduction="sum"
        )
        return outputs["encoder_out"][:, 0], loss
    logits, _ = model(**inputs)
    return logits[:, :3], logits[:, :3].float().log_softmax(-1)[..., 3].sum()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    write_manifest(path, "train", durations(12))
    return path


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_translation_on_the_gpu_equals_the_cpu(name, training):
    same_on_both(build_variant(name, **STILL).train(training), batch(), translate)


@pytest.mark.parametrize("name", TYPES)
def test_language_model_on_the_gpu_equals_the_cpu(name):
    # without dropout, which each device draws for itself
    words = [w for key in STILL for w in (f"--{key.replace('_', '-')}", 0.0)]
    model = build_lm("--position-embedding", name, *words).train()
    same_on_both(model, batch(), translate)


@pytest.mark.parametrize("mode", [(), ("--padding-free",)], ids=["padded", "padding-free"])
@pytest.mark.parametrize(("name", "arch"), EACH)
def test_speech_on_the_gpu_equals_the_cpu(folder, name, arch, mode):
    task, sample = speech_batch(folder, *mode)
    inputs = sample["net_input"].items()
    sample["net_input"] = {key: value for key, value in inputs if value is not None}
    same_on_both(make_model(task, arch, name).train(), sample, recognise)


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize("name", VARIANTS)
def test_autocast_is_near_float32(name, dtype):
    model = build_variant(name, **STILL).train().to(DEVICE)
    half_steps(model, moved(batch()), translate, dtype, SHARES[dtype])


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize(("name", "arch"), EACH)
def test_speech_trains_in_half_precision(folder, name, arch, dtype):
    """Parameters in half precision, as ``--fp16`` has them."""
    task, sample = speech_batch(folder)
    model, sample = make_model(task, arch, name).to(DEVICE, dtype).train(), moved(sample)
    sample["net_input"]["src_tokens"] = sample["net_input"]["src_tokens"].to(dtype)
    outputs, loss = recognise(model, sample)
    loss.float().backward()
    assert torch.isfinite(outputs).all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if arch == CTC:
        value, _, _ = CapeCtcCriterion(task)(model, sample)
        assert torch.isfinite(value)


@pytest.mark.parametrize("dtype", SHARES)
@pytest.mark.parametrize("name", VARIANTS)
def test_half_precision_positions_are_exact(name, dtype):
    """What is added by a half-precision model is what a float32 one adds, rounded, beyond position
    2048; and a model with positions in attention is near the float32 one."""
    source = pad([[5 + i % 17 for i in range(2600)] + [2], [7, 8, 2]], left=True).to(DEVICE)
    previous, seen = batch()[1][:2].to(DEVICE), []
    model = build_variant(name, **STILL).to(DEVICE).eval()
    module = model.encoder.embed_positions
    if module is not None:
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        expected, _ = model(source, source.ne(PAD).sum(1), previous)
        actual, _ = model.to(dtype)(source, source.ne(PAD).sum(1), previous)
    assert torch.isfinite(actual).all()
    close(actual, expected, 3 * SHARES[dtype])
    if seen:
        torch.testing.assert_close(seen[1], seen[0].to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_evaluation_draws_nothing(name):
    model, (source, previous) = build_variant(name).to(DEVICE).eval(), moved(batch())
    with torch.no_grad(), no_random_numbers():
        model(source, source.ne(PAD).sum(1), previous)


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_from_a_cache_are_one_pass(name):
    model, (source, previous) = build_variant(name).to(DEVICE).eval(), moved(batch())
    with torch.no_grad():
        encoded = model.encoder(source, source.ne(PAD).sum(1))
        whole, _ = model.decoder(previous, encoder_out=encoded)
        state, steps = {}, []
        for length in range(1, previous.shape[1] + 1):
            logits, _ = model.decoder(
                previous[:, :length], encoder_out=encoded, incremental_state=state
            )
            steps.append(logits[:, -1])
    real = previous.ne(PAD)
    close(torch.stack(steps, 1)[real], whole[real], 1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_activation_checkpointing_draws_once(name):
    gradients = []
    for checkpoint in (False, True):
        model = build_variant(name, checkpoint_activations=checkpoint, **STILL).to(DEVICE).train()
        torch.manual_seed(5)
        translate(model, moved(batch()))[1].backward()
        named = model.named_parameters()
        gradients.append({part: p.grad for part, p in named if p.grad is not None})
    largest = max(float(value.abs().max()) for value in gradients[0].values())
    for part, value in gradients[0].items():
        assert (gradients[1][part] - value).abs().max() < 1e-4 * largest, part


def training_waits(model):
    """Places where the second training step waits; the first may copy constants."""
    model, inputs = model.to(DEVICE).train(), moved(batch())

    def call():
        scores(model, inputs).float().log_softmax(-1)[..., 0].sum().backward()

    call()
    return waits(call)


@pytest.mark.parametrize(
    ("name", "host"),
    [*((name, "translation") for name in VARIANTS), *((name, "language") for name in TYPES)],
)
def test_a_step_waits_no_more_often_than_the_stock_model(name, host):
    if host == "translation":
        stock, model = build("transformer_tiny"), build_variant(name)
    else:
        stock, model = build_lm(arch="transformer_lm"), build_lm("--position-embedding", name)
    stock_waits, our_waits = training_waits(stock), training_waits(model)
    assert len(our_waits) <= len(stock_waits), (our_waits, stock_waits)


WIDE = {
    f"{side}_{part}": size
    for side in ("encoder", "decoder")
    for part, size in (("embed_dim", 256), ("ffn_embed_dim", 1024), ("attention_heads", 4))
}


def encoder_peak(name, length):
    """Bytes of a training step of an encoder in half precision, without padding."""
    settings = {**VARIANTS[name], **WIDE, **STILL}
    model = build(**settings).to(DEVICE, torch.float16 if ON_GPU else None).train()
    tokens = torch.randint(4, 20, (1, length), device=DEVICE)
    lengths = torch.tensor([length], device=DEVICE)

    def step():
        model.encoder(tokens, lengths)["encoder_out"][0].float().sum().backward()
        model.zero_grad()

    return peak_memory(step)


def test_turned_queries_and_keys_keep_the_fused_kernel():
    """No T x T scores, which would more than double the memory; turned queries and keys of such
    narrow layers are a twelfth of it."""
    length = 4000 if ON_GPU else 100
    peaks = {name: encoder_peak(name, length) for name in ("nopos", "rope")}
    assert peaks["rope"] <= 1.1 * peaks["nopos"], peaks
