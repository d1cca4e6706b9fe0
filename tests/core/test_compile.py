"""torch.compile and torch.export take the whole core without a graph break and with equal results,
and nothing reads a value back from the device, as fake tensors show."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from cape_plugins import (
    TYPES,
    PositionTable,
    RelativeGridPositions,
    RelativePositions,
    frame_positions,
    relative_attention,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics import relative
from cape_plugins.settings.domains import DOMAINS
from tests.support.core import BATCH, EVERYWHERE, RANDOM_TYPES, make_encoder, valid_mask
from tests.support.expected import DOMAIN_SAMPLES, HOP

# what draws nothing is the same in training and in evaluation
CASES = [(name, "text", True) for name in TYPES]
CASES += [("cape", domain, True) for domain in DOMAINS if domain != "text"]
CASES += [("cape", "text", False), ("abspos", "image", True)]
RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
WHOLE_GRAPHS = pytest.mark.skipif(
    RELEASE < (2, 13), reason="older compilers of torch do not follow properties of named tuples"
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="eager", fullgraph=True, **options)


def positions_from(domain, valid):
    """The part of a model's forward that makes positions."""
    if domain == "audio":  # of one hop; several are below
        return frame_positions(valid.sum(1), HOP, max_frames=6)
    samples = DOMAIN_SAMPLES[domain]
    return samples.positions(valid, samples.size)


def placed_encoder(name, domain):
    """An encoder as in a model, with alpha if there is a source; some samples are not augmented."""
    if domain != "text":
        return make_encoder(name, domain, start=0.0125, unit=0.5)
    settings = {"architecture": "seq2seq", "source_scale": 1.05, "augment_probability": 0.5}
    return make_encoder(name, domain, start=2.0, **(settings if name in RANDOM_TYPES else {}))


def test_a_graph_break_would_be_noticed():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(lambda x: x * x.sum().item() if x.sum() > 0 else x)(torch.ones(2))


@WHOLE_GRAPHS
@pytest.mark.parametrize(("name", "domain", "training"), CASES)
def test_compiled_encoder_computes_the_same(name, domain, training):
    encoder, valid = placed_encoder(name, domain).train(training), valid_mask()

    def forward(valid):
        positions, draw = positions_from(domain, valid), encoder.draw(BATCH)
        if draw is not None and draw.order is not None:
            draw = draw.covering(encoder.num_positions(positions.valid))
        return encoder(positions, draw, dtype=torch.bfloat16), draw

    torch.manual_seed(1)
    expected, expected_draw = forward(valid)
    torch.manual_seed(1)
    actual, draw = compiled(forward)(valid)
    if expected is None:
        assert actual is None
        return
    assert torch.equal(actual, expected)
    assert (draw is None) == (expected_draw is None) == (not (name in RANDOM_TYPES and training))


@WHOLE_GRAPHS
def test_lengths_may_change_without_compiling_each():
    encoder, frames = make_encoder("cape").eval(), torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=frames, fullgraph=True)
    def forward(tokens):
        return encoder(token_positions(tokens.ne(1)))

    for length in (6, 9, 12, 31, 40):
        forward(torch.full((2, length), 5))
    assert frames.frame_count <= 2  # one for the first length, one for any


@WHOLE_GRAPHS
def test_exported_program_is_saved_and_loaded(tmp_path):
    """Of audio; tests/hf/test_hosts.py has models of texts and images."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = placed_encoder("cape", "audio")

        def forward(self, valid):
            return self.encoder(positions_from("audio", valid))

    model, valid = Model().eval(), valid_mask()
    torch.export.save(torch.export.export(model, (valid,)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(loaded(valid), model(valid))


def test_exported_table_begins_anew_at_lengths_that_its_sample_did_not_have():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = PositionTable(4, 7)

        def forward(self, data):
            return self.table.lookup(token_positions(data.ne(1)))

    model, sizes = Model(), {1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (torch.zeros(2, 5),), dynamic_shapes=(sizes,))
    for length in (3, 7, 8, 20):
        data = torch.zeros(2, length)
        assert torch.equal(exported.module()(data), model(data))


@pytest.mark.parametrize(
    ("options", "blocks"), [({}, False), ({"beyond": "zero", "values": True, "num_heads": 2}, True)]
)
def test_compiled_relative_attention_computes_the_same(monkeypatch, options, blocks):
    if blocks:
        monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 2 * 5 * 4)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    masks = {"attn_mask": torch.ones(5, 5).triu(1).bool(), "key_padding_mask": padding}
    assert_compiled_attention_is_the_same(compiled, RelativePositions(2, 4, **options), 5, **masks)


def assert_compiled_attention_is_the_same(compiler, positions, length, **inputs):
    """Outputs and gradients."""
    query = torch.randn(2, 2, length, 4, requires_grad=True)

    def forward(query):
        return relative_attention(query, query, query, positions, **inputs)[0]

    outputs = compiler(forward)(query), forward(query)
    torch.testing.assert_close(*outputs)
    parameters = [query, *positions.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), parameters) for output in outputs]
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_inductor_takes_distances_between_patches():
    """Compiles with inductor, as users do; the tests above stop before kernels are made."""
    inductor = partial(torch.compile, fullgraph=True)
    positions, patches = RelativeGridPositions(2, 4), (3, 4)
    assert_compiled_attention_is_the_same(inductor, positions, 1 + 12, patches=patches)


def test_reading_a_value_would_be_noticed():
    with FakeTensorMode():
        mask = torch.ones(2, 3).bool()
        for read in (torch.Tensor.any, torch.Tensor.sum):
            with pytest.raises(DataDependentOutputException):
                bool(read(mask))
        with pytest.raises(DataDependentOutputException):  # documented: costs a synchronisation
            frame_positions(torch.randint(9, (BATCH,)), HOP)


@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_encoder_reads_no_values(name, domain):
    with FakeTensorMode():
        encoder = make_encoder(name, domain)
        positions = positions_from(domain, torch.rand(BATCH, 6) < 0.9)
        result = encoder(positions, encoder.draw(BATCH), dtype=torch.float16)
        assert (result is None) == (encoder.encoding is None)
        if encoder.config.random:
            half = make_encoder(name, domain, augment_probability=0.5)
            assert half(positions, half.draw(BATCH)).shape == result.shape
        encoder.eval()(positions)
        if domain == "text":
            encoder(token_position_at(3, positions.rows.device))


def test_relative_attention_reads_no_values(monkeypatch):
    monkeypatch.setattr(relative, "BLOCK_ELEMENTS", 2 * 5 * 4)
    with FakeTensorMode():
        positions = RelativePositions(2, 4, values=True)
        query = torch.randn(2, 2, 5, 4, requires_grad=True)
        padding, causal = torch.zeros(2, 5).bool(), torch.ones(5, 5).triu(1).bool()
        masks = {"attn_mask": causal, "key_padding_mask": padding}
        output, _ = relative_attention(query, query, query, positions, **masks, dropout=0.1)
        output.sum().backward()
        assert query.grad.shape == query.shape
