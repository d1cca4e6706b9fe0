"""Sizes of ViTs and settings of trainings, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

UNIVIT_SIZES = tuple(range(128, 321, 32))  # CAPE section 5.1


def _vit(
    hidden: int, heads: int, layers: int = 12, ratio: int = 4, patch: int = 16, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ratio * hidden,
        "num_hidden_layers": layers,
        "patch_size": patch,
        **more,
    }


# Models of CAPE section 5.1 (B) and of DeiT (Ti, S)
PRESETS = {
    "vit_ti": _vit(192, 3, layer_norm_eps=1e-6),
    "vit_s": _vit(384, 6, layer_norm_eps=1e-6),
    "vit_b": _vit(768, 12, layer_norm_eps=1e-6),
}


class Recipe(NamedTuple):
    """Settings of a training; options on the command line override these settings."""

    training: str = ""  # flags of the Trainer
    options: Mapping[str, Any] = {}  # options of recipes/vit/finetune_hf.py
    model: Mapping[str, Any] = {}  # sizes of a model from scratch
    # settings of positions by type, instead of the defaults
    settings: Mapping[str, Mapping[str, Any]] = {}
    univit_sizes: Sequence[int] = UNIVIT_SIZES
    rate_per_1024: float | None = None  # learning rate by images per update; else in `training`


_SMALL_TRAINING = (
    "--max_steps 1200 --learning_rate 2e-3 --lr_scheduler_type cosine --weight_decay 0.05"
)
_DIGIT_SIZES = (16, 20, 24, 32, 48)
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
    "--label_smoothing_factor 0.1 --max_grad_norm 0 --dataloader_drop_last True "
    "--save_strategy epoch"
)

RECIPES = {
    "plain": Recipe(),
    # scikit-learn's digits, enlarged: one minute for each type
    "digits": Recipe(
        training=f"{_SMALL_TRAINING} --per_device_train_batch_size 64 --warmup_steps 50",
        options={"crop": (0.25, 1.0), "test_sizes": _DIGIT_SIZES},
        model=_vit(64, heads=4, layers=3, ratio=2, patch=4, image_size=24, num_channels=1),
        # The paper's shift is a quarter of the image, and its training 300 epochs of ImageNet.
        settings={"cape": {"max_global_shift": 0.1}},
        univit_sizes=_DIGIT_SIZES,
    ),
    # CIFAR-10, or some thousand images of it: minutes for each type on one core
    "cifar10": Recipe(
        training=f"{_SMALL_TRAINING} --per_device_train_batch_size 32 --warmup_steps 100 "
        "--per_device_eval_batch_size 100",
        options={"flip": True, "test_sizes": (16, 20, 24, 28, 32, 40, 48, 64)},
        # initializer_range 1 / sqrt(96): so short a training of a small model learns less with 0.02
        model=_vit(96, heads=4, layers=4, ratio=2, patch=4, image_size=32)
        | {"layer_norm_eps": 1e-6, "initializer_range": 0.1},
        univit_sizes=(16, 24, 32, 40, 48),
    ),
    # A grid of 16 x 16 patches, close to ImageNet's 14 x 14. 42 % of the channels turn by more than
    # half a circle from one patch to the next on 8 x 8 patches (recipe cifar10), and 9 % on 16 x
    # 16. Weights start with the standard deviation 0.02, as in DeiT, except the weights of the
    # patch projection.
    "cifar10-fine": Recipe(
        training="--num_train_epochs 10 --learning_rate 2e-3 --lr_scheduler_type cosine "
        "--weight_decay 0.05 --per_device_train_batch_size 32 --warmup_steps 200 "
        "--per_device_eval_batch_size 50",
        options={"flip": True, "scale_patches": True, "test_sizes": (20, 24, 28, 32, 40, 48, 64)},
        model=_vit(64, heads=2, layers=3, ratio=2, patch=2, image_size=32)
        | {"layer_norm_eps": 1e-6},
        univit_sizes=(16, 24, 32, 40, 48),
    ),
    # DeiT without distillation, CAPE section 5.1: 5 epochs of warm-up, down to 1e-5
    "deit": Recipe(
        training=f"{_DEIT_TRAINING} --num_train_epochs 300 --weight_decay 0.05 "
        "--warmup_steps 0.01667 --lr_scheduler_type cosine_with_min_lr "
        '--lr_scheduler_kwargs {"min_lr":1e-5}',
        options=_DEIT_OPTIONS,
        model={"layer_norm_eps": 1e-6},
        rate_per_1024=1e-3,
    ),
    # DeiT's command for finetuning at a larger image size: 5e-6 for 512 images, 5 epochs of warm-up
    "deit-finetune": Recipe(
        training=f"{_DEIT_TRAINING} --num_train_epochs 30 --weight_decay 1e-8 "
        "--warmup_steps 0.1667 --lr_scheduler_type constant_with_warmup",
        options={**_DEIT_OPTIONS, "train_sizes": (384,)},
        rate_per_1024=1e-5,
    ),
}
