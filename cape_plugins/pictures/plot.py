"""Pictures of position embeddings: components over the plane (CAPE Figure 9) and similarities.

matplotlib is imported when a figure is made; no display is needed.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cape_plugins.checkpoints.stack import Size, Stack
from cape_plugins.pictures.views import View, similarity, similarity_by_distance
from cape_plugins.settings.config import option_fields
from cape_plugins.utils.files import writing

DPI = 120
WIDTH = 10.0  # inches
ZOOM = 50  # positions in the enlarged part of a map

# ---- figures -----------------------------------------------------------------------------------


def new_figure(height: float, title: str) -> Any:
    """A figure of WIDTH inches, which needs no display.

    Raises:
        ImportError: without the package matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'pictures need the package matplotlib ({error}); pip install "cape-plugins[plot]"'
        ) from None
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure


def save(figure: Any, path: Path, dpi: int = DPI) -> None:
    """Writes a PNG file in one step. The picture has 256 colours, so that files of maps are several
    times smaller."""
    from PIL import Image  # comes with matplotlib

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    with writing(path, "wb") as file:
        image.save(file, format="PNG", optimize=True)


def title_of(stack: Stack, what: str) -> str:
    """Title of a figure: subject, type, domain, and the settings that have an effect."""
    config = stack.config
    settings = [
        f"{option.name} {value:g}" if isinstance(value, float) else f"{option.name} {value}"
        for option in option_fields(config.domain)
        if (value := getattr(config, option.name)) != option.metadata["off"]
    ]
    head = [f"{what}: {config.type}", config.domain, *filter(None, [stack.name])]
    return "\n".join([", ".join(head), ", ".join(settings)]).strip()


def size_label(stack: Stack, size: Size) -> str:
    """The size with its unit."""
    if isinstance(size, tuple):
        return f"{' x '.join(map(str, size))} {stack.domain.steps}"
    if stack.domain.spacing is not None:
        return f"{size * stack.spacing:.3g} {stack.domain.symbol}"
    return f"{size} {stack.domain.steps if size != 1 else stack.domain.steps.removesuffix('s')}"


def distance_label(stack: Stack) -> str:
    """Label of an axis of relative embeddings: from query to key."""
    return f"distance ({stack.domain.steps})"


def components_figure(stack: Stack, views: Sequence[View], channels: Sequence[int]) -> Any:
    """The `channels` of each view: maps over the plane (CAPE Figure 9), curves over time, or curves
    over the distances of relative embeddings."""
    title = title_of(stack, "components of the embedding")
    if stack.domain.grid and not stack.relative:
        return _component_maps(stack, views, channels, title)
    sizes = list(dict.fromkeys(view.size for view in views))
    figure = new_figure(1.3 + 1.1 * len(channels), title)
    axes = figure.subplots(len(channels), len(sizes), sharex="col", sharey=True, squeeze=False)
    for row, channel in zip(axes, channels, strict=True):
        row[0].set_ylabel(f"channel {channel}", fontsize="small")
        for view in views:
            is_draw = view.state != "evaluation"
            axis = row[sizes.index(view.size)]
            style = {"lw": 0.8, "alpha": 0.7} if is_draw else {"color": "black", "zorder": 3}
            axis.plot(view.places[:, 0], view.embedding[:, channel], label=view.state, **style)
    for above, below, size in zip(axes[0], axes[-1], sizes, strict=True):
        if stack.relative:
            below.set_xlabel(distance_label(stack))
        else:
            above.set_title(size_label(stack, size), fontsize="small")
            below.set_xlabel(stack.domain.axis)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=6, fontsize="small")
    return figure


def _component_maps(
    stack: Stack, views: Sequence[View], channels: Sequence[int], title: str
) -> Any:
    limit = max(np.abs(view.embedding[:, list(channels)]).max() for view in views)
    cell = min(2.2, (WIDTH - 1.5) / len(channels))
    figure = new_figure(1.2 + cell * len(views), title)
    axes = figure.subplots(len(views), len(channels), squeeze=False)
    for row, view in zip(axes, views, strict=True):
        for axis, channel in zip(row, channels, strict=True):
            # planes of more than two axes stand below one another
            plane = view.embedding[:, channel].reshape(-1, view.size[-1])
            image = axis.imshow(plane, "RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            axis.set(xticks=[0, plane.shape[1] - 1], yticks=[])
            axis.tick_params(labelsize="x-small")
        row[0].set_yticks([0, len(plane) - 1])
        row[0].set_ylabel(f"{size_label(stack, view.size)}\n{view.state}", fontsize="x-small")
    for axis, channel in zip(axes[0], channels, strict=True):
        axis.set_title(f"channel {channel}", fontsize="small")
    figure.supxlabel(f"column ({stack.domain.steps})", fontsize="small")
    rows = "row" if len(views[0].size) == 2 else "rows of all planes, one below another"
    figure.supylabel(f"{rows} ({stack.domain.steps})", fontsize="small")
    figure.colorbar(image, ax=axes, shrink=min(1.0, 3 / len(views)), pad=0.01)
    return figure


def similarity_figure(
    embeddings: Mapping[str, np.ndarray],
    title: str,
    unit: str,
    step: float = 1.0,
    start: float = 0.0,
) -> Any:
    """Dot products and cosines of position embeddings in one dimension: all, a zoom, by distance.

    Args:
        embeddings: Maps labels to ``[T, K]``.
        title: Title of the figure.
        unit: Unit of the axes.
        step: Distance of neighbours in this unit.
        start: Position of the first row, in this unit; below 0 if rows are distances. The zoom
            shows the first positions, or the distances nearest to 0.
    """
    row_name, distance_name = "positions", f"distance, {unit}"
    if start:
        row_name, distance_name = "distances", "difference of distances"
    figure = new_figure(0.8 + 5.6 * len(embeddings), title)
    axes = figure.subplots(2 * len(embeddings), 3, squeeze=False)
    maps = [
        (f"{name}, {label}".removesuffix(", "), matrix)
        for label, rows in embeddings.items()
        for name, matrix in similarity(rows).items()
    ]
    for (full, zoom, curve), (name, matrix) in zip(axes, maps, strict=True):
        length = len(matrix)
        zoom_length = min(ZOOM // 2 if start else ZOOM, length)
        zoom_start = min(max(0, round(-start / step) - zoom_length // 2), length - zoom_length)
        nearest = "the nearest" if start else "the first"
        for axis, low, count, selection in (
            (full, 0, length, "all"),
            (zoom, zoom_start, zoom_length, nearest),
        ):
            part = slice(low, low + count)
            left, right = (start + number * step for number in (low, low + count))
            image = axis.imshow(matrix[part, part], extent=(left, right, right, left))
            figure.colorbar(image, ax=axis, shrink=0.8)
            axis.set(xlabel=unit, ylabel=unit)
            axis.set_title(f"{name}\n{selection} {count} {row_name}", fontsize="small")
        by_distance = similarity_by_distance(matrix, min(ZOOM, length - 1))
        distance = step * np.arange(len(by_distance))
        curve.fill_between(distance, *by_distance.T[1:], alpha=0.3, label="lowest to highest")
        curve.plot(distance, by_distance[:, 0], marker=".", label="mean")
        curve.set_title(f"{name}\nby distance", fontsize="small")
        curve.set(xlabel=distance_name, ylabel="similarity")
        curve.legend(fontsize="x-small")
    return figure


def similarities_figure(stack: Stack, views: Sequence[View], patch: tuple[int, int] | None) -> Any:
    """Similarities of each view. In images `patch` (row, column), by default the patch in the
    middle, is compared with all others."""
    title = title_of(stack, "similarity")
    if stack.relative:
        rows = {view.state: view.embedding for view in views}
        # the axis begins at the edge of the first pixel; a place is the middle of a pixel
        start = min(view.places.min() for view in views) - 0.5
        return similarity_figure(rows, title, distance_label(stack), start=start)
    if stack.domain.grid:
        return _patch_similarities(stack, views, patch, title)
    return similarity_figure(
        {f"{size_label(stack, view.size)}, {view.state}": view.embedding for view in views},
        title,
        stack.domain.axis,
        stack.spacing,
    )


def _patch_similarities(
    stack: Stack, views: Sequence[View], patch: tuple[int, int] | None, title: str
) -> Any:
    """Similarities of all pairs of patches, counted row by row; of one patch with all others, and
    with its row and column."""
    figure, steps = new_figure(0.8 + 5.6 * len(views), title), stack.domain.steps
    axes = iter(figure.subplots(2 * len(views), 3, squeeze=False))
    for view in views:
        *_, width = view.size
        height = len(view.embedding) // width  # planes of a clip stand below one another
        row, column = patch or (height // 2, width // 2)
        label = f"{size_label(stack, view.size)}, {view.state}"
        for (name, matrix), (full, around, lines) in zip(
            similarity(view.embedding).items(), axes, strict=False
        ):
            plane = matrix[row * width + column].reshape(height, width)
            for axis, shades in ((full, matrix), (around, plane)):
                figure.colorbar(axis.imshow(shades, interpolation="nearest"), ax=axis, shrink=0.8)
            full.set(xlabel="patch, row by row", ylabel="patch, row by row")
            full.set_title(f"{name}, all pairs\n{label}", fontsize="small")
            around.plot(column, row, "r+")
            around.set(xlabel=f"column ({steps})", ylabel=f"row ({steps})")
            around.set_title(f"{name} with patch ({row}, {column})", fontsize="small")
            lines.plot(np.arange(width) - column, plane[row], marker=".", label="along its row")
            lines.plot(np.arange(height) - row, plane[:, column], marker=".", label="its column")
            lines.set(xlabel=f"distance ({steps})", ylabel=name)
            lines.legend(fontsize="x-small")
    return figure
