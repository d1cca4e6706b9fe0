"""Checks of the exporters of both hosts, made before they begin to write."""

from __future__ import annotations

from torch import nn

# Bytes of the largest table in float32. Exporters need memory for a few copies of a table. The
# limit does not depend on the free memory, so that a command works the same on every day.
LARGEST = 2**30


def refuse_not_finite(model: nn.Module, source: object) -> None:
    """Refuses weights that are not finite. All outputs would be NaN, and the comparison with the
    exported model would report a fault of the export.

    Args:
        model: The loaded model.
        source: The model's file or folder, for the error.

    Raises:
        ValueError: names the first weight that is not finite.
    """
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(
                f"the weights of {source} are not all finite: {name} has NaN or infinity. The "
                "training has diverged, or the file is damaged; give an earlier checkpoint."
            )


def refuse_large_table(option: str, rows: int, width: int) -> None:
    """Refuses a table that would fill the memory, before the table is made.

    Args:
        option: The flag that asks for the size.
        rows: Positions of the table.
        width: Channels.

    Raises:
        ValueError: names the largest table.
    """
    most = LARGEST // (4 * width)
    if rows > most:
        raise ValueError(
            f"{option} asks for a table of {rows} positions; allowed: up to {most} with the "
            f"{width} channels of this model ({LARGEST // 2**30} GiB). Give less."
        )
