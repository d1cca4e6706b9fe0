"""Types that act in attention against no positions: training steps of a translation model and of an
image classifier, and the memory of an encoder by length.

`rope` turns queries and keys, so that torch's fused kernels still compute attention; `alibi` and
`fire` add a bias to T x T scores; `relpos` adds products of queries and a table.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import hosts, vision
from benchmarks.measure import Setup, Step, interleave, peak_memory
from benchmarks.report import (
    Report,
    legend_below,
    plot_columns,
    plot_ratios,
    ratio_tables,
    variant_table,
)
from benchmarks.translation import SIZES, VOCABULARY
from cape_plugins import ENCODINGS, TYPES
from recipes.lab.steps import progress

REFERENCE = "nopos"
SECONDS = 8.0
LIMIT = 1.05
LENGTHS = {"cpu": (500, 1000), "cuda": (1000, 2000, 4000)}
LAYERS = 6
TEXT = (
    f"""\
Training steps of fairseq's `transformer` (6L-6L, 512/2048, 8 heads, {VOCABULARY} symbols,
label-smoothed cross entropy, Adam, sentences of 80 to 100 % of T tokens) and of ViT-Ti (forward,
loss and backward, {vision.SIZE} pixels). The reference is `{REFERENCE}`. All take turns in one
process and share their parameters. To reach on a GPU: rope and alibi at most {LIMIT}, fire at most
1.2.""",
    f"""\
Memory: peak of forward and backward of the encoder ({LAYERS} layers, 512/2048, 8 heads) with one
sample of T tokens, nothing padded. To reach: rope at most {LIMIT} times `{REFERENCE}`.""",
)


def types() -> list[str]:
    """The reference, and the types that act in attention."""
    rows = ((name, ENCODINGS[row.encoding]) for name, row in TYPES.items())
    return [REFERENCE, *(name for name, row in rows if row.in_attention or row.relative)]


def run(setup: Setup) -> Report:
    """Times steps, then measures memory."""
    report = Report("Types that act in attention", TEXT)
    for case, steps in {**translation_steps(setup), **image_steps(setup)}.items():
        report.add({"case": case}, interleave(steps(), setup, setup.seconds(SECONDS), case))
    timed = list(report.rows)
    report.tables = ratio_tables(timed, "case")
    lengths = (20, 40) if setup.quick else LENGTHS[setup.device.type]
    sizes = [(name, length) for name in types() for length in lengths]
    for name, length in progress(sizes, "attention memory"):
        mib = peak_memory(setup, make_encoder_step, name, length, setup)
        report.rows.append({"variant": name, "T": length, "mib": round(mib, 1)})
    measured = [row for row in report.rows if "mib" in row]
    heading = "Peak memory of an encoder, forward and backward, B 1, MiB"
    report.tables[heading] = variant_table(measured, "T", lambda row: f"{row['mib']:.1f}")
    report.plot = partial(_plot, timed, measured)
    return report


def make_model(setup: Setup, task: Any, name: str) -> nn.Module:
    """transformer-base of a type."""
    sizes = hosts.TINY if setup.quick else hosts.BASE
    return hosts.make_model(task, {"position_embedding": name}, setup, **sizes).train()


def translation_steps(setup: Setup) -> dict[str, Callable[[], dict[str, Step]]]:
    """Maps each case to a function that makes the models and their steps."""

    def make(batch: int, length: int) -> dict[str, Step]:
        task = hosts.make_task(1000 if setup.quick else VOCABULARY)
        models = {name: make_model(setup, task, name) for name in types()}
        return hosts.training_steps(task, models, hosts.make_sample(task, batch, length, setup))

    sizes = ((4, 20),) if setup.quick else SIZES[setup.device.type]
    return {f"translation, {b} x {t}": partial(make, b, t) for b, t in sizes}


def image_steps(setup: Setup) -> dict[str, Callable[[], dict[str, Step]]]:
    """As :func:`translation_steps`, of images."""
    batch = 2 if setup.quick else vision.BATCH[setup.device.type]
    size = 32 if setup.quick else vision.SIZE
    return {
        f"images, {batch} x {size} px": partial(
            vision.type_steps, setup, batch, size, size, types()
        )
    }


def make_encoder_step(name: str, length: int, setup: Setup) -> Step:
    """Forward and backward of an encoder, for a process that measures memory."""
    task = hosts.make_task(1000)
    encoder = make_model(setup, task, name).encoder
    symbols = task.source_dictionary
    tokens = torch.randint(symbols.nspecial, len(symbols), (1, length), device=setup.device)
    lengths = torch.tensor([length], device=setup.device)

    def step() -> None:
        encoder(tokens, lengths)["encoder_out"][0].sum().backward()
        encoder.zero_grad()

    return step


def _plot(timed: list[dict], measured: list[dict], figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    plot_ratios(left, timed, "case", LIMIT)
    left.tick_params(axis="x", labelsize=7)
    for number, name in enumerate(types()):
        rows = [row for row in measured if row["variant"] == name]
        plot_columns(right, rows, "T", "mib", color=f"C{number}")
    right.set(xlabel="T", ylabel="MiB", title="peak memory of an encoder")
    right.grid(alpha=0.3)
    legend_below(figure, left)
