"""Trains image classifiers with any position embedding at one or several sizes, and tests them at
other sizes.

    python recipes/vit/finetune_hf.py              # built-in digits, about a minute a type
    accelerate launch recipes/vit/finetune_hf.py --position-embedding cape \\
        --model google/vit-base-patch16-224 --dataset food101 --test-sizes 160 224 384
    accelerate launch recipes/vit/finetune_hf.py --univit ...    # one random size per update
    accelerate launch recipes/vit/finetune_hf.py --preset vit_s --recipe deit --dataset IMAGENET

Without --model a ViT with the sizes of --preset and --model-config is trained from scratch. Without
--dataset the data are scikit-learn's handwritten digits, enlarged, and the model is small.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import Seq2SeqTrainingArguments

from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.lab.command_line import number, positive, settings_to_compare
from recipes.lab.data import add_data_args, has_data
from recipes.lab.hf_checkpoints import load_model, make_config, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.steps import CommandError, run_main
from recipes.vit.augment import Augment, ImageTrainer, Mixing, rand_augment
from recipes.vit.catalog import PRESETS, RECIPES, Recipe
from recipes.vit.data import COLUMNS, Images, Request, digits, given_data, make_processor

COMPARED = ("abspos", "sinpos", "cape")
CLASSIFIER = ("classifier.weight", "classifier.bias")  # get new random values if the classes differ


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "image", COMPARED, "results/vit")
    add_data_args(parser, files=False)
    for option, names in COLUMNS.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            metavar="NAME",
            help=f"column (default: the first of {', '.join(names)} that is there)",
        )
    parser.add_argument("--preset", choices=PRESETS, help="sizes of a model from scratch")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="settings of a training; other options override these settings (default: digits "
        "without --dataset)",
    )
    pixels = {"nargs": "+", "type": positive, "metavar": "PIXELS"}
    parser.add_argument(
        "--train-sizes", **pixels, help="sizes of training (default: the size of the model)"
    )
    parser.add_argument(
        "--test-sizes",
        **pixels,
        help="sizes of the test (default: --train-sizes; for the digits: 16 to 48)",
    )
    parser.add_argument(
        "--scale-patches",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="start the patch projection of a new model with standard deviation 1/sqrt(inputs)",
    )
    parser.add_argument(
        "--univit",
        action="store_true",
        help="train at one random size of --train-sizes per update; default: 128 to 320 in steps "
        "of 32, for the digits: 16 to 48",
    )
    _add_regularisation(parser)
    return parser


def _add_regularisation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--crop",
        nargs=2,
        type=number(0, 1),
        metavar=("LOW", "HIGH"),
        help="train on random crops of this share of the image; default: whole, for the digits "
        "0.25 1",
    )
    parser.add_argument(
        "--flip",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="mirror half of the images",
    )
    parser.add_argument(
        "--rand-augment",
        metavar="NAME",
        help="deit (two of 15 operations), none, or a setting of timm such as rand-m9-mstd0.5-inc1",
    )
    parser.add_argument(
        "--random-erasing",
        type=number(0, 1),
        default=0.0,
        metavar="P",
        help="share of the images in which a box is replaced by noise",
    )
    parser.add_argument(
        "--mixup",
        type=number(0, 1e3),
        default=0.0,
        metavar="A",
        help="mix pairs of images, with lambda drawn from Beta(A, A); with --cutmix, one of the "
        "two per batch",
    )
    parser.add_argument(
        "--cutmix",
        type=number(0, 1e3),
        default=0.0,
        metavar="A",
        help="replace a box by the same box of another image, with its share drawn from Beta(A, A)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=1,
        metavar="N",
        help="copies of each image in an epoch, augmented independently; an epoch keeps its number "
        "of updates, so it has 1/N of the images (default: 1, no repetition)",
    )
    parser.add_argument(
        "--drop-path",
        type=number(0, 1, below=True),
        metavar="P",
        help="stochastic depth: rate of the last layer (default: 0, or as in the checkpoint)",
    )


def read_options(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, Seq2SeqTrainingArguments, Recipe]:
    """Parses the options; ``--recipe`` sets options that the command line leaves out."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_options()
    first = parser.parse_known_args(argv)[0]
    recipe = RECIPES[first.recipe or ("plain" if has_data(first) else "digits")]
    parser.set_defaults(**recipe.options)
    args, training = parse(parser, recipe.training.split(), argv)
    flags = {word.split("=")[0].replace("-", "_") for word in argv}
    if recipe.rate_per_1024 and "__learning_rate" not in flags:
        images = training.train_batch_size * training.gradient_accumulation_steps
        training.learning_rate = recipe.rate_per_1024 * images * training.world_size / 1024
    low, high = args.crop or (1, 1)
    if not 0 < low <= high <= 1:
        raise CommandError(f"--crop {low} {high} is not allowed; allowed: 0 < LOW <= HIGH <= 1")
    if training.train_sampling_strategy != "random":
        raise CommandError(
            f"--train_sampling_strategy {training.train_sampling_strategy} is not possible here: "
            "images come in random order; leave the option out"
        )
    if args.model and args.preset:
        raise CommandError("--preset has no effect on the checkpoint of --model")
    if args.model and "__scale_patches" in flags:
        raise CommandError("--scale-patches has no effect on the checkpoint of --model")
    if args.univit and args.train_sizes is None:
        args.train_sizes = recipe.univit_sizes
    if args.train_sizes and (len(set(args.train_sizes)) > 1) != args.univit:
        need = "--univit needs several sizes" if args.univit else "several sizes need --univit"
        raise CommandError(f"--train-sizes {' '.join(map(str, args.train_sizes))}: {need}")
    return args, training, recipe


def model_sizes(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Fields of the configuration. The image size is the size of training; for a new model that is
    trained at several sizes, it is the middle size: 224 of 128 to 320."""
    pixels = sorted(args.train_sizes or ())
    middle = {"image_size": pixels[len(pixels) // 2]} if pixels else {}
    only_size = middle if len(pixels) == 1 else {}
    if args.model:
        stock = read_config(args.model, CapeViTConfig)
        names = ("image_size", "patch_size", "num_channels")
        return {name: getattr(stock, name) for name in names if hasattr(stock, name)} | only_size
    preset = PRESETS.get(args.preset, {})
    return {**middle, **recipe.model, **preset, **only_size, **(args.model_config or {})}


def collate(
    samples: Sequence[tuple[torch.Tensor, int]], mean: torch.Tensor, std: torch.Tensor
) -> dict[str, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": (torch.stack(images) - mean) / std, "labels": torch.tensor(labels)}


def build_model(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    sizes: Mapping[str, Any],
    names: Sequence[str],
) -> CapeViTForImageClassification:
    """A model from a checkpoint, stock or cape, or from scratch. The learned table of a checkpoint
    is resized to the image size once, so that it learns at this size."""
    model_class = CapeViTForImageClassification
    more = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    if args.drop_path is not None:
        more["drop_path_rate"] = args.drop_path
    if not args.model:
        more["position_embedding"] = dict(settings)
        model = model_class(make_config(CapeViTConfig, sizes, **more))
        if args.scale_patches:
            scale_patches(model)
        return model
    more |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # for the classifier
    model, info = load_model(model_class, args.model, settings, **more)
    others = sorted({key for key, *_ in info["mismatched_keys"]} - set(CLASSIFIER))
    if others:
        raise CommandError(
            f"--model {args.model}: the shapes of {', '.join(others[:3])} differ from its "
            "config.json; give the folder that save_pretrained wrote"
        )
    if sizes["image_size"] != model.config.image_size:
        model.base_model.resize_images(*np.broadcast_to(sizes["image_size"], 2).tolist())
    return model


def scale_patches(model: CapeViTForImageClassification) -> None:
    """Draws the weights of the patch projection again, with a standard deviation of 1 /
    sqrt(inputs), so that the output has the standard deviation of the pixels. With 0.02, embeddings
    of patches of few pixels are so much smaller than sinusoids that a short training hardly uses
    them. Other weights keep 0.02, as in DeiT. `cifar10-fine` has patches of 2 pixels because 42 %
    of the channels turn by more than half a circle from one patch to the next on the 8 x 8 patches
    of `cifar10`."""
    weight = model.base_model.embeddings.patch_embeddings.projection.weight
    torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)


def accuracy(
    model: Any, data: Images, size: int, collate: Any, training: Seq2SeqTrainingArguments
) -> float:
    with ThreadPoolExecutor(max(1, training.dataloader_num_workers)) as pool:

        def run(rows: Sequence[int]) -> list[bool]:
            requests = [Request(row, size, 0, row) for row in rows]
            batch = collate(list(pool.map(data.__getitem__, requests)))
            logits = model(batch["pixel_values"].to(model.device)).logits
            return (logits.argmax(-1).cpu() == batch["labels"]).tolist()

        work = batches([0] * len(data), training.eval_batch_size)
        right = share(work, run, f"size {size}", len(data))
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> None:
    args, training, recipe = read_options(argv)
    if not args.dataset:
        torch.set_num_threads(1)  # more threads do not speed up such a small model
    sizes = args.model_config = model_sizes(args, recipe)  # part of the record of a training
    fields = CapeViTConfig().to_dict() | sizes
    # in a configuration, a size may have one number for each side
    channels, size = fields["num_channels"], int(np.min(fields["image_size"]))
    trained = list(args.train_sizes or [size])
    tested = list(args.test_sizes or trained)
    patch = int(np.max(fields["patch_size"]))
    if patch < 1:
        raise CommandError(f"--model-config: patch_size {patch} is not allowed; allowed: >= 1")
    if (least := min(*trained, *tested)) < patch:
        why = f"size {least} is smaller than a patch of {patch} pixels; give larger sizes"
        raise CommandError(why)
    compared = settings_to_compare(args, "image", COMPARED, recipe.settings)
    train_set, test_set = given_data(args, channels) if args.dataset else digits(channels)
    processor = make_processor(args.model, size, channels)
    if len(train_set.names) < 2:
        why = f"--dataset {args.dataset}: all images are of one class; give two or more"
        raise CommandError(why)
    mean = torch.tensor(processor.image_mean)[:, None, None]
    std = torch.tensor(processor.image_std)[:, None, None]
    normalised = partial(collate, mean=mean, std=std)
    pixels = rand_augment(args.rand_augment, processor.image_mean)
    train_set.crop = args.crop
    train_set.augment = Augment(mean, std, args.flip, pixels, args.random_erasing)

    def make_trainer(settings: Any, run_args: Seq2SeqTrainingArguments) -> ImageTrainer:
        train_set.seed = run_args.seed
        model = build_model(args, settings, sizes, train_set.names)
        trainer = ImageTrainer(model, run_args, normalised, train_set, processing_class=processor)
        trainer.sizes, trainer.repeats = trained, args.repeats
        if args.mixup or args.cutmix:
            trainer.mixing = Mixing(args.mixup, args.cutmix, len(train_set.names))
        return trainer

    rows = []
    made_of = train_set.fingerprint()
    for columns, trainer in train_all(compared, args, training, make_trainer, made_of):
        for side in tested:
            right = accuracy(trainer.model, test_set, side, normalised, training)
            rows.append({**columns, "image size": str(side), "accuracy": right})
    metrics, trained = {"accuracy": "Accuracy"}, list(map(str, trained))
    report(args, "Image classification", rows, "image size", metrics, trained=trained)


if __name__ == "__main__":
    run_main(main)
