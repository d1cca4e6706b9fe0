"""Numbers of patches along the axes of images, videos and spectrograms."""

from __future__ import annotations

from collections.abc import Sequence


def count_patches(
    height: int, width: int, kernel: tuple[int, int], stride: tuple[int, int]
) -> tuple[int, int]:
    """Rows and columns of the patches of an image, which may overlap.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        kernel: Height and width of a patch.
        stride: Distance of neighbouring patches, down and to the right.

    Raises:
        ValueError: if the image is smaller than a patch.
    """
    if height < kernel[0] or width < kernel[1]:
        raise ValueError(
            f"image of {height} x {width} pixels is smaller than a patch "
            f"({kernel[0]} x {kernel[1]}); allowed: at least one patch. Resize the image, or "
            "choose a smaller patch_size."
        )
    rows, columns = count_cells((height, width), kernel, stride)
    return rows, columns


def count_cells(
    lengths: Sequence[int], kernel: Sequence[int], stride: Sequence[int]
) -> tuple[int, ...]:
    """Numbers of patches along axes of these lengths; for the other arguments see
    :func:`count_patches`."""
    axes = zip(lengths, kernel, stride, strict=True)
    return tuple((length - patch) // step + 1 for length, patch, step in axes)
