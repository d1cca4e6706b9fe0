"""Measurements of one model on one data set: ranks of the right class by size and rule, with the
protocols of CAPE (section 5.1 and Appendix B)."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import starmap
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from recipes.lab.command_line import bins
from recipes.lab.steps import CommandError
from recipes.lab.tables import Row
from recipes.vit.classifier import Classifier, match_classes
from recipes.vit.data import Data, resize, shapes_of

CENTRE = 0.875  # share of the shorter side that the centre crop keeps: 224 of 256 pixels
BIN_EDGES = (100, 150, 200, 250, 300, 350, 384)  # CAPE Table 5
OPEN_BIN_MAX = 500 / 384  # largest size of the table above the last edge, relative to the last edge
MIN, MAX = "min", "max"  # names of strategies
GAMMA_RULES = {"1": 0, "r/train": 1, "sqrt(r/train)": 0.5}  # powers of r/train, CAPE Table 6


class View(NamedTuple):
    """One way to resize and crop an image ``[C, h, w]`` for a model, by one of the protocols:

    "crop", the paper's: the shorter side becomes ``int(size / 0.875)`` pixels, with the same
    aspect, then a square is cropped from the centre; "whole": the whole image becomes a square;
    "original": both sides are enlarged by 1 / 0.875 and the centre is cropped to the size that the
    image had; "untouched": no change (the last two: CAPE Appendix B.2, strategies iv and v).
    """

    protocol: str
    size: int = 0  # side of the square in pixels; 0 if the image keeps its size
    gamma: float = 1.0  # factor on the grid of positions

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        sides = image.shape[1:]
        if self.protocol == "untouched":
            return image
        if self.protocol == "whole":
            return resize(image, self.size)
        if self.protocol == "crop":
            shorter = int(self.size / CENTRE)
            larger = [int(shorter * side / min(sides)) for side in sides]
            high = wide = self.size
        else:
            larger = [int(side / CENTRE) for side in sides]
            high, wide = sides
        top, left = round((larger[0] - high) / 2), round((larger[1] - wide) / 2)
        return resize(image, *larger)[:, top : top + high, left : left + wide]


def columns_of(args: argparse.Namespace, train: int) -> dict[tuple[str, int, str], list[View]]:
    """Views of all images for each column of the tables, by name of table, size and rule; the
    log-probabilities of the views of a column are added up."""
    columns = {}
    for size in args.sizes:
        view = View(args.protocol, size)
        columns["accuracy", size, ""] = [view]
        if args.tta:  # CAPE section 5.1.3
            step = args.tta_step
            if step >= size:
                raise CommandError(
                    f"--tta-step {step} is not allowed with size {size}; allowed: less than the "
                    "smallest of --sizes"
                )
            columns["tta", size, "-"] = [view]
            together = sorted({size - step, size, size + step})
            columns["tta", size, "+"] = [view._replace(size=other) for other in together]
        for rule, power in GAMMA_RULES.items() if args.gamma else ():
            columns["gamma", size, rule] = [view._replace(gamma=(size / train) ** power)]
    return columns


def scores_of(classifier: Classifier, images: Sequence[torch.Tensor], gamma: float) -> torch.Tensor:
    """Log-probabilities ``[B, classes]``; images of exactly the same size share a forward. Images
    that are not cropped keep their shape, as in the paper."""
    scores = torch.empty(len(images), len(classifier.labels))
    for shape in {image.shape for image in images}:
        rows = [row for row, image in enumerate(images) if image.shape == shape]
        batch = torch.stack([images[row] for row in rows])
        scores[rows] = classifier.scores(batch, gamma).cpu()
    return scores


def rank_of(scores: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``[B]``: the number of classes that come before the `right` one ``[B]`` in `scores`
    ``[B, classes]``; among equal scores the first class comes first, as in argmax."""
    order = scores.argsort(dim=1, descending=True, stable=True)
    return (order == right[:, None]).nonzero()[:, 1]


def label_ranks(
    classifier: Classifier, data: Data, columns: Mapping[Any, list[View]], classes: Sequence[int]
) -> dict[Any, np.ndarray]:
    """Ranks of the right class of each image of the order, by column; rank 0 is the best. The
    log-probabilities of the views of a column are added up. Each image is read once, and each
    distinct view is scored once; `classes` has the number of the model's class for each label."""
    views = {view for column in columns.values() for view in column}
    pictures = {view._replace(gamma=1.0) for view in views}
    ranks: dict[Any, list[int]] = {name: [] for name in columns}

    def show(index: int) -> tuple[int, dict[View, torch.Tensor]]:
        image, label = data.images[index]
        return classes[label], {view: view(image) for view in pictures}

    for samples in data.read(show, f"{classifier.path}: {data.name}"):
        right = torch.tensor([label for label, _ in samples])
        scores = {}
        for view in views:
            images = [looks[view._replace(gamma=1.0)] for _, looks in samples]
            scores[view] = scores_of(classifier, images, view.gamma)
        for name, column in columns.items():
            ranks[name] += rank_of(sum(scores[view] for view in column), right).tolist()
    return {name: np.array(values) for name, values in ranks.items()}


def check(classifier: Classifier, args: argparse.Namespace) -> None:
    """Refuses options that the model does not support, before hours of work."""
    if args.gamma:
        classifier.check_gamma()
    columns = columns_of(args, classifier.size).values()
    for size in sorted({view.size for column in columns for view in column}):
        if reason := classifier.refusal(size, size):
            raise CommandError(
                f"{classifier.path} refuses images of {size} x {size} pixels ({reason}); its size "
                f"is {classifier.size}; give other --sizes"
            )


def measure(classifier: Classifier, data: Data, args: argparse.Namespace) -> dict[str, list[Row]]:
    """Rows by table, for all tables except throughput."""
    classes, matched = match_classes(data.images.names, classifier.labels)
    if matched != "by name":
        print(f"{classifier.path}, {data.name}: classes are matched {matched}", flush=True)
    columns = columns_of(args, args.trained_size or classifier.size)
    rows: dict[str, list[Row]] = {}
    for (table, size, rule), ranks in label_ranks(classifier, data, columns, classes).items():
        more = {table: rule} if rule else {}
        rows.setdefault(table, []).append({"size": size, **more, **accuracies(ranks)})
    if args.bins:
        rows["bins"] = measure_bins(classifier, data, args, classes)
    return rows


def accuracies(ranks: np.ndarray) -> Row:
    """Number of images, top-1 and top-5 accuracy in percent."""
    return {"images": len(ranks), **{f"top{k}": 100 * float((ranks < k).mean()) for k in (1, 5)}}


def size_bins(edges: Sequence[int]) -> list[tuple[str, int, float]]:
    """Label, lowest and highest shorter side of each bin: "101-150"; the last bin is "385+"."""
    *closed, (_, low, high) = bins(edges, "--bins")
    return [*closed, (f"{low}+", low, high)]


def strategies(
    shapes: Sequence[tuple[int, int]], low: int, high: float, sizes: Sequence[int]
) -> Mapping[str, View]:
    """Ways to resize the images of the bin from `low` to `high`, by name (CAPE Appendix B.2);
    `shapes` are (height, width). The last bin may have images of thousands of pixels, so its
    largest tested size is 500 pixels (with the edges of the paper), and its images are not tested
    at their original size."""
    sides = [min(shape) for shape in shapes]
    largest = max(round(OPEN_BIN_MAX * (low - 1)), min(sides)) if high == inf else max(sides)
    views = {f"{size} px": View("crop", size) for size in sizes}
    views |= {MIN: View("crop", min(sides)), MAX: View("crop", largest)}
    if high < inf:
        views |= {"original": View("original"), "original (no crop)": View("untouched")}
    return views


def measure_bins(
    classifier: Classifier, data: Data, args: argparse.Namespace, classes: Sequence[int]
) -> list[Row]:
    """A row for each bin and strategy; leaves out strategies with a shape that the model
    refuses."""
    # images of one size follow each other, so that they share a forward
    members = sorted(zip(shapes_of(data), data.order, strict=True))
    rows = []
    for label, low, high in size_bins(args.bins):
        chosen = [member for member in members if low <= min(member[0]) <= high]
        if not chosen:
            continue
        shapes, order = zip(*chosen, strict=True)
        columns = {}
        for name, view in strategies(shapes, low, high, args.sizes).items():
            tested = [(view.size, view.size)] if view.size else extremes(shapes)
            if reason := next(filter(None, starmap(classifier.refusal, tested)), None):
                print(f"{classifier.path}, {data.name} {label}: without {name!r}, because {reason}")
            else:
                columns[name] = [view]
        ranks = label_ranks(classifier, data._replace(order=order), columns, classes)
        for name, values in ranks.items():
            size = columns[name][0].size or "own"
            rows.append({"bin": label, "strategy": name, "size": size, **accuracies(values)})
    return rows


def extremes(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extremes of (height, width): the smallest height with the smallest width, and the shapes with
    the smallest and largest height and width. A model that accepts all of them has no fixed size,
    and its patches are small enough."""
    corners = [tuple(map(min, zip(*shapes, strict=True)))]
    corners += [pick(shapes, key=itemgetter(side)) for pick in (min, max) for side in (0, 1)]
    return list(dict.fromkeys(corners))
