"""The page of the shoot-out: a table for each question, a heat map, costs, and what is missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill

import numpy as np

from recipes.lab.figures import draw_matrix, new_figure, write_figure
from recipes.lab.tables import cell, markdown
from recipes.shootout.cells import PROGRAM, Cell
from recipes.shootout.ranks import Answer, Balance, Rank, answers, balance
from recipes.shootout.tasks import QUESTIONS, TYPES, Task

PICTURE = "shootout.png"
Answers = Mapping[str, Sequence[Answer]]  # by question


def all_answers(tasks: Sequence[Task], cells: Sequence[Cell]) -> Answers:
    """Values and ranks of each task, by question."""
    return {question: answers(tasks, question, cells) for question in QUESTIONS}


def sections(
    answers: Answers, tasks: Sequence[Task], cells: Sequence[Cell], missing: Sequence[str]
) -> dict[str, list[str]]:
    """The sections of the page by heading.

    Args:
        answers: Values and ranks of the cells.
        missing: Lines that tell what was not measured, and why.
    """
    parts = {
        "": [*_introduction(answers), "", f"![ahead and behind by question]({PICTURE})"],
        "First places": first_places(answers),
    }
    parts |= {question.capitalize(): _table(rows) for question, rows in answers.items() if rows}
    parts["Tasks"] = _tasks(tasks, cells)
    parts["Seconds of training"] = costs(cells)
    if machines := _machines(cells):
        parts["Machines of cells that were trained here"] = machines
    one_seed = [
        f"- {answer.task.name}, {_names(names)}: one seed, so no rank"
        for answer in answers[QUESTIONS[0]]
        if (names := [name for name in answer.values if name not in answer.ranks])
    ]
    nothing = "Each chosen type has two seeds or more on each chosen task that has the type."
    parts["Not measured"] = [*missing, *one_seed] or [nothing]
    return parts


def _introduction(answers: Answers) -> list[str]:
    counts = [len(row.ranks) for rows in answers.values() for row in rows]
    pairs = sum(count * (count - 1) // 2 for count in counts)
    labels = "; ".join(f"`{TYPES[name]}` is `{name}`" for name in TYPES if TYPES[name] != name)
    return [
        "* A value is the mean ± sample standard deviation of the seeds. Where a question has "
        "several lengths, the value is their mean.",
        "* The number in brackets is the rank of the type. Types that cannot be told apart have an "
        "interval: `2-4` means that one type is better, and that the type may be second, third or "
        "fourth. A wide interval means that the seeds differ much. **Bold**: no type is better.",
        "* `First places` have the best value, then the type with this value, and types that are "
        "level with it: like the first, none is beaten by another type, and each is better than as "
        "many types. Types after `perhaps` are not beaten either, but are better than fewer types: "
        "they may be worse than the first, and the seeds cannot tell. The tables below have the "
        "values.",
        "* A type is better than another if Welch's t-test of their seeds has p < 0.05. The page "
        f"compares {pairs} pairs, and nothing is corrected for their number: pairs without a "
        f"difference would give about {pairs * 0.05:.0f} differences by chance.",
        "* `ahead` and `behind` are the shares of the other types that a type is better and worse "
        "than, averaged over families of tasks, whose number stands below. Shares of few families "
        "say little.",
        f"* ↓: lower is better, ↑: higher is better. *Italics*: one seed, no rank. {labels}.",
        "* [cells.csv](cells.csv) has all values, each with its page, or with the command that "
        "made it, machine and versions.",
    ]


def first_places(answers: Answers) -> list[str]:
    """A table with the types that no other type is better than, by task and question; the type with
    the best mean stands first, after its value. Types with a wider rank than this type are
    doubtful: often they are tied only because their seeds differ much."""
    by_task: dict[str, list[str]] = {}
    for column, rows in enumerate(answers.values()):
        for answer in rows:
            texts = by_task.setdefault(_title(answer.task), [""] * len(answers))
            texts[column] = _first(answer)
    return markdown(["task", *answers], [[title, *texts] for title, texts in by_task.items()])


def _first(answer: Answer) -> str:
    ranks, values = answer.ranks, answer.values
    order = sorted(
        ranks, key=lambda name: mean(values[name]), reverse=not answer.task.lower_is_better
    )
    tied = [name for name in order if ranks[name].best == 1]
    if not tied:
        return ""
    level = [name for name in tied if ranks[name].worst <= ranks[tied[0]].worst]
    doubtful = [name for name in tied if name not in level]
    others = [name for name in order if name not in level]
    best = cell(values[tied[0]])
    if not others:
        return f"{best} all {len(level)} types"
    if not doubtful and 2 < len(level) > len(others):
        return f"{best} all but {_names(others)}"
    return f"{best} {_names(level)}" + (f"; perhaps {_names(doubtful)}" if doubtful else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{TYPES[name]}`" for name in names)


def _title(task: Task) -> str:
    return f"{task.name}: {task.metric} {'↓' if task.lower_is_better else '↑'}"


def _table(answers: Sequence[Answer]) -> list[str]:
    """A row for each task. Types stand in the order of their lead; types with ranks in less than
    half of the families stand at the end."""
    balances = {name: balance(answers, name) for name in TYPES}
    families = len({answer.task.family for answer in answers})
    names = sorted(
        (name for name in TYPES if any(name in answer.values for answer in answers)),
        key=lambda name: _order(balances[name], families),
    )
    rows = [
        [
            _title(answer.task),
            *(_cell(answer.values.get(name, ()), answer.ranks.get(name)) for name in names),
        ]
        for answer in answers
    ]
    shares = [balances[name] for name in names]
    rows.append(["ahead", *(f"{100 * row.ahead:.0f} %" if row else "" for row in shares)])
    rows.append(["behind", *(f"{100 * row.behind:.0f} %" if row else "" for row in shares)])
    rows.append([f"families of {families}", *(str(row.families) if row else "0" for row in shares)])
    return markdown(["task", *map(_names, ([name] for name in names))], rows)


def _order(row: Balance | None, families: int) -> tuple[bool, float]:
    if row is None:
        return True, 2.0
    return row.families * 2 < families, row.behind - row.ahead


def _cell(values: Sequence[float], rank: Rank | None) -> str:
    if not values:
        return ""
    text = cell(values)
    if rank is None:
        return f"*{text}*"
    ranks = f"{rank.best}" if rank.best == rank.worst else f"{rank.best}-{rank.worst}"
    return f"**{text}** ({ranks})" if rank.best == 1 else f"{text} ({ranks})"


def _tasks(tasks: Sequence[Task], cells: Sequence[Cell]) -> list[str]:
    """Lengths and settings of each task that has cells."""
    lines = []
    for task in tasks:
        trained = {row.type: _trained_here(row) for row in cells if row.task == task.name}
        if not trained:
            continue
        tests = "; ".join(f"{name}: {', '.join(groups)}" for name, groups in task.tests.items())
        words = {
            TYPES[name]: task.word(name) if trained.get(name) else task.row(name)
            for name in {**task.words, **task.rows}
        }
        settings = [f"`{name}` is `{word}`" for name, word in words.items() if word != name]
        note = "; ".join(filter(None, (task.note, *settings)))
        lines.append([task.name, task.family, tests, task.lengths, note])
    return markdown(["task", "family", "tests by question", "lengths", "settings"], lines)


def costs(cells: Sequence[Cell]) -> list[str]:
    """A table of seconds of training: the least of the seeds, whose times differ by what else ran
    on the machine."""
    columns: dict[str, dict[str, float]] = {}
    for row in cells:
        times = columns.setdefault(f"{row.task} ({_origin(row)})", {})
        if row.train_seconds:
            times[row.type] = min(times.get(row.type, row.train_seconds), row.train_seconds)
    rows = [
        [title, *(f"{times[name]:.0f}" if name in times else "" for name in TYPES)]
        for title, times in columns.items()
        if times
    ]
    without = ", ".join(title for title, times in columns.items() if not times)
    missing = f"No seconds are in the tables of {without}." if without else ""
    if not rows:
        return [missing]
    note = (
        "The least of the seeds. Machines and their loads differ between rows, and loads also "
        "within a row: [benchmarks](../../../benchmarks/README.md) measure what a type costs. "
    )
    head = ["task (page)", *(f"`{label}`" for label in TYPES.values())]
    return [(note + missing).rstrip(), "", *markdown(head, rows)]


def _machines(cells: Sequence[Cell]) -> list[str]:
    """A table of the machines and versions of cells that this program trained."""
    types: dict[tuple[str, str, str], list[str]] = {}
    for row in filter(_trained_here, cells):
        types.setdefault((row.task, row.machine, row.versions), []).append(row.type)
    rows = [
        [task, _names([name for name in TYPES if name in names]), *made]
        for (task, *made), names in types.items()
    ]
    return markdown(["task", "types", "machine", "versions"], rows) if rows else []


def _trained_here(row: Cell) -> bool:
    """Whether this program trained a cell; other cells are of published pages."""
    return row.source.startswith(PROGRAM)


def _origin(row: Cell) -> str:
    """The folder of a published page; "trained here" for others."""
    return "trained here" if _trained_here(row) else Path(row.source).parent.name


def write_picture(path: Path, answers: Answers) -> None:
    """Draws a heat map: by type and question, the share of the other types that a type is ahead of
    minus the share that it is behind, and the number of families."""
    leads = np.full((len(TYPES), len(QUESTIONS)), np.nan)
    texts = [[""] * len(QUESTIONS) for _ in TYPES]
    for column, rows in enumerate(answers.values()):
        for row, name in enumerate(TYPES):
            if (lead := balance(rows, name)) is not None:
                leads[row, column] = 100 * (lead.ahead - lead.behind)
                texts[row][column] = f"{leads[row, column]:+.0f} ({lead.families})"
    figure, [[axes]] = new_figure(10, 6)
    draw_matrix(axes, leads, texts, vmin=-100, vmax=100, cmap="RdYlGn")
    axes.set_xticks(range(len(QUESTIONS)), [fill(name, 14) for name in QUESTIONS])
    axes.set_yticks(range(len(TYPES)), TYPES.values())
    axes.set_title(
        "% of the other types that are worse, minus % that are better (families of tasks)"
    )
    write_figure(path, figure)
