"""Reports error rates by duration, and by hop of the frames."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import jiwer

from recipes.lab.figures import draw_lines, new_figure, write_figure
from recipes.lab.scores import write_scores
from recipes.lab.tables import ALL, Row, grouped, pivot, seed_table, write_csv, write_page

METRICS = {"wer": "Word error rate, %", "ler": "Letter error rate, %"}
SPEED = "audio_seconds_per_second"


class Text(NamedTuple):
    seconds: float  # of the recording
    reference: str  # the right text
    hypothesis: str  # the text of the model


def rates(texts: Sequence[Text]) -> dict[str, Any]:
    """Word and letter error rate in percent, and the number of words and recordings."""
    references = [text.reference for text in texts]
    hypotheses = [text.hypothesis for text in texts]
    return {
        "wer": 100 * jiwer.wer(references, hypotheses),
        "ler": 100 * jiwer.cer(references, hypotheses),
        "words": sum(len(reference.split()) for reference in references),
        "count": len(texts),
    }


def duration_bins(bins: Sequence[float]) -> dict[str, float]:
    """Names of the bins, with their lower ends; `bins` are upper ends in seconds."""
    edges = [0, *bins]
    names = {f"{low:g}-{high:g} s": low for low, high in pairwise(edges)}
    return {**names, f"over {edges[-1]:g} s": edges[-1]}


def by_duration(texts: Sequence[Text], bins: Sequence[float]) -> list[Row]:
    """Error rates for each range of durations that has recordings, and for all recordings; `bins`
    are upper ends in seconds."""
    names = list(duration_bins(bins))
    groups: dict[str, list[Text]] = {name: [] for name in names}
    for text in texts:
        groups[names[sum(text.seconds > end for end in bins)]].append(text)
    groups[ALL] = list(texts)
    return [{"duration": name, **rates(group)} for name, group in groups.items() if group]


def in_training(rows: Sequence[Row], bins: Sequence[float], longest: float) -> list[str]:
    """Labels of the durations of `rows` that occur in training; `longest` is the longest training
    recording."""
    lows = {name: low for name, low in duration_bins(bins).items() if low < longest}
    return [name for name in dict.fromkeys(row["duration"] for row in rows) if name in lows]


def write_report(
    output: Path,
    title: str,
    parts: Sequence[tuple[Sequence[Row], Sequence[Row]]],
    models: Mapping[str, Any],
    facts: Mapping[str, str],
    bins: Sequence[float],
    longest: float = 0.0,
) -> None:
    """Writes rows by duration, and rows by hop if there are any. `models` describes each model by
    name; `longest` is the longest training recording in seconds, 0 if not known."""
    names = list(models)
    rows, hops = (
        sorted((row for part in column for row in part), key=lambda row: names.index(row["model"]))
        for column in zip(*parts, strict=True)
    )
    lines = []
    for name, model_rows in grouped(rows, "model").items():
        seconds = [row["train_seconds"] for row in model_rows if row["train_seconds"] is not None]
        lasted = f", trained in {mean(seconds):.0f} s (mean)" if seconds else ""
        lines.append(f"- **{name}**: `{models[name]}`{lasted}")
    more = {"trained": in_training(rows, bins, longest), "more": {"Models": lines}}
    write_scores(output, title, rows, "duration", METRICS, facts, **more)
    if hops:
        write_hops(output, hops, facts)


def write_hops(output: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Writes word error rate and throughput by hop as ``hops.csv``, ``hops.md`` and ``hops.png``.

    In the figure each hop is a point at its mean throughput (CAPE Figure 17). The rows have the
    columns model, seed, hop_ms, wer and :data:`SPEED`.
    """
    wers, speeds = (pivot(rows, "model", "hop_ms", column) for column in ("wer", SPEED))
    tables = {
        METRICS["wer"]: seed_table(wers, "model by hop in ms"),
        "Seconds of audio per second of computation": seed_table(speeds, "model by hop in ms", 0),
    }
    write_csv(output / "hops.csv", rows)
    write_page(output / "hops.md", "Word error rate and throughput by hop", tables, facts)
    figure, ((left, right),) = new_figure(9, 4.4, columns=2)
    draw_lines(left, wers)
    at_speeds = {
        name: {mean(speeds[name][hop]): values for hop, values in by_hop.items()}
        for name, by_hop in wers.items()
    }
    draw_lines(right, at_speeds)
    left.set(xlabel="hop, ms", ylabel=METRICS["wer"])
    right.set(xlabel="throughput, seconds of audio per second")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    left.legend(fontsize="small")
    write_figure(output / "hops.png", figure)
