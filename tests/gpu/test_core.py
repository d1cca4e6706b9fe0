"""The core on a GPU: embeddings, positions in attention, draws, programs and graphs."""

import copy
from functools import partial

import pytest
import torch
from torch._inductor import config as inductor

from cape_plugins import (
    ENCODINGS,
    TYPES,
    PositionConfig,
    RelativePositions,
    build_layer_bias,
    build_position_encoder,
    build_stack_positions,
    patch_positions,
    relative_attention,
    token_positions,
)
from cape_plugins.mathematics import augmentation
from cape_plugins.mathematics.augmentation import rank_generator
from tests.core.test_compile import CASES, placed_encoder
from tests.support.core import BATCH, EVERYWHERE, RANDOM, make_encoder, make_positions, valid_mask
from tests.support.gpu import (
    DEVICE,
    ON_GPU,
    WHOLE_GRAPH,
    SameNumbers,
    close,
    moved,
    regular_numbers,
    waits,
)

HALVES = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
IN_ATTENTION = [name for name, row in TYPES.items() if ENCODINGS[row.encoding].in_attention]
GRAPHS = pytest.mark.skipif(not ON_GPU, reason="a CPU has no CUDA graphs")
COMPILERS = pytest.mark.skipif(not ON_GPU, reason="compilers for CPUs are tested elsewhere")
HEADS, HEAD_DIM = 4, 16


def on_device(positions):
    """Positions of a batch on the GPU."""
    return type(positions)(*moved(tuple(positions)))


def embedded(encoder, positions, device, **options):
    """The embedding of a batch, with the random numbers of the CPU."""
    torch.manual_seed(3)
    with SameNumbers():
        draw = encoder.draw(BATCH, device)
        return encoder(positions, draw, **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_embedding_on_the_gpu_equals_the_cpu(name, domain, training):
    encoder, positions = make_encoder(name, domain).train(training), make_positions(domain)
    expected = embedded(encoder, positions, "cpu")
    actual = embedded(encoder.to(DEVICE), on_device(positions), DEVICE)
    if expected is None:
        assert actual is None
        return
    assert actual.device.type == DEVICE.type
    close(actual, expected, 4e-3)  # phases of offsets up to 500 are rounded


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_half_precision_has_exact_positions_beyond_2048(name, training, dtype):
    """Numbers of half precision are whole to 256 (bfloat16) and 2048 (float16)."""
    length = 5000
    sizes = {"max_position": length} if TYPES[name].sampling else {}
    encoder = make_encoder(name, **sizes).train(training)
    positions = token_positions(torch.ones(BATCH, length, dtype=torch.bool))
    expected = embedded(encoder, positions, "cpu")
    half = copy.deepcopy(encoder).to(DEVICE, dtype)
    with torch.autocast(DEVICE.type, dtype):
        actual = embedded(half, on_device(positions), DEVICE, dtype=dtype)
    if expected is None:
        assert actual is None
        return
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.float().cpu(), expected.detach(), atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
    )


def stack_parts(name, domain, training=False, **options):
    """Encoder of a stack, what its layers share, and the learned bias of a layer."""
    config = PositionConfig(name, domain, **options)
    encoder = build_position_encoder(config, HEADS * HEAD_DIM).train(training)
    stack = build_stack_positions(config, HEAD_DIM, HEADS, encoder.unit)
    torch.manual_seed(0)
    return encoder, stack, build_layer_bias(config, HEADS, encoder.unit)


def attended(parts, positions, device, dtype=torch.float32):
    """Turned queries and keys, and the bias, of random queries and keys."""
    encoder, stack, layer_bias = parts
    torch.manual_seed(4)
    with SameNumbers():
        draw = encoder.draw(1, device)
        attention = stack(encoder, positions, draw, random=encoder.draws)
    generator = torch.Generator().manual_seed(5)
    shape = (2, 1, HEADS, attention.key.shape[1], HEAD_DIM)
    query, key = torch.randn(shape, generator=generator).to(device, dtype)
    return [*attention.turn(query, key), attention.bias_of(layer_bias, query, key)]


AUGMENTED = {"max_local_shift": 0.5, "max_global_scale": 1.5}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("options", [{}, AUGMENTED], ids=["plain", "augmented"])
@pytest.mark.parametrize("domain", ["text", "image"])
@pytest.mark.parametrize("name", IN_ATTENTION)
def test_positions_in_attention_equal_the_cpu(name, domain, options, dtype):
    """Beyond 2048 tokens, too: angles and distances are made in float32."""
    tokens = token_positions(torch.ones(1, 2200, dtype=torch.bool))
    positions = patch_positions(5, 7) if domain == "image" else tokens
    parts = stack_parts(name, domain, training=bool(options), **options)
    expected = attended(parts, positions, "cpu")
    target = {"device": DEVICE} | ({} if dtype == torch.float32 else {"dtype": dtype})
    moved_parts = [part if part is None else copy.deepcopy(part).to(**target) for part in parts]
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        actual = attended(moved_parts, on_device(positions), DEVICE, dtype)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == dtype
            close(ours, theirs, 4 * ROUNDING[dtype] if dtype != torch.float32 else 1e-3)


@pytest.mark.parametrize("options", [{}, {"beyond": "zero", "values": True}], ids=["keys", "both"])
def test_relative_attention_equals_the_cpu(options):
    positions = RelativePositions(3, HEAD_DIM, **options)
    query = torch.randn(2, HEADS, 9, HEAD_DIM)
    padding, causal = ~valid_mask((9, 5), 9), torch.ones(9, 9).triu(1).bool()

    def results(device):
        tensors = [query.clone().to(device).requires_grad_() for _ in range(3)]
        masks = {"attn_mask": causal.to(device), "key_padding_mask": padding.to(device)}
        module = copy.deepcopy(positions).to(device)
        output, _ = relative_attention(*tensors, module, **masks)
        output.square().sum().backward()
        return [output, *(part.grad for part in (*tensors, *module.parameters()))]

    for actual, expected in zip(results(DEVICE), results("cpu"), strict=True):
        close(actual, expected, 1e-4)


def assert_repeats(encoder, choices):
    """The first two of three draws are the same, the last is another; all are on the GPU. A choice
    is a seed and the arguments of a draw."""
    draws = []
    for seed, *arguments in choices:
        torch.manual_seed(seed)
        draw = encoder.draw(64, DEVICE, *arguments)
        draws.append([part for part in draw if isinstance(part, torch.Tensor)])
    assert all(part.device.type == DEVICE.type for part in draws[0])
    assert all(map(torch.equal, draws[0], draws[1]))
    assert not any(map(torch.equal, draws[0], draws[2]))


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_draws_repeat_with_seed_and_rank_and_leave_the_stream_of_dropout(name, domain):
    assert_repeats(make_encoder(name, domain, augment_probability=0.5), [(1,), (1,), (2,)])
    encoder = make_encoder(name, domain)
    before = torch.cuda.get_rng_state() if ON_GPU else None
    assert_repeats(encoder, [(1, partial(rank_generator, rank=rank)) for rank in (0, 0, 1)])
    if ON_GPU:
        torch.cuda.manual_seed(1)
        state = torch.cuda.get_rng_state()
        encoder.draw(64, DEVICE, lambda device: rank_generator(device, 1))
        assert torch.equal(state, torch.cuda.get_rng_state())
        torch.cuda.set_rng_state(before)


@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_an_embedding_never_waits_for_the_gpu(name, domain):
    """After the first call, which may copy frequencies."""
    encoder, positions = make_encoder(name, domain).to(DEVICE), on_device(make_positions(domain))

    def call():
        encoder(positions, encoder.draw(BATCH, DEVICE))

    call()
    assert waits(call) == []


@pytest.mark.parametrize("domain", ["text", "image"])
@pytest.mark.parametrize("name", IN_ATTENTION)
def test_positions_in_attention_never_wait_for_the_gpu(name, domain):
    parts = [None if p is None else p.to(DEVICE) for p in stack_parts(name, domain, True)]
    encoder, stack, layer_bias = parts
    valid = valid_mask().to(DEVICE)
    positions = patch_positions(2, 3, device=DEVICE) if domain == "image" else None
    query = torch.randn(BATCH, HEADS, 6, HEAD_DIM, device=DEVICE)

    def call():
        of_stack = token_positions(valid) if positions is None else positions
        attention = stack(encoder, of_stack, encoder.draw(BATCH, DEVICE), random=encoder.draws)
        attention.turn(query, query)
        attention.bias_of(layer_bias, query, query)

    call()
    assert waits(call) == []


@COMPILERS
@pytest.mark.parametrize(("name", "domain", "training"), CASES)
def test_compiled_embedding_is_the_same(name, domain, training, monkeypatch):
    """By the compiler that makes kernels."""
    monkeypatch.setattr(augmentation, "_unit", regular_numbers)
    torch._dynamo.reset()
    encoder = placed_encoder(name, domain).to(DEVICE).train(training)
    positions = on_device(make_positions(domain))

    def forward(positions):
        draw = encoder.draw(BATCH, DEVICE)
        if draw is not None and draw.order is not None:
            draw = draw.covering(encoder.num_positions(positions.valid))
        return encoder(positions, draw)

    compiled, results = torch.compile(forward, fullgraph=WHOLE_GRAPH), []
    for call in (forward, compiled):
        torch.manual_seed(1)
        with inductor.patch(fallback_random=True):
            results.append(call(positions))
    if results[0] is None:
        assert results[1] is None
        return
    close(results[1], results[0], 1e-4)


@GRAPHS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_embedding_in_a_cuda_graph(name, domain, training):
    """Training draws anew in each replay; evaluation gives the same."""
    encoder = make_encoder(name, domain).to(DEVICE).train(training)
    positions = on_device(make_positions(domain))

    def call():
        return encoder(positions, encoder.draw(BATCH, DEVICE))

    first, second = replayed(call)
    if first is None:
        return
    assert torch.equal(first, second) != encoder.draws
    if not encoder.draws:
        close(first, call(), 1e-6)


@GRAPHS
@pytest.mark.parametrize("name", IN_ATTENTION)
def test_positions_in_attention_in_a_cuda_graph(name):
    encoder, stack, layer_bias = (
        None if part is None else part.to(DEVICE) for part in stack_parts(name, "text")
    )
    valid = valid_mask().to(DEVICE)
    query = torch.randn(BATCH, HEADS, 6, HEAD_DIM, device=DEVICE)

    @torch.no_grad()
    def call():
        attention = stack(encoder, token_positions(valid))
        turned, _ = attention.turn(query, query)
        bias = attention.bias_of(layer_bias, query, query)
        return turned if bias is None else bias

    first, second = replayed(call)
    assert torch.equal(first, second)
    close(first, call(), 1e-6)


def replayed(call):
    """Results of two replays of a call in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # warms up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    results = []
    for _ in range(2):
        graph.replay()
        results.append(None if result is None else result.clone())
    return results
