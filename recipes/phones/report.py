"""Writes the tables of one comparison, and the page that shows tables and pictures."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from recipes.lab.figures import Panel, write_lines_figure
from recipes.lab.steps import folder_name
from recipes.lab.tables import (
    Row,
    cell,
    grouped,
    markdown,
    pivot,
    seed_table,
    write_csv,
    write_page,
)
from recipes.phones.analysis import Frames, matching_frames, relations, top_confusions
from recipes.phones.train import CONDITIONS, NEAR, NO_POSITIONS

PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "espeakng-loader")
COUNTS = ("per", "changes", "type1", "type2", "type3", "long_runs")
# Errors that the thesis shows frame by frame: type of error by model (0: the model is right)
PRINTED = {
    "M-inc, type 1 (thesis, Tables 5.5 and 5.6)": {"inc": 1},
    "M-exc, type 2 (Table 5.7)": {"exc": 2},
    "M-exc, type 3 (Table 5.8)": {"exc": 3},
    "M-inc has type 1 where M-exc has type 2 (Tables 5.10 and 5.11)": {"inc": 1, "exc": 2},
    "M-inc is right where M-exc has type 3 (Tables 5.12 and 5.13)": {"inc": 0, "exc": 3},
}
# CSV files of all types together, and the rows of a result that are in them
TABLES = {
    "trainings": "trainings",
    "training": "histories",
    "heads": "heads",
    "heads-epochs": "epochs",
    "attention-classes": "relations",
    "similarity": "similarities",
}
LARGEST = 8  # number of confusions shown for a model
EXAMPLES = 2  # number of examples of each kind of error
AROUND = 2  # frames that are shown on each side of an error


@dataclass
class Result:
    """Measurements with one position embedding. Rows name their seed; `similarities` and `printed`
    come from the first seed."""

    name: str
    target_changes: int  # class changes between consecutive frames in the labels of the test
    # a row for each model (all seeds) and test condition: type, trained, tested, seed, COUNTS
    rows: list[Row] = field(default_factory=list)
    trainings: list[Row] = field(default_factory=list)  # of all seeds: loss, PER of dev, epoch
    histories: list[Row] = field(default_factory=list)  # by condition of training, epoch
    # condition of training, seed: [targets, predictions] in percent
    confusions: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    # condition of training and of the test: confusions in training utterances, and PER
    fitted: dict[tuple[str, str], dict[int, np.ndarray]] = field(default_factory=dict)
    fitted_rates: list[Row] = field(default_factory=list)
    heads: list[Row] = field(default_factory=list)  # by condition of training, layer, head
    epochs: list[Row] = field(default_factory=list)  # heads by epoch
    relations: list[Row] = field(default_factory=list)  # attention by class, for each head
    layer_relations: list[Row] = field(default_factory=list)  # the same, mean over heads
    similarities: list[Row] = field(default_factory=list)  # by distance in frames
    printed: list[str] = field(default_factory=list)  # lines with errors frame by frame

    def type_of(self, condition: str) -> str:
        """The type that is shown for a model: all types share the models that were trained without
        positions."""
        return self.name if CONDITIONS[condition].positions else NO_POSITIONS.type

    def folder(self, condition: str | None = None) -> str:
        """Name of the folder for pictures of all models, or of the model of a `condition`."""
        return folder_name(self.type_of(condition) if condition else self.name)


def rate_table(rows: Sequence[Row]) -> list[str]:
    """A table of error rates with models in rows and test conditions in columns."""
    rows = [{**row, "model": f"{row['type']} M-{row['trained']}"} for row in rows]
    cells = pivot(rows, "model", "tested", "per")
    tests = [name for name in CONDITIONS if any(name in row for row in cells.values())]
    ordered = {name: {test: row.get(test, []) for test in tests} for name, row in cells.items()}
    return seed_table(ordered, "model by test")


def write_lengths(
    output: Path,
    facts: Mapping[str, str],
    rows: Sequence[Row],
    epochs: Sequence[Row],
    train_length: float | None,
) -> list[str]:
    """Writes error rates by length of the test: ``results.md``, ``lengths.csv`` and ``.png``, and
    ``training.csv``. Returns the lines of the table."""
    write_csv(output / "lengths.csv", rows)
    write_csv(output / "training.csv", epochs)
    named = [
        {**row, "model": f"{row['type']} M-{row['trained']}", "length": f"{row['seconds']:g} s"}
        for row in rows
    ]
    cells = pivot(named, "model", "length", "per")
    trained = {f"{train_length:g} s"} if train_length else ()
    panels = [Panel(cells, "wrong frames, %")]
    write_lines_figure(output / "lengths.png", panels, "length of the test", trained)
    table = seed_table(cells, "model by length of the test")
    text = (
        "Wrong frames in percent. All lengths have the same frames of the test, which is joined "
        "and cut into pieces of each length."
    )
    lines = [text, "", *table, "", "![by length](lengths.png)"]
    write_page(output / "results.md", "Phone classification by length", {"": lines}, facts)
    return table


def printed_errors(
    names: Sequence[str],
    targets: Frames,
    predictions: Mapping[str, Frames],
    classes: Sequence[str],
) -> list[str]:
    """Lines with the first errors of each kind of :data:`PRINTED`, from different utterances: the
    frames, their targets, and the predictions of the models."""
    lines = []
    for title, wanted in PRINTED.items():
        if not {*wanted} <= {*predictions}:
            continue
        tables = (
            _error_table(names[number], target, models, wanted, classes)
            for number, target in enumerate(targets)
            if (models := {name: frames[number] for name, frames in predictions.items()})
        )
        examples = [*islice(filter(None, tables), EXAMPLES)]
        lines += ["", f"{title}:", *(line for table in examples for line in ["", *table])]
        lines += [] if examples else ["", "none"]
    return lines


def _error_table(
    name: str,
    target: np.ndarray,
    predictions: Mapping[str, np.ndarray],
    wanted: Mapping[str, int],
    classes: Sequence[str],
) -> list[str]:
    """A table of the first error of the wanted kind in an utterance, with the frames around it;
    empty if there is no such error."""
    for first, end in matching_frames(target, predictions, wanted)[:1]:
        frames = range(max(0, first - AROUND), min(len(target), end + AROUND))
        rows = {"target": target} | {f"M-{model}": row for model, row in predictions.items()}
        named = ([label, *(classes[row[i]] for i in frames)] for label, row in rows.items())
        return markdown([f"{name}, frame", *frames], named)
    return []


def write_results(
    output: Path,
    facts: Mapping[str, str],
    classes: Sequence[str],
    results: Sequence[Result],
) -> list[str]:
    """Writes ``results.md``, and CSV files with rows of all types. Returns the lines of the table
    of error rates."""
    measurements = [row for result in results for row in result.rows]
    write_csv(output / "measurements.csv", measurements)
    write_csv(output / "confusions.csv", _confusion_rows(results, classes))
    for name, attribute in TABLES.items():
        rows = [{"type": r.name, **row} for r in results for row in getattr(r, attribute)]
        if rows:
            write_csv(output / f"{name}.csv", rows)
    rates = rate_table(measurements)
    sections = {"PER": ["Wrong frames in percent of all frames of the test.", "", *rates]}
    for result in results:
        sections[result.name] = _section(result, classes)
    write_page(output / "results.md", "Phone classification", sections, facts)
    return rates


def mean_matrix(seeds: Mapping[int, np.ndarray]) -> np.ndarray:
    """The mean of one matrix for each seed."""
    return np.mean([*seeds.values()], 0)


def _confusion_rows(results: Sequence[Result], classes: Sequence[str]) -> list[Row]:
    """Confusions in the test and in training utterances; once only for a model that types share."""
    matrices = {}
    for result in results:
        measured = {("test", name, name): seeds for name, seeds in result.confusions.items()}
        measured |= {("training", *pair): seeds for pair, seeds in result.fitted.items()}
        for (utterances, trained, tested), seeds in measured.items():
            matrices[result.type_of(trained), utterances, trained, tested] = seeds
    columns = ("type", "utterances", "trained", "tested")
    return [
        dict(zip((*columns, "seed", "target", *classes), (*key, seed, target, *row), strict=True))
        for key, seeds in matrices.items()
        for seed, matrix in seeds.items()
        for target, row in zip(classes, matrix.tolist(), strict=True)
    ]


def _section(result: Result, classes: Sequence[str]) -> list[str]:
    """The section of the page on one type, with numbers of all seeds. The table of heads, printed
    errors, and pictures of attention and positions come from the first seed only."""
    of_type = result.folder()
    of_models = {name: result.folder(name) for name in result.confusions}
    pictures = [f"{of_type}/training", f"{of_type}/confusions"]
    pictures += [f"{of_type}/confusions-training"] if result.fitted else []
    for name in ("attention", "attention-epochs", "attention-classes"):
        pictures += [f"{folder}/{name}-{model}" for model, folder in of_models.items()]
    pictures += [f"{of_type}/similarity"] if result.similarities else []
    first, *others = dict.fromkeys(row["seed"] for row in result.rows)
    drawn = "attention and of positions" if result.similarities else "attention"
    of_first = [f"Pictures of {drawn}, and printed errors, are of seed {first}.", ""]
    tops = {f"M-{name}": _confused(seeds, classes) for name, seeds in result.confusions.items()}
    confused = zip(*tops.values(), strict=True)
    columns = ("layer", "head", "distance", "weight", "near")
    heads = (
        [f"M-{row['trained']}", *(row[column] for column in columns)]
        for row in result.heads
        if row["seed"] == first
    )
    epochs = dict.fromkeys(f"epoch {row['epoch']}" for row in result.epochs)
    return [
        *(of_first if others else []),
        *(f"![{picture.partition('/')[2]}]({picture}.png)" for picture in pictures),
        "",
        "Last training loss, and the least PER of dev with its epoch (thesis, Tables 5.1, 5.14):",
        "",
        *_seed_rows(result.trainings, ("trained",), ("loss", "PER of dev", "epoch")),
        "",
        "Smoothness (class changes between consecutive frames; the labels have "
        f"{result.target_changes}) and wrong frames by type of error:",
        "",
        *_seed_rows(result.rows, ("trained", "tested"), COUNTS),
        "",
        "Largest confusions, in percent of the frames of the target:",
        "",
        *markdown(list(tops), confused),
        *_fitted(result.fitted_rates),
        "",
        f"Attention by head, for one utterance and seed {first}: the distance of key and query "
        "with the largest mean weight, that weight, and the share of keys at most "
        f"{NEAR} frames away:",
        "",
        *markdown(["trained", *columns], heads),
        "",
        f"Share of the attention at most {NEAR} frames away by epoch, in the same utterance, of "
        "the head of each layer that has most of it in the first of these epochs:",
        "",
        *_seed_rows(nearest_heads(result.epochs), ("trained", "layer"), epochs),
        "",
        "Attention by class of phone, mean of the heads of a layer: how many times as much as if "
        "all frames were attended to alike. A group is vowels, consonants or silence:",
        "",
        *_seed_rows(result.layer_relations, ("trained", "layer"), relations(classes)),
        *result.printed,
    ]


def _confused(seeds: Mapping[int, np.ndarray], classes: Sequence[str]) -> list[str]:
    """The largest confusions in the mean of the seeds, such as "t as s 20.8 ± 1.5"."""
    rows = {name: row for row, name in enumerate(classes)}
    return [
        f"{a} as {b} {cell([float(matrix[rows[a], rows[b]]) for matrix in seeds.values()], 1)}"
        for a, b, _ in top_confusions(mean_matrix(seeds), classes, LARGEST)
    ]


def _fitted(rows: Sequence[Row]) -> list[str]:
    """Lines with error rates in training utterances; empty if there are no rows."""
    if not rows:
        return []
    text = f"Wrong frames of {rows[0]['utterances']} utterances of the training, in percent:"
    return ["", text, "", *_seed_rows(rows, ("trained", "tested"), ("per",))]


def _seed_rows(rows: Sequence[Row], keys: Sequence[str], columns: Collection[str]) -> list[str]:
    """Lines of a table with `columns` of rows of all seeds; a row for each model, named by
    `keys`."""
    named = [{**row, "trained": f"M-{row['trained']}"} for row in rows]
    cells = {
        name: {
            column: [row[column] for row in model_rows if row[column] is not None]
            for column in columns
        }
        for name, model_rows in grouped(named, *keys).items()
    }
    return seed_table(cells, ", ".join(keys))


def nearest_heads(rows: Sequence[Row]) -> list[Row]:
    """Attention to near frames by epoch, for each model, seed and layer, of the head that has the
    largest such attention in the first of these epochs."""
    by_layer = grouped(rows, "trained", "seed", "layer").values()
    nearest = []
    for layer in by_layer:
        start = [row for row in layer if row["epoch"] == layer[0]["epoch"]]
        head = max(start, key=lambda row: row["near"])["head"]
        shares = {f"epoch {row['epoch']}": row["near"] for row in layer if row["head"] == head}
        names = {key: layer[0][key] for key in ("trained", "seed", "layer")}
        nearest.append({**names, "head": head, **shares})
    return nearest
