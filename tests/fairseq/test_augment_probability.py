"""Samples that training leaves as they are, in fairseq: source and target alike, nothing at
probability 0, what it was at probability 1. That ranks and resumed trainings agree is in
test_resume.py."""

import math

import pytest

pytest.importorskip("soundfile")
import torch

from cape_plugins import PositionEncoder
from fairseq_user_dir.errors import SettingsError
from tests.fairseq.test_draws import coordinates
from tests.fairseq.test_identities import after_training
from tests.support.fairseq_models import (
    ALPHA,
    START,
    VARIANTS,
    build,
    build_lm,
    build_variant,
    decoder_input,
    differences,
    record,
    train,
)
from tests.support.fairseq_speech import S2T, durations, make_model, make_task, write_manifest

RANDOM = [name for name in VARIANTS if build_variant(name).position_config.random]
SINUSOIDS = [name for name in RANDOM if "+" not in name]
HALF = {"position_augment_probability": 0.5}


def moved(coords, expected):
    """``[B]``, whether any position of a row is elsewhere; padding is nan."""
    return ((coords - expected).abs() > 1e-5).any(1)


@pytest.mark.parametrize("name", RANDOM)
def test_source_and_target_of_a_pair_are_augmented_alike(name):
    """Also where they draw for themselves."""
    options = {"position_max_offset": 10_000} if name == "shape" else {}  # not 0 by chance
    model = build_variant(name, position_source_scale=ALPHA, **HALF, **options)
    rows = []
    for seed in range(20):
        source, i, target, j = coordinates(model, random_seed=seed)
        pair = moved(source, START + float(ALPHA) * i), moved(target, START + j)
        assert torch.equal(*pair)
        rows += pair[0].tolist()
    assert abs(sum(rows) / len(rows) - 0.5) < 4 * math.sqrt(0.25 / len(rows))


def test_a_language_model_leaves_its_share():
    model = build_lm("--position-augment-probability", 0.25)
    recorder, previous = record(model.decoder), decoder_input()
    for _ in range(60):
        model(previous)
    every = torch.cat([coords[:, 0, 0] != START for coords in recorder.seen]).float()
    assert abs(every.mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(every))


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_0_equals_sinpos_after_updates(name):
    """Parameters, gradients and outputs, dropout included."""
    options = {"dropout": 0.1, "position_source_scale": ALPHA, "position_source_bos": True}
    results = [
        after_training(build(position_embedding=type_name, **options, **more))
        for type_name, more in (
            ("sinpos", {}), (name, {"position_augment_probability": 0}), (name, {}),
        )
    ]  # fmt: skip
    for plain, ours, augmented in zip(*results, strict=True):
        assert differences(ours, plain) == []
        assert differences(augmented, plain)


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_1_is_the_default_after_updates(name):
    options = {"dropout": 0.1, "position_source_scale": ALPHA}
    results = [
        train(build(position_embedding=name, **options, **more)).state_dict()
        for more in ({}, {"position_augment_probability": 1}, HALF)
    ]
    assert differences(results[0], results[1]) == []
    assert differences(results[0], results[2])


def test_encoder_and_decoder_of_speech_are_augmented_alike(tmp_path, monkeypatch):
    """They have settings of their own: seconds and tokens."""
    write_manifest(tmp_path, "train", durations(8))
    task = make_task(tmp_path)
    task.load_dataset("train")
    data = task.dataset("train")
    sample = data.collater([data[index] for index in range(8)])
    model, drawn = make_model(task, S2T, "cape", **HALF).train(), []
    draw = PositionEncoder.draw

    def noted(*args):
        drawn.append(draw(*args))
        return drawn[-1]

    monkeypatch.setattr(PositionEncoder, "draw", noted)
    for _ in range(20):
        model(**sample["net_input"])
    of_source, of_target = drawn[::2], drawn[1::2]
    for source, target in zip(of_source, of_target, strict=True):
        assert torch.equal(source.augmented, target.augmented)
        assert torch.equal(target.shift != 0, source.augmented)
        assert not (target.shift == source.shift)[source.augmented].any()
    every = torch.cat([source.augmented for source in of_source]).float()
    assert abs(every.mean() - 0.5) < 4 * math.sqrt(0.25 / len(every))


@pytest.mark.parametrize("value", [-0.5, 1.5])
def test_what_is_no_probability_is_refused_by_the_name_of_the_flag(value):
    with pytest.raises(
        SettingsError, match=rf"--position-augment-probability {value} is not .*: 0 to 1"
    ):
        build(position_augment_probability=value)
