"""Bad inputs: each is refused with a ValueError that names the argument, its value and what is
allowed, before anything is computed. Options of the configuration are in test_options.py, files and
counts in test_alpha.py."""

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
from tests.support.core import make_encoder, make_positions, valid_mask

FRAMES = torch.tensor([3, 2])


BAD = [
    ("valid of integers", lambda: token_positions(torch.ones(2, 3).long()), ["int64", "bool"]),
    ("valid of one row", lambda: token_positions(torch.ones(3).bool()), ["(3,)", "[batch"]),
    (
        "times of another batch",
        lambda: timed_frame_positions(torch.rand(3, 4), FRAMES, 0.1),
        ["(3, 4)", "(2,)", "[batch, frames]"],
    ),
    ("hop zero", lambda: frame_positions(FRAMES, 0), ["seconds_per_frame=0", "> 0"]),
    ("hop nan", lambda: frame_positions(FRAMES, math.nan), ["seconds_per_frame=nan", "> 0"]),
    (
        "hops of another batch",
        lambda: frame_positions(FRAMES, torch.rand(3)),
        ["seconds_per_frame", "(3,)", "[2]"],
    ),
    ("frames as floats", lambda: frame_positions(FRAMES.float(), 0.1), ["num_frames", "float32"]),
    ("negative frames", lambda: frame_positions(-FRAMES, 0.1), ["num_frames holds -2", ">= 0"]),
    ("frames as a number", lambda: frame_positions(50, 0.1), ["num_frames=50", "torch.tensor"]),
    ("no patch rows", lambda: patch_positions(0, 3), ["height=0", "> 0", "smaller"]),
    ("unit zero", lambda: make_encoder(unit=0.0), ["unit=0.0", "> 0"]),
    ("unknown side", lambda: make_encoder(side="left"), ["side='left'", "source, target"]),
    (
        "coordinates of no domain",
        lambda: coordinate_positions(torch.rand(1, 2, 9)),
        ["(1, 2, 9)", "1 or 2"],
    ),
    ("flat coordinates", lambda: coordinate_positions(torch.rand(2, 3)), ["(2, 3)", "[batch"]),
    (
        "mask of another length",
        lambda: coordinate_positions(torch.rand(3, 4, 1), valid_mask()),
        ["(3, 6)", "(3, 4, 1)"],
    ),
    ("odd dimension", lambda: Sinusoid(7), ["7", "even", ">= 4"]),
    ("dimension of one pair", lambda: Sinusoid(2), ["2", ">= 4"]),
    ("unknown frequencies", lambda: Sinusoid(8, "taste"), ["frequencies='taste'", "text", "image"]),
    ("unknown layout", lambda: Sinusoid(8, "text", "sin_first"), ["layout='sin_first'", "blocks"]),
    (
        "frequencies of another domain",
        lambda: Sinusoid(8, "image")(torch.rand(1, 2, 1)),
        ["coordinate", "image"],
    ),
    ("empty table", lambda: PositionTable(8, 0), ["size=0", ">= 1"]),
    (
        "resize of a sequence",
        lambda: PositionTable(8, 16).resize(4, 4),
        ["size (16,)", "(4, 4)", "as many axes"],
    ),
    (
        "tokens in a table of a grid",
        lambda: PositionTable(8, (2, 3)).lookup(token_positions(valid_mask())),
        ["(2, 3)", "patch_positions"],
    ),
    ("unknown sampling", lambda: draw_global(2, sampling="x"), ["sampling='x'", "'subset'"]),
    ("scale below 1", lambda: draw_global(2, max_global_scale=0.5), ["scale=0.5", ">= 1"]),
    ("context zero", lambda: RelativePositions(0, 4), ["context 0", ">= 1"]),
    ("head dimension zero", lambda: RelativePositions(4, 0), ["dimension 0", ">= 1"]),
    ("unknown beyond", lambda: RelativePositions(4, 4, beyond="wrap"), ["beyond='wrap'", "clip"]),
    (
        "a draw for images on text",
        lambda: make_encoder("cape")(make_positions("text"), make_encoder("cape", "image").draw(3)),
        ["coordinate"],
    ),
    (
        "a draw for another batch",
        lambda: make_encoder("cape")(make_positions("text"), make_encoder("cape").draw(2)),
        ["draw", "(2, 1, 1)", "3"],
    ),
    (
        "a local shift of another length",
        lambda: make_encoder("cape").eval()(make_positions("text"), None, torch.rand(3, 5, 1)),
        ["local_shift", "(3, 5, 1)", "6"],
    ),
    ("unhashable type", lambda: PositionConfig(["cape"]), ["position_embedding=['cape']", "cape"]),
    ("unknown domain", lambda: PositionConfig("cape", "taste"), ["domain='taste'", "audio"]),
    (
        "unknown architecture",
        lambda: PositionConfig("cape", "text", "gan"),
        ["architecture='gan'", "seq2seq"],
    ),
    ("unknown preset", lambda: PositionConfig.preset("bert"), ["preset='bert'", "cape_wmt14"]),
    (
        "relpos without a context",
        lambda: PositionConfig("relpos", relative_context=0),
        ["relative_context=0", ">= 1", "nopos"],
    ),
    (
        "gamma on text",
        lambda: PositionConfig("cape", gamma=2.0),
        ["gamma=2.0", "'text'", "Leave it out"],
    ),
]


@pytest.mark.parametrize(
    ("call", "expected"), [pytest.param(*case, id=name.replace(" ", "-")) for name, *case in BAD]
)
def test_bad_input_is_refused(call, expected):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below)
        call()
    text = str(error.value)
    missing = [part for part in expected if part not in text]
    assert not missing, text
