"""Cells: the value of one type, seed and group of tests of a task, and the command that made it.
Cells are read from published tables, or made by the recipes; the file of cells is what a run that
was interrupted goes on from."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.lab.steps import CommandError, folder_name, run_module
from recipes.lab.tables import shown_command, write_csv
from recipes.shootout.tasks import Task


class Cell(NamedTuple):
    """A value; `seconds` of training are empty where a table has none."""

    task: str
    type: str
    seed: int
    group: str
    value: float
    train_seconds: float | None
    source: str


def published(task: Task, folder: Path) -> list[Cell]:
    """Reads the cells of a task from tables like those in ``docs/results``, below `folder`. A table
    that several pages share has a column ``page``. A type that several pages have is read from the
    first page, because types are compared within one run."""
    cells: list[Cell] = []
    for table, page in task.pages:
        path = folder / table
        if not path.is_file():
            continue
        known = {cell.type for cell in cells}
        source = (folder / (page or table)).as_posix()
        rows = (row for row in _rows(path) if not page or row["page"] == page)
        cells += (cell for cell in _cells(task, rows, source) if cell.type not in known)
    return cells


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _cells(task: Task, rows: Iterable[Mapping[str, str]], source: str) -> Iterator[Cell]:
    """The cells of a table of a recipe, for types and groups of the task only."""
    types = {_in_tables(task.word(name)): name for name in task.types()}
    groups = {group for groups in task.tests.values() for group in groups}
    type_column, group_columns, value_column = task.columns
    if isinstance(group_columns, str):
        group_columns = (group_columns,)
    for row in rows:
        group = next(row[column] for column in group_columns if column in row)
        name = types.get(_in_tables(row[type_column]))
        if name is None or group not in groups or not row[value_column]:
            continue
        seconds = float(row["train_seconds"]) if row.get("train_seconds") else None
        value = float(row[value_column])
        yield Cell(task.name, name, int(row["seed"]), group, value, seconds, source)


def _in_tables(word: str) -> str:
    """A type as tables write it: names of models for recipes.mt.analyze have no "="."""
    return word.replace("=", " ")


def read_cells(path: Path) -> list[Cell]:
    """Reads a file of :func:`write_cells`; a file that does not exist has no cells."""
    if not path.is_file():
        return []
    try:
        return [
            Cell(
                row["task"],
                row["type"],
                int(row["seed"]),
                row["group"],
                float(row["value"]),
                float(row["train_seconds"]) if row["train_seconds"] else None,
                row["source"],
            )
            for row in _rows(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        why = f"{path} is no table of this program ({error}); delete it or give another --output"
        raise CommandError(why) from None


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    """Writes all cells as CSV in one step."""
    write_csv(path, [cell._asdict() for cell in cells], digits=6)


def command_of(task: Task, types: Sequence[str], seed: int, options: Sequence[str]) -> list[str]:
    """Module and arguments that train and test `types` with one seed.

    Args:
        options: The user's files, as options of the recipe; they replace ``{files}``.
    """
    words = [part for word in task.command.split() for part in _filled(word, options)]
    return [*words, "--seeds", str(seed), "--compare", *map(task.word, types)]


def _filled(word: str, options: Sequence[str]) -> Sequence[str]:
    return options if word == "{files}" else (word,)


def make(
    task: Task,
    types: Sequence[str],
    seed: int,
    options: Sequence[str],
    work: Path,
    jobs: int,
) -> list[Cell]:
    """Trains and tests `types` with one seed; returns their cells.

    Args:
        options: See :func:`command_of`.
        work: Folder of finished trainings, tables and logs.
        jobs: Trainings that run side by side, where the recipe can do that.

    Raises:
        ChildError: the recipe failed, or its table lacks a type.
    """
    folder = work / folder_name(task.name)
    settings = {"jobs": jobs, "work": folder / "work", "output": folder / f"seed{seed}"}
    shared = [word for name in task.shared for word in (f"--{name}", str(settings[name]))]
    module, *words = command_of(task, types, seed, options)
    run_module(module, *words, *shared, log=folder / f"seed{seed}.log")
    table = settings["output" if "output" in task.shared else "work"] / task.table
    cells = []
    for cell in _cells(task, _rows(table), ""):
        source = shown_command("python -m", command_of(task, (cell.type,), seed, options))
        # recipes.mt.analyze numbers the seeds that it was given
        cells.append(cell._replace(seed=seed, source=source))
    return [cell for cell in cells if cell.type in types]
