"""How an image becomes the input of a model, and which images are compared: no model, no data."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F

from recipes.lab.steps import CommandError
from recipes.vit.data import resize

CENTRE = 0.875  # share of the shorter side that the centre crop keeps: 224 of 256 pixels
BIN_EDGES = (100, 150, 200, 250, 300, 350, 384)  # CAPE Table 5
OPEN_BIN_MAX = 500 / 384  # its largest size above the last edge, by that edge
MIN, MAX = "min", "max"  # names of strategies
GAMMA_RULES = ("1", "r/train", "sqrt(r/train)")  # CAPE Table 6


class View(NamedTuple):
    """One way to show an image ``[C, h, w]`` to a model.

    Attributes:
        kind: "crop", the paper's protocol: the shorter side becomes ``int(size / 0.875)`` pixels,
            the aspect is kept, then a square is cropped from the centre; "whole": the whole image
            becomes a square; "original": both sides are enlarged by 1 / 0.875 and the centre is
            cropped to the size that the image had; "untouched": the image as it is (the last two:
            CAPE Appendix B.2, strategies iv and v).
        size: Side of the square in pixels; 0 where the image keeps its own size.
    """

    kind: str
    size: int = 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """``[C, size, size]``, or ``[C, h, w]`` where the image keeps its own size."""
        height, width = image.shape[1:]
        if self.kind == "whole":
            return resize(image, self.size)
        if self.kind == "crop":
            return centre(_scale_shorter(image, int(self.size / CENTRE)), self.size, self.size)
        if self.kind == "original":
            larger = _interpolate(image, int(height / CENTRE), int(width / CENTRE))
            return centre(larger, height, width)
        return image


def centre(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """``[C, height, width]`` from the centre of an image that is at least as large."""
    top, left = round((image.shape[1] - height) / 2), round((image.shape[2] - width) / 2)
    return image[:, top : top + height, left : left + width]


def _scale_shorter(image: torch.Tensor, shorter: int) -> torch.Tensor:
    height, width = image.shape[1:]
    if height <= width:
        return _interpolate(image, shorter, int(shorter * width / height))
    return _interpolate(image, int(shorter * height / width), shorter)


def _interpolate(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    options = {"mode": "bilinear", "align_corners": False, "antialias": True}
    return F.interpolate(image[None], size=(height, width), **options)[0]


def tta_sizes(size: int, step: int) -> tuple[int, ...]:
    """Sizes whose log-probabilities are added up (CAPE section 5.1.3)."""
    if step >= size:
        raise CommandError(
            f"--tta-step {step} is not allowed with size {size}; allowed: less than the smallest "
            "of --sizes"
        )
    return tuple(sorted({size - step, size, size + step}))


def gamma_of(rule: str, size: int, train: int) -> float:
    """Factor on the grid of an image of `size` pixels by one of :data:`GAMMA_RULES`.

    Args:
        train: Size that the model was trained at, in pixels.
    """
    ratio = size / train
    return {"1": 1.0, "r/train": ratio, "sqrt(r/train)": ratio**0.5}[rule]


# ---- bins of image sizes -----------------------------------------------------------------------


def check_edges(edges: Sequence[int]) -> None:
    """Largest sides of all bins but the last, which is open."""
    if any(low >= high for low, high in pairwise(edges)):
        raise CommandError(f"--bins {' '.join(map(str, edges))}: the edges must increase")


def bin_of(height: int, width: int, edges: Sequence[int]) -> int:
    """Number of the bin of an image, by its shorter side."""
    return bisect_left(edges, min(height, width))


def bin_label(number: int, edges: Sequence[int]) -> str:
    """Label of a bin, such as "101-150"; the last one is "385+"."""
    low = edges[number - 1] + 1 if number else 0
    return f"{low}+" if number == len(edges) else f"{low}-{edges[number]}"


def strategies(
    shapes: Sequence[tuple[int, int]], number: int, edges: Sequence[int], sizes: Sequence[int]
) -> Mapping[str, View]:
    """Ways to resize the images of one bin by name (CAPE Appendix B.2).

    The bin without an upper end may have images of thousands of pixels: 500 pixels (at the paper's
    edges) stand for its largest, and no image keeps its own size.

    Args:
        shapes: (height, width) of the images of the bin.
        number: Of the bin.
        sizes: Sizes to try in each bin.
    """
    sides = [min(shape) for shape in shapes]
    is_open = number == len(edges)
    largest = max(round(OPEN_BIN_MAX * edges[-1]), min(sides)) if is_open else max(sides)
    views = {f"{size} px": View("crop", size) for size in sizes}
    views |= {MIN: View("crop", min(sides)), MAX: View("crop", largest)}
    if not is_open:
        views |= {"original": View("original"), "original (no crop)": View("untouched")}
    return views
