"""Reads images with labels: built-in digits, folders, tables and data sets of the hub."""

import argparse
import contextlib
import hashlib
import io
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Image as Feature
from PIL import Image, ImageOps
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import ViTImageProcessor

from cape_plugins.utils.texts import first_line
from recipes.lab.data import TEST_SPLITS, check_columns, open_dataset, train_and_test
from recipes.lab.steps import CommandError, progress

# Default columns: the first of these names that the data have.
COLUMNS = {
    "image_column": ("image", "img", "picture"),
    "label_column": ("label", "labels", "fine_label", "target", "class"),
}
_DARK = 4095  # largest value of 12 bits
HELD_BYTES = 2**28  # CIFAR-10 needs 150 MB


class Request(NamedTuple):
    """Asks for an image of a training epoch: a square of `size` pixels or, with None, the crop
    without resizing. The augmentation depends only on seed, epoch and `number` in the order of the
    epoch, so neither resuming nor the number of workers or processes changes it."""

    index: int
    size: int | None
    epoch: int
    number: int


@dataclass(eq=False)
class Images(Dataset):
    """Images ``[channels, height, width]`` in 0 to 1 with labels, by index or :class:`Request`."""

    items: Any  # one item for each image
    load: Callable  # from an item to image (float32 in 0 to 1, or uint8) and label
    names: Sequence[str]  # of the classes
    column: str = ""  # column of the images, where `items` are rows of a data set
    crop: tuple[float, float] | None = None  # smallest and largest share of a random crop
    augment: Callable[[torch.Tensor, random.Random], torch.Tensor] | None = None  # after resizing
    seed: int = 0  # seed of crops and augmentation

    def __len__(self) -> int:
        return len(self.items)

    def keep(self, number: int) -> None:
        """Keeps `number` images, evenly spread, or all images if there are fewer."""
        if number < len(self):
            indices = [n * len(self) // number for n in range(number)]
            if isinstance(self.items, list):
                self.items = [self.items[index] for index in indices]
            else:
                self.items = self.items.select(indices)

    def hold(self, limit: int = HELD_BYTES) -> "Images":
        """Decodes all images at once, if they take at most `limit` bytes together."""
        sample = [self.read(index)[0] for index in range(min(16, len(self)))]
        if len(self) * sum(image.nbytes for image in sample) <= limit * len(sample):
            self.items = [self.read(n) for n in progress(range(len(self)), "decode", delay=1)]
            self.load = tuple
        return self

    def fingerprint(self) -> str:
        """Fingerprint of classes, number of images, and a hundred images."""
        sha = hashlib.sha256(repr((self.names, len(self))).encode())
        for index in range(0, len(self), -(-len(self) // 100) or 1):
            image, label = self.read(index)
            sha.update(f"{label} {tuple(image.shape)}".encode() + image.numpy().tobytes())
        return sha.hexdigest()[:16]

    def read(self, index: int) -> tuple[torch.Tensor, int]:
        """Image in its stored size, and label; an error names the file or row."""
        try:
            return self.load(self.items[index])
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            name = f"image {index} of the data"
            if self.column and isinstance(self.items.features[self.column], Feature):
                row = self.items.cast_column(self.column, Feature(decode=False))[index]
                name = (row[self.column] or {}).get("path") or name
            why = (
                f"{name} cannot be read ({first_line(error)}); repair the image, or remove it from "
                "the data"
            )
            raise CommandError(why) from None

    def __getitem__(self, key: int | Request) -> tuple[torch.Tensor, int]:
        request = key if isinstance(key, Request) else Request(key, None, 0, key)
        image, label = self.read(request.index)
        if image.dtype == torch.uint8:
            image = image.float() / 255
        rng = random.Random(f"{self.seed} {request.epoch} {request.number}")
        if self.crop is not None:
            image = random_crop(image, self.crop, rng)
        if request.size is not None:
            image = resize(image, request.size)
        return image if self.augment is None else self.augment(image, rng), label


def random_crop(
    image: torch.Tensor, share: tuple[float, float], rng: random.Random
) -> torch.Tensor:
    """``[C, h, w]``, a part of random area, position and shape (3:4 to 4:3) of ``[C, H, W]``."""
    height, width = image.shape[1:]
    area = rng.uniform(*share) * height * width
    ratio = math.exp(rng.uniform(-1, 1) * math.log(4 / 3))
    high = min(height, max(1, round(math.sqrt(area / ratio))))
    wide = min(width, max(1, round(math.sqrt(area * ratio))))
    top, left = rng.randint(0, height - high), rng.randint(0, width - wide)
    return image[:, top : top + high, left : left + wide]


def resize(image: torch.Tensor, height: int, width: int | None = None) -> torch.Tensor:
    """``[..., C, height, width]``, by default a square; bilinear with antialiasing."""
    size = (height, width or height)
    if image.shape[-2:] == size:
        return image
    batch = image if image.dim() == 4 else image[None]
    batch = F.interpolate(batch, size, mode="bilinear", align_corners=False, antialias=True)
    return batch.reshape(*image.shape[:-2], *size)


def digits(channels: int = 1) -> tuple[Images, Images]:
    """scikit-learn's 1797 digits of 8 x 8 pixels, four fifths for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = torch.tensor(data.images[order] / 16, dtype=torch.float32)[:, None]
    images = images.expand(-1, channels, -1, -1)
    items = list(zip(images, data.target[order].tolist(), strict=True))
    cut = len(items) * 4 // 5
    names = list(map(str, data.target_names))
    return tuple(Images(part, tuple, names) for part in (items[:cut], items[cut:]))


def given_data(args: argparse.Namespace, channels: int) -> tuple[Images, Images]:
    """Training and test of the user's data; small data sets are decoded at once."""
    data = open_dataset(args.dataset, args.dataset_config)
    if args.test_split is None:
        data = labelled(args, data)
    parts = train_and_test(data, args.train_split, args.test_split)
    train = parts["train"]
    return tuple(read_images(args, train, rows, channels).hold() for rows in parts.values())


def labelled(args: argparse.Namespace, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The splits with labels other than -1; all splits if no split has such labels. Tests of
    competitions on the hub, such as ImageNet, have only labels of -1."""

    def has_labels(rows: Any) -> bool:
        column = _usual(args, "label_column", rows)
        return column is None or not len(rows) or any(label != -1 for label in rows[column])

    return {split: rows for split, rows in data.items() if has_labels(rows)} or data


def read_images(args: argparse.Namespace, training: Any, rows: Any, channels: int) -> Images:
    """The images of `rows`, with the classes of `training`, decoded when they are read."""
    pixels, target = (_column(args, option, training) for option in COLUMNS)
    names = getattr(training.features[target], "names", None)
    for labels in (training[target], rows[target]):
        if None in labels:
            where = f"row {labels.index(None) + 1} of the data"
            why = f"{where} has no label; add a label, or remove the row"
            raise CommandError(f"--label-column {target}: {why}")
    # labels that are plain numbers or words have no names of classes
    values = sorted(set(training[target])) if names is None else range(len(names))
    classes = {value: number for number, value in enumerate(values)}
    unknown = set(rows[target]) - set(classes)
    if unknown:
        label = min(unknown, key=str)
        why = (
            "the label -1, which means no label; name another --test-split"
            if label == -1
            else f"the label {label!r}, which is none of the {len(values)} classes of training; "
            "name another --test-split, or remove these rows"
        )
        raise CommandError(f"--label-column {target}: the test split has {why}")
    declared = isinstance(rows.features[pixels], Feature)
    # datasets would convert the image, and cut off large values
    if declared and rows.features[pixels].mode:
        rows = rows.cast_column(pixels, Feature())
    first = None if declared or not len(rows) else rows[0][pixels]
    if first is not None and not _has_bytes(first):
        raise CommandError(
            f"--image-column {pixels} has no images, but {first!r:.40}; name another column"
        )
    load = partial(_load, pixels=pixels, target=target, channels=channels, classes=classes)
    return Images(rows, load, list(map(str, names or values)), pixels)


def _load(
    row: Mapping[str, Any], pixels: str, target: str, channels: int, classes: Mapping[Any, int]
) -> tuple[torch.Tensor, int]:
    """The image ``[channels, H, W]``, uint8, and the number of its class."""
    image = row[pixels]
    if image is None:
        raise ValueError("this row has no image")
    if _has_bytes(image):  # a parquet file that does not declare the feature Image
        image = Image.open(io.BytesIO(image["bytes"]))
    image = eight_bits(ImageOps.exif_transpose(image))  # turned by its EXIF data
    # a copy, because the pixels of an image are read-only
    array = torch.from_numpy(np.array(image.convert("L" if channels == 1 else "RGB")))
    array = array[None] if channels == 1 else array.permute(2, 0, 1).contiguous()
    return array, classes[row[target]]


def eight_bits(image: Image.Image) -> Image.Image:
    """The image with its grey values scaled to 0 to 255, if it stores more than 8 bits; Pillow's
    conversion would cut them off at 255. White is 65535 for whole numbers, with a warning if all
    values fit into 12 bits; for floats white is 1, or 255 if a value is above 1. Other values are
    refused, because white is not defined. The scale is not chosen for each image, because this
    would make dark images bright.

    Raises:
        ValueError: if a value is not between 0 and white.
    """
    if image.mode[0] not in "IF":
        return image
    values = np.asarray(image, np.float64)
    low, high = values.min(), values.max()
    white = 65535 if image.mode[0] == "I" else 1 if high <= 1 else 255
    if not 0 <= low <= high <= white:  # also if low or high is no number
        raise ValueError(
            f"its values are {low:g} to {high:g}; allowed: whole numbers from 0 to 65535, floats "
            "from 0 to 1 or 255"
        )
    if white == 65535 and 0 < high <= _DARK:
        warnings.warn(
            f"an image has whole numbers of at most {_DARK}, nearly black if white is 65535; if "
            "white is 255 or 4095 in this image, store the image in 8 bits, or multiply its "
            "values by 257 or 16",
            stacklevel=2,
        )
    return Image.fromarray((values * (255 / white)).round().astype(np.uint8))


def _has_bytes(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), bytes)


def _usual(args: argparse.Namespace, option: str, data: Any) -> str | None:
    """The column that the option names, or the first column with a usual name; checks that the data
    have this column."""
    names = [getattr(args, option)] if getattr(args, option) else COLUMNS[option]
    return next((name for name in names if name in data.column_names), None)


def _column(args: argparse.Namespace, option: str, data: Any) -> str:
    if getattr(args, option) is not None:
        check_columns(args, data, option)
    elif not _usual(args, option, data):
        raise CommandError(
            f"--{option.replace('_', '-')} is missing: the data have the columns "
            f"{', '.join(data.column_names)}; name one of them, or give a folder with a subfolder "
            "of images for each of two classes or more"
        )
    return _usual(args, option, data)


def make_processor(path: str | None, size: int, channels: int) -> ViTImageProcessor:
    """The processor for images of `size`: it normalises with mean and standard deviation of the
    checkpoint `path`, or with 0.5 and 0.5."""
    pixels = {"height": size, "width": size}
    if path:
        with contextlib.suppress(OSError):  # a checkpoint without a processor
            return ViTImageProcessor.from_pretrained(path, size=pixels)
    half = [0.5] * channels
    return ViTImageProcessor(size=pixels, image_mean=half, image_std=half)


class Data(NamedTuple):
    """Test images: `order` are the indices to use, a batch has `batch_size` images, and `workers`
    threads read images."""

    name: str
    images: Images
    order: Sequence[int]
    batch_size: int = 64
    workers: int = 1

    def read(self, read: Callable[[int], Any], what: str) -> Iterator[list]:
        """Yields batches of the results of `read` for the indices of the order, with progress. The
        next batch is read while a batch is in use."""
        order, size = self.order, self.batch_size
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        # threads, because decoding releases Python's lock, and processes would have to send every
        # pixel
        with ThreadPoolExecutor(self.workers) as pool:
            waiting = pool.map(read, chunks[0])
            for following in progress([*chunks[1:], ()], what, unit="batch"):
                ready, waiting = waiting, pool.map(read, following)
                yield list(ready)


@cache  # shapes are the same for all models
def shapes_of(data: Data) -> list[tuple[int, int]]:
    """(height, width) of each image of the order, in pixels."""
    shapes = data.read(lambda index: data.images[index][0].shape[1:], f"{data.name}: sizes")
    return [tuple(shape) for batch in shapes for shape in batch]


def load_data(args: argparse.Namespace, channels: int) -> list[Data]:
    """All data sets of the command line, in the colours that the models take."""
    by_name: dict[str, Data] = {}
    for source in args.dataset:
        name = "digits" if source is None else Path(source).name
        name = str(source) if name in by_name else name
        images = digits(channels)[1] if source is None else _test_images(source, args, channels)
        if not len(images):
            raise CommandError(f"--dataset {source} has no images in the split that is tested")
        images.keep(args.limit or len(images))
        order = range(len(images))
        by_name[name] = Data(name, images.hold(), order, args.batch_size, args.workers)
    return list(by_name.values())


def _test_images(name: str, args: argparse.Namespace, channels: int) -> Images:
    """Images of a whole split: ``--test-split``, or the only split, or else the first split that
    has a usual name and labels. Only the labels of this split define the classes, because there may
    be no training split. A training split is tested only if it is named or is the only split."""
    data = open_dataset(name, args.dataset_config)
    splits = f"{name} has the splits {', '.join(data)}"
    split = args.test_split
    if not split and len(data) == 1:
        print(
            f"{name}: all images of its only split are tested; make sure that no model was "
            "trained on them",
            flush=True,
        )
        (split,) = data
    elif not split:
        with_labels = labelled(args, data)
        split = next((split for split in TEST_SPLITS if split in with_labels), None)
        if split is None:
            raise CommandError(
                f"--test-split is missing: {splits}, and no split with labels is called "
                f"{', '.join(TEST_SPLITS)}; name the split to test"
            )
    if split not in data:
        raise CommandError(f"--test-split {split}: {splits}; name one of them")
    return read_images(args, data[split], data[split], channels)
