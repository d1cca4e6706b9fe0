"""A domain that this package has never seen costs one row: scan, with slices, height and width."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from cape_plugins import (
    DOMAINS,
    Domain,
    PositionConfig,
    build_position_encoder,
    build_relative_positions,
    patch_positions,
    relative_attention,
)
from cape_plugins.cli import main
from tests.support.core import ADDING, RANDOM_TYPES

SIZE, DIM = (2, 3, 4), 12
MOVES = {"max_global_shift": 0.25, "max_global_scale": 1.2}


def scan_frequencies(dim, device):
    """``[3, K/2]``, directions spread over the sphere."""
    k = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device)
    directions = torch.stack((k.cos(), k.sin(), (2 * k).cos()))
    return math.pi * torch.pow(10.0, k * (2 / dim)) * directions


@pytest.fixture(autouse=True)
def _scan(monkeypatch):
    assert "scan" not in DOMAINS, "give the domain of this test another name"
    row = Domain(
        frequencies=scan_frequencies,
        unit="half the body",
        steps="cubes",
        axis="position (normalised)",
        grid=("slices", "rows", "columns"),
        defaults={**MOVES, "mean_normalize": False, "relative_context": 3},
        table_size=SIZE,
    )
    monkeypatch.setitem(DOMAINS, "scan", row)


def make(name, **options):
    return build_position_encoder(PositionConfig(name, "scan", **options), DIM, table_size=SIZE)


def test_settings_have_its_defaults_and_errors_its_unit():
    config = PositionConfig("cape", "scan")
    assert (config.max_global_shift, config.max_global_scale) == (0.25, 1.2)
    assert PositionConfig("relpos", "scan").relative_context == 3
    assert PositionConfig("cape", "scan", gamma=2.0).gamma == 2.0  # it is a grid
    with pytest.raises(ValueError, match=r"half the body \(scan\)"):
        PositionConfig("cape", "scan", max_global_shift=-1)
    with pytest.raises(ValueError, match="domain='film' is unknown; allowed: .*scan"):
        PositionConfig("cape", "film")


def test_a_default_that_its_row_lacks_is_named(monkeypatch):
    monkeypatch.setitem(DOMAINS, "scan", dataclasses.replace(DOMAINS["scan"], defaults={}))
    for name, option in (("cape", "max_global_shift"), ("relpos", "relative_context")):
        with pytest.raises(ValueError, match=f"domain 'scan' has no default of {option}; add"):
            PositionConfig(name, "scan")
    assert PositionConfig("relpos", "scan", relative_context=2).relative_context == 2


@pytest.mark.parametrize("name", [name for name, domain in ADDING if domain == "image"])
def test_every_type_embeds_it(name):
    encoder, positions = make(name), patch_positions(*SIZE)
    assert positions.coords.shape == (1, math.prod(SIZE), 3)
    assert positions.coords[0, 1, 0] > positions.coords[0, 0, 0]  # the fastest axis comes first
    embedding = encoder(positions, encoder.draw(2))
    assert embedding.shape == (2 if name in RANDOM_TYPES else 1, math.prod(SIZE), DIM)
    assert embedding[0].unique(dim=0).shape[0] == math.prod(SIZE)
    with pytest.raises(ValueError, match="coordinates|grid"):
        encoder(patch_positions(3, 4), encoder.draw(2))


def test_a_learned_table_is_resized_along_all_axes():
    encoder = make("abspos")
    table = encoder.encoding.weight.detach()
    actual = encoder(patch_positions(4, 3, 8))[0]
    image = table.T.reshape(1, DIM, *SIZE)
    expected = F.interpolate(image, (4, 3, 8), mode="trilinear", align_corners=False)
    torch.testing.assert_close(actual, expected.flatten(2)[0].T)
    assert torch.equal(encoder(patch_positions(*SIZE))[0], table)


def test_relative_attention_has_a_table_for_each_axis():
    """The numbers of three axes are in test_relative.py."""
    config = PositionConfig("relpos", "scan")
    relative = build_relative_positions(config, 4, 2)
    named = {name.partition(".")[0] for name, _ in relative.named_parameters()}
    assert named == {"slices", "rows", "columns"}
    query = torch.randn(1, 2, math.prod(SIZE) + 1, 4)
    output, _ = relative_attention(query, query, query, relative, patches=SIZE)
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("picture", "name"),
    [
        *((picture, "cape") for picture in ("components", "augmentation", "coverage")),
        ("similarity", "relpos"),
    ],
)
def test_it_is_drawn(picture, name, figures, tmp_path):
    pytest.importorskip("matplotlib")
    words = ["plot", picture, "--domain", "scan", "--position-embedding", name, "--dim", str(DIM)]
    words += {"components": ["--channels", "0"], "coverage": ["--draws", "5"]}.get(picture, [])
    main([*words, "--output", str(tmp_path / "x.png")])
    (figure,) = figures
    assert f"{name}, scan" in figure.get_suptitle()
    assert all(axis.has_data() for axis in figure.axes)


def test_a_grid_has_no_spacing():
    """Seconds between frames are an option, so a distance in the row would have no effect."""
    with pytest.raises(ValueError, match=r"spacing=0.5.*spans \[-1, 1\].*Leave spacing out"):
        dataclasses.replace(DOMAINS["scan"], spacing=0.5)
