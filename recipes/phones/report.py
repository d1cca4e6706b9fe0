"""Tables and pictures of one comparison, and the page that shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recipes.lab.tables import Row, markdown, pivot, seed_table, write_csv, write_page
from recipes.phones.analysis import top_confusions
from recipes.phones.train import CONDITIONS, NEAR, NO_POSITIONS, History, folder_name

PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "espeakng-loader")
COUNTS = ("per", "changes", "type1", "type2", "type3", "long_runs")
HEADS = ("layer", "head", "distance", "weight", "near")


@dataclass
class Result:
    """What was measured with one position embedding.

    Attributes:
        name: Name of the position embedding.
        target_changes: Changes of the class between consecutive frames in the labels of the test.
        rows: Models of all seeds under the test conditions: type, trained, tested, seed, wrong
            frames in percent (per), changes of the class between predicted frames, and wrong frames
            by type of error.
        histories: Epochs by condition of training, of the first seed, as the rest.
        confusions: Matrices by condition of training: ``[targets, predictions]`` in percent.
        heads: Condition of training, and the columns of :data:`HEADS`.
        similarities: Rows by distance in frames: mean, smallest and largest dot product and cosine.
    """

    name: str
    target_changes: int
    rows: list[Row] = field(default_factory=list)
    histories: dict[str, History] = field(default_factory=dict)
    confusions: dict[str, np.ndarray] = field(default_factory=dict)
    heads: list[Row] = field(default_factory=list)
    similarities: list[Row] = field(default_factory=list)

    def folder(self, condition: str | None = None) -> str:
        """Name of the folder of the pictures, or of those of a model: models that were trained
        without positions are shared by all types."""
        own = condition is None or CONDITIONS[condition].positions
        return folder_name(self.name) if own else NO_POSITIONS.type


def rate_table(results: Sequence[Result]) -> list[str]:
    """Error rates with models in rows, test conditions in columns."""
    rows = [
        {**row, "model": f"{row['type']} M-{row['trained']}"}
        for result in results
        for row in result.rows
    ]
    cells = pivot(rows, "model", "tested", "per")
    tests = [name for name in CONDITIONS if any(name in row for row in cells.values())]
    ordered = {name: {test: row.get(test, []) for test in tests} for name, row in cells.items()}
    return seed_table(ordered, "model by test")


def write_results(
    output: Path, facts: Mapping[str, str], classes: Sequence[str], results: Sequence[Result]
) -> list[str]:
    """Writes all tables: ``results.md``, ``measurements.csv``, and those of each type in its
    folder.

    Returns:
        The lines of the table of error rates.
    """
    write_csv(output / "measurements.csv", [row for result in results for row in result.rows])
    rates = rate_table(results)
    sections = {"PER": ["Wrong frames in percent of all frames of the test.", "", *rates]}
    for result in results:
        folder = output / result.folder()
        for name, matrix in result.confusions.items():
            rows = [
                {"target": target, **dict(zip(classes, row, strict=True))}
                for target, row in zip(classes, matrix.tolist(), strict=True)
            ]
            write_csv(output / result.folder(name) / f"confusions-{name}.csv", rows)
        epochs = [{"trained": name, **row} for name, h in result.histories.items() for row in h]
        write_csv(folder / "training.csv", epochs)
        write_csv(folder / "heads.csv", result.heads)
        if result.similarities:
            write_csv(folder / "similarity.csv", result.similarities)
        sections[result.name] = _section(result, classes)
    write_page(output / "results.md", "Phone classification", sections, facts)
    return rates


def _section(result: Result, classes: Sequence[str]) -> list[str]:
    """The page's part on one type, of its first seed."""
    pictures = [f"{result.folder()}/{name}" for name in ("training", "confusions")]
    pictures += [f"{result.folder(name)}/attention-{name}" for name in result.confusions]
    pictures += [f"{result.folder()}/similarity"] if result.similarities else []
    first = [row for row in result.rows if row["seed"] == result.rows[0]["seed"]]
    counts = (
        [f"M-{row['trained']}", row["tested"], *(row[name] for name in COUNTS)] for row in first
    )
    tops = {f"M-{name}": top_confusions(m, classes, 8) for name, m in result.confusions.items()}
    confused = (
        [f"{target} as {predicted} {percent:.1f}" for target, predicted, percent in row]
        for row in zip(*tops.values(), strict=True)
    )
    heads = ([f"M-{row['trained']}", *(row[name] for name in HEADS)] for row in result.heads)
    return [
        *(f"![{place.partition('/')[2]}]({place}.png)" for place in pictures),
        "",
        "Smoothness (class changes between consecutive frames; the labels have "
        f"{result.target_changes}) and wrong frames by type of error:",
        "",
        *markdown(["trained", "tested", *COUNTS], counts),
        "",
        "Largest confusions, in percent of the frames of the target:",
        "",
        *markdown(list(tops), confused),
        "",
        "Attention by head, for one utterance: the distance of key and query with the largest mean "
        f"weight, that weight, and the share of keys at most {NEAR} frames away:",
        "",
        *markdown(["trained", *HEADS], heads),
    ]
