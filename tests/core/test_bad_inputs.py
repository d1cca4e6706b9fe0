"""Bad inputs: each is refused with a ValueError that names the argument, its value and what is
allowed. Options of the configuration are in test_options.py, files and counts in test_alpha.py."""

import math

import pytest
import torch

from cape_plugins import (
    PositionConfig,
    PositionTable,
    RelativePositions,
    Sinusoid,
    coordinate_positions,
    frame_positions,
    patch_positions,
    timed_frame_positions,
    token_positions,
)
from cape_plugins.mathematics.augmentation import draw_global
from cape_plugins.mathematics.rotary import Rotation
from cape_plugins.speech.batching import PaddingFreeBatches, equal_length
from cape_plugins.speech.features import log_mel, spec_augment
from cape_plugins.speech.subsampling import ConvSubsampler, subsampled_positions
from tests.support.core import make_encoder, make_positions, valid_mask

FRAMES = torch.tensor([3, 2])


CAPE = make_encoder("cape")
TEXT = make_positions("text")
PAIR = make_encoder("rfs", architecture="seq2seq", source_scale=1)
OUTPUTS = torch.tensor([2])
BAD = [
    (lambda: token_positions(torch.ones(2, 3).long()), "int64.*bool"),
    (lambda: token_positions(torch.ones(3).bool()), r"\(3,\).*\[batch"),
    (lambda: timed_frame_positions(torch.rand(3, 4), FRAMES, 0.1), r"\(3, 4\).*\(2,\)"),
    (lambda: frame_positions(FRAMES, 0), "seconds_per_frame=0.*> 0"),
    (lambda: frame_positions(FRAMES, math.nan), "seconds_per_frame=nan.*> 0"),
    (lambda: frame_positions(FRAMES, torch.rand(3)), r"seconds_per_frame.*\(3,\).*\[2\]"),
    (lambda: frame_positions(FRAMES.float(), 0.1), "num_frames.*float32"),
    (lambda: frame_positions(-FRAMES, 0.1), "num_frames holds -2.*>= 0"),
    (lambda: frame_positions(50, 0.1), "num_frames=50.*torch.tensor"),
    (lambda: patch_positions(0, 3), "height=0.*> 0.*smaller"),
    (lambda: patch_positions(3, 2, 2, seconds=0.0), "seconds=0.0 .*allowed: > 0"),
    (lambda: patch_positions(3, 2, 2, seconds=-0.25), "seconds=-0.25 .*allowed: > 0"),
    (lambda: patch_positions(3, 2, 2, seconds=math.inf), "seconds=inf .*allowed: > 0"),
    (lambda: patch_positions(3, 2, 2, seconds=math.nan), "seconds=nan .*allowed: > 0"),
    (lambda: make_encoder(unit=0.0), "unit=0.0.*> 0"),
    (lambda: make_encoder(side="left"), "side='left'.*source, target"),
    (lambda: coordinate_positions(torch.rand(1, 2, 9)), r"\(1, 2, 9\).*1 or 2"),
    (lambda: coordinate_positions(torch.rand(2, 3)), r"\(2, 3\).*\[batch"),
    (lambda: coordinate_positions(torch.rand(3, 4, 1), valid_mask()), r"\(3, 6\).*\(3, 4, 1\)"),
    (lambda: Sinusoid(7), "7.*even.*>= 4"),
    (lambda: Sinusoid(2), "2.*>= 4"),
    (lambda: Sinusoid(8, "taste"), "frequencies='taste'.*text.*image"),
    (lambda: Sinusoid(8, "text", "sin_first"), "layout='sin_first'.*blocks"),
    (lambda: Sinusoid(8, "image")(torch.rand(1, 2, 1)), "coordinate.*image"),
    (lambda: PositionTable(8, 0), "size=0.*>= 1"),
    (lambda: PositionTable(8, 16).resize(4, 4), r"size \(16,\).*\(4, 4\).*as many axes"),
    (lambda: PositionTable(8, (2, 3)).lookup(TEXT), r"\(2, 3\).*patch_positions"),
    (lambda: draw_global(2, sampling="x"), "sampling='x'.*'subset'"),
    (lambda: draw_global(2, max_global_scale=0.5), "scale=0.5.*>= 1"),
    (lambda: make_encoder("abspos")(coordinate_positions(torch.rand(2, 3, 1))), "table"),
    (lambda: Rotation(7, 1, 100.0, 1.0), "7 channels.*1 coord.*allowed"),
    (lambda: Rotation(2, 2, 100.0, 1.0), "2 channels.*2 coord.*allowed"),
    (lambda: RelativePositions(0, 4), "context 0.*>= 1"),
    (lambda: RelativePositions(4, 0), "dimension 0.*>= 1"),
    (lambda: RelativePositions(4, 4, beyond="wrap"), "beyond='wrap'.*clip"),
    (lambda: CAPE(TEXT, make_encoder("cape", "image").draw(3)), "coordinate"),
    (lambda: CAPE(TEXT, CAPE.draw(2)), r"draw.*\(2, 1, 1\).*3"),
    (lambda: CAPE(TEXT, CAPE.draw(3), torch.rand(3, 5, 1)), r"local_shift.*\(3, 5, 1\).*6"),
    (lambda: PAIR(TEXT, PAIR.draw(3)), r"synchronize=True.*draw\.covering"),
    (lambda: PositionConfig(["cape"]), r"position_embedding=\['cape'\].*cape"),
    (lambda: PositionConfig("cape", "taste"), "domain='taste'.*audio"),
    (lambda: PositionConfig("cape", "text", "gan"), "architecture='gan'.*seq2seq"),
    (lambda: PositionConfig.preset("bert"), "preset='bert'.*cape_wmt14"),
    (lambda: PositionConfig("relpos", relative_context=0), "relative_context=0.*>= 1.*nopos"),
    (lambda: PositionConfig("cape", gamma=2.0), "gamma=2.0.*'text'.*Leave it out"),
    (lambda: PositionConfig("cape", "image", seconds_per_frame=0.1), r"grid with time \(.*'video'"),
    (lambda: PositionConfig("sinpos", layers="first"), "layers='first'.*no layer of attention"),
    (lambda: PositionConfig("rope", layers="not:1"), "layers='not:1'"),
    (lambda: PositionConfig("rfs", max_position=0, learned_table=True), "True has no rows.*>= 1"),
    (lambda: PositionConfig("randpos", "image"), "'randpos'.*sequence.*'image' are a grid.*cape"),
    (lambda: PositionConfig("rfs", "image"), "'rfs'.*sequence.*'image' are a grid.*cape"),
    # speech
    (lambda: PaddingFreeBatches([1.0, 0.0]), "seconds must have the shape"),
    (lambda: PaddingFreeBatches([1.0, math.inf]), "finite"),
    (lambda: PaddingFreeBatches([1.0], 0), "max_seconds=0"),
    (lambda: PaddingFreeBatches([1.0], target_hop=0.7), "target_hop=0.7"),
    (lambda: PaddingFreeBatches([1.0], hops=(0.0, 0.02)), "hops="),
    (lambda: PaddingFreeBatches([1.0], num_replicas=2, rank=2), "rank=2"),
    (lambda: PaddingFreeBatches([1.0] * 3, num_replicas=4), "num_replicas=4 .* 1 batches"),
    (lambda: equal_length([]), "no recording"),
    (lambda: equal_length([torch.zeros(0, 4)]), "without frames"),
    (lambda: log_mel(torch.zeros(199), 8000), "199 samples.*at least 200"),
    (lambda: log_mel(torch.zeros(2, 1000), 8000), r"shape \(2, 1000\).*one channel"),
    (lambda: log_mel(torch.full((1000,), math.nan), 8000), "NaN"),
    (lambda: log_mel(torch.zeros(1000), 8000, hop_seconds=0), "hop_seconds=0 .*one sample"),
    (lambda: log_mel(torch.zeros(1000), 8000, window_seconds=100), "window_seconds=100"),
    (lambda: spec_augment(torch.rand(5, 4), frequency_masks=-1), "frequency_masks=-1.*allowed: "),
    (lambda: spec_augment(torch.rand(5, 4), time_width=-3), "time_width=-3 .*allowed: "),
    (lambda: spec_augment(torch.rand(5, 4), time_share=1.5), "time_share=1.5 .*allowed: "),
    (lambda: ConvSubsampler([8, 4], [(4, 2)]), "kernel size 4"),
    (lambda: subsampled_positions(OUTPUTS, 2, 3, 0.01, torch.zeros(1, 6)), "dtype"),
    (lambda: subsampled_positions(OUTPUTS, 2, 3, 0.01, torch.zeros(1, 8).long()), "one time for"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
