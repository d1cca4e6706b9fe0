"""The fairseq commands of a translation experiment: binarise, train, decode.

Quickstart and recipes go through these functions; they run the very commands a user would type, in
child processes, with the same interpreter.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

import cape_plugins
from recipes.steps import digest, matches, record, run_module, step, write_lines, writing

USER_DIR = Path(cape_plugins.__file__).resolve().parent
TRAIN_LINE = re.compile(r"\| train_inner \| (\{.*\})")


def binarise(
    prefixes: Mapping[str, object], languages: tuple[str, str], workers: int, folder: Path
) -> None:
    """Run fairseq-preprocess with a joined dictionary on the files ``{prefix}.{language}``."""
    run_module(
        "fairseq_cli.preprocess",
        *("--source-lang", languages[0], "--target-lang", languages[1]),
        *(arg for split, prefix in prefixes.items() for arg in (f"--{split}pref", prefix)),
        *("--joined-dictionary", "--destdir", folder, "--workers", workers),
        log=folder.with_name("preprocess.log"),
    )


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a child process that computes with `threads` threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def train(
    data: Path,
    run: Path,
    flags: Sequence[object],
    settings: Mapping[str, object],
    *,
    updates: int | None,
    threads: int,
    title: str,
) -> float:
    """Run fairseq-train in the folder `run`; an interrupted run goes on from its last checkpoint.

    `updates` is the expected number of updates, for the progress bar; None if it is not known.
    Returns the training time in seconds. A run that was finished with these `settings` is reused.
    """
    settings = {**settings, "flags": [str(flag) for flag in flags]}
    if not matches(run, settings):
        record(run, settings)
    timing = run / "seconds.json"  # its presence means: finished
    if timing.exists():
        return json.loads(timing.read_text())
    started = time.monotonic()
    with tqdm(total=updates, desc=title, unit="update", mininterval=progress_interval()) as bar:

        def show(line: str) -> None:
            if match := TRAIN_LINE.search(line):
                values = json.loads(match[1])
                bar.set_postfix_str(f"epoch {values['epoch']} loss {values['loss']}", refresh=False)
                bar.update(int(values["num_updates"]) - bar.n)

        run_module(
            "fairseq_cli.train",
            *(data, "--user-dir", USER_DIR, "--save-dir", run),
            *("--log-format", "json", "--log-interval", min(50, max(1, (updates or 500) // 10))),
            *flags,
            log=run / "train.log",
            env=child_environment(threads),
            on_line=show,
        )
        bar.update((updates or bar.n) - bar.n)
    seconds = round(time.monotonic() - started, 1)
    with writing(timing) as file:
        json.dump(seconds, file)
    return seconds


def progress_interval() -> float:
    """Seconds between updates of a progress bar: on a terminal often, in a log file seldom."""
    return 0.5 if os.isatty(2) else 30.0


def decode(
    data: Path, checkpoint: Path, folder: Path, flags: Sequence[object], *, threads: int
) -> list[str]:
    """Run fairseq-generate in a step `folder`; returns the best hypothesis of each sentence.

    Hypotheses are lines of subwords in the order of the corpus, also kept in ``folder/hypotheses``.
    """

    def make(partial: Path) -> None:
        log = partial / "generate.log"
        run_module(
            "fairseq_cli.generate",
            *(data, "--user-dir", USER_DIR, "--path", checkpoint, *flags),
            log=log,
            env=child_environment(threads),
        )
        write_lines(partial / "hypotheses", read_hypotheses(log))

    settings = {"checkpoint": digest(checkpoint), "flags": [str(flag) for flag in flags]}
    step(folder, settings, make)
    return (folder / "hypotheses").read_text("utf-8").split("\n")[:-1]


def read_hypotheses(log: Path) -> list[str]:
    """The ``H-`` lines of a fairseq-generate log, in the order of the corpus."""
    hypotheses = {}
    with open(log, encoding="utf-8", newline="\n") as file:
        for line in file:
            if line.startswith("H-"):
                number, _, text = line.rstrip("\n").split("\t")
                hypotheses.setdefault(int(number[2:]), text)  # the first of the n-best list
    return [text for _, text in sorted(hypotheses.items())]
