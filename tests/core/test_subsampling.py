"""Where the outputs of the convolutions stand in time, alone and in a batch."""

import pytest
import torch

from cape_plugins import PositionConfig, build_position_encoder, draw_local, timed_frame_positions
from cape_plugins.speech.batching import equal_length, frame_nanoseconds
from cape_plugins.speech.features import WINDOW_SECONDS, log_mel
from cape_plugins.speech.subsampling import ConvSubsampler, subsampled_lengths, subsampled_positions

RATE = 16000
LAYERS = {"paper": [(7, 3)], "speech2text": [(5, 2), (5, 2)], "none": [(3, 1)]}


def subsampler(layers, bins=8):
    torch.manual_seed(0)
    return ConvSubsampler([bins, *[4] * len(layers)], layers)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("hop", [0.0077, 0.020])
def test_a_click_is_found_at_its_time(layers, hop):
    """The position of the output that a click changes most is the time of the click."""
    wave = torch.randn(RATE * 2, generator=torch.Generator().manual_seed(1)) * 1e-3
    clicked = wave.clone()
    clicked[int(1.23 * RATE)] += 0.9
    model = subsampler(layers)
    with torch.no_grad():
        for conv in model.conv_layers:  # averages, so that each output looks at all of its field
            conv.weight.fill_(0.1)
            conv.bias.zero_()
    frames = [log_mel(samples, RATE, 8, hop, normalize=False)[None] for samples in (wave, clicked)]
    lengths = torch.tensor([frames[0].shape[1]])
    with torch.no_grad():
        (quiet, outputs), (loud, _) = (model.subsample(mel, lengths) for mel in frames)
    positions = subsampled_positions(outputs, quiet.shape[1], model.stride, hop)
    times = positions.coords[0, :, 0] + WINDOW_SECONDS / 2
    change = (loud - quiet).abs().sum(-1)[0]
    centre = (times * change).sum() / change.sum()
    assert abs(float(centre) - 1.23) < max(0.0125, 0.75 * hop * model.stride)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_batch_equals_its_samples(layers):
    model = subsampler(layers)
    features = torch.randn(3, 50, 8)
    lengths = torch.tensor([50, 31, 7])
    hidden, outputs = model.subsample(features, lengths)
    assert outputs.tolist() == [subsampled_lengths(layers, int(length)) for length in lengths]
    for row, length in enumerate(lengths):
        alone, _ = model.subsample(features[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(hidden[row, : outputs[row]], alone[0])
        assert not hidden[row, outputs[row] :].any()


def test_skipped_frames_keep_their_times_and_order():
    """Positions of outputs are times of frames that stay; a local shift does not change order."""
    frames = [torch.randn(90, 8), torch.randn(61, 8)]
    features, frame_numbers = equal_length(frames, torch.Generator().manual_seed(3))
    times = frame_nanoseconds(frame_numbers, [0.008, 0.0118])
    model = subsampler([(7, 3)])
    hidden, outputs = model.subsample(features, torch.tensor([61, 61]))
    positions = subsampled_positions(outputs, hidden.shape[1], 3, 0.01, times)
    expected = frame_numbers[:, ::3] * torch.tensor([[0.008], [0.0118]])  # since the first centre
    torch.testing.assert_close(positions.coords[..., 0], expected)
    torch.testing.assert_close(positions.step.flatten(), torch.tensor([0.024, 0.0354]))
    for _ in range(20):
        shifted = positions.coords + draw_local(positions.coords, positions.step, 0.5, 2)
        assert (shifted.diff(dim=1) > 0).all()


def test_learned_rows_follow_the_frames_that_stay():
    encoder = build_position_encoder(PositionConfig("abspos", "audio"), 8, table_size=5).eval()
    times = torch.tensor([[0.1, 0.3, 0.4, 0.5, 0.9, 1.0, 7.0]])
    out = encoder(timed_frame_positions(times, torch.tensor([6]), 0.1))
    torch.testing.assert_close(out[0, :5], encoder.encoding.weight[:5].detach())
    torch.testing.assert_close(out[0, 5], encoder.encoding.weight[0].detach())
    assert not out[0, 6].any(), "padding"
