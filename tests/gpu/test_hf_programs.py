"""Models of transformers compiled by the compiler that makes kernels, in CUDA graphs, and their
memory beside models without positions."""

import copy

import pytest
import torch
from torch._inductor import config as inductor

from cape_plugins.mathematics import augmentation
from tests.hf.test_hosts import rows, shallow
from tests.support.gpu import (
    DEVICE,
    ON_GPU,
    WHOLE_GRAPH,
    close,
    moved,
    peak_memory,
    regular_numbers,
)
from tests.support.hf import FAMILIES, OF_FAMILY, answer

pytestmark = pytest.mark.slow
GPU_ONLY = pytest.mark.skipif(not ON_GPU, reason="compilers for CPUs are tested elsewhere")
# families of each kind of stack, and what acts in each place of it
COMPILED = [
    *(("marian", "cape"), ("marian", "fire"), ("vit", "rope"), ("vit", "cape")),
    *(("bert", "alibi"), ("bert", "rfs"), ("llama", "cape"), ("speech_ctc", "relpos")),
]
HALF = torch.bfloat16 if ON_GPU else torch.float32


@pytest.fixture(autouse=True)
def _random_numbers_as_without_compiler():
    torch._dynamo.reset()
    with inductor.patch(fallback_random=True):
        yield


def gradients(call, model, inputs):
    """Outputs and gradients of a training step."""
    torch.manual_seed(1)
    model.zero_grad()
    outputs = answer(call(**inputs))
    outputs.float().square().mean().backward()
    named = model.named_parameters()
    return {"outputs": outputs} | {n: p.grad.clone() for n, p in named if p.grad is not None}


@GPU_ONLY
@pytest.mark.parametrize(("family", "name"), COMPILED)
def test_compiled_model_has_the_same_gradients(family, name, monkeypatch):
    """In training, with augmentation."""
    monkeypatch.setattr(augmentation, "_unit", regular_numbers)
    model, inputs = shallow(family, name).train().to(DEVICE), moved(rows(family, 2))
    expected = gradients(model, model, inputs)
    compiled = torch.compile(model, fullgraph=WHOLE_GRAPH)
    actual = gradients(compiled, model, inputs)
    assert actual.keys() == expected.keys()
    largest = max(float(value.abs().max()) for part, value in expected.items() if "." in part)
    close(actual["outputs"], expected["outputs"], 1e-3)
    for part, value in expected.items():
        if "." in part:
            assert (actual[part] - value).abs().max() < 2e-3 * largest, part


def skipped_graphs(model, inputs):
    """How often the compiler leaves CUDA graphs out; the outputs, compiled and not."""
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        expected = answer(model(**inputs))
        for _ in range(3):
            actual = answer(compiled(**inputs)).clone()
    torch._dynamo.reset()
    return counters["cudagraph_skips"], actual, expected


@GPU_ONLY
@pytest.mark.parametrize(
    ("family", "name"), [("vit", "cape"), ("vit", "alibi"), ("bert", "rope"), ("bert", "fire")]
)
def test_cuda_graphs_are_left_out_no_more_often_than_in_the_stock_model(family, name):
    inputs = moved(rows(family, 2))
    row = FAMILIES[family]
    stock, _, _ = skipped_graphs(
        row.build_stock(num_hidden_layers=1).to(DEVICE), {**inputs, **row.stock_call}
    )
    ours, actual, expected = skipped_graphs(shallow(family, name).to(DEVICE), inputs)
    close(actual, expected, 1e-3)
    assert ours <= stock


@GPU_ONLY
@pytest.mark.parametrize(("family", "name"), [("vit", "cape"), ("bert", "rope")])
def test_training_in_cuda_graphs_draws_anew(family, name):
    model, inputs = shallow(family, name).train().to(DEVICE), moved(rows(family, 2))
    compiled, outputs = torch.compile(model, mode="reduce-overhead"), []
    torch.manual_seed(1)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        output = answer(compiled(**inputs))
        output.float().square().mean().backward()
        outputs.append(output.detach().clone())
        model.zero_grad()
    changes = any(not torch.equal(output, outputs[-1]) for output in outputs[3:-1])
    assert changes == model.config.position_config.random
    assert all(output.isfinite().all() for output in outputs)


WIDE = {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 1024}
LENGTH = 4000 if ON_GPU else 100  # tokens


def model_peak(family, name):
    """Bytes of a training step of about LENGTH positions, in half precision, nothing padded."""
    sizes = {**WIDE, "num_hidden_layers": 4}
    model = FAMILIES[family].build(OF_FAMILY[family][name], **sizes).to(DEVICE, HALF).train()
    generator = torch.Generator().manual_seed(0)
    if family == "vit":
        side = 8 * int(LENGTH**0.5)  # of patches of 8 pixels
        inputs = {"pixel_values": torch.rand(1, 3, side, side, generator=generator).to(HALF)}
    else:
        inputs = {"input_ids": torch.randint(1, 50, (1, LENGTH), generator=generator)}
    inputs = moved(inputs)

    def step():
        answer(model(**inputs)).float().square().mean().backward()
        model.zero_grad()

    return peak_memory(step)


@pytest.mark.parametrize("family", ["vit", "bert"])
def test_turned_queries_and_keys_keep_the_fused_kernel(family):
    """No T x T scores, which would more than double the memory; turned queries and keys of such
    narrow layers are a twelfth of it."""
    peaks = {name: model_peak(family, name) for name in ("nopos", "rope")}
    assert peaks["rope"] <= 1.1 * peaks["nopos"], peaks


def test_copies_of_models_on_the_gpu_compute_the_same():
    model, inputs = shallow("vit", "cape").to(DEVICE), moved(rows("vit", 2))
    assert torch.equal(answer(copy.deepcopy(model)(**inputs)), answer(model(**inputs)))
