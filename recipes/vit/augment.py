"""Image training of DeiT and CAPE without torchvision: sizes, augmentation, targets.

Touvron et al., "Training data-efficient image transformers", 2021, is the recipe of the CAPE paper
(section 5.1). Magnitudes come from the released code of CAPE: the magnitudes of DeiT without their
small random part.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Sampler
from transformers import Trainer

from recipes.lab.hf_training import SetEpoch
from recipes.lab.steps import CommandError
from recipes.vit.data import Request

RANDAUGMENT_DRAWS, RANDAUGMENT_CHANCE = 2, 0.5
ERASED_AREA, ERASED_ASPECT, ERASING_TRIES = (0.02, 1 / 3), 0.3, 10
# Weight decay applies to parameters that are multiplied with inputs, and not to added parameters:
# biases and norms (as in the Trainer and DeiT), and the parameters of this list (as in DeiT).
# Learned biases of attention (fire) are added to scores, as relative keys are. CAPE's released code
# decays biases and norms, but not the first two parameters, which are class token and patches
# without positions.
WITHOUT_DECAY = ("cls_token", "mask_token", "position_embeddings", ".relative.", ".layer_bias.")

Color = int | tuple[int, ...]
Pixels = Callable[[Image.Image, random.Random], Image.Image]


@dataclass(eq=False)
class SizeSampler(Sampler[Request]):
    """Images in random order; all images of an update have the same random size (UniViT, CAPE
    section 5.1). The paper writes "per batch", and does not say whether this means the batch of one
    GPU. The code of CAPE goes through its sizes in a fixed order, with 224 twice and without 320.

    Order and sizes depend only on seed and epoch and are the same in every process. All images of
    an update therefore have one size with any number of processes and micro-batches, and a resumed
    training continues with the sizes of a training without interruption.
    """

    images: int  # number of images
    sizes: Sequence[int]  # in pixels; drawn with equal probability
    update: int  # number of images in an update, over all processes and micro-batches
    multiple: int = 1  # the epoch is filled up with its first images to a multiple of this
    seed: int = 0
    repeats: int = 1  # copies of an image in an epoch of unchanged length (Hoffer et al., 2020)
    epoch: int = 0

    def __len__(self) -> int:
        return -(-self.images // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Request]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.images).repeat(self.repeats)[: self.images]
        sizes = rng.choice(self.sizes, -(-len(self) // self.update)).tolist()
        for number, index in enumerate(np.resize(order, len(self)).tolist()):
            yield Request(index, sizes[number // self.update], self.epoch, number)


@dataclass(frozen=True)
class Augment:
    """Augments a cropped and resized image ``[C, H, W]`` in 0 to 1, in this order: mirrors half of
    the images, applies :func:`rand_augment`, and erases a part of the share `erasing` of the
    images."""

    mean: Tensor  # of the normalisation [C, 1, 1], after which erased parts are normal noise
    std: Tensor
    flip: bool = False
    pixels: Pixels | None = None
    erasing: float = 0.0

    def __call__(self, image: Tensor, rng: random.Random) -> Tensor:
        if self.flip and rng.random() < 0.5:
            image = image.flip(-1)
        if self.pixels is not None:
            image = from_pil(self.pixels(to_pil(image), rng))
        if self.erasing and rng.random() < self.erasing:
            image = self._erase(image, rng)
        return image

    def _erase(self, image: Tensor, rng: random.Random) -> Tensor:
        """Fills a rectangle with normal noise (Zhong et al., 2020)."""
        height, width = image.shape[1:]
        for _ in range(ERASING_TRIES):
            area = rng.uniform(*ERASED_AREA) * height * width
            aspect = math.exp(rng.uniform(-1, 1) * math.log(ERASED_ASPECT))
            high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < high < height and 0 < wide < width:
                top, left = rng.randint(0, height - high), rng.randint(0, width - wide)
                generator = torch.Generator().manual_seed(rng.getrandbits(63))
                noise = torch.randn(image.shape[0], high, wide, generator=generator)
                image = image.clone()
                image[:, top : top + high, left : left + wide] = noise * self.std + self.mean
                break
        return image


def to_pil(image: Tensor) -> Image.Image:
    """Converts ``[1 or 3, H, W]`` in 0 to 1."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0).copy())


def from_pil(image: Image.Image) -> Tensor:
    """``[1 or 3, H, W]`` in 0 to 1."""
    array = torch.from_numpy(np.array(image)).float() / 255
    return array[None] if array.dim() == 2 else array.permute(2, 0, 1)


def _sign(rng: random.Random) -> int:
    return rng.choice((-1, 1))


def _affine(image: Image.Image, matrix: Sequence[float], fill: Color) -> Image.Image:
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        data=matrix,
        resample=Image.Resampling.BILINEAR,
        fillcolor=fill,
    )


def _enhance(enhancer: Any) -> Callable:
    return lambda image, rng, fill: enhancer(image).enhance(1 + 0.8 * _sign(rng))


OPERATIONS: dict[str, Callable[[Image.Image, random.Random, Color], Image.Image]] = {
    "auto-contrast": lambda image, rng, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, rng, fill: ImageOps.equalize(image),
    "invert": lambda image, rng, fill: ImageOps.invert(image),
    "rotate": lambda image, rng, fill: image.rotate(
        _sign(rng) * math.degrees(0.47), Image.Resampling.BILINEAR, fillcolor=fill
    ),
    "posterize": lambda image, rng, fill: ImageOps.posterize(image, 1),
    "solarize": lambda image, rng, fill: ImageOps.solarize(image, 26),
    "solarize-add": lambda image, rng, fill: image.point(lambda v: v + 100 if v < 128 else v),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear-x": lambda image, rng, fill: _affine(image, (1, 0.27 * _sign(rng), 0, 0, 1, 0), fill),
    "shear-y": lambda image, rng, fill: _affine(image, (1, 0, 0, 0.27 * _sign(rng), 1, 0), fill),
    "translate-x": lambda image, rng, fill: _affine(
        image, (1, 0, _sign(rng) * 0.45 * 0.9 * image.width, 0, 1, 0), fill
    ),
    "translate-y": lambda image, rng, fill: _affine(
        image, (1, 0, 0, 0, 1, _sign(rng) * 0.45 * 0.9 * image.height), fill
    ),
}


def rand_augment(name: str | None, mean: Sequence[float]) -> Pixels | None:
    """RandAugment (Cubuk et al., 2020), by name: "deit" draws two of the 15 :data:`OPERATIONS`, and
    applies each with probability 0.5; a setting in the notation of timm, such as
    "rand-m9-mstd0.5-inc1"; "none" or None. Empty areas get the color `mean`, in 0 to 1. timm is
    imported only for a setting of timm, because timm imports torchvision, which does not load
    beside a CPU-only torch."""
    if name in (None, "none"):
        return None
    fill = tuple(round(255 * value) for value in mean)
    fill = fill[0] if len(fill) == 1 else fill
    if name == "deit":
        return partial(_randaugment, fill)  # a lambda could not be sent to worker processes
    if not name.startswith("rand-"):
        raise CommandError(
            f"--rand-augment {name} is unknown; allowed: deit, none, or a setting of timm such as "
            "rand-m9-mstd0.5-inc1"
        )
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError:
        raise CommandError(
            f"--rand-augment {name} needs timm, which is not installed; install it (pip install "
            "timm), or give deit, which does not need timm"
        ) from None
    return partial(_seeded, rand_augment_transform(name, {"img_mean": fill}))


def _randaugment(fill: Color, image: Image.Image, rng: random.Random) -> Image.Image:
    for _ in range(RANDAUGMENT_DRAWS):
        operation = OPERATIONS[rng.choice(list(OPERATIONS))]
        if rng.random() < RANDAUGMENT_CHANCE:
            image = operation(image, rng, fill)
    return image


def _seeded(transform: Callable, image: Image.Image, rng: random.Random) -> Image.Image:
    """Seeds the global random generators, from which timm draws, and restores their states
    afterwards, because other code also draws from them."""
    states = random.getstate(), np.random.get_state()
    random.seed(rng.getrandbits(64))
    np.random.seed(rng.getrandbits(32))
    try:
        return transform(image)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Mix(NamedTuple):
    """One draw for mixing the images of a batch with the images of the reversed batch."""

    share: float  # lambda, the part of the original image
    # top, bottom, left, right of the replaced part (CutMix); None averages pixels (Mixup)
    box: tuple[int, int, int, int] | None = None


@dataclass
class Mixing:
    """Mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019), equally likely for each batch, with
    one lambda of Beta(mixup, mixup) or Beta(cutmix, cutmix); 0 turns Mixup or CutMix off."""

    mixup: float
    cutmix: float
    classes: int

    def draw(self, height: int, width: int) -> Mix:
        """Draws from torch's generator of the process."""
        cut = bool(self.cutmix) and (not self.mixup or bool(torch.rand(()) < 0.5))
        alpha = self.cutmix if cut else self.mixup
        share = float(torch.distributions.Beta(alpha, alpha).sample())
        if not cut:
            return Mix(share)
        edges = []
        for side in (height, width):
            half = int(side * math.sqrt(1 - share)) // 2
            center = int(torch.randint(side, ()))
            edges += [max(0, center - half), min(side, center + half)]
        top, bottom, left, right = edges  # the box may have reached beyond the image
        return Mix(1 - (bottom - top) * (right - left) / (height * width), tuple(edges))

    def __call__(
        self, images: Tensor, labels: Tensor, mix: Mix | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mixed images ``[B, C, H, W]`` and their targets ``[B, classes]``, which add up to 1. A
        `mix` of None is drawn."""
        share, box = mix or self.draw(*images.shape[2:])
        others = images.flip(0)
        if box:
            top, bottom, left, right = box
            images = images.clone()
            images[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        else:
            images = share * images + (1 - share) * others
        targets = F.one_hot(labels, self.classes).float()
        return images, share * targets + (1 - share) * targets.flip(0)


class ImageTrainer(Trainer):
    """Trainer with one image size per update, Mixup and CutMix, and smoothed targets."""

    sizes: Sequence[int] = ()
    repeats: int = 1
    # mixes in compute_loss, because batches are loaded ahead of their update: a resumed training
    # must draw the same
    mixing: Mixing | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> SizeSampler:
        args = self.args
        update = self.get_total_train_batch_size(args)
        if self.accelerator.split_batches:  # the batch size counts all processes
            update //= args.world_size
        # otherwise accelerate fills up the last step with images of the first step, which have
        # another size
        fill = args.world_size > 1 and not args.dataloader_drop_last
        multiple = update // args.gradient_accumulation_steps if fill else 1
        sampler = SizeSampler(
            len(self.train_dataset), self.sizes, update, multiple, args.seed, self.repeats
        )
        self.add_callback(SetEpoch(sampler))
        return sampler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not any(part in name for part in WITHOUT_DECAY)]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """Cross-entropy with smoothed targets. Smoothing mixed targets equals mixing smoothed
        targets (DeiT), because both are linear."""
        pixels, targets = inputs["pixel_values"], inputs["labels"]
        if self.mixing is not None and model.training:
            pixels, targets = self.mixing(pixels, targets)
        outputs = model(pixel_values=pixels)
        smoothing = self.args.label_smoothing_factor
        loss = F.cross_entropy(outputs.logits.float(), targets, label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss
