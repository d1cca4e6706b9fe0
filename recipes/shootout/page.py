"""The page of the shoot-out: a table a question, a heat map, costs, and what is missing."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import NamedTuple

import numpy as np

from recipes.lab.figures import draw_matrix, new_figure, write_figure
from recipes.lab.tables import Row, cell, grouped, markdown
from recipes.shootout.cells import Cell
from recipes.shootout.ranks import Rank, Values, ranks_of, values_of
from recipes.shootout.tasks import LABELS, QUESTIONS, TYPES, Task

INTRODUCTION = (
    "Values are mean ± sample standard deviation of seeds; a number of lengths is averaged. Behind "
    "a value stands its rank: `2-4` is tied for the places two to four. A type is ahead of another "
    "if Welch's t-test of the seeds has p < 0.05, without correction for the number of "
    "comparisons. The first columns are the mean shares of the other types that a type is ahead of "
    "and behind, over the tasks that have ranks of this type; `tasks` is their number, and shares "
    "of few tasks tell little about other tasks. Values of one seed are in italics, and have no "
    "rank. {arrows}: lower or higher is better. {labels}. Cells, and the command of each: "
    "[cells.csv](cells.csv)."
)
PICTURE = "shootout.png"


def sections(
    tasks: Sequence[Task], cells: Sequence[Cell], missing: Sequence[str]
) -> dict[str, list[str]]:
    """The sections of the page by heading.

    Args:
        missing: Lines that tell what was not measured, and why.
    """
    introduction = INTRODUCTION.format(
        arrows="↓, ↑", labels="; ".join(f"`{label}` is `{name}`" for name, label in LABELS.items())
    )
    parts = {"": [introduction, "", f"![ahead and behind by question]({PICTURE})"]}
    parts["First places"] = first_places(tasks, cells)
    for question in QUESTIONS:
        if lines := _question(tasks, question, cells):
            parts[question.capitalize()] = lines
    parts["Seconds of training"] = costs(tasks, cells)
    parts["Not measured"] = list(missing) or ["Everything is measured."]
    return parts


def first_places(tasks: Sequence[Task], cells: Sequence[Cell]) -> list[str]:
    """A table with the types that no other type is ahead of, by task and question; the type with
    the best mean stands first, with its value."""
    by_question = {name: ranks_by_task(tasks, name, cells) for name in QUESTIONS}
    rows = []
    for task in tasks:
        found = [by_task.get(task.name) for by_task in by_question.values()]
        texts = [
            _first(*values_and_ranks, task) if values_and_ranks else ""
            for values_and_ranks in found
        ]
        if any(texts):
            rows.append([f"{task.name}: {task.metric}", *texts])
    return markdown(["task", *QUESTIONS], rows)


def _first(values: Values, ranks: Mapping[str, Rank], task: Task) -> str:
    means = {name: mean(values[name]) for name in ranks}
    order = sorted(ranks, key=means.__getitem__, reverse=not task.lower_is_better)
    tied = [name for name in order if ranks[name].best == 1]
    behind = [name for name in order if ranks[name].best > 1]
    if not tied:
        return ""
    if not behind:
        return f"all {len(tied)} types are tied"
    best = f"{cell(values[tied[0]])}"
    if len(tied) > 2 and len(behind) < len(tied):
        return f"{best}, all but {_names(behind)}"
    return f"{best} {_names(tied)}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{LABELS.get(name, name)}`" for name in names)


def ranks_by_task(
    tasks: Iterable[Task], question: str, cells: Sequence[Cell]
) -> dict[str, tuple[Values, Mapping[str, Rank]]]:
    """Values and ranks of the tasks that answer a question and have cells."""
    found = {}
    for task in tasks:
        if values := values_of(task, question, cells):
            found[task.name] = values, ranks_of(values, task.lower_is_better)
    return found


class Balance(NamedTuple):
    """Mean shares of the other types that a type is ahead of and behind, over some tasks."""

    ahead: float
    behind: float
    tasks: int


def balance(ranks: Iterable[Mapping[str, Rank]], name: str) -> Balance | None:
    """The balance of a type; None without ranks."""
    rows = [row[name] for row in ranks if name in row]
    if not rows:
        return None
    shares = (mean(row.ahead for row in rows), mean(row.behind for row in rows))
    return Balance(*shares, len(rows))


def _question(tasks: Sequence[Task], question: str, cells: Sequence[Cell]) -> list[str]:
    found = ranks_by_task(tasks, question, cells)
    if not found:
        return []
    by_name = {task.name: task for task in tasks}
    header = ["type", "ahead, %", "behind, %", "tasks"]
    for name in found:
        arrow = "↓" if by_name[name].lower_is_better else "↑"
        header.append(f"{name}: {by_name[name].metric} {arrow}")
    balances = {name: balance((ranks for _, ranks in found.values()), name) for name in TYPES}
    rows = []
    for name in sorted(TYPES, key=lambda name: _order(balances[name])):
        texts = [_cell(values.get(name, ()), ranks.get(name)) for values, ranks in found.values()]
        if any(texts):
            rows.append([_names([name]), *_shown(balances[name]), *texts])
    return markdown(header, rows)


def _order(row: Balance | None) -> float:
    """Sorts the largest lead first, and types without ranks last."""
    return 2.0 if row is None else row.behind - row.ahead


def _shown(row: Balance | None) -> list[str]:
    if row is None:
        return ["", "", "0"]
    return [f"{100 * row.ahead:.0f}", f"{100 * row.behind:.0f}", str(row.tasks)]


def _cell(values: Sequence[float], rank: Rank | None) -> str:
    if not values:
        return ""
    text = cell(values)
    if rank is None:
        return f"*{text}*"
    place = f"{rank.best}" if rank.best == rank.worst else f"{rank.best}-{rank.worst}"
    return f"**{text}** ({place})" if rank.best == 1 else f"{text} ({place})"


def costs(tasks: Sequence[Task], cells: Sequence[Cell]) -> list[str]:
    """A table of seconds of training. Seconds compare within a column only: tables were made on
    different machines."""
    columns = {}
    for task in tasks:
        rows = [row._asdict() for row in cells if row.task == task.name and row.train_seconds]
        tables = grouped(({**row, "table": _table(row["source"])} for row in rows), "table")
        for table, table_rows in tables.items():
            columns[f"{task.name} ({table})"] = grouped(table_rows, "type")
    if not columns:
        return ["No table has seconds."]
    rows = []
    for name in TYPES:
        seconds = [_seconds(column.get(name, ())) for column in columns.values()]
        if any(seconds):
            rows.append([_names([name]), *seconds])
    note = "Seconds compare within a column only: machines and loads differ between columns."
    return [note, "", *markdown(["type", *columns], rows)]


def _table(source: str) -> str:
    """The folder of a published table; "here" for a training of this program."""
    return "here" if source.startswith("python ") else Path(source).parent.name


def _seconds(rows: Iterable[Row]) -> str:
    numbers = [row["train_seconds"] for row in rows]
    return f"{mean(numbers):.0f}" if numbers else ""


def write_picture(path: Path, tasks: Sequence[Task], cells: Sequence[Cell]) -> None:
    """Draws a heat map: by type and question, the share of the other types that a type is ahead of
    minus the share that it is behind."""
    found = {name: ranks_by_task(tasks, name, cells) for name in QUESTIONS}
    leads = np.full((len(TYPES), len(QUESTIONS)), np.nan)
    for column, tasks_of_question in enumerate(found.values()):
        for row, name in enumerate(TYPES):
            lead = balance((ranks for _, ranks in tasks_of_question.values()), name)
            if lead is not None:
                leads[row, column] = 100 * (lead.ahead - lead.behind)
    texts = [["" if np.isnan(lead) else f"{lead:+.0f}" for lead in row] for row in leads]
    figure, [[axes]] = new_figure(9, 6)
    draw_matrix(axes, leads, texts, vmin=-100, vmax=100, cmap="RdYlGn")
    axes.set_xticks(range(len(QUESTIONS)), [fill(name, 16) for name in QUESTIONS])
    axes.set_yticks(range(len(TYPES)), [LABELS.get(name, name) for name in TYPES])
    axes.set_title("other types ahead of, minus other types behind, %")
    write_figure(path, figure)
