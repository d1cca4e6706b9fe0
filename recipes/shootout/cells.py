"""Cells: the value of one type, seed and group of tests of a task, and where it is from. Published
cells are read from tables each time; trained cells are in a file, from which a run that was
interrupted goes on."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from recipes.lab.steps import ChildError, CommandError, folder_name, run_module
from recipes.lab.tables import shown_command, write_csv
from recipes.shootout.tasks import TASKS, Task

PROGRAM = "python -m"  # how the source of a trained cell begins


class Cell(NamedTuple):
    """The score of one type, trained with one seed, on one group of tests. `train_seconds` is None
    if the published table has no training times; `source` is the path of the published page, or the
    command that trains the type with this seed. `machine` and `versions` are of this command; a
    published page has them itself."""

    task: str
    type: str
    seed: int
    group: str
    value: float
    train_seconds: float | None
    source: str
    machine: str = ""
    versions: str = ""


def published(task: Task, folder: Path) -> list[Cell]:
    """Reads the cells of a task from tables as in ``docs/results``, below `folder`. A table
    that several pages share has a column ``page``. A type that several pages have is read from the
    first page, because types are compared within one run.

    Raises:
        CommandError: if a table lacks a column or has values that are no numbers.
    """
    cells: list[Cell] = []
    for table, page in task.pages:
        path = folder / table
        if not path.is_file():
            continue
        types_of_first_pages = {cell.type for cell in cells}
        source = (folder / page if page else path.with_suffix(".md")).as_posix()
        try:
            rows = [row for row in _rows(path) if not page or row["page"] == page]
            of_page = _cells(task, rows, source, task.row)
            cells += [cell for cell in of_page if cell.type not in types_of_first_pages]
        except (KeyError, TypeError, ValueError) as error:
            why = (
                f"--tables {folder}: {table} is no table of results ({error!r}); give docs/results"
            )
            raise CommandError(why) from None
    return cells


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _cells(
    task: Task, rows: Iterable[Mapping[str, str]], source: str, word: Callable[[str], str]
) -> Iterator[Cell]:
    """The cells of a table of a recipe, for types and groups of the task only. `word` is the word
    of the table for a type."""
    types = {_in_tables(word(name)): name for name in task.types()}
    groups = {group for groups in task.tests.values() for group in groups}
    for row in rows:
        group_column = next(filter(row.__contains__, task.group_column), task.group_column[0])
        group = row[group_column]
        name = types.get(_in_tables(row[task.type_column]))
        if name is None or group not in groups or not row[task.value_column]:
            continue
        seconds = float(row["train_seconds"]) if row.get("train_seconds") else None
        value = float(row[task.value_column])
        yield Cell(task.name, name, int(row["seed"]), group, value, seconds, source)


def _in_tables(word: str) -> str:
    """A type as tables write it: names of models for recipes.mt.analyze have no "="."""
    return word.replace("=", " ")


def read_trained(path: Path) -> list[Cell]:
    """Reads the trained cells of a file of :func:`write_cells`; no file has no cells."""
    if not path.exists():
        return []
    groups = {task.name: {g for row in task.tests.values() for g in row} for task in TASKS}
    cells = []
    try:
        for row in _rows(path):
            seconds = float(row["train_seconds"]) if row["train_seconds"] else None
            value, seed = float(row["value"]), int(row["seed"])
            made = [row["source"], row.get("machine") or "", row.get("versions") or ""]
            cell = Cell(row["task"], row["type"], seed, row["group"], value, seconds, *made)
            if not isfinite(value) or not cell.source:
                raise ValueError(f"cut line: {', '.join(map(str, row.values()))}")
            # tasks and groups may have changed since
            if cell.source.startswith(PROGRAM) and cell.group in groups.get(cell.task, ()):
                cells.append(cell)
    except (KeyError, OSError, TypeError, ValueError) as error:
        why = f"{path} is no table of this program ({error}); delete it or give another --output"
        raise CommandError(why) from None
    return cells


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    """Writes all cells as CSV in one step."""
    write_csv(path, [cell._asdict() for cell in cells], digits=6)


def command_of(task: Task, types: Sequence[str], seed: int, options: Sequence[str]) -> list[str]:
    """Module and arguments that train and test `types` with one seed.

    Args:
        options: The user's files, as options of the recipe; they replace ``{files}``.
    """
    words: list[str] = []
    for word in task.command.split():
        words += options if word == "{files}" else [word]
    return [*words, "--seeds", str(seed), "--compare", *map(task.word, types)]


def source_of(task: Task, name: str, seed: int, options: Sequence[str]) -> str:
    """The source of a trained cell. Other files give another source, so that their cells are not
    taken for each other."""
    return shown_command(PROGRAM, command_of(task, (name,), seed, options))


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
        ChildError: the recipe failed, or its table lacks a type or a group of tests.
    """
    folder = work / folder_name(task.name)
    settings = {"jobs": jobs, "work": folder / "work", "output": folder / f"seed{seed}"}
    shared = [word for name in task.shared for word in (f"--{name}", str(settings[name]))]
    module, *words = command_of(task, types, seed, options)
    log = folder / f"seed{seed}.log"
    run_module(module, *words, *shared, log=log)
    table = settings["output" if "output" in task.shared else "work"] / task.table
    # recipes.mt.analyze numbers the seeds that it was given: 1, whatever the seed
    cells = [
        cell._replace(seed=seed, source=source_of(task, cell.type, seed, options))
        for cell in _cells(task, _rows(table), "", task.word)
        if cell.type in types
    ]
    groups = {group for groups in task.tests.values() for group in groups}
    wanted = {(name, group) for name in types for group in groups}
    if missing := wanted - {(cell.type, cell.group) for cell in cells}:
        name, group = min(missing)
        raise ChildError(f"{table} has no row of {task.word(name)} at {group}; see {log}")
    return cells
