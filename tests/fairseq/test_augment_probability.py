"""Samples that training leaves where they are, in fairseq: source and target alike, and nothing at
probability 0. That ranks and resumed trainings agree is in test_resume.py."""

import math

import pytest

pytest.importorskip("soundfile")
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from cape_plugins import TYPES, PositionEncoder
from fairseq_user_dir.asr.criterion import CapeCtcCriterion
from tests.fairseq.test_draws import coordinates
from tests.support.expected import EXPECTED
from tests.support.fairseq_models import (
    ALPHA,
    SINUSOID,
    START,
    VARIANTS,
    build,
    build_lm,
    build_variant,
    differences,
    flags,
    loss_of,
)
from tests.support.fairseq_speech import CTC, S2T, durations, make_model, make_task, write_manifest

RANDOM = [name for name in VARIANTS if build_variant(name).position_config.random]
HALF = {"position_augment_probability": 0.5}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A task and a batch of recordings of different lengths."""
    folder = tmp_path_factory.mktemp("speech")
    write_manifest(folder, "train", durations(8))
    task = make_task(folder)
    task.load_dataset("train")
    data = task.dataset("train")
    return task, data.collater([data[index] for index in range(8)])


def assert_share(augmented, share=0.5):
    """Within four standard deviations of a binomial share."""
    deviation = math.sqrt(share * (1 - share) / len(augmented))
    assert abs(augmented.float().mean() - share) < 4 * deviation


@pytest.mark.parametrize("name", RANDOM)
def test_source_and_target_of_a_pair_are_augmented_alike(name):
    """Also where they draw for themselves."""
    options = {"position_max_offset": 10_000} if name == "shape" else {}  # not 0 by chance
    model = build_variant(name, position_source_scale=ALPHA, **HALF, **options)
    rows = []
    for seed in range(20):
        source, i, target, j = coordinates(model, random_seed=seed)
        expected = START + float(ALPHA) * i, START + j
        # padding is nan
        moved = [
            ((coords - raw).abs() > 1e-5).any(1)
            for coords, raw in zip((source, target), expected, strict=True)
        ]
        assert torch.equal(*moved)
        rows.append(moved[0])
    assert_share(torch.cat(rows))


def test_encoder_and_decoder_of_speech_are_augmented_alike(speech, monkeypatch):
    """They have different settings: seconds and tokens."""
    task, sample = speech
    model, drawn = make_model(task, S2T, "cape", **HALF).train(), []
    draw = PositionEncoder.draw

    def noted(*args):
        drawn.append(draw(*args))
        return drawn[-1]

    monkeypatch.setattr(PositionEncoder, "draw", noted)
    for _ in range(20):
        model(**sample["net_input"])
    for source, target in zip(drawn[::2], drawn[1::2], strict=True):
        assert torch.equal(source.augmented, target.augmented)
        assert torch.equal(target.shift != 0, source.augmented)
        assert not (target.shift == source.shift)[source.augmented].any()
    assert_share(torch.cat([source.augmented.flatten() for source in drawn[::2]]))


# Dropout notices a random number more.
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}


def translation(speech, **settings):
    options = {"position_source_scale": ALPHA, "position_source_bos": True}
    model = build(**options, **settings, **DROPOUT)
    return model, lambda: loss_of(model, 0)


def language_model(speech, **settings):
    """It has neither alpha nor BOS hint."""
    model = build_lm(*flags({**settings, **DROPOUT}))
    return model, lambda: loss_of(model, 0)


def recognition(speech, arch=CTC, **settings):
    task, sample = speech
    model = make_model(task, arch, **DROPOUT, feature_dropout=0.1, **settings)
    criterion = CapeCtcCriterion(task) if arch == CTC else CrossEntropyCriterion(task, False)
    return model, lambda: criterion(model, sample)[0]


def speech_to_text(speech, **settings):
    """The decoder, whose settings are for tokens, follows the probability of its encoder."""
    return recognition(speech, S2T, **settings)


def outcome(model, loss):
    """Loss and gradients of two updates in training."""
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-2)
    values = {}
    for update in range(2):
        torch.manual_seed(3 + update)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        values[f"loss {update}"] = value.detach()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**values, **gradients}


@pytest.mark.parametrize("name", [name for name in SINUSOID if EXPECTED[name].random])
@pytest.mark.parametrize("host", [translation, language_model, recognition, speech_to_text])
def test_probability_0_equals_sinpos_after_updates(host, name, speech):
    """Losses and gradients, dropout included."""
    # the mean of the times is subtracted in evaluation, too: that is no augmentation
    centred = host in (recognition, speech_to_text) and "mean_normalize" in TYPES[name].options
    ours = {"position_embedding": name, **({"position_mean_normalize": False} if centred else {})}
    plain, actual, augmented = (
        outcome(*host(speech, **settings))
        for settings in (
            {"position_embedding": "sinpos"},
            {**ours, "position_augment_probability": 0},
            ours,
        )
    )
    assert len(plain) > 10
    assert all(value.any() for name, value in plain.items() if "k_proj.bias" not in name)
    assert differences(actual, plain) == []
    assert {"loss 0", "loss 1"} <= set(differences(augmented, plain))
