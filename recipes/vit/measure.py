"""What is measured of one model on one data set: ranks of the right classes by size and rule."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from recipes.lab.data import TEST_SPLITS, open_dataset
from recipes.lab.steps import CommandError
from recipes.lab.tables import Row
from recipes.vit.classifier import Classifier, match_classes
from recipes.vit.data import Images, digits, labelled, read_images
from recipes.vit.protocol import (
    GAMMA_RULES,
    View,
    bin_label,
    bin_of,
    gamma_of,
    strategies,
    tta_sizes,
)

T = TypeVar("T")

DIGITS = "digits"


# ---- data --------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Images to test on.

    Attributes:
        name: For tables.
        order: Indices of those that are used.
        batch_size: Images of a forward, at most.
        workers: Threads that read images.
    """

    name: str
    images: Images
    order: Sequence[int]
    batch_size: int = 64
    workers: int = 1

    def load(self, images: Any, collate: Callable[[list], T], what: str) -> Iterator[T]:
        """Batches of those of `images` that are in the order, with progress; one is read while the
        one before is in use."""
        order, size = list(self.order), self.batch_size
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        # Decoding and resizing release Python's lock; processes would send every pixel through
        # shared memory.
        with ThreadPoolExecutor(self.workers) as pool:

            def submit(chunk: Sequence[int]) -> list[Future]:
                return [pool.submit(images.__getitem__, index) for index in chunk]

            waiting = submit(chunks[0])
            for following in tqdm([*chunks[1:], []], what, leave=False, disable=None, unit="batch"):
                ready, waiting = waiting, submit(following)
                yield collate([future.result() for future in ready])


@cache  # the same for all models
def shapes_of(data: Data) -> list[tuple[int, int]]:
    """(height, width) of each image of the order, in pixels."""
    loader = data.load(data.images, _shapes, f"{data.name}: sizes")
    return [shape for batch in loader for shape in batch]


def _shapes(samples: Sequence[tuple[torch.Tensor, int]]) -> list[tuple[int, int]]:
    return [tuple(image.shape[1:]) for image, _ in samples]


def load_data(args: argparse.Namespace, channels: int) -> list[Data]:
    """All data sets of the command line, in the colours that the models take."""
    by_name: dict[str, Data] = {}
    for given in args.dataset:
        name = DIGITS if given is None else Path(given).name
        name = str(given) if name in by_name else name
        images = digits(channels)[1] if given is None else _test_images(given, args, channels)
        if not len(images):
            raise CommandError(f"--dataset {given} has no images in the split that is tested")
        images.keep(args.limit or len(images))
        images.hold()
        by_name[name] = Data(name, images, range(len(images)), args.batch_size, args.workers)
    return list(by_name.values())


def _test_images(name: str, args: argparse.Namespace, channels: int) -> Images:
    """The whole split that is tested. Classes are those of the split itself, for there may be no
    training."""
    data = open_dataset(name, args.dataset_config)
    split = args.test_split or _test_split(name, args, data)
    if split not in data:
        raise CommandError(
            f"--test-split {split}: {name} has the splits {', '.join(data)}; name one"
        )
    return read_images(args, data[split], data[split], channels)


def _test_split(name: str, args: argparse.Namespace, data: Mapping[str, Any]) -> str:
    """The only split, or the first of a usual name that has labels.

    Raises:
        CommandError: if there is none, for a split of training is not tested unless it is named.
    """
    if len(data) == 1:
        print(f"{name}: its only split is tested whole; is it new to the models?", flush=True)
        return next(iter(data))
    with_labels = labelled(args, data)
    split = next((split for split in TEST_SPLITS if split in with_labels), None)
    if split is None:
        raise CommandError(
            f"--test-split is missing: {name} has the splits {', '.join(data)}, of which none with "
            f"labels is called {', '.join(TEST_SPLITS)}; name the one to test"
        )
    return split


# ---- ranks of the right classes ------------------------------------------------------------------


class Pass(NamedTuple):
    """One forward of an image: how it is shown, and the factor on the grid of positions."""

    view: View
    gamma: float = 1.0


class _Views:
    """Each image in all its views, with its label."""

    def __init__(self, images: Images, views: Sequence[View]) -> None:
        self.images, self.views = images, views

    def __getitem__(self, index: int) -> tuple[int, list[torch.Tensor]]:
        image, label = self.images[index]
        return label, [view(image) for view in self.views]


Groups = list[tuple[list[int], torch.Tensor]]


def grouped(images: Sequence[torch.Tensor]) -> Groups:
    """Batches ``[b, C, h, w]`` of one exact size, each with the places of its images."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, image in enumerate(images):
        groups.setdefault(tuple(image.shape), []).append(place)
    return [(places, torch.stack([images[i] for i in places])) for places in groups.values()]


def _collate(samples: Sequence[tuple[int, list[torch.Tensor]]]) -> tuple[list[int], list[Groups]]:
    labels, views = zip(*samples, strict=True)
    return list(labels), [grouped(images) for images in zip(*views, strict=True)]


def scores_of(classifier: Classifier, groups: Groups, gamma: float = 1.0) -> torch.Tensor:
    """Log-probabilities ``[B, classes]`` in the order of the places; a forward for each group."""
    scores = torch.empty(sum(len(places) for places, _ in groups), len(classifier.labels))
    for places, batch in groups:
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
    classifier: Classifier,
    data: Data,
    columns: Mapping[Any, Sequence[Pass]],
    classes: Sequence[int],
) -> dict[Any, np.ndarray]:
    """Rank of the right class of each image, 0 where it is the best.

    Images are read once, each distinct pass runs once, and images of different sizes never share a
    forward.

    Args:
        columns: What is compared: passes whose log-probabilities are added up.
        classes: Number of the model's class for each label.

    Returns:
        ``[len(data.order)]`` integers for each column.
    """
    passes = list(dict.fromkeys(one for column in columns.values() for one in column))
    views = list(dict.fromkeys(one.view for one in passes))
    ranks: dict[Any, list[int]] = {name: [] for name in columns}
    what = f"{classifier.path}: {data.name}"
    for labels, shown in data.load(_Views(data.images, views), _collate, what):
        groups = dict(zip(views, shown, strict=True))
        scores = {one: scores_of(classifier, groups[one.view], one.gamma) for one in passes}
        right = torch.tensor([classes[label] for label in labels])
        for name, column in columns.items():
            ranks[name] += rank_of(sum(scores[one] for one in column), right).tolist()
    return {name: np.array(values) for name, values in ranks.items()}


# ---- one checkpoint on one data set --------------------------------------------------------------


def columns_of(args: argparse.Namespace, train: int) -> dict[tuple[str, int, str], list[Pass]]:
    """What is compared on all images: passes by kind of table, size and rule."""
    view = {size: View(args.protocol, size) for size in args.sizes}
    columns = {("accuracy", size, ""): [Pass(view[size])] for size in args.sizes}
    for size in args.sizes:
        if args.tta:
            together = tta_sizes(size, args.tta_step)
            columns["tta", size, "-"] = [Pass(view[size])]
            columns["tta", size, "+"] = [Pass(View(args.protocol, other)) for other in together]
        for rule in GAMMA_RULES if args.gamma else ():
            columns["gamma", size, rule] = [Pass(view[size], gamma_of(rule, size, train))]
    return columns


def check(classifier: Classifier, args: argparse.Namespace) -> None:
    """Refuses what the model cannot do before hours of work."""
    if args.gamma:
        classifier.check_gamma()
    columns = columns_of(args, classifier.size).values()
    for size in sorted({one.view.size for column in columns for one in column}):
        reason = classifier.refusal(size, size)
        if reason:
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
    for (kind, size, rule), ranks in label_ranks(classifier, data, columns, classes).items():
        more = {kind: rule} if rule else {}
        rows.setdefault(kind, []).append({"size": size, **more, **accuracies(ranks)})
    if args.bins:
        rows["bins"] = measure_bins(classifier, data, args, classes)
    return rows


def accuracies(ranks: np.ndarray) -> Row:
    """Number of images, top-1 and top-5 accuracy in percent."""
    return {"images": len(ranks), **{f"top{k}": 100 * float((ranks < k).mean()) for k in (1, 5)}}


def measure_bins(
    classifier: Classifier, data: Data, args: argparse.Namespace, classes: Sequence[int]
) -> list[Row]:
    """A row for each bin and strategy; see :func:`recipes.vit.protocol.strategies`.

    A strategy is left out of a bin where the model refuses one of its :func:`extremes`, which is
    said.
    """
    members: dict[int, list[tuple[tuple[int, int], int]]] = {}
    for shape, index in zip(shapes_of(data), data.order, strict=True):
        members.setdefault(bin_of(*shape, args.bins), []).append((shape, index))
    rows = []
    for number in sorted(members):
        # images of one size follow each other, so that they share a forward
        shapes, order = zip(*sorted(members[number]), strict=True)
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
    """Extremes of (height, width) in pixels: the smallest of each, and shapes with the smallest and
    largest of each. A model that takes all of them has neither a size of its own nor too large a
    patch."""
    corners = [(min(height for height, _ in shapes), min(width for _, width in shapes))]
    corners += [pick(shapes, key=itemgetter(side)) for pick in (min, max) for side in (0, 1)]
    return list(dict.fromkeys(corners))
