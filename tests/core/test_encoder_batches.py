"""What else is in a batch does not matter: padding on either side, other samples, whatever stands
on padding; and samples that share an image grid or the hop of audio differ where they must."""

import pytest
import torch

from cape_plugins import (
    DOMAINS,
    ENCODINGS,
    TYPES,
    Draw,
    coordinate_positions,
    frame_positions,
    token_positions,
)
from tests.support.core import (
    ADDING,
    BATCH,
    FRAMES,
    LENGTHS,
    SEQUENCES,
    make_encoder,
    make_positions,
    reading_coords,
    valid_mask,
)

ON_GRIDS = [pair for pair in ADDING if DOMAINS[pair[1]].grid]
# Tables have rows for whole grids, not for some of their cells.
PADDED = [p for p in ADDING if p not in ON_GRIDS or not ENCODINGS[TYPES[p[0]].encoding].counts]


@pytest.mark.parametrize(("name", "domain"), PADDED)
def test_rows_on_padding_are_zero(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    if positions.valid is None:
        # patches that were dropped; a table has no rows for these
        positions = coordinate_positions(positions.coords, valid_mask(), positions.step)
    for training, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        result = encoder.train(training)(positions, encoder.draw(BATCH), dtype=dtype)
        assert result[~positions.valid].eq(0).all()
        assert result[positions.valid].abs().sum(-1).ne(0).all()


@pytest.mark.parametrize("name", [name for name, domain in ADDING if domain == "text"])
def test_left_and_right_padded_tokens_get_the_same(name):
    right, left = valid_mask(), valid_mask(left=True)
    for start in (0.0, 2.0):
        encoder = make_encoder(name, start=start).eval()
        a = encoder(token_positions(right))
        b = encoder(token_positions(left))
        assert not torch.equal(a, b)
        assert torch.equal(a[right], b[left])


@pytest.mark.parametrize(("name", "domain"), [pair for pair in ADDING if pair not in ON_GRIDS])
def test_a_sample_alone_equals_the_sample_in_its_batch(name, domain):
    encoder, positions = make_encoder(name, domain), make_positions(domain)
    draw = encoder.draw(BATCH)
    local = torch.rand(BATCH, 6, 1) if encoder.config.max_local_shift else None
    batch = encoder(positions, draw, local)
    for row, length in enumerate(LENGTHS):
        step = positions.step
        alone = positions._replace(
            rows=positions.rows[:, :length],
            step=step[row : row + 1] if isinstance(step, torch.Tensor) else step,
            index=positions.index[row : row + 1, :length],
        )
        own = (
            part[row : row + 1] if isinstance(part, torch.Tensor) else None
            for part in draw or Draw()
        )
        result = encoder(
            alone, Draw(*own), None if local is None else local[row : row + 1, :length]
        )
        torch.testing.assert_close(result[0], batch[row, :length], atol=2e-4, rtol=0)


@pytest.mark.parametrize("positions", ["tokens", "one hop", "hops"])
@pytest.mark.parametrize("mean_normalize", [True, False])
def test_evaluation_is_centred_on_the_mean_of_what_is_valid(positions, mean_normalize):
    """Holds where the samples share one grid, too, which is not the same once it is centred."""
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
