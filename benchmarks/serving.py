"""The cost of serving a trained model with fairseq and transformers, and with the engines that
`cape-plugins export` writes for."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines import ctranslate2, fairseq, hugging_face, onnx
from benchmarks.engines.task import SOURCES, SPECIAL, Search
from benchmarks.hosts import ALPHA
from benchmarks.measure import Setup, interleave
from benchmarks.report import Report, distinct, legend_below, timing_columns
from cape_plugins.cli import main as cape_plugins
from recipes.lab.tables import markdown

SECONDS = 10.0
VOCABULARY, SOURCE, TARGET = 7000, 25, 30
SIZES = {"layers": 6, "attention-heads": 4, "embed-dim": 512, "ffn-embed-dim": 1024}
TINY = {"layers": 2, "attention-heads": 4, "embed-dim": 32, "ffn-embed-dim": 64}
BATCHES, THREADS, BEAM = (1, 24), (1, 2), 5
FAIRSEQ, HUGGING_FACE, ONNX = "fairseq-generate", "Hugging Face generate", "ONNX Runtime"
TRANSLATORS = {
    FAIRSEQ: fairseq.translator,
    HUGGING_FACE: hugging_face.translator,
    "CTranslate2": ctranslate2.float32,
    "CTranslate2 int8": ctranslate2.int8,
    ONNX: onnx.translator,
}
BEAM_SEARCH, GREEDY = f"beam {BEAM}", "greedy"
TEXT = (
    f"""\
Translation of sentences of {4 * SOURCE // 5} to {SOURCE} tokens into exactly {TARGET}, with beam
{BEAM} and greedily, one sentence and {BATCHES[-1]} at a time, with one thread and two, by a model
of {{parameters}} million parameters (6L-6L, 512/1024, 4 heads, joint dictionary of {VOCABULARY}
symbols, post-LN, `cape` with its BOS token). The weights are random: the time does not depend on
them for a fixed length. `{FAIRSEQ}` is fairseq's `SequenceGenerator` on a checkpoint of
`cape_transformer`, as `fairseq-generate` prepares it, and the reference; `{HUGGING_FACE}` is
`generate` of `CapeMarianMTModel`, of the same sizes. `cape-plugins export` has written the other
models: `ctranslate2` from the checkpoint, without and with `--quantization int8`, `onnx` from the
Hugging Face folder, called token by token with its cache. ONNX Runtime has no beam search for this
model, so that it takes part in the greedy search only. All take turns in one process.""",
    """\
Peak memory is measured in a separate process, which translates a second time with one thread: the
whole process, interpreter, libraries and weights included, loading left out. Processes of
CTranslate2 and ONNX Runtime do not import torch.""",
)


def run(setup: Setup) -> Report:
    """Times all translators in all cases, and measures the memory of each translator."""
    speed = "speed as a multiple of the reference's; the .csv has the intervals of times"
    report = Report("Serving a translation model", TEXT, in_parentheses=speed)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_models(folder, setup)
        report.text = [TEXT[0].format(parameters=f"{count / 1e6:.0f}"), *TEXT[1:]]
        try:
            for search in searches(setup):
                add_case(report, setup, folder, search)
        finally:
            torch.set_num_threads(threads)
    report.tables = tables(report.rows)
    report.plot = partial(plot, report.rows)
    return report


def searches(setup: Setup) -> Iterator[Search]:
    """All cases; quick runs have one thread, because other programs may use the other cores."""
    batches, threads = ((2,), THREADS[:1]) if setup.quick else (BATCHES, THREADS)
    for beam, batch, count in product((BEAM, 1), batches, threads):
        yield Search(batch, beam, 5 if setup.quick else TARGET, count)


def add_case(report: Report, setup: Setup, folder: Path, search: Search) -> None:
    """Adds a row for each translator that has this search."""
    absent = () if search.beam == 1 else (ONNX,)
    makers = {name: make for name, make in TRANSLATORS.items() if name not in absent}
    steps = {name: make(folder, search) for name, make in makers.items()}
    case = {
        "search": GREEDY if search.beam == 1 else BEAM_SEARCH,
        "batch": search.batch,
        "threads": search.threads,
    }
    timings = interleave(steps, setup, setup.seconds(SECONDS), ", ".join(map(str, case.values())))
    tokens = search.batch * search.length
    for name, timing in timings.items():
        row = {**case, "variant": name} | timing_columns(timing)
        row["tokens_per_second"] = round(1000 * tokens / timing.milliseconds, 1)
        if search.threads == 1:
            row["peak_mib"] = round(peak_memory(makers[name], folder, search), 1)
        report.rows.append(row)


def peak_memory(make: Callable, folder: Path, search: Search) -> float:
    """Peak memory in MiB of a new process, which imports only the modules that `make` needs."""
    name = f"{make.__module__}:{make.__name__}"
    program = "import sys; from benchmarks.engines import memory; memory.print_peak(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, name, str(folder), json.dumps(asdict(search))],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": str(search.threads)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout.splitlines()[-1])


# ---- models --------------------------------------------------------------------------------------


def write_models(folder: Path, setup: Setup) -> int:
    """Writes the checkpoint, the Hugging Face folder, the exports of both, and the sentences.
    Returns the number of parameters."""
    rng = np.random.default_rng(0)
    num_words = 100 if setup.quick else VOCABULARY - SPECIAL
    lengths = [SOURCE, *rng.integers(4 * SOURCE // 5, SOURCE, endpoint=True, size=max(BATCHES) - 1)]
    # one token of each sentence is </s>
    sources = [[str(word) for word in rng.integers(num_words, size=size - 1)] for size in lengths]
    (folder / SOURCES).write_text(json.dumps(sources), encoding="utf-8")
    sizes = TINY if setup.quick else SIZES
    parameters = fairseq.save(folder, sizes, num_words, ALPHA)
    hugging_face.save(folder, sizes, num_words + SPECIAL, float(ALPHA))
    checkpoint = folder / fairseq.CHECKPOINT
    for out, more in {
        ctranslate2.FLOAT32: (),
        ctranslate2.INT8: ("--quantization", "int8"),
    }.items():
        export("ctranslate2", checkpoint, folder / out, "--data", folder, *more)
    export("onnx", folder / hugging_face.FOLDER, folder / onnx.FOLDER)
    return parameters


def export(*arguments: Any) -> None:
    """Calls ``cape-plugins export`` without its output."""
    with contextlib.redirect_stdout(io.StringIO()):
        cape_plugins(["export", *map(str, arguments)])


# ---- report --------------------------------------------------------------------------------------


def case_of(row: dict[str, Any]) -> str:
    threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
    return f"batch {row['batch']}, {threads}"


def tables(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """A table of speed, with ratios to the speed of the reference, for each search; and a table of
    memory."""
    sections = {}
    for search in distinct(rows, "search"):
        of_search = [row for row in rows if row["search"] == search]
        sections[f"Tokens per second, {search} (times the reference)"] = table(
            of_search, lambda row: f"{row['tokens_per_second']:.0f} ({1 / row['ratio']:.2f})"
        )
    measured = [row for row in rows if "peak_mib" in row]
    sections["Peak memory of the process in MiB, one thread"] = table(
        measured,
        lambda row: f"{row['peak_mib']:.0f}",
        lambda row: f"{row['search']}, batch {row['batch']}",
    )
    return sections


def table(rows: list[dict[str, Any]], cell: Any, column: Any = case_of) -> list[str]:
    """Translators by cases; "-" if a translator has no such case."""
    columns = list(dict.fromkeys(map(column, rows)))
    lines = []
    for name in distinct(rows, "variant"):
        cells = {column(row): cell(row) for row in rows if row["variant"] == name}
        lines.append([name, *(cells.get(label, "-") for label in columns)])
    return markdown(["", *columns], lines)


def plot(rows: list[dict[str, Any]], figure: Any) -> None:
    """Speed as a multiple of the reference."""
    searches, names = distinct(rows, "search"), list(TRANSLATORS)
    panels = figure.subplots(1, len(searches), sharey=True)
    width = 0.8 / len(names)
    for panel, search in zip(panels, searches, strict=True):
        of_search = [row for row in rows if row["search"] == search]
        cases = list(dict.fromkeys(map(case_of, of_search)))
        for number, name in enumerate(names):
            bars = {case_of(row): 1 / row["ratio"] for row in of_search if row["variant"] == name}
            xs = [cases.index(case) + (number - 2) * width for case in bars]
            panel.bar(xs, bars.values(), width, label=name)
        panel.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases])
        panel.set_title(search)
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel(f"speed / speed of {FAIRSEQ}")
    legend_below(figure, panels[-1])
