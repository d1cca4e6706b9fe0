"""The command ``cape-plugins demo``: trains small models with each type of position embedding on
short inputs, and shows the errors of the models on longer inputs."""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from cape_plugins.demo.model import BATCH, LAYERS, UPDATES, Job, train_and_test
from cape_plugins.demo.tasks import CHANCE, SYMBOLS, TASKS, Task
from cape_plugins.pictures.command import markdown_table
from cape_plugins.pictures.plot import new_figure, save
from cape_plugins.settings.arguments import (
    Distinct,
    add_position_args,
    positive,
)
from cape_plugins.settings.registry import types_of
from cape_plugins.settings.switching import (
    Step,
    add_switch_args,
    gains_of_switches,
    plan_trainings,
)
from cape_plugins.utils.files import missing_folder, writing
from cape_plugins.utils.machine import available_cores, describe_processor

Rows = list[dict[str, Any]]


def add_demo_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo."""
    default, *_ = TASKS
    number_options = {"type": positive, "metavar": "N"}
    parser.add_argument(
        "--domain", choices=TASKS, default=default, help=f"kind of the inputs (default: {default})"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="TYPE",
        help="position embeddings to train: types with their defaults, or with other options as "
        "in cape:max_global_scale=1; defaults are set for the lengths of the test (default: "
        "all types)",
    )
    parser.add_argument(
        "--seeds",
        **number_options,
        nargs="+",
        action=Distinct,
        default=[1, 2, 3],
        help="train each type with each of these seeds (default: 1 2 3)",
    )
    parser.add_argument(
        "--updates", **number_options, default=UPDATES, help=f"training steps (default: {UPDATES})"
    )
    add_switch_args(parser)
    cores = available_cores()
    parser.add_argument(
        "--jobs", **number_options, default=cores, help=f"trainings side by side (default: {cores})"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="such as cpu or cuda:1 (default: cpu)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where results are written (default: results/demo, or results/demo-DOMAIN)",
    )
    add_position_args(parser, None, "see --compare", "encoder")
    parser.set_defaults(refuse=parser.error)


def run_demo(args: argparse.Namespace) -> str:
    """Trains, tests and writes ``scores.csv``, ``scores.md`` and ``scores.png``.

    Returns:
        The paths of the files; the task and the table are printed before files are written.

    Raises:
        ValueError: for a folder or a device that cannot be used.
        ImportError: without the package matplotlib, before anything is trained.
    """
    task = TASKS[args.domain]
    try:
        plan = plan_trainings(args, args.domain, *_defaults(args.domain), args.updates)
    except ValueError as error:
        args.refuse(str(error))
    default_domain, *_ = TASKS
    name = "demo-switch" if args.switch_from else "demo"
    name += "" if args.domain == default_domain else f"-{args.domain}"
    output = args.output or Path("results", name)
    paths = {ending: output / f"scores.{ending}" for ending in ("csv", "md", "png")}
    missing_folder(output, f"--output {output}")
    device = _device(args.device)
    new_figure(1, "")  # fails before the training, not after it, if matplotlib is missing
    print(introduction(task), flush=True)
    continued = [step for step in plan if step.continues]
    jobs = [
        Job(args.domain, step, seed, device, continued if step is plan[0] else ())
        for seed in args.seeds
        for step in plan
        if not step.continues
    ]
    rows = list(_with_progress(_train_side_by_side(jobs, min(args.jobs, len(jobs))), len(jobs)))
    order = [step.name for step in plan]
    rows.sort(key=lambda row: (order.index(row["type"]), args.seeds.index(row["seed"])))
    table = markdown_table(_cells(rows, task))
    if gains := _gains(rows, plan, task):
        table += ["", *gains]
    print("\n".join(table), flush=True)
    with writing(paths["csv"]) as file:
        _write_csv(file, rows, task)
    facts = _how_made(args, plan)
    page = [f"# Demo: {task.summary}", "", introduction(task), "", *table, "", *facts]
    with writing(paths["md"]) as file:
        file.writelines(f"{line}\n" for line in page)
    save(_figure(rows, task), paths["png"])
    return f"\npicture: {paths['png']}, table: {paths['csv']}"


def introduction(task: Task) -> str:
    """Text on the task of the models and the meaning of the numbers."""
    lengths = " / ".join(f"{task.on_axis(size):g}" for size in task.tests)
    return (
        f"The label of each place is {task.summary}. Symbols are drawn at random, so only "
        f"positions lead to the label; a guess is wrong in {CHANCE:g} %. Models are trained at "
        f"{task.axis} {task.on_axis(task.train):g} and tested at {lengths}: wrong labels in "
        "percent."
    )


def _defaults(domain: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """All types, each with the options of the task that the type has."""
    options = TASKS[domain].options
    # Only options in the row of a type. Relative attention could be combined with every type that
    # adds to the content, and would solve the task for all of them.
    rows = {
        name: {option: value for option, value in options.items() if option in row.options}
        for name, row in types_of("encoder", domain).items()
    }
    for name, row in types_of("encoder", domain).items():
        if not row.sampling:  # positions are counted by default
            rows[name].pop("max_position", None)
    return list(rows), rows


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--device {name}: not available here ({reason}); give cpu, cuda or cuda:1"
        ) from None
    return device


# ---- trainings side by side ---------------------------------------------------------------------


def _train_side_by_side(jobs: Sequence[Job], side_by_side: int) -> Iterator[Rows]:
    """Yields the rows of each job when the job ends. Processes are spawned, because a fork of a
    process that has used threads may hang; all processes end with this one."""
    if side_by_side == 1:
        yield from map(train_and_test, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(side_by_side, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap_unordered(train_and_test, jobs)


def _with_progress(rows_of_jobs: Iterable[Rows], total: int) -> Iterator[dict[str, Any]]:
    """Yields the rows; draws a progress bar only on a terminal, because a bar would fill a log
    file."""
    start, width, on_terminal = time.monotonic(), 30, sys.stderr.isatty()

    def draw(done: int) -> None:
        seconds = time.monotonic() - start
        remaining = f", about {seconds / done * (total - done):.0f} s left" if done else ""
        bar = "#" * (width * done // total)
        line = f"\r[{bar:<{width}}] {done} of {total} trainings{remaining}  "
        print(
            line if done < total else f"\r{'':{len(line)}}\r", end="", file=sys.stderr, flush=True
        )

    if on_terminal:
        draw(0)
    for done, rows in enumerate(rows_of_jobs, 1):
        if on_terminal:
            draw(done)
        yield from rows


# ---- table and picture --------------------------------------------------------------------------


def _by_type(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["type"], []).append(row)
    return groups


def _plus_minus(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


def _cells(rows: Rows, task: Task) -> list[dict[str, str]]:
    """A line of the table for each type."""
    seeds = len({row["seed"] for row in rows})
    heads = {
        size: _size(task, size) + (" (training)" if size == task.train else "")
        for size in task.tests
    }
    corner = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    return [
        {f"type ({corner})": name}
        | {
            head: _plus_minus([row["errors"][size] for row in group])
            for size, head in heads.items()
        }
        | {"training (CPU s)": f"{mean(row['train_seconds'] for row in group):.0f}"}
        for name, group in _by_type(rows).items()
    ]


def _size(task: Task, size: Any) -> str:
    return f"{task.on_axis(size):g}"


def _gains(rows: Rows, plan: Sequence[Step], task: Task) -> list[str]:
    """Lines on what switches of a trained model gain and lose."""
    steps = {step.name: step for step in plan}
    trainings = [(steps[row["type"]], row["train_seconds"]) for row in rows]
    errors = {
        name: {_size(task, size): [row["errors"][size] for row in group] for size in task.tests}
        for name, group in _by_type(rows).items()
    }
    trained = (_size(task, task.train),)
    return gains_of_switches(trainings, errors, trained, lower_is_better=True, digits=1)


def _write_csv(file: Any, rows: Rows, task: Task) -> None:
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["type", "seed", task.axis, "error_percent", "train_seconds"])
    for row in rows:
        for size, error in row["errors"].items():
            seconds = f"{row['train_seconds']:.1f}"
            cells = [row["type"], row["seed"], _size(task, size), f"{error:.3f}", seconds]
            table.writerow(cells)


def _how_made(args: argparse.Namespace, plan: Sequence[Step]) -> list[str]:
    """Facts for repeating and judging the numbers."""
    settings = "; ".join(
        " ".join([step.name, *(f"{key}={x}" for key, x in step.settings.items() if key != "type")])
        for step in plan
        if not step.continues
    )
    switch = (
        f"- **After {args.switch_from}**: weights of this model, without parameters of positions "
        f"that the next type does not have; other inputs; one cycle of {args.switch_rate:g} x the "
        "learning rate"
    )
    return [
        "## How it was made",
        "",
        f"- **Command**: `{shlex.join(['cape-plugins', *args.argv])}`",
        f"- **Machine**: {describe_processor()}; {args.jobs} trainings side by side, one thread "
        "each",
        f"- **Versions**: Python {platform.python_version()}, torch {torch.__version__}",
        f"- **Model**: {LAYERS} pre-norm layers, {SYMBOLS} symbols; {args.updates} updates of "
        f"{BATCH} inputs, AdamW with one cycle of the learning rate",
        *([switch] if args.switch_from else []),
        f"- **Settings**: {settings}",
    ]


def _figure(rows: Rows, task: Task) -> Any:
    """Errors by size, a line with its band for each type."""
    figure = new_figure(4.4, f"errors where the label is {task.summary}")
    axes = figure.subplots()
    x_values = [task.on_axis(size) for size in task.tests]
    for number, (name, group) in enumerate(_by_type(rows).items()):
        values = [[row["errors"][size] for row in group] for size in task.tests]
        means = list(map(mean, values))
        deviations = [stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
        low, high = (
            [m + sign * s for m, s in zip(means, deviations, strict=True)] for sign in (-1, 1)
        )
        style = {"color": f"C{number % 10}", "ls": ("-", "--")[number % 2]}
        axes.plot(x_values, means, marker="o", ms=4, label=name, **style)
        axes.fill_between(x_values, low, high, alpha=0.15, color=style["color"], linewidth=0)
    axes.axhline(CHANCE, color="0.6", lw=0.8, ls=":")
    axes.annotate("a guess", (x_values[-1], CHANCE), fontsize="small", ha="right", va="bottom")
    axes.axvline(task.on_axis(task.train), color="0.9", lw=8, zorder=0, label="size of training")
    axes.set(xscale="log", xlabel=task.axis, ylabel="wrong labels (%)", ylim=(-3, None))
    axes.set_xticks(x_values, [f"{x:g}" for x in x_values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure
