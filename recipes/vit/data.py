"""Images with labels: built-in digits, folders, tables and data sets of the hub."""

import argparse
import contextlib
import io
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import ViTImageProcessor

from recipes.data import check_columns, open_dataset, train_and_test
from recipes.steps import CommandError


class Images(Dataset):
    """Images ``[channels, height, width]`` in 0 to 1 with labels.

    Attributes:
        names: Names of the classes.
        crop: Smallest and largest share of the image in a random crop; None for whole images.
        seed: Crops depend on it, the epoch and the index alone, so that resuming repeats them.
    """

    def __init__(self, items: Any, load: Any, names: Sequence[str]) -> None:
        self.items, self.load, self.names = items, load, list(names)
        self.crop: tuple[float, float] | None = None
        self.seed = self.epoch = 0

    def __len__(self) -> int:
        return len(self.items)

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.load(self.items[index])
        if self.crop is not None:
            rng = random.Random(f"{self.seed} {self.epoch} {index}")
            image = random_crop(image, self.crop, rng)
        return image, label


def random_crop(
    image: torch.Tensor, share: tuple[float, float], rng: random.Random
) -> torch.Tensor:
    """``[C, h, w]``, a part of random area, place and shape (3:4 to 4:3) of ``[C, H, W]``."""
    height, width = image.shape[1:]
    area = rng.uniform(*share) * height * width
    ratio = math.exp(rng.uniform(-1, 1) * math.log(4 / 3))
    high = min(height, max(1, round(math.sqrt(area / ratio))))
    wide = min(width, max(1, round(math.sqrt(area * ratio))))
    top, left = rng.randint(0, height - high), rng.randint(0, width - wide)
    return image[:, top : top + high, left : left + wide]


def resize(image: torch.Tensor, size: int) -> torch.Tensor:
    """``[C, size, size]``."""
    options = {"size": (size, size), "mode": "bilinear", "align_corners": False, "antialias": True}
    return F.interpolate(image[None], **options)[0]


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1797 digits of 8 x 8 pixels, four fifths for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = torch.tensor(data.images[order] / 16, dtype=torch.float32)[:, None]
    items = list(zip(images, data.target[order].tolist(), strict=True))
    names = [str(name) for name in data.target_names]
    cut = len(items) * 4 // 5
    return tuple(Images(part, lambda item: item, names) for part in (items[:cut], items[cut:]))


def given_data(args: argparse.Namespace, channels: int) -> tuple[Images, Images]:
    """A data set of the hub, a local folder of images or parquet, csv or json files."""
    data = open_dataset(args.dataset, args.dataset_config)
    parts = train_and_test(data, args.train_split, args.test_split)
    check_columns(args, parts["train"], "image_column", "label_column")
    names = getattr(parts["train"].features[args.label_column], "names", None)
    # plain numbers or words have no names
    values = sorted(set(parts["train"][args.label_column])) if names is None else range(len(names))
    classes = {value: place for place, value in enumerate(values)}
    unknown = set(parts["test"][args.label_column]) - set(classes)
    if unknown:
        raise CommandError(
            f"--label-column {args.label_column}: the test has {min(unknown, key=str)!r}, which "
            "training does not have"
        )

    def load(row: Any) -> tuple[torch.Tensor, int]:
        image = row[args.image_column]
        if isinstance(image, dict):  # bytes of a parquet file without a declared feature
            image = Image.open(io.BytesIO(image["bytes"]))
        image = image.convert("L" if channels == 1 else "RGB")
        pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
        pixels = pixels[None] if channels == 1 else pixels.permute(2, 0, 1)
        return pixels, classes[row[args.label_column]]

    return tuple(
        Images(parts[name], load, list(map(str, names or values))) for name in ("train", "test")
    )


def make_processor(path: str | None, size: int, channels: int) -> ViTImageProcessor:
    """What the images are normalised by; saved with the model."""
    if path:
        with contextlib.suppress(OSError):  # a checkpoint without one
            return ViTImageProcessor.from_pretrained(path)
    half = [0.5] * channels
    return ViTImageProcessor(size={"height": size, "width": size}, image_mean=half, image_std=half)
