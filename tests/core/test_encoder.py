"""The position encoder in use, for every row of the registry and every domain: draws, what is bit
for bit the plain sinusoid, padding, batch mates, dtype and evaluation."""

import pytest
import torch

from cape_plugins import (
    DOMAINS,
    ENCODINGS,
    TYPES,
    Draw,
    coordinate_positions,
    frame_positions,
    token_position_at,
    token_positions,
)
from cape_plugins.mathematics.encoder import SIDES
from tests.support.core import (
    ADDING,
    ADDING_TYPES,
    BATCH,
    EVERYWHERE,
    FRAMES,
    LENGTHS,
    RANDOM,
    SEQUENCES,
    SINUSOID_TYPES,
    SINUSOIDS,
    embed,
    make_encoder,
    make_positions,
    random_numbers_untouched,
    reading_coords,
    valid_mask,
    whole_positions,
)
from tests.support.expected import EXPECTED

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_only_random_types_in_training_need_a_draw(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    if encoder.config.random:
        with pytest.raises(ValueError, match=rf"'{name}'.*draw=encoder\.draw"):
            encoder(positions)
        encoder(positions, encoder.draw(BATCH))
        return
    with random_numbers_untouched():
        result = encoder(positions, encoder.draw(BATCH))
    assert (result is not None) == EXPECTED[name].adds
    assert EXPECTED[name].adds or not list(encoder.parameters())


@pytest.mark.parametrize(("name", "domain"), EVERYWHERE)
def test_evaluation_is_deterministic_and_draws_nothing(name, domain):
    encoder, positions = make_encoder(name, domain).eval(), make_positions(domain)
    with random_numbers_untouched():
        assert encoder.draw(BATCH) is None
        first, second = encoder(positions), encoder(positions)
    assert first is second is None or torch.equal(first, second)


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_augmentation_can_be_switched_off_in_training(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    with random_numbers_untouched():
        plain = embed(encoder, positions, random=False)
    assert torch.equal(plain, embed(encoder.eval(), positions))
    draw = encoder.train().draw(BATCH)
    assert not torch.equal(plain, embed(encoder, positions, draw, random=True))
    with pytest.raises(ValueError, match="needs a draw"):
        embed(encoder.eval(), positions, random=True)


@pytest.mark.parametrize(("name", "domain"), RANDOM)
def test_a_generator_reproduces_a_forward(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)

    def forward(seed):
        generator = torch.Generator().manual_seed(seed)
        draw = encoder.draw(BATCH, generator=generator)
        return embed(encoder, positions, draw, generator=generator)

    with random_numbers_untouched():
        first, second, other = forward(1), forward(1), forward(2)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ADDING_TYPES)
def test_a_generator_is_made_only_where_something_is_drawn(name):
    """A model passes a function, and does not need to know what a type draws."""
    encoder, positions, devices = make_encoder(name), make_positions("text"), []

    def make(device):
        devices.append(device)
        return torch.Generator().manual_seed(len(devices))

    for training in (True, False):
        draw = encoder.train(training).draw(BATCH, CPU, make)
        encoder(positions, draw, generator=make)
    local = encoder.config.max_local_shift > 0
    assert devices == [CPU] * (encoder.config.random + local)


@pytest.mark.parametrize("domain", DOMAINS)
def test_offsets_count_grid_steps(domain):
    """Tokens, frames or patches: frames are 0.02 to 0.04 s apart, so are the offsets."""
    encoder = reading_coords(make_encoder("shape", domain, max_offset=20))
    positions = whole_positions(domain, 64)
    offset = (encoder(positions, encoder.draw(64)) - positions.coords) / positions.step
    torch.testing.assert_close(offset, offset[:, :1].expand_as(offset))  # one for each sample
    torch.testing.assert_close(offset, offset.round(), atol=1e-3, rtol=0)
    seen = {round(value) for value in offset.flatten().tolist()}
    assert seen <= set(range(21))
    assert len(seen) > 15


def test_source_and_target_share_the_draw_but_not_the_local_shift():
    settings = {"architecture": "seq2seq", "source_scale": 2.0, "max_global_scale": 1.4}
    sides = [reading_coords(make_encoder("cape", side=side, **settings)) for side in SIDES]
    encoder, decoder = sides
    positions = token_positions(torch.ones(50, 20, dtype=torch.bool))
    draw, other = encoder.draw(50), encoder.draw(50)

    def local_shifts(side, alpha, with_draw):
        """Local shifts, computed from coordinates by removing alpha, shift and scale."""
        return side(positions, with_draw) / draw.scale - draw.shift - alpha * positions.coords

    wrong = local_shifts(encoder, 2.0, other)
    assert wrong.abs().max() > 1  # another draw is noticed
    on_source, on_target = local_shifts(encoder, 2.0, draw), local_shifts(decoder, 1.0, draw)
    for local in (on_source, on_target):
        assert local.abs().max() < 0.5 + 1e-4  # and not scaled by alpha
        assert local.abs().max() > 0.49
    correlation = torch.corrcoef(torch.stack((on_source.flatten(), on_target.flatten())))[0, 1]
    assert abs(correlation) < 4 / 1000**0.5
    # the first tokens of both sides are where the draw puts them
    quiet = torch.zeros(50, 20, 1)
    first = [side(positions, draw, quiet)[:, 0] for side in sides]
    assert torch.equal(*first)
    assert torch.equal(first[0], draw.shift[:, 0] * draw.scale[:, 0])


@pytest.mark.parametrize(("name", "domain"), SINUSOIDS)
def test_zero_maxima_equal_sinpos_bit_for_bit(name, domain):
    positions = make_positions(domain)
    for dtype in (torch.float32, torch.bfloat16):
        encoder = make_encoder(name, domain, **EXPECTED[name].zero).to(dtype)
        assert not encoder.config.random
        with random_numbers_untouched():
            result = encoder(positions, encoder.draw(BATCH), dtype=dtype)
        assert result.dtype == dtype
        assert torch.equal(result, make_encoder("sinpos", domain)(positions, dtype=dtype))


@pytest.mark.parametrize(("name", "domain"), SINUSOIDS)
def test_known_coordinates_give_what_their_grid_gives(name, domain):
    """Positions made by hand take the slow path and agree up to rounding of the phase."""
    with torch.device("meta"):
        encoder = make_encoder(name, domain).eval()
    assert not encoder.state_dict()
    assert not list(encoder.buffers())
    positions = make_positions(domain)
    by_hand = coordinate_positions(positions.coords, positions.valid, positions.step)
    torch.testing.assert_close(encoder(by_hand), encoder(positions), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SINUSOID_TYPES)
@pytest.mark.parametrize("scale", [1.0, 1.05])
def test_one_step_of_decoding_equals_its_row(name, scale):
    alpha = {"architecture": "seq2seq", "source_scale": scale}
    encoder = make_encoder(name, start=2.0, **alpha).eval()
    whole = encoder(token_positions(torch.ones(1, 40, dtype=torch.bool)))
    for index in (0, 7, 39):
        for number in (index, torch.tensor(index)):
            step = encoder(token_position_at(number, CPU))
            assert torch.equal(step[0, 0], whole[0, index])
    assert torch.equal(encoder(token_position_at(7, CPU, 5))[0], whole[0, 7:12])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("domain", SEQUENCES)
def test_half_precision_is_float32_then_cast(domain, dtype):
    shift, encoder, positions = 2000.3, make_encoder("cape", domain), make_positions(domain)
    draw = Draw(torch.full((BATCH, 1, 1), shift), None)
    local = torch.zeros(BATCH, 6, 1)
    scaled = positions.rows * positions.step
    rounded = (scaled + shift).to(dtype).float() - shift
    rounded = positions._replace(rows=rounded / positions.step)
    expected = encoder(positions, draw, local)
    lost = encoder(rounded, draw, local)
    assert (lost - expected).abs().max() > 0.01  # half-precision positions would be wrong
    encoder.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual = encoder(positions, draw, local, dtype=dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize(
    ("name", "domain"),
    # tables have rows for whole grids, not for some of their cells
    [p for p in ADDING if p[1] in SEQUENCES or not ENCODINGS[TYPES[p[0]].encoding].counts],
)
def test_rows_on_padding_are_zero(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    if positions.valid is None:
        # patches that were dropped; a table has no rows for these
        positions = coordinate_positions(positions.coords, valid_mask(), positions.step)
    for training, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        result = encoder.train(training)(positions, encoder.draw(BATCH), dtype=dtype)
        assert result[~positions.valid].eq(0).all()
        assert result[positions.valid].abs().sum(-1).ne(0).all()


@pytest.mark.parametrize(("name", "domain"), [pair for pair in ADDING if pair[1] in SEQUENCES])
def test_a_sample_alone_equals_the_sample_in_its_batch(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    draw = encoder.draw(BATCH)
    local = torch.rand(BATCH, 6, 1) if encoder.config.max_local_shift else None
    batch = encoder(positions, draw, local)
    for row, length in enumerate(LENGTHS):

        def of_sample(part, length=None, row=row):
            return part[row : row + 1, :length] if isinstance(part, torch.Tensor) else part

        alone = positions._replace(
            rows=positions.rows[:, :length],
            step=of_sample(positions.step),
            valid=of_sample(positions.valid, length),
            row_of=of_sample(positions.row_of, length),
        )
        draw_alone = Draw(*map(of_sample, draw or Draw()))._replace(batch_size=None)
        result = encoder(alone, draw_alone, of_sample(local, length))
        torch.testing.assert_close(result[0], batch[row, :length], atol=2e-4, rtol=0)


@pytest.mark.parametrize("positions", ["tokens", "one hop", "hops"])
@pytest.mark.parametrize("mean_normalize", [True, False])
def test_evaluation_is_centred_on_the_mean_of_what_is_valid(positions, mean_normalize):
    """Also if the samples share one grid, which differs between samples after centring."""
    valid = valid_mask()
    positions = {
        "tokens": token_positions(valid),
        "one hop": frame_positions(FRAMES, 0.03),
        "hops": frame_positions(FRAMES, torch.tensor([0.03, 0.02, 0.04])),
    }[positions]
    encoder = make_encoder("cape", mean_normalize=mean_normalize, start=0.5)
    encoder = reading_coords(encoder).eval()
    coords = encoder(positions)[..., 0]
    means = torch.stack([row[mask].mean() for row, mask in zip(coords, valid, strict=True)])
    assert means.abs().lt(1e-6).all() == mean_normalize
    if not mean_normalize:
        expected = 0.5 + positions.coords[..., 0].expand(3, 6)
        torch.testing.assert_close(coords[valid], expected[valid])


@pytest.mark.parametrize("domain", SEQUENCES)
def test_a_row_of_padding_only_is_zero_and_not_nan(domain):
    encoder = make_encoder("cape", domain)
    result = encoder(make_positions(domain, (6, 0, 2)), encoder.draw(3))
    assert result.isfinite().all()
    assert result[1].eq(0).all()
    assert result[0].ne(0).any()


@pytest.mark.parametrize("domain", DOMAINS)
def test_coordinates_on_padding_may_be_anything(domain):
    """The appendix marks padding by NaN."""
    encoder, valid = make_encoder("cape", domain), valid_mask()
    coords = make_positions(domain).coords.expand(BATCH, -1, -1)
    soiled = torch.where(valid[..., None], coords, float("nan"))
    draw, local = encoder.draw(BATCH), torch.zeros_like(coords)
    clean, result = (
        encoder(coordinate_positions(c, valid, 0.1), draw, local) for c in (coords, soiled)
    )
    assert torch.equal(result, clean)
