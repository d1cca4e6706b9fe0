"""What is measured of one model on one data set: ranks of the right classes by size and rule, by
the protocols of CAPE (section 5.1 and Appendix B)."""

import argparse
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from recipes.lab.data import TEST_SPLITS, open_dataset
from recipes.lab.steps import CommandError, progress
from recipes.lab.tables import Row
from recipes.vit.classifier import Classifier, match_classes
from recipes.vit.data import Images, digits, labelled, read_images, resize

T = TypeVar("T")

CENTRE = 0.875  # share of the shorter side that the centre crop keeps: 224 of 256 pixels
BIN_EDGES = (100, 150, 200, 250, 300, 350, 384)  # CAPE Table 5
OPEN_BIN_MAX = 500 / 384  # its largest size above the last edge, by that edge
MIN, MAX = "min", "max"  # names of strategies
GAMMA_RULES = {"1": 0, "r/train": 1, "sqrt(r/train)": 0.5}  # powers of r/train, CAPE Table 6


# ---- data --------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Images to test on, those of `order`, by so many in a forward, read by `workers` threads."""

    name: str
    images: Images
    order: Sequence[int]
    batch_size: int = 64
    workers: int = 1

    def read(self, read: Callable[[int], T], what: str) -> Iterator[list[T]]:
        """Batches of what `read` makes of the indices of the order, with progress; one is read
        while the one before is in use."""
        order, size = self.order, self.batch_size
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        # Decoding and resizing release Python's lock; processes would send every pixel through
        # shared memory.
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = pool.map(read, chunks[0])
            for following in progress([*chunks[1:], ()], what, unit="batch"):
                ready, waiting = waiting, pool.map(read, following)
                yield list(ready)


@cache  # the same for all models
def shapes_of(data: Data) -> list[tuple[int, int]]:
    """(height, width) of each image of the order, in pixels."""
    shapes = data.read(lambda index: data.images[index][0].shape[1:], f"{data.name}: sizes")
    return [tuple(shape) for batch in shapes for shape in batch]


def load_data(args: argparse.Namespace, channels: int) -> list[Data]:
    """All data sets of the command line, in the colours that the models take."""
    by_name: dict[str, Data] = {}
    for given in args.dataset:
        name = "digits" if given is None else Path(given).name
        name = str(given) if name in by_name else name
        images = digits(channels)[1] if given is None else _test_images(given, args, channels)
        if not len(images):
            raise CommandError(f"--dataset {given} has no images in the split that is tested")
        images.keep(args.limit or len(images))
        images.hold()
        by_name[name] = Data(name, images, range(len(images)), args.batch_size, args.workers)
    return list(by_name.values())


def _test_images(name: str, args: argparse.Namespace, channels: int) -> Images:
    """The whole split that is named, the only one, or the first of a usual name that has labels; a
    split of training is not tested unless it is named. Classes are those of the split itself, for
    there may be no training."""
    data = open_dataset(name, args.dataset_config)
    said = f"{name} has the splits {', '.join(data)}"
    split = args.test_split
    if not split and len(data) == 1:
        print(f"{name}: its only split is tested whole; is it new to the models?", flush=True)
        (split,) = data
    elif not split:
        with_labels = labelled(args, data)
        split = next((split for split in TEST_SPLITS if split in with_labels), None)
        if split is None:
            raise CommandError(
                f"--test-split is missing: {said}, of which none with labels is called "
                f"{', '.join(TEST_SPLITS)}; name the one to test"
            )
    if split not in data:
        raise CommandError(f"--test-split {split}: {said}; name one")
    return read_images(args, data[split], data[split], channels)


# ---- how an image becomes the input of a model -------------------------------------------------


class View(NamedTuple):
    """One way to show an image ``[C, h, w]`` to a model.

    Attributes:
        protocol: "crop", the paper's: the shorter side becomes ``int(size / 0.875)`` pixels, the
            aspect is kept, then a square is cropped from the centre; "whole": the whole image
            becomes a square; "original": both sides are enlarged by 1 / 0.875 and the centre is
            cropped to the size that the image had; "untouched": the image as it is (the last two:
            CAPE Appendix B.2, strategies iv and v).
        size: Side of the square in pixels; 0 where the image keeps its own size.
    """

    protocol: str
    size: int = 0

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        sides = image.shape[1:]
        if self.protocol == "whole":
            return resize(image, self.size)
        if self.protocol == "crop":
            shorter = int(self.size / CENTRE)
            larger = resize(image, *(int(shorter * side / min(sides)) for side in sides))
            return _centre(larger, self.size, self.size)
        if self.protocol == "original":
            return _centre(resize(image, *(int(side / CENTRE) for side in sides)), *sides)
        return image


def _centre(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    top, left = round((image.shape[1] - height) / 2), round((image.shape[2] - width) / 2)
    return image[:, top : top + height, left : left + width]


class Pass(NamedTuple):
    """One forward of an image: how it is shown, and the factor on the grid of positions."""

    view: View
    gamma: float = 1.0


def tta_sizes(size: int, step: int) -> tuple[int, ...]:
    """Sizes whose log-probabilities are added up (CAPE section 5.1.3)."""
    if step >= size:
        raise CommandError(
            f"--tta-step {step} is not allowed with size {size}; allowed: less than the smallest "
            "of --sizes"
        )
    return tuple(sorted({size - step, size, size + step}))


def gamma_of(rule: str, size: int, train: int) -> float:
    """Factor on the grid of positions by one of :data:`GAMMA_RULES`."""
    return (size / train) ** GAMMA_RULES[rule]


def columns_of(args: argparse.Namespace, train: int) -> dict[tuple[str, int, str], list[Pass]]:
    """What is compared on all images: passes by kind of table, size and rule."""
    views = {size: View(args.protocol, size) for size in args.sizes}
    columns = {("accuracy", size, ""): [Pass(view)] for size, view in views.items()}
    for size, view in views.items():
        if args.tta:
            together = tta_sizes(size, args.tta_step)
            columns["tta", size, "-"] = [Pass(view)]
            columns["tta", size, "+"] = [Pass(View(args.protocol, other)) for other in together]
        for rule in GAMMA_RULES if args.gamma else ():
            columns["gamma", size, rule] = [Pass(view, gamma_of(rule, size, train))]
    return columns


# ---- ranks of the right classes ------------------------------------------------------------------


def scores_of(classifier: Classifier, images: Sequence[torch.Tensor], gamma: float) -> torch.Tensor:
    """Log-probabilities ``[B, classes]``; images of one exact size share a forward."""
    scores = torch.empty(len(images), len(classifier.labels))
    for shape in {image.shape for image in images}:
        places = [place for place, image in enumerate(images) if image.shape == shape]
        batch = torch.stack([images[place] for place in places])
        scores[places] = classifier.scores(batch, gamma).cpu()
    return scores


def rank_of(scores: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``[B]``: how many classes come before the `right` one ``[B]`` in `scores` ``[B, classes]``;
    of equal scores the first comes first, as in argmax."""
    right = right[:, None]
    own = scores.gather(1, right)
    earlier = torch.arange(scores.shape[1]) < right
    return ((scores > own) | ((scores == own) & earlier)).sum(1)


def label_ranks(
    classifier: Classifier, data: Data, columns: Mapping[Any, list[Pass]], classes: Sequence[int]
) -> dict[Any, np.ndarray]:
    """Rank of the right class of each image of the order, 0 where it is the best, by column: passes
    whose log-probabilities are added up. Images are read once, each distinct pass runs once.

    Args:
        classes: Number of the model's class for each label.
    """
    passes = list(dict.fromkeys(look for column in columns.values() for look in column))
    views = {look.view for look in passes}
    ranks: dict[Any, list[int]] = {name: [] for name in columns}

    def show(index: int) -> tuple[int, dict[View, torch.Tensor]]:
        image, label = data.images[index]
        return classes[label], {view: view(image) for view in views}

    for samples in data.read(show, f"{classifier.path}: {data.name}"):
        right = torch.tensor([label for label, _ in samples])
        scores = {
            look: scores_of(classifier, [shown[look.view] for _, shown in samples], look.gamma)
            for look in passes
        }
        for name, column in columns.items():
            ranks[name] += rank_of(sum(scores[look] for look in column), right).tolist()
    return {name: np.array(values) for name, values in ranks.items()}


# ---- one checkpoint on one data set --------------------------------------------------------------


def check(classifier: Classifier, args: argparse.Namespace) -> None:
    """Refuses what the model cannot do before hours of work."""
    if args.gamma:
        classifier.check_gamma()
    columns = columns_of(args, classifier.size).values()
    for size in sorted({look.view.size for column in columns for look in column}):
        if reason := classifier.refusal(size, size):
            raise CommandError(
                f"{classifier.path} refuses images of {size} x {size} pixels ({reason}); its own "
                f"size is {classifier.size}; give other --sizes"
            )


def measure(classifier: Classifier, data: Data, args: argparse.Namespace) -> dict[str, list[Row]]:
    """Rows of all tables but that of throughput, by kind."""
    classes, how = match_classes(data.images.names, classifier.labels)
    if how != "by name":
        print(f"{classifier.path}, {data.name}: classes are matched {how}", flush=True)
    columns = columns_of(args, args.train_size or classifier.size)
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


# ---- bins of image sizes -----------------------------------------------------------------------


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
    """Ways to resize the images of bin `number`, of these (height, width), by name (CAPE Appendix
    B.2). The bin without an upper end may have images of thousands of pixels: 500 pixels (at the
    paper's edges) stand for its largest, and no image keeps its own size."""
    sides = [min(shape) for shape in shapes]
    is_open = number == len(edges)
    largest = max(round(OPEN_BIN_MAX * edges[-1]), min(sides)) if is_open else max(sides)
    views = {f"{size} px": View("crop", size) for size in sizes}
    views |= {MIN: View("crop", min(sides)), MAX: View("crop", largest)}
    if not is_open:
        views |= {"original": View("original"), "original (no crop)": View("untouched")}
    return views


def measure_bins(
    classifier: Classifier, data: Data, args: argparse.Namespace, classes: Sequence[int]
) -> list[Row]:
    """A row for each bin and strategy. A strategy is left out of a bin where the model refuses one
    of its :func:`extremes`, which is said."""
    # images of one size follow each other, so that they share a forward
    members = sorted(zip(shapes_of(data), data.order, strict=True))
    rows = []
    for number in range(len(args.bins) + 1):
        chosen = [member for member in members if bin_of(*member[0], args.bins) == number]
        if not chosen:
            continue
        shapes, order = zip(*chosen, strict=True)
        label = bin_label(number, args.bins)
        columns = {}
        for name, view in strategies(shapes, number, args.bins, args.sizes).items():
            shown = [(view.size, view.size)] if view.size else extremes(shapes)
            reason = next(filter(None, (classifier.refusal(*sides) for sides in shown)), None)
            if reason:
                print(f"{classifier.path}, {data.name} {label}: without {name!r}, since {reason}")
            else:
                columns[name] = [Pass(view)]
        ranks = label_ranks(classifier, data._replace(order=order), columns, classes)
        for name, values in ranks.items():
            size = columns[name][0].view.size or "own"
            rows.append({"bin": label, "strategy": name, "size": size, **accuracies(values)})
    return rows


def extremes(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extremes of (height, width): the smallest of each, and shapes with the smallest and largest
    of each. A model that takes all of them has neither a size of its own nor too large a patch."""
    corners = [tuple(map(min, zip(*shapes, strict=True)))]
    corners += [pick(shapes, key=itemgetter(side)) for pick in (min, max) for side in (0, 1)]
    return list(dict.fromkeys(corners))
