"""Checks pictures of plots by their pixels."""

import numpy as np
from PIL import Image

COLOURS = ((31, 119, 180), (255, 127, 14))  # the first of matplotlib
LEGEND = 150  # a legend has fewer pixels of one of them


def assert_lines(path, colours=COLOURS):
    """A picture with lines of these colours; one may hide another that is drawn before it."""
    pixels = np.asarray(Image.open(path).convert("RGB"), dtype=int)
    height, width, _ = pixels.shape
    assert height > 300
    assert width > 400
    for colour in colours:
        assert (np.abs(pixels - colour).sum(-1) < 30).sum() > LEGEND
