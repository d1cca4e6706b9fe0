"""Compares all types of position embeddings on all tasks of the recipes, on one page.

    python -m recipes.shootout --budget 1h
    python -m recipes.shootout --budget full --texts train.en.gz val.en.gz --images cifar10
    python -m recipes.shootout --tables docs/results --budget none
    python -m recipes.shootout --plan

A budget sets the seeds of each task: `none` trains nothing; `1h` the control, number lists and
copies; `6h` small models and one seed more; `full` all. The hours are for two cores. Recipes train
each type and seed of a task. An interrupted run goes on where it was. With --tables, cells of
published tables are taken over and not trained again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from recipes.lab import command_line
from recipes.lab.steps import CommandError, run_main, started_as
from recipes.lab.tables import how_made, markdown, shown_command, write_page
from recipes.shootout.cells import Cell, make, published, read_cells, write_cells
from recipes.shootout.page import PICTURE, sections, write_picture
from recipes.shootout.tasks import BUDGETS, TASKS, TYPES, Task

PACKAGES = ("torch", "transformers", "fairseq-fixed", "scipy")
Job = tuple[Task, int, tuple[str, ...]]  # task, seed, types


def make_parser() -> argparse.ArgumentParser:
    parser = command_line.new_parser(__doc__)
    parser.add_argument("--budget", choices=BUDGETS, default="1h", help="(default: %(default)s)")
    names = [task.name for task in TASKS]
    parser.add_argument(
        "--tasks", nargs="+", choices=names, metavar="TASK", help=f"of {'; '.join(names)}"
    )
    parser.add_argument(
        "--compare", nargs="+", choices=TYPES, metavar="TYPE", help=f"of {' '.join(TYPES)}"
    )
    parser.add_argument(
        "--tables", type=Path, metavar="FOLDER", help="published tables, such as docs/results"
    )
    parser.add_argument(
        "--texts",
        nargs=2,
        type=Path,
        metavar=("TRAIN", "VALID"),
        help="text files of the language models",
    )
    parser.add_argument(
        "--captions",
        nargs=6,
        type=Path,
        metavar="FILE",
        help="training, validation and test text of the captions, source and target of each",
    )
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="images of CIFAR-10")
    parser.add_argument("--plan", action="store_true", help="print what would be trained, and stop")
    command_line.add_shared(parser, "jobs", default=1)
    command_line.add_shared(parser, "work", default=Path("build/shootout"))
    command_line.add_shared(parser, "output", default=Path("results/shootout"))
    return parser


def files_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Options of the recipes for the user's files, by the name of the option of this program."""
    options = {}
    if args.texts:
        train, valid = map(str, args.texts)
        options["texts"] = ["--train-file", train, "--validation-file", valid]
    if args.captions:
        train, valid, test = (list(map(str, args.captions[at : at + 2])) for at in (0, 2, 4))
        options["captions"] = ["--train", *train, "--valid", *valid, "--test", *test]
    if args.images:
        options["images"] = ["--dataset", str(args.images)]
    return options


def plan(
    tasks: Sequence[Task],
    types: Sequence[str],
    budget: str,
    cells: Sequence[Cell],
    files: Sequence[str],
) -> tuple[list[Job], list[str]]:
    """What has to be trained, the first seed of all tasks first; and what is left out, and why."""
    finished = {(cell.task, cell.type, cell.seed) for cell in cells}
    jobs: list[Job] = []
    missing: list[str] = []
    for task in tasks:
        for why in dict.fromkeys(task.without.values()):
            refused = [name for name in types if task.without.get(name) == why]
            missing += _left_out(task, refused, why)
        wanted = [name for name in types if name in task.types()]
        seeds = task.seeds.get(budget, ())
        reason = f"not in the budget {budget}"
        if task.files and task.files not in files:
            seeds, reason = (), f"give --{task.files}"
        for seed in seeds:
            todo = tuple(name for name in wanted if (task.name, name, seed) not in finished)
            if todo:
                jobs.append((task, seed, todo))
        seen = {name for task_name, name, _ in finished if task_name == task.name}
        if not seeds:
            missing += _left_out(task, [name for name in wanted if name not in seen], reason)
    return sorted(jobs, key=lambda job: job[1]), missing


def _left_out(task: Task, types: Sequence[str], why: str) -> list[str]:
    """A line that tells why a task has no values of these types."""
    return [f"- {task.name}, {', '.join(f'`{name}`' for name in types)}: {why}"] if types else []


def plan_table(jobs: Sequence[Job], side_by_side: int) -> list[str]:
    """What will be trained, and about how long that takes on the machine of the tables."""
    rows, total = [], 0
    for task, seed, types in jobs:
        seconds = task.seconds * len(types)
        total += seconds // (side_by_side if "jobs" in task.shared else 1)
        rows.append([task.name, seed, " ".join(types), f"{seconds / 60:.0f}"])
    lines = markdown(["task", "seed", "types", "CPU minutes, about"], rows)
    return [*lines, "", f"about {total / 3600:.1f} hours"]


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)
    command_line.check_shared(args)
    tasks = [task for task in TASKS if not args.tasks or task.name in args.tasks]
    types = [name for name in TYPES if not args.compare or name in args.compare]
    files = files_of(args)
    path = args.output / "cells.csv"
    cells = read_cells(path)
    if args.tables:
        if not args.tables.is_dir():
            raise CommandError(f"--tables {args.tables}: no such folder; give docs/results")
        found = [cell for task in tasks for cell in published(task, args.tables)]
        known = {(cell.task, cell.type, cell.seed) for cell in cells}
        cells += [cell for cell in found if (cell.task, cell.type, cell.seed) not in known]
    jobs, missing = plan(tasks, types, args.budget, cells, list(files))
    print("\n".join(plan_table(jobs, args.jobs)) if jobs else "nothing is left to train")
    if args.plan:
        return
    for task, seed, names in tqdm(jobs, "tasks and seeds", disable=None):
        tqdm.write(f"{task.name}, seed {seed}: {' '.join(names)}")
        options = files.get(task.files, [])
        cells += make(task, names, seed, options, args.work, args.jobs)
        write_cells(path, cells)
    if not cells:
        raise CommandError("no cell to show; raise --budget, or give --tables docs/results")
    write_cells(path, cells)
    shown = [cell for cell in cells if cell.type in types]
    write_picture(args.output / PICTURE, tasks, shown)
    facts = how_made(shown_command(started_as(), argv), PACKAGES)
    parts = sections(tasks, shown, missing)
    write_page(args.output / "shootout.md", "Shoot-out: all types on all tasks", parts, facts)
    print(f"page and figure: {args.output}/shootout.md, {PICTURE}")


if __name__ == "__main__":
    run_main(main, "interrupted: the same command goes on")
