"""Writes tables as CSV and as Markdown, and the pages that hold the tables. Values of several seeds
are shown as mean ± sample standard deviation, which the head of the table says. JSON is not
written: CSV is enough for recipes.shootout, which reads tables again."""

import contextlib
import csv
import platform
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from cape_plugins.utils.files import writing
from cape_plugins.utils.machine import describe_processor
from recipes.lab.steps import write_lines

Row = Mapping[str, Any]
# {label of a row or line: {label of a column or x: values of the seeds}}
Cells = dict[str, dict[Any, list[float]]]
ALL = "all"  # the label of all samples together


def pivot(rows: Iterable[Row], row: str, column: str, value: str) -> Cells:
    """Lists of the values of all seeds by two keys, in the order of the rows."""
    cells: Cells = {}
    for entry in rows:
        cells.setdefault(entry[row], {}).setdefault(entry[column], []).append(entry[value])
    return cells


def grouped(rows: Iterable[Row], *keys: str) -> dict[str, list[Row]]:
    """Groups rows by the values of `keys`; the joined values are the heading of a group."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return groups


def write_csv(path: Path, rows: Iterable[Row], digits: int = 4) -> None:
    """Writes a line for each row; missing cells and None become empty cells."""
    rows = [{key: _cell_text(value, digits) for key, value in row.items()} for row in rows]
    with writing(path) as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _cell_text(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "" if value is None else str(value)


def plus_minus(middle: float, spread: float | None = None, digits: int = 2) -> str:
    """Writes "2.00 ± 1.00", or the number alone."""
    return f"{middle:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def cell(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± sample standard deviation; a single value alone; equal integers as an integer; "-" for
    no value."""
    if not values:
        return "-"
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return str(values[0])
    return plus_minus(mean(values), stdev(values) if len(values) > 1 else None, digits)


def of_seeds(cells: Cells) -> str:
    """Description of the numbers: "one seed", or "mean ± sample standard deviation of 3 seeds"."""
    counts = sorted({len(values) for row in cells.values() for values in row.values() if values})
    if counts in ([], [1]):
        return "one seed"
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean ± sample standard deviation of {many} seeds"


def markdown(header: Sequence[Any], rows: Iterable[Sequence[Any]], digits: int = 2) -> list[str]:
    """Lines of a table; floating-point numbers have `digits`, None is an empty cell."""

    def line(row: Sequence[Any]) -> str:
        return f"| {' | '.join(_cell_text(entry, digits) for entry in row)} |"

    return [line(header), "|---" * len(header) + "|", *map(line, rows)]


def seed_table(
    cells: Cells, corner: str, digits: int = 2, trained: Collection[Any] = ()
) -> list[str]:
    """Lines of a table whose head describes the rows (`corner`) and the numbers, and marks the
    columns that occur in training."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    seeds = of_seeds(cells)
    rows = (
        [name, *(cell(row.get(column, ()), digits) for column in columns)]
        for name, row in cells.items()
    )
    head = [f"{column} (training)" if column in trained else column for column in columns]
    return markdown([corner if seeds == "one seed" else f"{corner} ({seeds})", *head], rows)


def flags_and_times(rows: Iterable[Row], flags: Mapping[str, str]) -> dict[str, list[str]]:
    """A section of a page: the flags of each variant of the rows, and its seconds of training."""
    lines = [
        [name, f"`{flags[name]}`", f"{mean(row['train_seconds'] for row in variant_rows):.0f}"]
        for name, variant_rows in grouped(rows, "variant").items()
    ]
    return {"Variants": markdown(["variant", "flags", "training time (s, mean)"], lines)}


def write_page(
    path: Path, title: str, sections: Mapping[str, Sequence[str]], facts: Mapping[str, str]
) -> list[str]:
    """Writes a page with sections by heading (none for ""); returns their lines for the screen."""
    lines_of_sections: list[str] = []
    for heading, lines in sections.items():
        lines_of_sections += [*([f"## {heading}", ""] if heading else []), *lines, ""]
    fact_lines = [f"- **{name}**: {text}" for name, text in facts.items()]
    write_lines(path, [f"# {title}", "", *lines_of_sections, "## How it was made", "", *fact_lines])
    return lines_of_sections


def how_made(
    command: str, packages: Sequence[str], device: torch.device | None = None, **more: str
) -> dict[str, str]:
    """Facts for repeating and judging the numbers: command, machine, versions, and `more` by
    name."""
    where = describe_processor()
    if device is not None and device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}; {where}"
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    facts = {"Command": f"`{command}`", "Machine": where, "Versions": ", ".join(versions)}
    return facts | {name.replace("_", " ").capitalize(): text for name, text in more.items()}


def shown_command(program: str, argv: Sequence[str]) -> str:
    """The command that was typed; pasted into a shell in the same folder, it runs again.
    Committed results come from commands with relative paths.

    >>> shown_command("python -m run", ["--model", "a=runs/*/last.pt", "--output", "my results"])
    "python -m run --model 'a=runs/*/last.pt' --output 'my results'"
    """
    return shlex.join([*shlex.split(program), *map(str, argv)])
