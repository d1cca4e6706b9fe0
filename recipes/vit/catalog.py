"""Sizes of ViTs and settings of trainings, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

UNIVIT_SIZES = tuple(range(128, 321, 32))  # CAPE section 5.1


def _vit(hidden: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": 12,
        "patch_size": 16,
        "layer_norm_eps": 1e-6,
    }


# Models of CAPE section 5.1 (B) and of DeiT (Ti, S)
PRESETS = {"vit_ti": _vit(192, 3), "vit_s": _vit(384, 6), "vit_b": _vit(768, 12)}


class Recipe(NamedTuple):
    """What a name stands for; options that are given on the command line win.

    Attributes:
        training: Flags of the Trainer.
        options: Values of the recipe's own options.
        model: Sizes of a model from scratch.
        settings: Position settings by type, where the defaults do not suit the data.
        univit_sizes: Pixels that ``--univit`` draws from.
        rate_per_1024: Learning rate for 1024 images per update, to which it is proportional; None
            where `training` has it.
    """

    training: Sequence[str] = ()
    options: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    settings: Mapping[str, Mapping[str, Any]] = {}
    univit_sizes: Sequence[int] = UNIVIT_SIZES
    rate_per_1024: float | None = None


_DEIT_OPTIONS = {
    "crop": (0.08, 1.0),
    "flip": True,
    "rand_augment": "deit",
    "random_erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "repeats": 3,
}
_DEIT_TRAINING = (
    *("--label_smoothing_factor", "0.1", "--max_grad_norm", "0", "--dataloader_drop_last", "True"),
    *("--save_strategy", "epoch"),
)
_DIGIT_SIZES = (16, 20, 24, 32, 48)

RECIPES = {
    "plain": Recipe(),
    # scikit-learn's digits, enlarged: a minute a type
    "digits": Recipe(
        training=(
            *("--max_steps", "1200", "--per_device_train_batch_size", "64"),
            *("--learning_rate", "2e-3", "--warmup_steps", "50", "--lr_scheduler_type", "cosine"),
            *("--weight_decay", "0.05"),
        ),
        options={"crop": (0.25, 1.0), "test_sizes": _DIGIT_SIZES},
        model={
            "image_size": 24,
            "patch_size": 4,
            "num_channels": 1,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        },
        # The paper's shift is a quarter of the image, and its training 300 epochs of ImageNet.
        settings={"cape": {"max_global_shift": 0.1}},
        univit_sizes=_DIGIT_SIZES,
    ),
    # CIFAR-10, or some thousand images of it: minutes a type on one core
    "cifar10": Recipe(
        training=(
            *("--max_steps", "1200", "--per_device_train_batch_size", "32"),
            *("--learning_rate", "2e-3", "--warmup_steps", "100", "--lr_scheduler_type", "cosine"),
            *("--weight_decay", "0.05", "--per_device_eval_batch_size", "100"),
        ),
        options={"flip": True, "test_sizes": (16, 20, 24, 28, 32, 40, 48, 64)},
        model={
            "image_size": 32,
            "patch_size": 4,
            "hidden_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 192,
            "layer_norm_eps": 1e-6,
            # 1 / sqrt(96): from 0.02 so small and short a training learns much less
            "initializer_range": 0.1,
        },
        univit_sizes=(16, 24, 32, 40, 48),
    ),
    # DeiT without distillation, CAPE section 5.1: 5 epochs of warm-up, down to 1e-5
    "deit": Recipe(
        training=(
            *_DEIT_TRAINING,
            *("--num_train_epochs", "300", "--weight_decay", "0.05", "--warmup_steps", "0.01667"),
            *("--lr_scheduler_type", "cosine_with_min_lr"),
            *("--lr_scheduler_kwargs", '{"min_lr": 1e-5}'),
        ),
        options=_DEIT_OPTIONS,
        model={"layer_norm_eps": 1e-6},
        rate_per_1024=1e-3,
    ),
    # DeiT's command for finetuning at a higher size: 5e-6 for 512 images, 5 epochs of warm-up
    "deit-finetune": Recipe(
        training=(
            *_DEIT_TRAINING,
            *("--num_train_epochs", "30", "--weight_decay", "1e-8", "--warmup_steps", "0.1667"),
            *("--lr_scheduler_type", "constant_with_warmup"),
        ),
        options={**_DEIT_OPTIONS, "train_sizes": (384,)},
        rate_per_1024=1e-5,
    ),
}
