"""Ways to change the size of an image."""

import enum


class InterpolationMode(enum.Enum):
    """The way that the script for CLIP names."""

    BICUBIC = "bicubic"
