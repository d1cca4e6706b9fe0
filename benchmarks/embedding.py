"""Time and peak memory of the position embedding alone, in training, against the stock lookup.

The stock arch looks its sinusoids up; cape computes them, because augmented positions are no
integers. The cost of computing is compared with the stock lookup plus the addition to the content,
the cheapest operation of the model on the result.
"""

from functools import partial

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor, nn

from benchmarks import hosts
from benchmarks.measure import (
    MEBIBYTE,
    Setup,
    Step,
    Timing,
    in_new_process,
    interleave,
    keep_pages,
    peak_memory,
)
from benchmarks.report import (
    Report,
    distinct,
    legend_below,
    plot_ratios,
    ratio_tables,
    timing_columns,
    variant_table,
)
from cape_plugins import ENCODINGS, TYPES, PositionConfig, build_position_encoder
from fairseq_user_dir.embedding import TokenPositionEmbedding, WrappingPositionalEmbedding
from recipes.lab.steps import progress

BATCH, DIM, LENGTHS = 50, 768, (10, 100, 1000)
SECONDS = 15.0
REFERENCE, LOOKUP, ADD = "stock + add", "stock", " + add"
MALLOC = ("fresh pages", "pages kept")
TEXT = (
    f"""\
One call of the position embedding in training mode, with padding (sentences of 80 to 100 % of
the length), B {BATCH}, K {DIM}: `stock` is the lookup of fairseq's sinusoids,
`SinusoidalPositionalEmbedding.forward`; the types are the modules that replace it, which also
find the mask and draw local shifts; the global draw is made before. `+ add` is with the addition
to the content. `nopos` and `relpos` have no such module. The reference is `{REFERENCE}`. MiB: peak
of one call, its result included. To reach: every type alone no slower than `{REFERENCE}` at
T 1000, time linear in B x T.""",
    f"""\
*{MALLOC[0]}* is the default malloc of Linux, as in training on a CPU: a tensor of more than 32 MiB
gets fresh pages from the system with each call, which at T 1000 takes longer than filling it.
*{MALLOC[1]}* is the same with a malloc that never gives memory back: only arithmetic, a sine
against a copied number.""",
)


def types() -> list[str]:
    """Types that add something to the content."""
    return [name for name in TYPES if ENCODINGS[TYPES[name].encoding].adds]


def make_step(name: str, batch_size: int, length: int, dim: int, setup: Setup) -> Step:
    """A call of the embedding `name`, with the addition if `name` ends with it."""
    task = hosts.make_task(1000)
    tokens = hosts.make_sample(task, batch_size, length, setup)["net_input"]["src_tokens"]
    embedding = name.removesuffix(ADD)
    module = make_module(embedding, length, dim, task.source_dictionary.pad())
    module.to(setup.device, setup.dtype).train()
    draws = isinstance(module, TokenPositionEmbedding)
    draw = module.draw(batch_size, setup.device) if draws else None

    def embed() -> Tensor:
        if draw is None:
            return module(tokens)
        with module.using(draw):
            return module(tokens)

    if embedding == name:
        return embed
    content = torch.randn(batch_size, length, dim, device=setup.device, dtype=setup.dtype)
    return lambda: content + embed()


def make_module(name: str, length: int, dim: int, pad: int) -> nn.Module:
    """The stock lookup, or the module that replaces it in a cape model of type `name`."""
    if name == LOOKUP:
        return SinusoidalPositionalEmbedding(dim, pad, 1024)
    config = PositionConfig(name, "text", "encoder")
    if config.encoding.counts:
        table = LearnedPositionalEmbedding(length + pad + 1, dim, pad)
        return WrappingPositionalEmbedding.take_over(table)
    encoder = build_position_encoder(
        config, dim, start=pad + 1, frequencies="fairseq", layout="sin_cos_blocks"
    )
    return TokenPositionEmbedding(encoder, pad)


def run(setup: Setup) -> Report:
    """Times and peak memory of all types and lengths."""
    report = Report("The position embedding alone", TEXT)
    batch, dim, lengths = (4, 64, (10, 100)) if setup.quick else (BATCH, DIM, LENGTHS)
    names = [REFERENCE, LOOKUP, *types(), *(name + ADD for name in types())]
    for malloc in MALLOC[: 1 if setup.device.type == "cuda" else None]:
        for length in lengths:
            timings = in_new_process(time_all, names, batch, length, dim, setup, malloc)
            for name, timing in timings.items():
                row = {"T": length, "B": batch, "K": dim, "variant": name, "malloc": malloc}
                report.rows.append(row | timing_columns(timing))
        rows = [row for row in report.rows if row["malloc"] == malloc]
        where = "" if setup.device.type == "cuda" else f", {malloc}"
        for heading, table in ratio_tables(rows, "T").items():
            report.tables[heading + where] = table
        # constant if time is linear in B x T
        report.tables[f"Nanoseconds per number of the result{where}"] = variant_table(
            rows, "T", lambda r: f"{1e6 * r['milliseconds'] / (r['B'] * r['T'] * r['K']):.2f}"
        )
    fresh = [row for row in report.rows if row["malloc"] == MALLOC[0]]
    for row in progress(fresh, "embedding memory"):
        mib = peak_memory(setup, make_step, row["variant"], batch, row["T"], dim, setup)
        row["mib"] = round(mib, 2)
    tensor = batch * dim * setup.dtype.itemsize / MEBIBYTE
    sizes = [{"variant": "one tensor B x T x K", "T": t, "mib": t * tensor} for t in lengths]
    report.tables["Peak memory, MiB"] = variant_table(
        [*sizes, *fresh], "T", lambda row: f"{row['mib']:.1f}"
    )
    report.plot = partial(_plot, report)
    return report


def time_all(
    names: list[str], batch: int, length: int, dim: int, setup: Setup, malloc: str
) -> dict[str, Timing]:
    """Times one length. Runs in a new process, because `malloc` changes the process."""
    if malloc == MALLOC[1]:
        keep_pages()
    steps = {name: make_step(name, batch, length, dim, setup) for name in names}
    return interleave(steps, setup, setup.seconds(SECONDS), f"embedding T {length}, {malloc}")


def _plot(report: Report, figure) -> None:
    panels = figure.subplots(1, 1 + len(distinct(report.rows, "malloc")))
    for axes, malloc in zip(panels[1:], MALLOC, strict=False):
        plot_ratios(axes, [row for row in report.rows if row["malloc"] == malloc], "T", 1.0)
        axes.set_title(malloc)
    for name in (REFERENCE, LOOKUP, *types()):
        rows = [r for r in report.rows if r["variant"] == name and r["malloc"] == MALLOC[0]]
        tokens = [row["B"] * row["T"] for row in rows]
        panels[0].loglog(tokens, [row["milliseconds"] for row in rows], marker="o", label=name)
    panels[0].set(xlabel="B x T", ylabel="milliseconds", title=MALLOC[0])
    legend_below(figure, panels[1])
