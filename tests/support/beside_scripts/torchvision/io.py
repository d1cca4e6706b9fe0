"""Reads images as tensors."""

import enum

import numpy as np
import torch
from PIL import Image


class ImageReadMode(enum.Enum):
    """Colours of an image."""

    RGB = "RGB"


def read_image(path, mode=ImageReadMode.RGB):
    """``[3, H, W]``, numbers from 0 to 255."""
    return torch.from_numpy(np.array(Image.open(path).convert(mode.value))).permute(2, 0, 1)
