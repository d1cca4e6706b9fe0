"""Training of image classifiers by transformers' Trainer: one size per update, mixed targets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Sampler
from transformers import Trainer

from recipes.lab.hf_training import SetEpoch
from recipes.vit.data import Request

# Weight decay pulls to zero what is multiplied with inputs; what is added to them goes without:
# biases and norms (the Trainer and DeiT), and these (DeiT and the released code of CAPE).
WITHOUT_DECAY = ("cls_token", "mask_token", "position_embeddings", ".relative.")


@dataclass(eq=False)
class SizeSampler(Sampler[Request]):
    """Images in random order, those of one update with the same random size (UniViT, CAPE
    section 5.1).

    Order and sizes depend on seed and epoch alone and are the same in every process: however many
    processes and micro-batches share an update, all its images have one size, and a training that
    is resumed goes on with the sizes of one that was not interrupted.

    Args:
        images: Number of images.
        sizes: In pixels; one of them is drawn for each update, with equal probability.
        update: Images of an update: of all processes and micro-batches together.
        multiple: The epoch is filled up with its first images to a multiple of this number.
        repeats: An epoch has so many copies of each image, but not more images (repeated
            augmentation, Hoffer et al., 2020).
    """

    images: int
    sizes: Sequence[int]
    update: int
    multiple: int = 1
    seed: int = 0
    repeats: int = 1
    epoch: int = 0

    def __len__(self) -> int:
        return -(-self.images // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        """Called before the first image of an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Request]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.images).repeat(self.repeats)[: self.images]
        sizes = rng.choice(self.sizes, -(-len(self) // self.update)).tolist()
        for place, index in enumerate(np.resize(order, len(self)).tolist()):
            yield Request(index, sizes[place // self.update], self.epoch, place)


class Mix(NamedTuple):
    """How the images of a batch are mixed with those in reverse order.

    Attributes:
        share: Lambda, what an image keeps of itself.
        box: (top, bottom, left, right) of what is cut out and replaced (CutMix); None where all
            pixels are averaged (Mixup).
    """

    share: float
    box: tuple[int, int, int, int] | None = None


@dataclass
class Mixing:
    """Mixup (Zhang et al., 2018) or CutMix (Yun et al., 2019), one of them for each batch with
    equal probability, and one lambda for the batch: Beta(mixup, mixup) or Beta(cutmix, cutmix); 0
    for none."""

    mixup: float
    cutmix: float
    classes: int

    def draw(self, height: int, width: int) -> Mix:
        """Draws from torch's generator of the process, for images of `height` x `width` pixels."""
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
        """Mixed images ``[B, C, H, W]`` and their targets ``[B, classes]``, which add up to 1, by a
        mix that is drawn where none is given."""
        share, box = mix or self.draw(*images.shape[2:])
        others = images.flip(0)
        if box is None:
            images = share * images + (1 - share) * others
        else:
            top, bottom, left, right = box
            images = images.clone()
            images[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        targets = F.one_hot(labels, self.classes).float()
        return images, share * targets + (1 - share) * targets.flip(0)


class ImageTrainer(Trainer):
    """Trainer with one size per update, Mixup and CutMix, and smoothed targets.

    Attributes:
        sizes, repeats: See :class:`SizeSampler`.
        mixing: Mixup and CutMix; None for none. Drawn here, after the batch was loaded: batches
            are loaded ahead, and a resumed training must draw the same.
    """

    sizes: Sequence[int] = ()
    repeats: int = 1
    mixing: Mixing | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> SizeSampler:
        args = self.args
        update = self.get_total_train_batch_size(args)
        if self.accelerator.split_batches:  # the batch is that of all processes
            update //= args.world_size
        # accelerate would fill the last step up with images of the first, of another size
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
        """Cross-entropy with smoothed targets. Smoothing what was mixed is the same as mixing what
        was smoothed (DeiT), since both are linear."""
        pixels, targets = inputs["pixel_values"], inputs["labels"]
        if self.mixing is not None and model.training:
            pixels, targets = self.mixing(pixels, targets)
        outputs = model(pixel_values=pixels)
        loss = F.cross_entropy(
            outputs.logits.float(), targets, label_smoothing=self.args.label_smoothing_factor
        )
        return (loss, outputs) if return_outputs else loss
