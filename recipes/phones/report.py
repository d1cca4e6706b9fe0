"""Tables of the measurements, as CSV and in one Markdown page."""

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from recipes.lab.steps import write_lines, writing
from recipes.phones.analysis import attention_by_distance, near_attention, top_confusions
from recipes.phones.train import CONDITIONS, NEAR, NO_POSITIONS, History

PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "espeakng-loader")
HISTORY = ("epoch", "train_loss", "dev_per", "near_attention")
HEADS = ("layer", "head", "distance", "weight", "near")
SIMILARITIES = ("distance", "dot", "dot_min", "dot_max", "cosine", "cosine_min", "cosine_max")


class Measurement(NamedTuple):
    """One model under one test condition.

    Attributes:
        type: Position embedding.
        trained: Condition of training.
        tested: Condition of the test.
        seed: Of the model.
        per: Wrong frames in percent.
        changes: Of the class between consecutive predicted frames.
        type1, type2, type3, long_runs: Wrong frames by type of error.
    """

    type: str
    trained: str
    tested: str
    seed: int
    per: float
    changes: int
    type1: int
    type2: int
    type3: int
    long_runs: int


@dataclass
class Result:
    """What was found out about one position-embedding type.

    Attributes:
        type: Its name.
        target_changes: Of the class between consecutive frames in the labels of the test.
        measurements: Of all seeds.
        histories: By condition of training, of the first seed, as the rest.
        confusions: By condition of training: ``[targets, predictions]`` in percent.
        heads: Condition of training, and the row of :func:`head_rows`.
        similarities: By distance in frames: mean, smallest and largest dot product and cosine.
    """

    type: str
    target_changes: int
    measurements: list[Measurement] = field(default_factory=list)
    histories: dict[str, History] = field(default_factory=dict)
    confusions: dict[str, np.ndarray] = field(default_factory=dict)
    heads: list[tuple[Any, ...]] = field(default_factory=list)
    similarities: list[tuple[Any, ...]] = field(default_factory=list)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Numbers are rounded to four decimals."""
    with writing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            writer.writerow([f"{x:.4f}" if isinstance(x, float) else x for x in row])


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table; numbers have two decimals."""
    texts = [[f"{x:.2f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [[*header], *texts]]
    return [lines[0], "|" + "---|" * len(header), *lines[1:], ""]


def per_table(measurements: Sequence[Measurement]) -> list[str]:
    """Models in rows, test conditions in columns; means over seeds, with the standard deviation."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in measurements:
        row = cells.setdefault((one.type, one.trained), {})
        row.setdefault(one.tested, []).append(one.per)
    tests = [name for name in CONDITIONS if any(one.tested == name for one in measurements)]
    rows = []
    for (kind, trained), row in cells.items():
        texts = [_mean(row[test]) if test in row else "" for test in tests]
        rows.append([kind, f"M-{trained}", *texts])
    return markdown(["positions", "trained", *(f"tested {test}" for test in tests)], rows)


def _mean(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def shown_with(kind: str, condition: str) -> str:
    """The type whose folder has what is shown of one model: models trained without positions are
    shared by all types."""
    return kind if CONDITIONS[condition].positions else NO_POSITIONS.type


def head_rows(weights: np.ndarray, farthest: int = 10) -> list[tuple[int, int, int, float, float]]:
    """Layer, head, distance (of key minus query) with the largest mean weight, that weight, and the
    share of the attention at most :data:`NEAR` frames away; of ``[layers, H, T, T]``."""
    farthest = min(farthest, weights.shape[-1] - 1)
    by_distance = attention_by_distance(weights, farthest)
    rows = []
    for layer, head in np.ndindex(*weights.shape[:2]):
        peak = int(by_distance[layer, head].argmax())
        weight = float(by_distance[layer, head, peak])
        near = near_attention(weights[layer, head], NEAR)
        rows.append((layer + 1, head + 1, peak - farthest, weight, near))
    return rows


def write_results(
    output: Path, facts: Mapping[str, str], classes: Sequence[str], results: Sequence[Result]
) -> list[str]:
    """All tables: ``results.md``, ``measurements.csv``, and those of each type in its folder.

    Returns:
        The lines of the table of error rates.
    """
    measurements = [one for result in results for one in result.measurements]
    write_csv(output / "measurements.csv", Measurement._fields, measurements)
    lines = ["# Phone classification", ""]
    lines += [f"* {name}: {text}" for name, text in facts.items()]
    rates = per_table(measurements)
    lines += ["", "## PER", "", "Wrong frames in percent of all frames of the test.", "", *rates]
    for result in results:
        folder = output / result.type
        for name, matrix in result.confusions.items():
            rows = ([a, *map(float, row)] for a, row in zip(classes, matrix, strict=True))
            place = output / shown_with(result.type, name)
            write_csv(place / f"confusions-{name}.csv", ["target", *classes], rows)
        rows = ((name, *row.values()) for name, rows in result.histories.items() for row in rows)
        write_csv(folder / "training.csv", ["trained", *HISTORY], rows)
        write_csv(folder / "heads.csv", ["trained", *HEADS], result.heads)
        if result.similarities:
            write_csv(folder / "similarity.csv", SIMILARITIES, result.similarities)
        lines += _section(result, classes)
    write_lines(output / "results.md", lines[:-1])
    return rates


def _section(result: Result, classes: Sequence[str]) -> list[str]:
    """The page's part on one type, of its first seed."""
    lines = [f"## {result.type}", ""]
    lines += [f"![{name}]({result.type}/{name}.png)" for name in ("training", "confusions")]
    lines += [
        f"![attention-{name}]({shown_with(result.type, name)}/attention-{name}.png)"
        for name in result.confusions
    ]
    if result.similarities:
        lines.append(f"![similarity]({result.type}/similarity.png)")
    seed = result.measurements[0].seed
    rows = [
        [f"M-{one.trained}", one.tested, *one[4:]]
        for one in result.measurements
        if one.seed == seed
    ]
    lines += [
        *("", "Smoothness (class changes between consecutive frames; the labels have"),
        f"{result.target_changes}) and wrong frames by type of error:",
        *("", *markdown(["trained", "tested", *Measurement._fields[4:]], rows)),
        *("Largest confusions, in percent of the frames of the target:", ""),
    ]
    tops = {f"M-{name}": top_confusions(m, classes, 8) for name, m in result.confusions.items()}
    cells = (
        [f"{target} as {predicted} {percent:.1f}" for target, predicted, percent in top]
        for top in tops.values()
    )
    lines += markdown(list(tops), zip(*cells, strict=True))
    lines += [
        "Attention by head, for one utterance: the distance of key and query with the largest mean "
        f"weight, that weight, and the share of keys at most {NEAR} frames away:",
        *("", *markdown(["trained", *HEADS], ([f"M-{name}", *row] for name, *row in result.heads))),
    ]
    return lines
