"""Image classification with any position embedding, trained at one size or many, tested at others.

    python recipes/vit/finetune_hf.py              # built-in digits, about a minute a type
    accelerate launch recipes/vit/finetune_hf.py --position-embedding cape \\
        --model google/vit-base-patch16-224 --dataset food101 --test-sizes 160 224 384
    accelerate launch recipes/vit/finetune_hf.py --univit ...    # one random size per batch

Without --model a small model is trained from scratch; without --dataset the data are scikit-learn's
handwritten digits, enlarged.
"""

import argparse
import io
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainingArguments, Trainer

from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.finetune import (
    batches,
    check_columns,
    make_parser,
    open_dataset,
    parse,
    report,
    share,
    train,
    train_and_test,
    variants,
)
from recipes.steps import CommandError, positive, run_main

COMPARED = ("abspos", "sinpos", "cape")
UNIVIT_SIZES = tuple(range(128, 321, 32))  # CAPE section 5.1
DIGIT_SIZES = (16, 20, 24, 32, 48)
DIGIT_CROP = (0.25, 1.0)
# The paper's shift of half an image is more than so short a training can digest.
DIGIT_SETTINGS = {"cape": {"max_global_shift": 0.1}}
DIGIT_MODEL = {
    "image_size": 24,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
DIGIT_TRAINING = (
    *("--max_steps", "1200", "--per_device_train_batch_size", "64", "--learning_rate", "2e-3"),
    *("--warmup_steps", "50", "--lr_scheduler_type", "cosine", "--weight_decay", "0.05"),
)


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


class Collator:
    """Batches of one size, drawn anew for each batch where there are several (UniViT).

    The size is drawn from the content of the batch and the seed, so that a resumed training sees
    the same sizes.
    """

    def __init__(self, sizes: Sequence[int], patch: int, seed: int) -> None:
        for size in sizes:
            if size < patch:
                raise CommandError(
                    f"size {size} is smaller than a patch of {patch} pixels; give larger sizes"
                )
        self.sizes, self.seed = list(sizes), seed

    def __call__(self, samples: Sequence[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([label for _, label in samples])
        key = f"{self.seed} {float(sum(image.sum() for image, _ in samples))}"
        size = random.Random(key).choice(self.sizes)
        return {
            "pixel_values": torch.stack([resize(i, size) for i, _ in samples]),
            "labels": labels,
        }


def resize(image: torch.Tensor, size: int) -> torch.Tensor:
    """``[C, size, size]``, normalised to about -1 to 1."""
    options = {"size": (size, size), "mode": "bilinear", "align_corners": False, "antialias": True}
    return F.interpolate(image[None], **options)[0] * 2 - 1


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


def hub_dataset(args: argparse.Namespace) -> tuple[Images, Images]:
    """A data set of the hub, a local folder of images or parquet, csv or json files."""
    parts = train_and_test(open_dataset(args.dataset))
    check_columns(args, parts["train"], "image_column", "label_column")
    feature = parts["train"].features[args.label_column]
    names = getattr(feature, "names", None) or sorted(
        set(map(str, parts["train"][args.label_column]))
    )

    def load(row: Any) -> tuple[torch.Tensor, int]:
        image, label = row[args.image_column], row[args.label_column]
        if isinstance(image, dict):  # bytes of a parquet file without a declared feature
            image = Image.open(io.BytesIO(image["bytes"]))
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
        index = label if isinstance(label, int) else names.index(str(label))
        return torch.from_numpy(pixels).permute(2, 0, 1), index

    return tuple(Images(parts[name], load, names) for name in ("train", "test"))


def accuracy(model: Any, data: Images, size: int, batch_size: int) -> float:
    """Share of images of `data`, resized to `size`, whose best class is right."""
    collate = Collator([size], 1, 0)

    def run(rows: Sequence[int]) -> list[bool]:
        batch = collate([data[row] for row in rows])
        logits = model(batch["pixel_values"].to(model.device)).logits
        return (logits.argmax(-1).cpu() == batch["labels"]).tolist()

    right = share(batches([0] * len(data), batch_size), run, f"size {size}", len(data))
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe; see the module docstring."""
    parser = make_parser(__doc__, "image")
    add = parser.add_argument
    add("--dataset", metavar="NAME", help="hub data set, folder of images, parquet, csv or json")
    add("--image-column", default="image")
    add("--label-column", default="label")
    pixels = {"nargs": "+", "type": positive, "metavar": "PIXELS"}
    add("--train-sizes", **pixels, help="default: that of the model")
    add("--test-sizes", **pixels, help="default: that of training; of the digits: 16 to 48")
    text = "one random size per batch, of --train-sizes; default: 128 to 320 in steps of 32"
    add("--univit", action="store_true", help=f"{text}, of the digits: 16 to 48")
    text = "train on random crops of this share of the image; default: whole, of the digits 0.25 1"
    add("--crop", nargs=2, type=float, metavar=("LOW", "HIGH"), help=text)
    parser.set_defaults(output=Path("results/vit"))
    builtin = "--dataset" not in (sys.argv if argv is None else argv)
    args, training = parse(parser, DIGIT_TRAINING if builtin else (), argv)
    if builtin:
        torch.set_num_threads(1)  # so small a model gains nothing by more
    train_set, test_set = hub_dataset(args) if args.dataset else digits()
    sizes = dict(DIGIT_MODEL if builtin else {}) | dict(args.model_config or {})
    if args.crop and not 0 < args.crop[0] <= args.crop[1] <= 1:
        raise CommandError(
            f"--crop {args.crop[0]} {args.crop[1]} is not allowed; allowed: 0 < LOW <= HIGH <= 1"
        )
    train_set.crop = args.crop or (DIGIT_CROP if builtin else None)
    train_set.seed = training.seed
    train_sizes = args.train_sizes
    if train_sizes is None and args.univit:
        train_sizes = DIGIT_SIZES if builtin else UNIVIT_SIZES
    if train_sizes and len(train_sizes) > 1 and not args.univit:
        raise CommandError(
            f"--train-sizes {' '.join(map(str, train_sizes))}: several sizes need --univit"
        )

    def make_trainer(settings: Any, own: Seq2SeqTrainingArguments) -> Trainer:
        model = build_model(args.model, settings, sizes, train_set.names)
        collator = Collator(
            train_sizes or [min(model.vit.embeddings.image_size)],
            max(model.vit.embeddings.patch_size),
            own.seed,
        )
        return Trainer(model, own, data_collator=collator, train_dataset=train_set)

    scores = {}
    for name, settings in variants(args, "image", COMPARED, {}).items():
        if builtin and not args.position_embedding:
            settings = {**settings, **DIGIT_SETTINGS.get(name, {})}
        trainer = train(name, settings, args, training, make_trainer)
        trained = trainer.data_collator.sizes
        tested = args.test_sizes or (DIGIT_SIZES if builtin else trained)
        batch_size = training.per_device_eval_batch_size
        scores[name] = {
            str(size): accuracy(trainer.model, test_set, size, batch_size) for size in tested
        }
    report(args.output, scores, "accuracy", "image size", list(map(str, trained)))


def build_model(
    path: str | None, settings: dict[str, Any], sizes: dict[str, Any], names: Sequence[str]
) -> CapeViTForImageClassification:
    """From a stock or cape checkpoint, or from scratch."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    if path:
        return CapeViTForImageClassification.from_pretrained(
            path, position_embedding=settings, ignore_mismatched_sizes=True, **labels
        )
    return CapeViTForImageClassification(
        CapeViTConfig(**sizes, **labels, position_embedding=settings)
    )


if __name__ == "__main__":
    run_main(main)
