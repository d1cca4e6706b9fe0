"""Samples that training leaves as they are, in fairseq: source and target alike, nothing at
probability 0, what it was at probability 1. That ranks and resumed trainings agree is in
test_resume.py."""

import math

import pytest

pytest.importorskip("soundfile")
import torch
from torch.nn import functional as F

from cape_plugins import PositionEncoder
from fairseq_user_dir.asr.criterion import CapeCtcCriterion
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
    flags,
    loss_of,
    record,
    train,
)
from tests.support.fairseq_speech import CTC, S2T, durations, make_model, make_task, write_manifest

RANDOM = [name for name in VARIANTS if build_variant(name).position_config.random]
SINUSOIDS = [name for name in RANDOM if "+" not in name]
HALF = {"position_augment_probability": 0.5}
NONE = {"position_augment_probability": 0}
# dropout notices a random number more
SPEECH = {"dropout": 0.1, "feature_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A task and a batch of recordings of different lengths."""
    folder = tmp_path_factory.mktemp("speech")
    write_manifest(folder, "train", durations(8))
    task = make_task(folder)
    task.load_dataset("train")
    data = task.dataset("train")
    return task, data.collater([data[index] for index in range(8)])


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
            ("sinpos", {}), (name, NONE), (name, {}),
        )
    ]  # fmt: skip
    for plain, ours, augmented in zip(*results, strict=True):
        assert differences(ours, plain) == []
        assert differences(augmented, plain)


def outcome(model, loss):
    """Loss and gradients of a batch in training."""
    torch.manual_seed(3)
    value = loss(model.train())
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **gradients}


def assert_only_augmentation_differs(plain, ours, augmented):
    """Two outcomes are equal bit for bit; the third is not."""
    assert len(plain) > 10
    assert all(value.any() for name, value in plain.items() if "k_proj.bias" not in name)
    assert differences(ours, plain) == []
    assert "loss" in differences(augmented, plain)


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_0_equals_sinpos_in_a_language_model(name):
    """It has neither alpha nor BOS hint."""
    settings = (("sinpos", {}), (name, NONE), (name, {}))
    assert_only_augmentation_differs(
        *(
            outcome(
                build_lm(*flags({"position_embedding": type_name, **more, "dropout": 0.1})),
                lambda model: loss_of(model, 0),
            )
            for type_name, more in settings
        )
    )


# Cape subtracts the mean of the times in evaluation, too: that is no augmentation.
NO_MEAN = {"cape": {"position_mean_normalize": False}}


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_0_equals_sinpos_in_recognition_by_ctc(name, speech):
    task, sample = speech
    ours, criterion = NO_MEAN.get(name, {}), CapeCtcCriterion(task)
    settings = (("sinpos", {}), (name, {**ours, **NONE}), (name, ours))
    assert_only_augmentation_differs(
        *(
            outcome(
                make_model(task, CTC, type_name, **SPEECH, **more),
                lambda model: criterion(model, sample)[0],
            )
            for type_name, more in settings
        )
    )


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_0_equals_sinpos_in_speech_to_text(name, speech):
    """The decoder, with settings of its own, follows the probability of its encoder."""
    task, sample = speech
    ours = NO_MEAN.get(name, {})

    def loss(model):
        logits, _ = model(**sample["net_input"])
        padding = task.target_dictionary.pad()
        return F.cross_entropy(logits.transpose(1, 2), sample["target"], ignore_index=padding)

    settings = (("sinpos", {}), (name, {**ours, **NONE}), (name, ours))
    assert_only_augmentation_differs(
        *(
            outcome(make_model(task, S2T, type_name, **SPEECH, **more), loss)
            for type_name, more in settings
        )
    )


@pytest.mark.parametrize("name", SINUSOIDS)
def test_probability_1_is_the_default_after_updates(name):
    options = {"dropout": 0.1, "position_source_scale": ALPHA}
    results = [
        train(build(position_embedding=name, **options, **more)).state_dict()
        for more in ({}, {"position_augment_probability": 1}, HALF)
    ]
    assert differences(results[0], results[1]) == []
    assert differences(results[0], results[2])


def test_encoder_and_decoder_of_speech_are_augmented_alike(speech, monkeypatch):
    """They have settings of their own: seconds and tokens."""
    task, sample = speech
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
