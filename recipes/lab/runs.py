"""Runs the fairseq commands of an experiment: binarise, train, decode. These are the commands that
a user would type; they run in child processes with the same interpreter."""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import cape_plugins
from cape_plugins.utils.files import writing
from recipes.lab import steps

USER_DIR = Path(cape_plugins.__file__).resolve().parent
LIMITS = ("--max-source-positions", "100000", "--max-target-positions", "100000")  # no limit
# Factor on --seeds: fairseq seeds update n with seed + n, so trainings with close seeds share
# random numbers.
SEED_STEP = 100003
HYPOTHESES = "hypotheses"
LOG = "train.log"
SECONDS = "seconds.json"  # the time of a training; exists only if the training is finished
FIRST_SECONDS = "first_seconds.json"  # the time of a training that stopped after `until` updates
RESUMED_LINE = re.compile(r"Loaded checkpoint .* @ ([1-9]\d*) updates\)")
TRAIN_LINE = re.compile(r"\| train_inner \| (\{.*\})")


def binarise(
    prefixes: Mapping[str, object], languages: tuple[str, str], workers: int, folder: Path
) -> None:
    """Runs fairseq-preprocess with a joined dictionary on the files ``{prefix}.{language}``."""
    arguments: list[object] = ["--source-lang", languages[0], "--target-lang", languages[1]]
    for split, prefix in prefixes.items():
        arguments += [f"--{split}pref", prefix]
    arguments += ["--joined-dictionary", "--destdir", folder, "--workers", workers]
    log = folder.with_name("preprocess.log")
    steps.run_module("fairseq_cli.preprocess", *arguments, log=log)


def device_flags(device: torch.device) -> list[str]:
    """Flags of fairseq's commands for a device. The commands use all visible GPUs, so the number of
    a GPU is an error."""
    if device.index is not None:
        remedy = f"give --device cuda, with CUDA_VISIBLE_DEVICES={device.index} before the command"
        raise steps.CommandError(f"--device {device}: fairseq uses all GPUs that it sees; {remedy}")
    return ["--cpu"] if device.type == "cpu" else []


def check_flags(flags: Sequence[object]) -> None:
    """Refuses flags that fairseq-train does not accept, before data are prepared."""
    from fairseq.models import import_models
    from fairseq.options import get_training_parser, parse_args_and_arch

    calm_logging()
    # --user-dir itself does nothing in a process that has imported this package
    import_models(str(USER_DIR / "models"), f"{USER_DIR.name}.models")
    arguments = ["DATA", "--user-dir", str(USER_DIR), *map(str, flags)]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            parse_args_and_arch(get_training_parser(), arguments)
        except SystemExit:
            problem = errors.getvalue().strip().splitlines()[-1].partition("error: ")[2]
            problem = problem.partition(" (choose from")[0]  # without the list of all architectures
            why = f"fairseq-train: {problem}; correct it or leave it out"
            raise steps.CommandError(why) from None


def calm_logging() -> None:
    """Silences low-level log messages: the import of fairseq would make every library print
    them."""
    logging.getLogger().setLevel(logging.WARNING)


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a child process that computes with `threads` threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def train(
    data: Path,
    run: Path,
    flags: Sequence[object],
    settings: Mapping[str, object],
    *,
    threads: int,
    title: str,
    remedy: str = "give another --work folder",
    until: int | None = None,
) -> float:
    """Runs fairseq-train in the folder `run`, unless it is finished. A run that was interrupted, or
    stopped after `until` updates, goes on from its last checkpoint. A run that failed before its
    first checkpoint may begin again with other settings. Returns the seconds of the training since
    the last interruption, including the part up to `until`."""
    updates = last_update(flags)
    settings = {**settings, "flags": list(map(str, flags))}
    if not is_finished(run) and not any(run.glob("checkpoint*.pt")):
        (run / LOG).unlink(missing_ok=True)
        steps.record(run, settings)
    elif not steps.matches(run, settings, remedy):
        steps.record(run, settings)
    if is_finished(run):
        return json.loads((run / SECONDS).read_text())
    first_part = run / FIRST_SECONDS
    started = time.monotonic() - (json.loads(first_part.read_text()) if first_part.exists() else 0)
    often = 0.5 if os.isatty(2) else 30.0  # seconds between two lines; fewer lines in a log file
    with tqdm(total=updates, desc=title, unit="update", mininterval=often) as bar:

        def show(line: str) -> None:
            if match := RESUMED_LINE.search(line):
                bar.write(f"{title}: goes on from update {match[1]}")
            if match := TRAIN_LINE.search(line):
                values = json.loads(match[1])
                bar.set_postfix_str(f"epoch {values['epoch']} loss {values['loss']}", refresh=False)
                bar.update(int(values["num_updates"]) - bar.n)

        log_interval = min(50, max(1, (updates or 500) // 10))
        arguments = [data, "--user-dir", USER_DIR, "--save-dir", run]
        arguments += ["--log-format", "json", "--log-interval", log_interval, *flags]
        if until:
            arguments += ["--max-update", until]  # fairseq uses the last value
        steps.run_module(
            "fairseq_cli.train",
            *arguments,
            log=run / LOG,
            env=child_environment(threads),
            on_line=show,
        )
        bar.update((until or updates or bar.n) - bar.n)
    seconds = round(time.monotonic() - started, 1)
    with writing(first_part if until else run / SECONDS) as file:
        json.dump(seconds, file)
    return seconds


def is_finished(run: Path) -> bool:
    """Returns whether :func:`train` has done all updates of this folder."""
    return (run / SECONDS).exists()


def last_update(flags: Sequence[object]) -> int | None:
    """The last --max-update, which replaces the value of a recipe; None without a limit."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-update", default="")
    text = parser.parse_known_args(list(map(str, flags)))[0].max_update
    return int(text) if text.isdecimal() and int(text) else None  # fairseq reports mistakes


def generate(
    data: Path, checkpoint: Path, folder: Path, flags: Sequence[object], *, count: int, threads: int
) -> list[str]:
    """Runs fairseq-generate in a step. Returns the best hypotheses as subwords, in the order of the
    corpus."""

    def make(partial: Path) -> None:
        log = partial / "generate.log"
        arguments = [data, "--user-dir", USER_DIR, "--path", checkpoint, *flags]
        # otherwise fairseq drops the last few sentences
        arguments += ["--required-batch-size-multiple", 1]
        environment = child_environment(threads)
        steps.run_module("fairseq_cli.generate", *arguments, log=log, env=environment)
        best: dict[int, str] = {}
        with open(log, encoding="utf-8", newline="\n") as file:
            for line in file:
                name, *fields = line.rstrip("\n").split("\t")
                if name.startswith("H-") and fields:
                    best.setdefault(int(name[2:]), fields[-1])
        if len(best) != count:
            raise steps.ChildError(f"{log}: {len(best)} H- lines for {count} sentences")
        steps.write_lines(partial / HYPOTHESES, (text for _, text in sorted(best.items())))

    settings = {"checkpoint": steps.digest(checkpoint), "flags": [str(flag) for flag in flags]}
    steps.step(folder, settings, make)
    return steps.read_written(folder / HYPOTHESES)


def run_trainings(jobs: Sequence[Callable[[], Any]], workers: int, *updates: int) -> list[Any]:
    """Prints how many trainings there are, and runs these trainings; see :func:`run_all`."""
    numbers = " or ".join(map(str, sorted(updates)))
    print(f"{len(jobs)} trainings of {numbers} updates, {workers} side by side", flush=True)
    return run_all(jobs, workers)


def run_all(jobs: Sequence[Callable[[], Any]], workers: int) -> list[Any]:
    """Runs the jobs, `workers` at a time; the first failure stops all of them."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:  # also Ctrl-C: start nothing more and leave no training behind
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                # again: a job that was between two child processes would start the next one
                steps.stop_children()
                wait(futures, timeout=0.2)
            raise
