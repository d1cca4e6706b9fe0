"""Numbers behind pictures of positions: similarities and stages of the augmentation, against
examples by hand and against positions that training encodes."""

import numpy as np
import pytest
import torch

from cape_plugins import Draw
from cape_plugins.cli import main
from cape_plugins.pictures.views import (
    Stack,
    augmentation_stages,
    draw_positions,
    evaluation_positions,
    similarity,
    similarity_by_distance,
    training_positions,
    views,
)
from cape_plugins.settings.domains import DOMAINS
from tests.support.core import RANDOM_ADDING, SAMPLED_TYPES, make_encoder
from tests.support.expected import DOMAIN_SAMPLES


def make_stack(name="cape", domain="text", **options):
    encoder = make_encoder(name, domain, dim=16, **options)
    return Stack(encoder.config, encoder, DOMAINS[domain].spacing or 1.0)


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def test_similarities_are_those_computed_by_hand():
    maps = similarity(np.array([[3.0, 0.0], [4.0, 3.0], [0.0, 5.0]]))
    assert maps["dot product"].tolist() == [[9, 12, 0], [12, 25, 15], [0, 15, 25]]
    assert maps["cosine"].round(9).tolist() == [[1, 0.8, 0], [0.8, 1, 0.6], [0, 0.6, 1]]
    rows = similarity_by_distance(maps["dot product"], 2)
    assert rows.tolist() == [[pytest.approx(59 / 3), 9, 25], [13.5, 12, 15], [0, 0, 0]]


def test_stages_of_one_augmentation_are_those_computed_by_hand():
    """Mean-normalised, + global shift, + local shift, times global scale (CAPE section 4)."""
    stack = make_stack("cape", "audio")
    positions = stack.positions(3)
    local = torch.tensor([[[0.01], [-0.01], [0.002]]])
    draw = Draw(shift=torch.full((1, 1, 1), 2.0), scale=torch.full((1, 1, 1), 1.05))
    stages = augmentation_stages(stack.encoder, positions, draw, local)
    normalised = np.array([-0.03, 0.0, 0.03])
    expected = {
        "positions": [0.0, 0.03, 0.06],
        "mean-normalised": normalised,
        "+ global shift": normalised + 2.0,
        "+ local shift": normalised + 2.0 + [0.01, -0.01, 0.002],
        "× global scale": (normalised + 2.0 + [0.01, -0.01, 0.002]) * 1.05,
    }
    assert list(stages) == list(expected)
    for label, coords in stages.items():
        assert np.allclose(coords.flatten(), expected[label], atol=1e-6), label


@pytest.mark.parametrize(("name", "domain"), RANDOM_ADDING)
def test_last_stage_is_what_training_encodes(name, domain):
    stack, size = make_stack(name, domain), DOMAIN_SAMPLES[domain].size
    positions = stack.positions(size)
    *_, last = augmentation_stages(
        stack.encoder, positions, *draw_positions(stack.encoder, positions, 3, generator())
    ).values()
    evaluation, *drawn = views(stack, [size], 3, generator())
    assert evaluation.state == "evaluation"
    same = generator()
    draw = stack.encoder.train().draw(3, generator=same)
    trained = stack.encoder(positions, draw, generator=same)  # draws the local shift itself
    assert np.array_equal(np.stack([view.embedding for view in drawn]), trained)
    for view, coords in zip(drawn, last, strict=True):
        assert np.allclose(view.embedding, stack.encoder.encoding(coords[None])[0], atol=1e-5)
        assert not np.allclose(view.embedding, evaluation.embedding, atol=1e-2)
    covered = training_positions(stack, size, 3, generator())
    assert np.array_equal(covered, last.numpy())
    plain = stack.encoder.encoding(torch.from_numpy(evaluation_positions(stack, size))[None])[0]
    assert np.allclose(evaluation.embedding, plain, atol=1e-5)


PAIR = "--architecture seq2seq --position-source-scale 1.5 --position-embedding"
SHOWN = [
    f"{picture} --dim 16 {more} {PAIR} {name}"
    for picture, more in {
        "augmentation": "",
        "coverage": "--draws 5",
        "components": "--channels 1",
    }.items()
    for name in SAMPLED_TYPES
]


@pytest.mark.parametrize(
    "words", [*SHOWN, "augmentation --architecture rotary --position-max-global-scale 2"]
)
def test_positions_of_every_architecture_are_shown(words, figures, tmp_path):
    """All draws have the same number of drawn positions for source and target."""
    main(["plot", *words.split(), "--output", str(tmp_path / "x.png")])
    assert all(axis.has_data() for axis in figures[0].axes)
