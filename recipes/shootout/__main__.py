"""Compares all types of position embeddings on all tasks of the recipes, on one page.

    python -m recipes.shootout --budget 1h
    python -m recipes.shootout --budget full --texts train.en.gz val.en.gz --images cifar10
    python -m recipes.shootout --tables docs/results --budget none
    python -m recipes.shootout --plan

Recipes train each type and seed of a task. An interrupted run goes on where it was. With --tables,
values of published tables are shown, too, and are not trained again.
"""

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from cape_plugins.utils.machine import available_cores
from recipes.lab import command_line
from recipes.lab.steps import ChildError, CommandError, run_main, started_as
from recipes.lab.tables import how_made, markdown, shown_command, write_page
from recipes.shootout.cells import Cell, make, published, read_trained, source_of, write_cells
from recipes.shootout.page import PICTURE, all_answers, sections, write_picture
from recipes.shootout.tasks import BUDGETS, TASKS, TYPES, Task

PACKAGES = ("torch", "transformers", "fairseq-fixed", "scipy")
Job = tuple[Task, int, tuple[str, ...]]  # task, seed, types
Files = Mapping[str, Sequence[str]]  # options of the recipes, by option of this program


def make_parser() -> argparse.ArgumentParser:
    parser = command_line.new_parser(__doc__)
    parser.add_argument(
        "--budget",
        choices=BUDGETS,
        default="1h",
        help="none: nothing is trained; 1h: the control, copies, and lists with one seed; 6h: also "
        "small models; full: all (default: %(default)s; hours on two cores)",
    )
    names = [task.name for task in TASKS]
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=names,
        metavar="TASK",
        help=f"some of {' '.join(names)} (default: all)",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        choices=TYPES,
        metavar="TYPE",
        help=f"some of {' '.join(TYPES)} (default: all)",
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
    command_line.add_shared(parser, "jobs", default=available_cores())
    command_line.add_shared(parser, "work", default=Path("build/shootout"))
    command_line.add_shared(parser, "output", default=Path("results/shootout"))
    return parser


def files_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Options of the recipes for the user's files, by the option of this program."""
    options: dict[str, list[str]] = {}
    if args.texts:
        train, valid = map(str, args.texts)
        options["texts"] = ["--train-file", train, "--validation-file", valid]
    if args.captions:
        pairs = [list(map(str, args.captions[at : at + 2])) for at in (0, 2, 4)]
        options["captions"] = ["--train", *pairs[0], "--valid", *pairs[1], "--test", *pairs[2]]
    if args.images:
        options["images"] = ["--dataset", str(args.images)]
    for name in options:
        paths = getattr(args, name)
        for path in paths if isinstance(paths, list) else [paths]:
            if not path.exists():
                raise CommandError(f"--{name} {path}: no such file or folder")
    return options


def known_cells(
    args: argparse.Namespace, tasks: Sequence[Task], files: Files
) -> tuple[list[Cell], list[Cell]]:
    """Returns cells to show, and other cells of the file: of other tasks, and of other data. Cells
    of the user's data are never shown beside published cells."""
    names = {task.name: task for task in tasks}
    cells, others = [], []
    for cell in read_trained(args.output / "cells.csv"):
        task = names.get(cell.task)
        options = files.get(task.files, ()) if task else ()
        shown = task and cell.source == source_of(task, cell.type, cell.seed, options)
        (cells if shown else others).append(cell)
    if args.tables is None:
        return cells, others
    if not args.tables.is_dir():
        raise CommandError(f"--tables {args.tables}: no such folder; give docs/results")
    trained = {(cell.task, cell.type, cell.seed) for cell in cells}
    for task in tasks:
        if task.files not in files:
            of_page = published(task, args.tables)
            cells += [cell for cell in of_page if (cell.task, cell.type, cell.seed) not in trained]
    return cells, others


def plan(
    tasks: Sequence[Task],
    types: Sequence[str],
    budget: str,
    cells: Sequence[Cell],
    files: Files,
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
        reasons = [] if seeds else [f"not trained with --budget {budget}"]
        if task.files and task.files not in files:
            seeds, reasons = (), [*reasons, f"not trained without --{task.files}"]
        for seed in seeds:
            todo = tuple(name for name in wanted if (task.name, name, seed) not in finished)
            if todo:
                jobs.append((task, seed, todo))
        if not seeds:
            seen = {name for task_name, name, _ in finished if task_name == task.name}
            unknown = [name for name in wanted if name not in seen]
            missing += _left_out(task, unknown, ", ".join(reasons))
    return sorted(jobs, key=lambda job: job[1]), missing


def _left_out(task: Task, types: Sequence[str], why: str) -> list[str]:
    """A line that tells why a task has no values of these types."""
    names = ", ".join(f"`{TYPES[name]}`" for name in types)
    return [f"- {task.name}, {names}: {why}"] if types else []


def plan_table(jobs: Sequence[Job], side_by_side: int) -> list[str]:
    """What will be trained, and about how long that takes on two cores."""
    rows, total = [], 0.0
    for task, seed, types in jobs:
        minutes = task.seconds * len(types) / 60
        total += minutes / (side_by_side if "jobs" in task.shared else 1)
        rows.append([task.name, str(seed), " ".join(types), f"{minutes:.1f}"])
    if not rows:
        return ["nothing is left to train"]
    lines = markdown(["task", "seed", "types", "CPU minutes, about"], rows)
    unit = "minute" if round(total) == 1 else "minutes"
    return [*lines, "", f"about {total:.0f} {unit}, --jobs {side_by_side}"]


@contextlib.contextmanager
def alone(*folders: Path) -> Iterator[None]:
    """Holds a lock on each folder, so that two runs do not write into one."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)  # unlocks, as the end of the process does
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = f"{folder}: another run works here; wait, or give other --work and --output"
                raise CommandError(why) from None
        yield


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = make_parser().parse_args(argv)
    command_line.check_shared(args)
    tasks = [task for task in TASKS if not args.tasks or task.name in args.tasks]
    types = [name for name in TYPES if not args.compare or name in args.compare]
    files = files_of(args)
    cells, others = known_cells(args, tasks, files)
    jobs, missing = plan(tasks, types, args.budget, cells, files)
    print("\n".join(plan_table(jobs, args.jobs)), flush=True)
    if args.plan:
        print("\n".join(["", *missing]))
        return
    if not jobs and not cells:
        raise CommandError("no value to show; give a larger --budget, or --tables docs/results")
    facts = how_made(shown_command(started_as(), argv), PACKAGES)

    def write() -> None:
        shown = [cell for cell in cells if cell.type in types]
        write_cells(args.output / "cells.csv", [*cells, *others])
        all_ranked = all_answers(tasks, shown)
        write_picture(args.output / PICTURE, all_ranked)
        parts = sections(all_ranked, tasks, shown, missing)
        write_page(args.output / "shootout.md", "Shoot-out: all types on all tasks", parts, facts)

    with alone(args.work, args.output):
        failures = 0
        for task, seed, names in tqdm(jobs, "tasks and seeds", disable=None):
            tqdm.write(f"{task.name}, seed {seed}: {' '.join(names)}")
            try:
                made = make(task, names, seed, files.get(task.files, ()), args.work, args.jobs)
                machine, versions = facts["Machine"], facts["Versions"]
                cells += [cell._replace(machine=machine, versions=versions) for cell in made]
            except ChildError as error:  # the other tasks go on
                failures += 1
                tqdm.write(f"error: {error}", file=sys.stderr)
                missing += _left_out(task, names, f"seed {seed} failed")
            write()
        if not jobs:
            write()
    print(f"page and figure: {args.output}/shootout.md, {PICTURE}")
    if failures:
        raise ChildError(
            f"{failures} of {len(jobs)} commands failed; their logs are in {args.work}"
        )


if __name__ == "__main__":
    run_main(main, "interrupted: the same command goes on")
