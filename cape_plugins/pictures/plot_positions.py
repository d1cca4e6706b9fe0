"""Pictures of positions: what one augmentation does to a grid (CAPE Figure 1), and the positions
that training covers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cape_plugins.pictures.plot import WIDTH, new_figure, size_label, title_of
from cape_plugins.pictures.views import (
    Size,
    Stack,
    augmentation_stages,
    draw_positions,
    evaluation_positions,
    training_positions,
)


def augmentation_figure(stack: Stack, size: Size, draws: int, generator: torch.Generator) -> Any:
    """Effect of `draws` augmentations on the positions of an input, in steps (CAPE Figure 1)."""
    positions = stack.positions(size)
    draw, local_shift = draw_positions(stack.encoder, positions, draws, generator)
    stages = {
        label: coords.expand(draws, -1, -1).numpy()
        for label, coords in augmentation_stages(
            stack.encoder, positions, draw, local_shift
        ).items()
    }
    shift = None if draw.shift is None else draw.shift * stack.encoder.unit
    numbers = {"+ global shift": shift, "+ offset": draw.offset, "× global scale": draw.scale}
    labels = {
        stage: [", ".join(f"{number:.3g}" for number in row[0].tolist()) for row in values]
        for stage, values in numbers.items()
        if values is not None
    }
    title = title_of(stack, f"augmentation of {size_label(stack, size)}")
    if stack.domain.grid:
        return _grids(stages, labels, size, title)
    return _time_lines(stages, labels, stack.domain.axis, title)


def _grids(
    stages: Mapping[str, np.ndarray],
    labels: Mapping[str, Sequence[str]],
    size: tuple[int, ...],
    title: str,
) -> Any:
    """Rows are draws, columns are stages; a grid of more than two axes shows its first plane."""
    draws = len(next(iter(stages.values())))
    figure = new_figure(0.9 + draws * (WIDTH / len(stages) + 0.3), title)
    axes = figure.subplots(draws, len(stages), squeeze=False, sharex=True, sharey=True)
    for number, row in enumerate(axes):
        for axis, (stage, coords) in zip(row, stages.items(), strict=True):
            grid = coords[number].reshape(-1, *size[-2:], len(size))[0, ..., :2]
            for lines in (grid, grid.swapaxes(0, 1)):
                for line in lines:
                    axis.plot(*line.T, color="0.75", lw=0.7, zorder=1)
            points = grid.reshape(-1, 2)
            axis.scatter(*points.T, c=np.arange(len(points)), s=9, zorder=2)
            axis.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], "k--", lw=0.8)
            axis.set_title(f"{stage} {labels.get(stage, [''] * draws)[number]}", fontsize="small")
            axis.set(xlabel="x (normalised)", aspect="equal")
        row[0].set_ylabel(f"draw {number + 1}\ny (normalised)")
    axes[0, 0].invert_yaxis()  # the first row of patches on top
    return figure


def _time_lines(
    stages: Mapping[str, np.ndarray], labels: Mapping[str, Sequence[str]], unit: str, title: str
) -> Any:
    """Rows are stages. A row shows all positions of all draws, and some positions of the first draw
    before and after the step: neighbours if positions move independently; otherwise positions
    spread over the whole input, because all positions move together."""
    figure = new_figure(1.2 + 1.5 * len(stages), title)
    axes = figure.subplots(len(stages), 2, squeeze=False, width_ratios=[3, 2])
    before = next(iter(stages.values()))
    for (whole, near), (stage, coords) in zip(axes, stages.items(), strict=True):
        draws, length, _ = coords.shape
        whole.sharex(axes[0, 0])
        for number in range(draws):
            height = np.full(length, number + 1)
            whole.scatter(coords[number, :, 0], height, c=np.arange(length), s=12)
        names = [f"draw {i + 1}: {v}" for i, v in enumerate(labels.get(stage, ()))]
        names = names or [f"draw {i + 1}" for i in range(draws)]
        whole.set_yticks(range(1, draws + 1), names, fontsize="x-small")
        whole.set_ylim(draws + 0.6, 0.4)
        whole.set_title(f"{stage} (colour: number of the position)", fontsize="small")
        count, local = min(8, length), "local" in stage
        indices = np.arange(count) if local else np.linspace(0, length - 1, count).astype(int)
        ends = before[0, indices, 0], coords[0, indices, 0]
        for height, marker in enumerate("os"):
            near.scatter(ends[height], [height] * count, c=indices, marker=marker)
        near.plot(ends, [[0] * count, [1] * count], color="0.7", lw=0.8, zorder=0)
        near.set_yticks([0, 1], ["before", "after"], fontsize="x-small")
        near.set_ylim(1.4, -0.4)
        selection = f"the first {count}" if local else f"{count} of the {length}"
        near.set_title(f"draw 1, {selection} positions", fontsize="small")
        before = coords
    for axis in axes[-1]:
        axis.set_xlabel(unit)
    return figure


# ---- coverage ----------------------------------------------------------------------------------


def coverage_figure(
    stack: Stack,
    sizes: Sequence[Size],
    test_sizes: Sequence[Size],
    draws: int,
    generator: torch.Generator,
) -> tuple[Any, list[dict[str, str]]]:
    """Distribution of the positions drawn in training, and ranges of positions of other inputs.

    Args:
        stack: Position embedding.
        sizes: Sizes of the inputs in training.
        test_sizes: Sizes of inputs in evaluation.
        draws: Number of draws for each size.
        generator: Source of randomness.

    Returns:
        The figure, and the numbers in it: a row for each test size.
    """
    training = {size: training_positions(stack, size, draws, generator) for size in sizes}
    evaluation = {size: evaluation_positions(stack, size) for size in test_sizes}
    title = title_of(stack, f"positions in training, {draws or 'without'} draws")
    draw_figure = _plane if stack.domain.grid else _ranges
    return draw_figure(stack, training, evaluation, title)


def _ranges(
    stack: Stack,
    training: Mapping[Size, np.ndarray],
    evaluation: Mapping[Size, np.ndarray],
    title: str,
) -> tuple[Any, list[dict[str, str]]]:
    """For sequences: a histogram of positions above, ranges of positions below."""
    bars = 0.4 * (len(training) + len(evaluation)) + 0.3  # inches
    figure = new_figure(3.6 + bars, title)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, bars])
    low = min(positions.min() for positions in training.values())
    high = max(positions.max() for positions in training.values())
    longest = max(positions.shape[1] for positions in training.values())
    number = min(100, longest)
    if all((positions == positions.round()).all() for positions in training.values()):
        # each bin holds the same number of whole numbers, so a histogram has no false peaks
        width = max(1, math.ceil((high - low + 1) / number))
        bins = np.arange(low, high + width + 1, width) - 0.5
    else:
        bins = np.linspace(low, high, 1 + number)
    names, rows = [], []
    for number, (size, positions) in enumerate(training.items()):
        above.hist(
            positions.ravel(), bins, alpha=0.6, color=f"C{number}",
            weights=np.full(positions.size, 100 / positions.size),
            label=f"training: {size_label(stack, size)}",
        )  # fmt: skip
        below.barh(
            len(names), np.ptp(positions), left=positions.min(), color=f"C{number}", alpha=0.6
        )
        names.append(f"training: {size_label(stack, size)}")
    above.legend(fontsize="small")
    above.set_ylabel("positions drawn (%)")
    for size, positions in evaluation.items():
        inside = (positions >= low) & (positions <= high)
        for part, color in ((inside, "C2"), (~inside, "C3")):
            below.scatter(positions[part], np.full(part.sum(), len(names)), color=color, marker="|")
        share = f"{100 * inside.mean():.0f} %"
        names.append(f"test: {size_label(stack, size)}, {share} in range")
        rows.append(
            {
                "input": size_label(stack, size),
                "positions": f"{positions.min():g} to {positions.max():g}",
                f"between {low:.3g} and {high:.3g} as in training": share,
            }
        )
    for bound in (low, high):
        below.axvline(bound, color="0.4", ls="--", lw=0.8)
    below.set_yticks(range(len(names)), names, fontsize="small")
    below.set_ylim(len(names) - 0.4, -0.6)
    ends = [
        low,
        high,
        *(end for positions in evaluation.values() for end in (positions.min(), positions.max())),
    ]
    margin = 0.02 * np.ptp(ends) or 1.0
    below.set_xlim(min(ends) - margin, max(ends) + margin)
    below.set_xlabel(stack.domain.axis)
    return figure, rows


def _plane(
    stack: Stack,
    training: Mapping[Size, np.ndarray],
    evaluation: Mapping[Size, np.ndarray],
    title: str,
) -> tuple[Any, list[dict[str, str]]]:
    """For grids: density over the plane of the two fastest axes, and distances between
    neighbours."""
    figure = new_figure(5.4, title)
    left, right = figure.subplots(1, 2)
    points = np.concatenate([positions[..., :2].reshape(-1, 2) for positions in training.values()])
    *_, image = left.hist2d(*points.T, bins=80, cmap="viridis", density=True)
    figure.colorbar(image, ax=left, label="density of the positions drawn", shrink=0.8)
    left.plot([-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1], "w--", lw=1)
    left.set(xlabel="x (normalised)", ylabel="y (normalised)", aspect="equal")
    left.invert_yaxis()
    names = ", ".join(size_label(stack, size) for size in training)
    left.set_title(f"training: {names}", fontsize="small")
    distances = np.concatenate(
        [_neighbours(positions, size) for size, positions in training.items()]
    )
    gaps = {size: float(_neighbours(grid, size).mean()) for size, grid in evaluation.items()}
    bins = np.linspace(0, 1.05 * max(distances.max(), *gaps.values()), 101)
    right.hist(distances, bins, weights=np.full(distances.size, 100 / distances.size), color="0.7")
    rows = []
    for number, (size, grid) in enumerate(evaluation.items()):
        label, distance = size_label(stack, size), gaps[size]
        right.axvline(distance, color=f"C{number}", label=f"test: {label}, {distance:.3f}")
        rows.append(
            {
                "input": label,
                "positions": f"{grid.min():g} to {grid.max():g}",
                "distance of neighbours": f"{distance:.3f}",
                "smaller in training": f"{100 * (distances < distance - 1e-6).mean():.0f} %",
            }
        )
    right.set(xlabel="distance of neighbours, x or y (normalised)", ylabel="pairs drawn (%)")
    right.legend(fontsize="small")
    return figure, rows


def _neighbours(coords: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """``[pairs]``: differences in x along rows, in y along columns, and so on.

    Raises:
        ValueError: for an image of one patch.
    """
    if math.prod(size) == 1:
        raise ValueError("an image of 1 x 1 patches has no neighbours; allowed: at least 2 patches")
    grid = coords.reshape(-1, *size, len(size))
    fastest_first = range(len(size), 0, -1)
    return np.concatenate(
        [np.diff(grid[..., i], axis=axis).ravel() for i, axis in enumerate(fastest_first)]
    )
