"""The flags that give a learned position table another size."""

from __future__ import annotations

import argparse

from hf_models.storage.longer_tables import ALLOWED_SIZES, KEPT_ROWS, parse_extension


def add_table_args(parser: argparse._ActionsContainer) -> None:
    """Adds ``--position-table-size`` and ``--position-table-extension``."""
    parser.add_argument(
        "--position-table-size",
        metavar="N|HxW|FIELD=N",
        help=f"new size of a learned position table: {ALLOWED_SIZES} (default: the size in SRC)",
    )
    parser.add_argument(
        "--position-table-extension",
        metavar="wrap|copy|stretch[:K]",
        help="rows of a longer table. wrap: none, longer texts begin the table anew; copy: a "
        "second copy of the trained rows, which learns for itself; stretch: the first K rows stay "
        f"(default: {KEPT_ROWS}, as in Long-CLIP) and the others are interpolated; images and "
        "spectrograms are resized (default: copy with --position-table-size, otherwise wrap)",
    )


def given_table(args: argparse.Namespace) -> tuple[str, str] | None:
    """Size and extension from the flags; None if the table stays.

    Raises:
        ValueError: if the flags contradict each other, or if a value is wrong.
    """
    size, extension = args.position_table_size, args.position_table_extension
    if extension is not None and extension != "wrap":
        parse_extension(extension)
    if size is None and extension not in (None, "wrap"):
        raise ValueError(
            f"--position-table-extension {extension} needs the new size; give "
            "--position-table-size N"
        )
    if size is not None and extension == "wrap":
        raise ValueError(
            f"--position-table-size {size} has no meaning with --position-table-extension wrap, "
            "which adds no rows; allowed with a size: copy, stretch, stretch:K. Leave out the "
            "size, or choose another extension"
        )
    return None if size is None else (size, extension or "copy")
