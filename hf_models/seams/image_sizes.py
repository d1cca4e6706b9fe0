"""Heads of image models whose stock code takes images of fewer sizes than the model below them."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

_PIXELS = "pixel_values"


class SquareImages:
    """Mixin over a stock head that puts the patches of any image into a square. Patches of other
    images would not fit, or would silently stand in the wrong rows (4 x 16 patches as 8 x 8)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module) and not hasattr(cls.forward, "checks_image_size"):
            cls.forward = _checking(cls.forward)

    def check_image_size(self, height: int, width: int) -> None:
        """Refuses images that the head cannot take.

        Raises:
            ValueError: unless `height` is `width`.
        """
        if height != width:
            raise ValueError(
                f"images of {height} x {width} pixels are not allowed for {type(self).__name__}, "
                "whose stock head puts patches into a square; allowed: height = width, of any "
                "number of patches. Resize or pad the images to squares."
            )


class OneImageSize(SquareImages):
    """Mixin over a stock head that takes the number of patches from the configuration."""

    def check_image_size(self, height: int, width: int) -> None:
        """See :class:`SquareImages`.

        Raises:
            ValueError: unless both are the image size of the configuration.
        """
        size = self.config.image_size
        if (height, width) != (size, size):
            raise ValueError(
                f"images of {height} x {width} pixels are not allowed for {type(self).__name__}, "
                "whose stock head takes the size of the configuration only; allowed: "
                f"{size} x {size}. Resize the images, or set image_size in the configuration."
            )


# Such heads of generated families, by the names of their stock classes.
_HEADS: dict[str, type] = {
    "CLIPSegForImageSegmentation": SquareImages,
    "Data2VecVisionForSemanticSegmentation": OneImageSize,
}


def size_mixins(stock: type) -> tuple[type, ...]:
    """Mixins over a stock model of a generated family that check the sizes of images."""
    return (_HEADS[stock.__name__],) if stock.__name__ in _HEADS else ()


def _checking(forward: Any) -> Any:
    """A forward, with its signature, that checks the size of images first."""
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def checked_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        pixels = call.get(_PIXELS)
        if isinstance(pixels, Tensor) and pixels.dim() == 4:
            self.check_image_size(*pixels.shape[-2:])
        return forward(self, *args, **kwargs)

    checked_forward.checks_image_size = True  # a subclass of the user inherits it
    return checked_forward
