"""Samples that training does not augment, in models of transformers: every stack leaves its
share, encoder and decoder the same samples; nothing at probability 0; stored with the model. Ranks
differ and resume bit for bit in test_hosts.py."""

import json
import math

import pytest
import torch

import hf_models
from cape_plugins import PositionEncoder
from tests.support.hf import (
    ALPHA,
    FAMILIES,
    MOVED,
    OF_FAMILY,
    RANDOM,
    STACKS,
    batch,
    config_of,
    loss,
    seam,
    side_of,
)
from tests.support.whisper import LABELS, MASK, RAGGED, make_stock

HALF = {"augment_probability": 0.5}
TYPES = [(family, name) for family, name in RANDOM if family in STACKS and "+" not in name]
# Encoder and decoder draw for themselves.
DRAW_TWICE = [
    ("marian", {"type": "shape"}),
    ("marian", {"type": "cape", "source_scale": ALPHA, "synchronize": False}),
    *(
        (family, {"type": name})
        for family, name in TYPES
        if family == "speech_to_text" and (family, name) not in MOVED  # whose decoder is not moved
    ),
    ("marian", OF_FAMILY["marian"]["rope, moved"]),
    ("whisper", {"type": "cape"}),
]


def train_with_half(family, settings):
    """30 forwards of a model in training."""
    if family == "whisper":
        inputs = {"input_features": RAGGED, "attention_mask": MASK, "labels": LABELS}
        half = {**settings, **HALF}
        model = hf_models.switch(make_stock(), half, decoder_position_embedding=settings)
    else:
        model, inputs = FAMILIES[family].build({**settings, **HALF}), batch(family)
    for _ in range(30):  # with gradients: without, some models take it for generation
        model.train()(**inputs)


@pytest.mark.parametrize(("family", "settings"), DRAW_TWICE)
def test_encoder_and_decoder_that_draw_for_themselves_are_augmented_alike(
    family, settings, monkeypatch
):
    drawn, draw = [], PositionEncoder.draw

    def noted(*args, **kwargs):
        drawn.append(draw(*args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(PositionEncoder, "draw", noted)
    train_with_half(family, settings)
    assert len(drawn) == 60
    for source, target in zip(drawn[::2], drawn[1::2], strict=True):
        assert torch.equal(source.augmented, target.augmented)
        for number in (source.shift, source.offset, target.shift, target.offset):
            assert number is None or not number[~source.augmented].any()
        for scale in (source.scale, target.scale):
            assert scale is None or torch.equal(scale != 1, source.augmented)
    every = torch.cat([draw.augmented.flatten().float() for draw in drawn[::2]])
    assert abs(every.mean() - 0.5) < 4 * math.sqrt(0.25 / len(every))


def outcome(family, settings):
    """Loss and gradients of a forward in training."""
    model, inputs = FAMILIES[family].build(settings).train(), batch(family)
    torch.manual_seed(3)
    value = loss(model(**inputs))
    value.backward()
    return [value, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("family", "name"), TYPES)
def test_probability_0_is_the_model_without_augmentation(family, name):
    """Loss and gradients, bit for bit; probability 1 gives others."""
    config, architecture = config_of(family, name), side_of(family).architecture
    plain, ours, options = {"type": "sinpos"}, OF_FAMILY[family][name], {}
    if (family, name) in MOVED:
        plain["type"] = ours["type"]
    elif architecture == "seq2seq":
        options = {"source_scale": ALPHA, "source_bos": True}
    if config.mean_normalize:  # in evaluation, too: no augmentation
        ours = {**ours, "mean_normalize": False}
    if architecture == "rotary":
        plain["type"] = "rope"
        ours = ours | ({} if config.sampling else {"max_global_scale": 2.0})
    expected = outcome(family, {**plain, **options})
    actual = outcome(family, {**ours, **options, "augment_probability": 0})
    augmented = outcome(family, {**ours, **options})
    assert len(actual) == len(expected) > 5
    assert all(map(torch.equal, actual, expected))
    assert not torch.equal(augmented[0], expected[0])


def test_cape_of_rotary_models_is_rope_with_the_same_options():
    """Loss and gradients in training, bit for bit."""
    moved = OF_FAMILY["llama"]["rope, moved"]
    expected, actual = (outcome("llama", {**moved, "type": name}) for name in ("rope", "cape"))
    assert len(actual) == len(expected) > 5
    assert all(map(torch.equal, actual, expected))
    assert not torch.equal(outcome("llama", {"type": "rope"})[0], expected[0])


def test_a_decoder_with_settings_follows_its_encoder():
    """The text side of speech, until it is given a probability."""
    config = hf_models.CapeSpeech2TextConfig(
        position_embedding={"type": "cape", "augment_probability": 0}
    )
    assert config.decoder_position_config.augment_probability == 0
    for settings, expected in (({"max_global_shift": 9.0}, 0), ({"augment_probability": 1}, 1)):
        config.decoder_position_embedding = {"type": "cape", **settings}
        assert config.decoder_position_config.augment_probability == expected
        copy = hf_models.CapeSpeech2TextConfig.from_dict(config.to_dict())
        assert copy.decoder_position_config == config.decoder_position_config
    config.decoder_position_embedding = {"type": "sinpos"}  # is never augmented
    assert "augment_probability" not in config.decoder_position_embedding


def test_probability_is_stored_where_it_was_given(tmp_path):
    family = FAMILIES["marian"]
    for settings, stored in (({}, None), (HALF, 0.5)):
        model = family.build({"type": "cape", "source_scale": ALPHA, **settings})
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())["position_embedding"]
        assert saved.get("augment_probability") == stored
        loaded = family.model.from_pretrained(tmp_path)
        assert seam(loaded).config.augment_probability == (stored or 1.0)
