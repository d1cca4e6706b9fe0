"""Writes pages on all trainings of a recipe: scores, the best settings on validation text, and
learning curves.

scores  BLEU of each test set and each validation file (SHAPE, appendix D, table 5), and which
        settings are best on validation text (SHAPE, appendix B: the choice of K)
curves  validation perplexity by updates and by seconds, time of training, parameters (SHAPE,
        appendix E, figures 8 and 9, table 6; the speed of tables 2 and 5)
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from recipes.lab import runs, tables
from recipes.lab.figures import Panel, draw_band, new_figure, write_figure, write_lines_figure
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError
from recipes.mt.experiment import SCORES, Experiment

CHOSEN_BY = SCORES[2]
MEAN_OF_ALL = "mean of all"
_TIME = "%Y-%m-%d %H:%M:%S"
_STARTED = "Start iterating over samples"
_PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
_VALID = re.compile(r"\| valid \| (\{.*\})")


class Point(NamedTuple):
    """One validation during a training."""

    update: int
    seconds: float  # since the first update, without updates that an interruption lost
    loss: float  # of the criterion, in bits a token
    perplexity: float


class Curve(NamedTuple):
    """Numbers from the log of a training."""

    points: list[Point]
    updates: int
    seconds: float
    parameters: int


def read_curve(log: Path) -> Curve:
    """Reads a log of fairseq-train in json. After an interruption, a training continues from an
    earlier update; lines of the log for later updates before the interruption, and their time, do
    not count. The clock adds up the times of log lines, because fairseq's `wall` starts again on
    resuming.

    Raises:
        CommandError: if there is no log, or the log has no validation.
    """
    if not log.exists():
        raise CommandError(f"{log} does not exist; run the stage train first")
    clock = {0: 0.0}  # seconds by update
    points: dict[int, Point] = {}
    parameters, began = 0, (datetime.min, 0.0)

    def seconds(line: str) -> float:
        moment, offset = began
        return offset + (datetime.strptime(line[:19], _TIME) - moment).total_seconds()

    for line in log.read_bytes().decode("utf-8").split("\n"):
        if match := _PARAMETERS.search(line):
            parameters = int(match[1].replace(",", ""))
        elif match := runs.RESUMED_LINE.search(line):
            clock = {n: time for n, time in clock.items() if n <= int(match[1])}
            points = {n: point for n, point in points.items() if n <= int(match[1])}
        elif _STARTED in line:
            began = datetime.strptime(line[:19], _TIME), max(clock.values())
        elif match := runs.TRAIN_LINE.search(line):
            clock[int(json.loads(match[1])["num_updates"])] = seconds(line)
        elif match := _VALID.search(line):
            values = json.loads(match[1])
            update, now = int(values["valid_num_updates"]), seconds(line)
            clock[update] = now
            numbers = (float(values[f"valid_{name}"]) for name in ("loss", "ppl"))
            points[update] = Point(update, now, *numbers)
    if not points:
        raise CommandError(
            f"{log}: has no validation, so there is no learning curve; train without"
            " --disable-validation, for example with the recipe multi30k_study"
        )
    return Curve(list(points.values()), max(clock), max(clock.values()), parameters)


def write_curves(
    folder: Path, trainings: Sequence[Experiment], facts: Mapping[str, str]
) -> list[str]:
    """Writes ``curves.csv``, ``curves.md`` and ``curves.png``; returns the lines of the table."""
    curves: dict[str, list[Curve]] = {}
    rows: list[tables.Row] = []
    for training in trainings:
        curve = read_curve(training.run / runs.LOG)
        curves.setdefault(training.name, []).append(curve)
        columns = {"type": training.name, "seed": training.seed}
        rows += [{**columns, **point._asdict()} for point in curve.points]
    tables.write_csv(folder / "curves.csv", rows, digits=3)
    lines = time_table(curves)
    page = tables.write_page(folder / "curves.md", "Learning curves", {"": lines}, facts)
    write_figure(folder / "curves.png", _draw_curves(curves))
    print("\n".join([*page, f"tables and figure: {folder}/curves.md, curves.csv, curves.png"]))
    return lines


def time_table(curves: Mapping[str, Sequence[Curve]]) -> list[str]:
    """Time of training as in SHAPE table 6; the speed, in updates a second, is relative to the
    first row."""
    speeds = {
        name: [c.updates / max(c.seconds, 1.0) for c in group] for name, group in curves.items()
    }
    unit = fmean(next(iter(speeds.values())))
    head = ("type", "parameters", "updates", "seconds", "speed", "lowest perplexity", "last")
    rows = [
        (
            name,
            tables.cell([curve.parameters for curve in group], 0),
            tables.cell([curve.updates for curve in group], 0),
            tables.cell([curve.seconds for curve in group], 0),
            tables.cell([speed / unit for speed in speeds[name]]),
            tables.cell([min(point.perplexity for point in curve.points) for curve in group]),
            tables.cell([curve.points[-1].perplexity for curve in group]),
        )
        for name, group in curves.items()
    ]
    seeds = tables.of_seeds({name: {"": list(group)} for name, group in speeds.items()})
    return [*tables.markdown(head, rows), "", f"Perplexity of the validation text; {seeds}."]


def _draw_curves(curves: Mapping[str, Sequence[Curve]]) -> Any:
    """Draws SHAPE figures 8 (by updates) and 9 (by elapsed time); bands show the deviation over
    seeds."""
    figure, ((by_update, by_clock),) = new_figure(11, 4.4, columns=2)
    for name, group in curves.items():
        seeds = [{point.update: point for point in curve.points} for curve in group]
        shared = [n for n in seeds[0] if all(n in seed for seed in seeds)]
        values = [[seed[n].perplexity for seed in seeds] for n in shared]
        spread = [stdev(value) if len(value) > 1 else 0.0 for value in values]
        clock = [fmean(seed[n].seconds for seed in seeds) for n in shared]
        for axes, xs in ((by_update, shared), (by_clock, clock)):
            draw_band(axes, xs, list(map(fmean, values)), spread, label=name)
    for axes, text in ((by_update, "updates"), (by_clock, "seconds of training")):
        axes.set(xlabel=text, ylabel="validation perplexity", yscale="log")
        axes.grid(alpha=0.3, which="both")
    by_clock.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def write_all_scores(
    folder: Path, rows: Sequence[tables.Row], settings: Mapping[str, Any], facts: Mapping[str, str]
) -> None:
    """Writes ``scores.csv``, ``.md`` and ``.png`` of all trainings. `settings` are the settings of
    each type, by name. The page names the best type on validation text, if there are validation
    scores."""
    rows = [*rows, *_means_of_all(rows)]
    metrics = dict(zip(SCORES[2:], SCORES[2:], strict=True))
    valid = _on_validation(rows)
    more = {}
    if len(valid) > 1:
        ranked = sorted(valid.items(), key=lambda item: -fmean(item[1]))
        lines = tables.markdown(("type", CHOSEN_BY), [(n, tables.cell(v)) for n, v in ranked])
        more = {"Validation text, the best first": lines}
        if swept := option_swept({name: settings[name] for name in valid}):
            option, values = swept
            cells = {CHOSEN_BY: {values[name]: scores for name, scores in valid.items()}}
            panel = Panel(cells, f"{CHOSEN_BY} of validation text")
            write_lines_figure(folder / "sweep.png", [panel], option)
            lines += ["", f"![{CHOSEN_BY} by {option}](sweep.png)"]
        print(f"best on validation text: {ranked[0][0]}")
    title = "Scores of all trainings"
    write_scores(folder, title, rows, SCORES[0], metrics, facts, more=more)


def _means_of_all(rows: Iterable[tables.Row]) -> list[tables.Row]:
    """Means over validation files and test sets together, for trainings that have both."""
    means = []
    for group in tables.grouped(rows, "type", "seed").values():
        of_files = [row for row in group if row.get("split")]
        if len({row["split"] for row in of_files}) > 1:
            bleu = {name: fmean(row[name] for row in of_files) for name in SCORES[2:]}
            count = sum(row[SCORES[1]] for row in of_files)
            columns = {key: group[0][key] for key in ("type", "seed")}
            means.append({**columns, SCORES[0]: MEAN_OF_ALL, SCORES[1]: count, **bleu, "split": ""})
    return means


def _on_validation(rows: Iterable[tables.Row]) -> dict[str, list[float]]:
    """Scores of the validation text by type, one for each seed: the mean over the files."""
    valid = [row for row in rows if row.get("split") == "valid"]
    scores: dict[str, list[float]] = {}
    for group in tables.grouped(valid, "type", "seed").values():
        scores.setdefault(group[0]["type"], []).append(fmean(row[CHOSEN_BY] for row in group))
    return scores


def option_swept(settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, float]] | None:
    """The only option in which the settings of all types differ, and its numbers by type, in
    increasing order; None if there is no such option, or fewer than three numbers."""
    options = {key for of_type in settings.values() for key in of_type}
    different = [
        key for key in options if len({str(of_type.get(key)) for of_type in settings.values()}) > 1
    ]
    if len(different) != 1 or len(settings) < 3:
        return None
    values = {name: of_type.get(different[0]) for name, of_type in settings.items()}
    if not all(isinstance(value, int | float) for value in values.values()):
        return None
    return different[0], dict(sorted(values.items(), key=lambda item: item[1]))
