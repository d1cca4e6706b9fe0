"""Positions that act in attention: angles and biases against slow computations."""

import math
import pickle

import pytest
import torch
from torch.utils import _pytree

from cape_plugins import (
    DOMAINS,
    ENCODINGS,
    TYPES,
    PositionConfig,
    build_layer_bias,
    build_position_encoder,
    build_stack_positions,
    coordinate_positions,
    patch_positions,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.rotary import Rotation
from cape_plugins.settings.registry import types_of

HEAD_DIM, HEADS = 12, 3
IN_ATTENTION = [name for name, row in TYPES.items() if ENCODINGS[row.encoding].in_attention]
EVERYWHERE = [(name, domain) for domain in DOMAINS for name in IN_ATTENTION]


def coordinates(domain):
    return torch.rand(2, 6, DOMAINS[domain].num_coords, generator=torch.Generator().manual_seed(0))


def stack_positions(config, positions):
    """What the layers of a stack get in evaluation."""
    encoder = build_position_encoder(config, 8).eval()
    return build_stack_positions(config, HEAD_DIM, HEADS)(encoder, positions)


def attend(config, positions, draw=None, query_positions=None, encoder=None):
    """Outputs of one layer of attention for random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    encoder = encoder or build_position_encoder(config, 8).eval()
    stack = build_stack_positions(config, HEAD_DIM, HEADS, encoder.unit)
    torch.manual_seed(0)
    bias = build_layer_bias(config, HEADS, encoder.unit, config.architecture == "decoder")
    attention = stack(encoder, positions, draw, query_positions, random=encoder.draws)
    samples, length = attention.key.shape[:2]
    shape = (max(samples, 2), HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    query = query[:, :, -attention.query.shape[1] :]
    turned_query, turned_key = attention.turn(query, key)
    scores = turned_query @ turned_key.mT
    layer_bias = attention.bias_of(bias, query, key)
    return (scores if layer_bias is None else scores + layer_bias).softmax(-1) @ value


@pytest.mark.parametrize(("base", "speed"), [(10_000.0, 1.0), (100.0, 2 * math.pi)])
@pytest.mark.parametrize("num_coords", [1, 2, 4])
def test_each_pair_of_channels_is_turned_by_its_angle(num_coords, base, speed):
    """The slowest axis has the first pairs; pairs that are left over stay."""
    coords = 20 * torch.rand(2, 5, num_coords)
    x = torch.randn(2, HEADS, 5, 2 * 9)
    turned = Rotation(18, num_coords, base, speed)(coords).turn(x)
    pairs = 9 // num_coords
    expected = x.clone().double()
    for pair in range(num_coords * pairs):
        axis = num_coords - 1 - pair // pairs
        frequency = speed / base ** (pair % pairs / pairs)
        rotation = torch.polar(
            torch.ones(2, 1, 5, dtype=torch.float64), coords[:, None, :, axis].double() * frequency
        )
        number = torch.complex(*(x[..., pair + half].double() for half in (0, 9))) * rotation
        expected[..., pair], expected[..., pair + 9] = number.real, number.imag
    torch.testing.assert_close(turned, expected.float(), rtol=1e-5, atol=2e-5)


def test_layers_share_the_sum_of_bias_and_masks():
    """Other masks, another precision or a learned bias of the layer give another sum."""
    positions = stack_positions(PositionConfig("alibi"), token_position_at(0, length=4))
    x, mask = torch.randn(2, HEADS, 4, HEAD_DIM), torch.randn(4, 4)

    def combined(layer_bias=None, query=x, mask=mask, scale=1.0):
        return positions.mask_of(
            layer_bias, query, query, lambda bias, m, s: s * (bias + m.to(bias.dtype)), mask, scale
        )

    first = combined()
    assert torch.equal(first, positions.bias + mask)
    assert combined() is first
    assert torch.equal(combined(mask=2 * mask), positions.bias + 2 * mask)
    assert torch.equal(combined(scale=3.0), 3 * first)
    assert combined(query=x.half()).dtype == torch.float16
    learned = build_layer_bias(PositionConfig("fire", "text"), HEADS)
    assert not torch.equal(combined(learned), first)
    assert combined(learned) is not combined(learned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_of_far_positions_are_exact_in_half_precision(dtype):
    """The angles of 100 000 positions, in a model of any precision and under autocast."""
    numbers = torch.tensor([0, 255, 257, 2049, 65_537, 99_999])
    rotation = Rotation(HEAD_DIM, 1, 10_000.0, 1.0).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rotation(numbers.view(1, -1, 1).float())
    frequencies = 10_000.0 ** (-torch.arange(6) / 6.0)
    exact = numbers[:, None].double() * frequencies.float().double()
    of_channels = exact.cos().repeat(1, 2), torch.cat((-exact.sin(), exact.sin()), dim=-1)
    torch.testing.assert_close(cos[0, 0].double(), of_channels[0], rtol=0, atol=6e-3)
    torch.testing.assert_close(sin[0, 0].double(), of_channels[1], rtol=0, atol=6e-3)
    one = torch.ones(1, 1, len(numbers), HEAD_DIM, dtype=dtype)
    turned = rotation(numbers.view(1, -1, 1).float()).turn(one)
    assert turned.dtype == dtype
    assert len(turned[0, 0].unique(dim=0)) == len(numbers)


@pytest.mark.parametrize("where", [*EVERYWHERE, *((n, "text", "decoder") for n in IN_ATTENTION)])
def test_moving_all_positions_changes_nothing(where):
    """Of fire in a causal model up to its threshold, see FireBias."""
    config = PositionConfig(*where)
    coords = coordinates(config.domain)
    here, there = (attend(config, coordinate_positions(part)) for part in (coords, coords + 0.5))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    stretched = attend(config, coordinate_positions(2 * coords))
    assert not torch.allclose(here, stretched, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_queries_at_the_end_see_what_they_see_among_all(name):
    """As in incremental decoding."""
    config = PositionConfig(name, "text", "decoder")
    whole = attend(config, token_position_at(0, length=7))
    last = attend(config, token_position_at(0, length=7), None, token_position_at(5, length=2))
    torch.testing.assert_close(last, whole[:, :, 5:])


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_padding_on_either_side_is_not_counted(name):
    config = PositionConfig(name, "text")
    encoder = build_position_encoder(config, 8).eval()
    valid = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]]).bool()
    attention = build_stack_positions(config, HEAD_DIM, HEADS)(encoder, token_positions(valid))
    x = torch.zeros(3, HEADS, 5, HEAD_DIM)
    x.transpose(1, 2)[valid] = torch.randn(3, HEADS, HEAD_DIM).repeat(3, 1, 1)
    query, key = attention.turn(x, x)
    scores = query @ key.mT
    if (bias := attention.bias_of(build_layer_bias(config, HEADS), x, x)) is not None:
        scores = scores + bias
    first, *others = (score[:, rows][:, :, rows] for score, rows in zip(scores, valid, strict=True))
    for other in others:
        torch.testing.assert_close(other, first)
    assert not torch.allclose(first[:, 0, 1:2], first[:, 1, 2:])


@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_augmentation_that_moves_nothing_is_the_plain_type_bit_for_bit(name, domain):
    positions = coordinate_positions(coordinates(domain))
    moves = {"max_local_shift": 0.5, "max_global_scale": 2.0}
    if not DOMAINS[domain].grid:
        moves |= {"draw_positions": "uniform", "max_position": 10}
        positions = token_positions(torch.ones(2, 6).bool())
    plain = attend(PositionConfig(name, domain), positions)
    config = PositionConfig(name, domain, augment_probability=0.0, **moves)
    encoder = build_position_encoder(config, 8).train()
    assert encoder.draw(2) is None
    assert torch.equal(attend(config, positions, encoder=encoder), plain)
    config = PositionConfig(name, domain, **moves)
    encoder = build_position_encoder(config, 8)
    assert torch.equal(attend(config, positions, encoder=encoder.eval()), plain)
    draw = encoder.train().draw(2)
    assert not torch.allclose(attend(config, positions, draw, encoder=encoder), plain, atol=1e-3)
    with pytest.raises(ValueError, match=f"'{name}' in training needs a draw"):
        attend(config, positions, encoder=encoder)


def test_grids_of_distances_have_cells_that_span_the_image():
    """Distances across the image are the same at every resolution; a single cell is in the
    middle."""
    encoder = build_position_encoder(PositionConfig("rope", "image"), 8).eval()
    for rows, columns in ((4, 8), (1, 3)):
        coords = encoder.coordinates(patch_positions(rows, columns))[0]
        x, y = coords.view(rows, columns, 2).unbind(-1)
        torch.testing.assert_close(x[0], (2 * torch.arange(columns) + 1) / columns - 1)
        torch.testing.assert_close(y[:, 0], (2 * torch.arange(rows) + 1) / rows - 1)
    ends = build_position_encoder(PositionConfig("sinpos", "image"), 8).eval()
    assert ends.coordinates(patch_positions(4, 8))[0, 0].tolist() == [-1, -1]


def test_tokens_in_front_of_all_positions_have_none():
    """A class token is not turned, and its scores have no bias."""
    x = torch.randn(1, HEADS, 5, HEAD_DIM)
    for name in IN_ATTENTION:
        config = PositionConfig(name, "image")
        attention = stack_positions(config, patch_positions(2, 2))
        query, key = attention.turn(x, x)
        assert torch.equal(query[:, :, 0], x[:, :, 0])
        assert torch.equal(key[:, :, 0], x[:, :, 0])
        bias = attention.bias_of(build_layer_bias(config, HEADS), x, x)
        if bias is not None:
            assert not bias[:, :, 0].any()
            assert not bias[..., 0].any()
            assert bias[:, :, 1:, 1:].any()


def test_positions_of_layers_keep_their_precision_on_the_way():
    """FSDP casts tensors in tuples and dataclasses; accelerate calls `to`."""
    attention = stack_positions(PositionConfig("rope"), token_position_at(0, length=3))
    leaves, _ = _pytree.tree_flatten({"attention_positions": attention})
    assert leaves == [attention]
    moved = attention.to(torch.device("meta"), non_blocking=True)
    assert moved.key.is_meta
    assert moved.key_angles.cos.is_meta
    assert pickle.loads(pickle.dumps(attention)).key.tolist() == attention.key.tolist()


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", 8 * [True]),
        ("first", [True, *7 * [False]]),
        ("every:4", 2 * [False, False, False, True]),
        ("not:4", 2 * [True, True, True, False]),
        ("every:1", 8 * [True]),
    ],
)
def test_layers_are_counted_from_one(layers, expected):
    for name in [*IN_ATTENTION, "relpos"]:
        config = PositionConfig(name, layers=layers)
        assert [config.in_layer(index) for index in range(8)] == expected


NO_DISTANCE = [
    ("max_global_shift", 5, "encoder"),
    ("max_offset", 9, "encoder"),
    ("mean_normalize", True, "encoder"),
    ("relative_context", 4, "encoder"),
    ("synchronize", True, "seq2seq"),
    ("source_scale", "1.25", "seq2seq"),
]


@pytest.mark.parametrize(
    ("name", "option", "value", "architecture"),
    [
        *((name, *case) for name in IN_ATTENTION for case in NO_DISTANCE),
        ("cape", "max_global_shift", 5, "rotary"),
        ("cape", "relative_context", 4, "rotary"),
    ],
)
def test_what_changes_no_distance_is_refused_with_the_reason(name, option, value, architecture):
    reason = "relative keys are another" if option == "relative_context" else "only distances count"
    with pytest.raises(ValueError, match=rf"{option}=.*{reason}"):
        PositionConfig(name, "text", architecture, **{option: value})


def test_drawn_positions_need_a_number_and_a_sequence():
    for name in IN_ATTENTION:
        drawn = PositionConfig(name, draw_positions="subset")
        assert drawn.sampling == "subset"
        assert drawn.max_position == DOMAINS["text"].defaults["max_position"]
        with pytest.raises(ValueError, match=r"max_position=9.*draw_positions subset or uniform"):
            PositionConfig(name, max_position=9)
        with pytest.raises(ValueError, match=r"draw_positions='uniform'.*grid.*no order"):
            PositionConfig(name, "image", draw_positions="uniform")


@pytest.mark.parametrize("name", [n for n, r in types_of("rotary").items() if r.sampling])
def test_drawn_types_of_rotary_models_are_rope_with_the_option(name):
    row = types_of("rotary")[name]
    alias = PositionConfig(name, "text", "rotary")
    rope = PositionConfig("rope", "text", "rotary", draw_positions=row.sampling)
    encoders = [build_position_encoder(config, 8).train() for config in (alias, rope)]
    draws = [encoder.draw(3, generator=torch.Generator().manual_seed(1)) for encoder in encoders]
    assert torch.equal(draws[0].order, draws[1].order)
    raw = token_positions(torch.ones(3, 5).bool())
    coords = [encoder.coordinates(raw, draws[0]) for encoder in encoders]
    assert torch.equal(*coords)
