"""The audio spectrogram transformer: bands x frames, of which time alone is moved."""

import pytest
import torch
import transformers

import hf_models
from cape_plugins import Draw
from tests.support.expected import IN_ATTENTION, acts_in_attention, types_whose
from tests.support.generated import drawn, switched
from tests.support.hf import STACK

BANDS, FRAMES = 20, 48
SIZES = {**STACK, "patch_size": 8, "frequency_stride": 6, "time_stride": 5}
ROWS, COLUMNS = 3, 9  # overlapping patches
CAPE = {"type": "cape", "max_global_shift": 2.0, "max_global_scale": 1.5}
# a learned table has the rows of the stock model's patches, whatever the duration
OF_ANY_DURATION = types_whose(lambda encoding: not (acts_in_attention(encoding) or encoding.counts))


def build(**fields):
    sizes = {**SIZES, "num_mel_bins": BANDS, "max_length": FRAMES, **fields}
    return drawn(transformers.ASTForAudioClassification(transformers.ASTConfig(**sizes)))


def sounds(frames=FRAMES):
    return torch.randn(1, frames, BANDS).repeat(2, 1, 1)


def rows_of(model, draw=None, frames=FRAMES):
    """``[B, rows, columns, C]``, what is added to the patches."""
    seam, seen = model.seams()[0], []
    stock = seam.embed_patches
    seam.embed_patches = lambda *args: seen.append(stock(*args)) or seen[0]
    try:
        model(sounds(frames), **({} if draw is None else {"draw": draw}))
    finally:
        del seam.embed_patches
    return seen[0].unflatten(1, (ROWS, -1))


def sinusoids(times, half):
    """The paper's sinusoids for sounds: 30 radians a second at most; cosines and sines in turn."""
    k = torch.arange(1, half // 2 + 1)
    phase = times[..., None] * 30.0 * 10_000.0 ** (-2.0 * k / half)
    return torch.stack((phase.cos(), phase.sin()), -1).flatten(-2)


def test_columns_of_patches_are_at_their_seconds():
    model = switched(build(), type="sinpos")
    assert (model.seams()[0].grid, model.seams()[0].special_tokens) == ((ROWS, COLUMNS), 2)
    added = rows_of(model)
    # a hop of 10 ms, a window of 25 ms, patches of 8 frames, 5 frames apart
    seconds = 0.0125 + 0.035 + 0.05 * torch.arange(COLUMNS)
    expected = sinusoids(seconds, 16).expand(1, ROWS, -1, -1)
    torch.testing.assert_close(added[..., :16], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows_of(model, frames=200)[:, :, :COLUMNS], added)


def test_the_frequency_axis_does_not_move():
    model = switched(build(), **CAPE)
    at_rest = rows_of(model)
    shift, scale = torch.tensor([0.0, 1.5]), torch.tensor([1.0, 1.4])
    draw = Draw(shift.view(2, 1, 1), scale.view(2, 1, 1), batch_size=2)
    moved = rows_of(model.train(), draw)
    torch.testing.assert_close(moved[..., 16:], at_rest[..., 16:].expand(2, -1, -1, -1))
    assert not torch.allclose(moved[1, ..., :16], at_rest[0, ..., :16], atol=0.1)
    # neither in one row of patches otherwise than in another
    torch.testing.assert_close(moved[..., :16], moved[:, :1, :, :16].expand(-1, ROWS, -1, -1))
    rows = at_rest[0, :, 0, 16:]
    assert (rows[1:] - rows[:-1]).abs().amax(1).min() > 0.1


@pytest.mark.parametrize("name", OF_ANY_DURATION)
def test_sounds_of_any_duration(name):
    model = switched(build(), type=name)
    for frames in (8, 30, FRAMES, 200):
        assert torch.isfinite(model.train()(sounds(frames)).logits).all()
        assert torch.isfinite(model.eval()(sounds(frames)).logits).all()
    with pytest.raises(ValueError, match=r"7 frames and 20 bands is smaller than a patch"):
        model(sounds(7))


def test_the_stock_table_takes_one_duration_until_it_is_resized():
    model = switched(build(), type="abspos")
    with pytest.raises(ValueError, match=rf"200 frames .*: {FRAMES} frames .*extend_table"):
        model(sounds(200))
    longer = hf_models.extend_table(model, 200, "stretch")
    assert torch.isfinite(longer(sounds(200)).logits).all()


def test_special_tokens_get_their_rows():
    """A table of zeros but for the rows of the class and the distillation token is not lost."""
    stock, inputs = build(), sounds()
    with torch.no_grad():
        stock.audio_spectrogram_transformer.embeddings.position_embeddings[:, 2:].zero_()
    torch.testing.assert_close(switched(stock, type="nopos")(inputs).logits, stock(inputs).logits)


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_positions_in_attention_are_refused(name):
    with pytest.raises(ValueError, match="no layer takes them"):
        switched(build(), type=name)
