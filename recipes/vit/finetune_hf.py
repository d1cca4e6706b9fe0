"""Image classification with any position embedding, trained at one size or many, tested at others.

    python recipes/vit/finetune_hf.py              # built-in digits, about a minute a type
    accelerate launch recipes/vit/finetune_hf.py --position-embedding cape \\
        --model google/vit-base-patch16-224 --dataset food101 --test-sizes 160 224 384
    accelerate launch recipes/vit/finetune_hf.py --univit ...    # one random size per batch

Without --model a ViT is trained from scratch, of the sizes of --model-config. Without --dataset the
data are scikit-learn's handwritten digits, enlarged, and the model is small.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import AutoConfig, Seq2SeqTrainingArguments, Trainer

from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.data import add_data_args, has_data
from recipes.finetune import (
    batches,
    load_model,
    make_config,
    make_parser,
    parse,
    report,
    share,
    train,
    variants,
)
from recipes.steps import CommandError, positive, run_main
from recipes.vit.data import Images, digits, given_data, make_processor, resize

COMPARED = ("abspos", "sinpos", "cape")
UNIVIT_SIZES = tuple(range(128, 321, 32))  # CAPE section 5.1
DIGIT_SIZES = (16, 20, 24, 32, 48)
DIGIT_CROP = (0.25, 1.0)
# The paper's shift is half an image, and its training 300 epochs of ImageNet.
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


class Collator:
    """Batches of one size, drawn anew for each batch where there are several (UniViT).

    The size is drawn from the content of the batch and the seed, so that a resumed training sees
    the same sizes.
    """

    def __init__(self, sizes: Sequence[int], patch: int, seed: int, processor: Any) -> None:
        for size in sizes:
            if size < patch:
                raise CommandError(
                    f"size {size} is smaller than a patch of {patch} pixels; give larger sizes"
                )
        self.sizes, self.seed = list(sizes), seed
        self.mean, self.std = (
            torch.tensor(numbers)[:, None, None]
            for numbers in (processor.image_mean, processor.image_std)
        )

    def __call__(self, samples: Sequence[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        labels = torch.tensor([label for _, label in samples])
        key = f"{self.seed} {float(sum(image.sum() for image, _ in samples))}"
        size = random.Random(key).choice(self.sizes)
        images = torch.stack([resize(image, size) for image, _ in samples])
        return {
            "pixel_values": (images - self.mean) / self.std,
            "labels": labels,
        }


def accuracy(model: Any, data: Images, collate: Collator, batch_size: int) -> float:
    """Share of images of `data`, all of one size, whose best class is right."""

    def run(rows: Sequence[int]) -> list[bool]:
        batch = collate([data[row] for row in rows])
        logits = model(batch["pixel_values"].to(model.device)).logits
        return (logits.argmax(-1).cpu() == batch["labels"]).tolist()

    right = share(batches([0] * len(data), batch_size), run, f"size {collate.sizes[0]}", len(data))
    return sum(right) / len(right)


def make_options() -> argparse.ArgumentParser:
    """The options of this recipe."""
    parser = make_parser(__doc__, "image")
    add = parser.add_argument
    add_data_args(parser, files=False)
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
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe; see the module docstring."""
    parser = make_options()
    builtin = not has_data(parser.parse_known_args(argv)[0])
    args, training = parse(parser, DIGIT_TRAINING if builtin else (), argv)
    if builtin:
        torch.set_num_threads(1)  # so small a model gains nothing by more
    sizes = dict(DIGIT_MODEL if builtin else {}) | dict(args.model_config or {})
    stock = AutoConfig.from_pretrained(args.model) if args.model else CapeViTConfig()
    channels = sizes.get("num_channels", stock.num_channels)
    size, patch = (sizes.get(k, getattr(stock, k)) for k in ("image_size", "patch_size"))
    size, patch = int(np.min(size)), int(np.max(patch))  # a configuration may have one per side
    train_set, test_set = digits() if builtin else given_data(args, channels)
    processor = make_processor(args.model, size, channels)
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

    tested = args.test_sizes or (DIGIT_SIZES if builtin else None)
    collate = Collator(train_sizes or [size], patch, training.seed, processor)
    for other in tested or ():
        Collator([other], patch, 0, processor)  # refuses what is too small before hours of training

    def make_trainer(settings: Any, own: Seq2SeqTrainingArguments) -> Trainer:
        model = build_model(args.model, settings, sizes, train_set.names)
        return Trainer(
            model, own, data_collator=collate, train_dataset=train_set, processing_class=processor
        )

    scores = {}
    for name, settings in variants(
        args, "image", COMPARED, DIGIT_SETTINGS if builtin else {}
    ).items():
        trainer = train(name, settings, args, training, make_trainer)
        batch_size = training.per_device_eval_batch_size
        scores[name] = {
            str(other): accuracy(
                trainer.model, test_set, Collator([other], patch, 0, processor), batch_size
            )
            for other in tested or collate.sizes
        }
    report(args.output, scores, "accuracy", "image size", list(map(str, collate.sizes)))


def build_model(
    path: str | None, settings: dict[str, Any], sizes: dict[str, Any], names: Sequence[str]
) -> CapeViTForImageClassification:
    """From a stock or cape checkpoint, or from scratch."""
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    if path:
        return load_model(
            CapeViTForImageClassification, path, settings, ignore_mismatched_sizes=True, **labels
        )
    return CapeViTForImageClassification(
        make_config(CapeViTConfig, sizes, **labels, position_embedding=settings)
    )


if __name__ == "__main__":
    run_main(main)
