"""Sinusoids: the papers' equations by hand and against the references, formulas of hosts bit for
bit, layouts, shift invariance, and float32 whatever the dtype, the autocast or the device."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from cape_plugins import DOMAINS, PositionConfig, Sinusoid, build_position_encoder, patch_positions
from cape_plugins.mathematics.encodings import FREQUENCIES, LAYOUTS
from tests.reference import appendix_a
from tests.support.core import default_dtype
from tests.support.expected import DOMAIN_SAMPLES

NAMES = list(FREQUENCIES)
# Domains may share frequencies. The frequencies of hosts are for text.
DOMAINS_OF = {
    name: [key for key, row in DOMAINS.items() if row.frequencies == name] or ["text"]
    for name in NAMES
}
AXES = {name: DOMAINS[domains[0]].num_coords for name, domains in DOMAINS_OF.items()}
REACH = {
    name: max(DOMAIN_SAMPLES[domain].reach for domain in domains)
    for name, domains in DOMAINS_OF.items()
}
ALL = [(name, layout) for name in NAMES for layout in LAYOUTS]
CPU = torch.device("cpu")


def some_coords(name, batch=3, length=7):
    return (torch.rand(batch, length, AXES[name]) * 2 - 1) * REACH[name]


def phase_rounding(name):
    """Bound on the error of a phase: half a unit in the last place of the largest, for each of the
    roundings (frequency, product, sum) and axes, and of the offset pi / 2."""
    highest = FREQUENCIES[name](64, CPU).abs().max().item()
    return 4 * AXES[name] * REACH[name] * highest * 2.0**-24 + 1e-6


def test_text_has_the_sinusoids_computed_by_hand():
    # K = 4: frequencies 1/100 and 1/10000; at position 100 the phases are 1 and 0.01
    embedding = Sinusoid(4)(torch.tensor([[[100.0], [0.0]]]))
    expected = torch.tensor([[0.5403, 0.8415, 0.99995, 0.0100], [1.0, 0.0, 1.0, 0.0]])
    torch.testing.assert_close(embedding[0], expected, atol=1e-4, rtol=0)


def test_audio_turns_thirty_times_as_fast_as_text():
    # 30 times as fast: phase 1 after 100 / 30 seconds
    embedding = Sinusoid(4, "audio")(torch.tensor([[[100.0 / 30]]]))
    expected = torch.tensor([0.5403, 0.8415, 0.99995, 0.0100])
    torch.testing.assert_close(embedding[0, 0], expected, atol=1e-4, rtol=0)


def test_images_have_the_waves_computed_by_hand():
    # K = 4: radii sqrt(10) and 10, angles 1 and 2 rad (Eq. 4)
    x, y = 0.25, -0.5
    phases = [
        math.pi * math.sqrt(10) * (math.cos(1) * x + math.sin(1) * y),
        math.pi * 10 * (math.cos(2) * x + math.sin(2) * y),
    ]
    expected = [f(phase) for phase in phases for f in (math.cos, math.sin)]
    embedding = Sinusoid(4, "image")(torch.tensor([[[x, y]]]))[0, 0]
    torch.testing.assert_close(embedding, torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "factor"), [("text", 1.0), ("audio", 30.0)])
@pytest.mark.parametrize("dim", [4, 10])
def test_one_dimensional_sinusoids_equal_the_reference(name, factor, dim):
    coords = some_coords(name)
    expected = appendix_a.sinusoids_1d(coords[..., 0].double().numpy(), dim, factor)
    for actual in (Sinusoid(dim, name)(coords), Sinusoid(dim, name).grid(coords[0])[None]):
        part = expected[: len(actual)]
        np.testing.assert_allclose(actual.numpy(), part, atol=phase_rounding(name))


def test_image_sinusoids_equal_equation_three_and_four():
    dim, coords = 10, some_coords("image").double()
    expected = np.empty((*coords.shape[:2], dim))
    for k in range(1, dim // 2 + 1):
        w_x, w_y = (10 ** (2 * k / dim) * f(k) for f in (math.cos, math.sin))
        phase = math.pi * (w_x * coords[..., 0] + w_y * coords[..., 1])
        expected[..., 2 * k - 2], expected[..., 2 * k - 1] = phase.cos(), phase.sin()
    actual = Sinusoid(dim, "image")(coords.float()).numpy()
    np.testing.assert_allclose(actual, expected, atol=phase_rounding("image"))


def test_video_sinusoids_are_those_worked_out_by_hand():
    """K = 4; the golden ratio less 1 spreads directions along the axis of time."""
    x, y, time = 0.3, -0.7, 0.5
    expected = []
    for k in (1, 2):
        height = 2 * ((k * 0.6180339887) % 1) - 1
        radius, length = math.sqrt(1 - height**2), math.pi * 10 ** (k / 2)
        angle = radius * (math.cos(k) * x + math.sin(k) * y) + height / 2 * time
        expected += [math.cos(length * angle), math.sin(length * angle)]
    embedding = Sinusoid(4, "video")(torch.tensor([[[x, y, time]]]))[0, 0]
    torch.testing.assert_close(embedding, torch.tensor(expected), atol=2e-5, rtol=0)


def test_tubelets_of_a_clip_alias_less_than_patches_of_an_image():
    clip = Sinusoid(768, "video").aliased(8, 14, 14, seconds=8 / 30)
    assert 0 < clip < Sinusoid(768, "image").aliased(14, 14)
    # ten seconds from frame to frame are too far for most
    assert Sinusoid(768, "video").aliased(8, 14, 14, seconds=10.0) > 600


def fairseq_formula(rows, dim):
    """Table of fairseq's SinusoidalPositionalEmbedding.get_embedding."""
    half_dim = dim // 2
    emb = math.log(10000) / (half_dim - 1)
    emb = torch.exp(torch.arange(half_dim, dtype=torch.float) * -emb)
    emb = torch.arange(rows, dtype=torch.float).unsqueeze(1) * emb.unsqueeze(0)
    return torch.cat([torch.sin(emb), torch.cos(emb)], dim=1).view(rows, -1)


@pytest.mark.parametrize("dim", [4, 6, 64, 512])
def test_fairseq_layout_is_fairseqs_table_bit_for_bit(dim):
    table = fairseq_formula(300, dim)
    grid = torch.arange(300.0)[:, None]
    assert torch.equal(Sinusoid(dim, "fairseq", "sin_cos_blocks").grid(grid), table)
    if dim > 4:
        assert not torch.allclose(Sinusoid(dim, "text", "sin_cos_blocks").grid(grid), table)


@pytest.mark.parametrize("dim", [4, 10, 512])
def test_marian_layout_is_marians_table_bit_for_bit(dim):
    """Computed as in transformers' MarianSinusoidalPositionalEmbedding.create_weight."""
    angle = np.arange(1024)[:, None] / np.power(10000, 2 * np.arange(dim // 2) / dim)
    table = torch.from_numpy(np.concatenate((np.sin(angle), np.cos(angle)), axis=1)).float()
    grid = torch.arange(1024.0)[:, None]
    assert torch.equal(Sinusoid(dim, "marian", "sin_cos_blocks").grid(grid), table)


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_pass_over_a_batch_equals_the_exact_grid(name, layout):
    encode, coords = Sinusoid(64, name, layout), some_coords(name)
    exact = torch.stack([encode.grid(rows) for rows in coords])
    torch.testing.assert_close(encode(coords), exact, rtol=0, atol=phase_rounding(name))


@pytest.mark.parametrize(("name", "layout"), ALL)
def test_inner_products_depend_on_differences_only(name, layout):
    encode, dim = Sinusoid(64, name, layout), 64
    coords = some_coords(name, 1, 9) / 4
    shift = some_coords(name, 5, 1) / 4

    def products(points):
        embedding = encode(points)
        return embedding @ embedding.mT

    tolerance = dim * phase_rounding(name)
    torch.testing.assert_close(
        products(coords + shift), products(coords).expand(5, 9, 9), rtol=0, atol=tolerance
    )
    scaled = products(coords * 1.4)  # a scale is no shift
    assert (scaled - products(coords)).abs().max() > max(1.0, 10 * tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name):
    encode, coords = Sinusoid(16, name), some_coords(name)
    weights = FREQUENCIES[name](16, CPU).float()
    expected, exact, phase = encode(coords), encode.grid(coords[0]), coords @ weights
    with torch.autocast("cpu", torch.bfloat16):
        rounded = (coords @ weights).float()
        actual, actual_exact = encode(coords), encode.grid(coords[0])
    assert (rounded - phase).abs().max() > 0.01  # a matmul would be rounded
    assert actual.dtype == actual_exact.dtype == torch.float32
    assert torch.equal(actual, expected)
    assert torch.equal(actual_exact, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_of_the_module_and_the_default_change_nothing(dtype):
    coords = some_coords("text")
    expected = Sinusoid(16)(coords)
    with default_dtype(dtype):
        actual = Sinusoid(16).to(dtype)(coords)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_learned_coordinates(name):
    """Coordinates may be learned; the in-place operations must not damage their gradient."""
    encode = Sinusoid(8, name)
    coords = (some_coords(name, 1, 3) / REACH[name]).requires_grad_()
    target = torch.randn(1, 3, 8)
    (encode(coords) * target).sum().backward()
    exact = coords.detach().clone().requires_grad_()
    (encode.grid(exact[0]) * target[0]).sum().backward()
    assert coords.grad.abs().max() > 0
    torch.testing.assert_close(coords.grad, exact.grad, atol=1e-4, rtol=1e-4)


def aliased_by_hand(dim, rows, columns, gamma=1.0):
    """Channels whose phase moves by more than pi between neighbours, in a loop over patches."""
    grid = gamma * patch_positions(rows, columns).coords[0].view(rows, columns, 2).double()
    count = 0
    for k in range(1, dim // 2 + 1):
        wave = math.pi * 10 ** (2 * k / dim) * torch.tensor([math.cos(k), math.sin(k)]).double()
        phase = grid @ wave
        steps = [(phase[1:] - phase[:-1]).abs(), (phase[:, 1:] - phase[:, :-1]).abs()]
        count += 2 * any((step > math.pi).any().item() for step in steps)
    return count


@pytest.mark.parametrize("dim", [8, 192])
@pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 7), (14, 14)])
def test_channels_that_alias_are_counted_as_by_hand(size, dim):
    for gamma in (1.0, 0.4):
        expected = aliased_by_hand(dim, *size, gamma)
        assert Sinusoid(dim, "image").aliased(*size, gamma=gamma) == expected


def built(size, dim=128, name="cape", **options):
    config = PositionConfig(name, "image", **options)
    return build_position_encoder(config, dim, table_size=size)


def test_a_coarse_grid_is_warned_of_with_the_number_of_channels():
    """CIFAR-10 in patches of 4 pixels, with 128 channels: 42 %."""
    with pytest.warns(UserWarning, match=r"^54 of 128 channels .*gamma=0\.53 or less\.$"):
        built((8, 8))
    with warnings.catch_warnings(), FakeTensorMode():  # a model without values
        warnings.simplefilter("error")
        built((8, 8))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((14, 14), {}),  # the papers
        ((8, 8), {"gamma": 0.53}),  # what the warning recommends
        ((8, 8), {"name": "nopos"}),
        ((8, 8), {"name": "abspos"}),
        (1, {}),  # the caller does not say
    ],
)
def test_no_other_grid_is_warned_of(size, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder = built(size, **options)
        encoder(patch_positions(2, 2), encoder.draw(2))  # forwards are silent
