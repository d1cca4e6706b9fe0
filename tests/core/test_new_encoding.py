"""An encoding with new mathematics costs a class and two rows (tests/support/triangle.py):
settings, flags, encoder and pictures take it. fairseq in tests/fairseq/test_archs.py."""

import argparse

import pytest
import torch

from cape_plugins import PositionConfig, build_position_encoder, token_positions
from cape_plugins.settings.arguments import add_position_args, given_settings
from cape_plugins.settings.domains import DOMAINS
from tests.support.core import make_positions, random_numbers_untouched, valid_mask
from tests.support.triangle import Triangle, add_triangle


@pytest.fixture(autouse=True)
def _triangle(monkeypatch):
    add_triangle(monkeypatch)


def test_settings_take_it():
    config = PositionConfig("triangle")
    assert config.encoding.adds
    assert config.max_offset == 7
    assert config.random
    with pytest.raises(ValueError, match="belongs to .*cape"):
        PositionConfig("triangle", max_global_shift=1)
    with pytest.raises(ValueError, match="max_offset=-1"):
        PositionConfig("triangle", max_offset=-1)
    assert PositionConfig("sinpos").changes(config)["type"] == ("sinpos", "triangle")


def test_flags_take_it():
    parser = argparse.ArgumentParser()
    add_position_args(parser)
    words = ["--position-embedding", "triangle", "--position-max-offset", "3"]
    args = parser.parse_args(words)
    assert args.position_embedding == "triangle"
    assert given_settings(args) == {"max_offset": 3}
    assert "triangle: triangle waves" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_encoder_augments_and_embeds(domain):
    encoder = build_position_encoder(PositionConfig("triangle", domain), 5)
    positions = make_positions(domain)
    with pytest.raises(ValueError, match="needs a draw"):
        encoder(positions)
    assert encoder(positions, encoder.draw(3)).shape == (3, 6, 5)
    with random_numbers_untouched():
        encoder.eval()(positions)


def test_values_follow_its_mathematics():
    valid, settings = valid_mask(), {"architecture": "seq2seq", "source_scale": 2}
    config = PositionConfig("triangle", **settings)
    encoder = build_position_encoder(config, 5, start=1.0).eval()
    result = encoder(token_positions(valid))
    expected = Triangle(5)(1.0 + 2.0 * torch.arange(6.0)[None, :, None])[0]
    for row, length in enumerate(valid.sum(1)):
        torch.testing.assert_close(result[row, :length], expected[:length])
    assert result[~valid].eq(0).all()
