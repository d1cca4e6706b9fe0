"""The position embedding alone, in training: time and peak memory, against the stock lookup.

The stock arch looks its sinusoids up; cape computes them, because augmented positions are no
integers. What that costs is compared with the cheapest thing the model does with the result: the
stock lookup and the addition to the content.
"""

from functools import partial

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks import hosts
from benchmarks.measure import CONTROL, MEBIBYTE, Setup, Step, interleave, peak_memory
from benchmarks.report import Report, markdown_table, plot_ratios, ratio_tables, timing_columns
from cape_plugins import TYPES, PositionConfig, build_position_encoder
from fairseq_user_dir.embedding import TokenPositionEmbedding, WrappingPositionalEmbedding

BATCH, DIM, LENGTHS = 50, 768, (10, 100, 1000)
SECONDS = 20.0
REFERENCE, LOOKUP, ADD = "stock + add", "stock", " + add"
TEXT = (
    f"""\
One call of the position embedding in training mode, with padding (sentences of 80 to 100 % of
the length), B {BATCH}, K {DIM}: `stock` is the lookup of fairseq's sinusoids,
`SinusoidalPositionalEmbedding.forward`; the types are the modules that replace it, which also
find the mask and draw local shifts; the global draw is given. `+ add` is with the addition to
the content. `nopos` and `relpos` have no such module. Ratios are to `{REFERENCE}`; the control
is the reference again. MiB: peak of one call, its result included. To reach: every type alone
no slower than `stock + add` at T 1000, time linear in B x T.""",
    """\
With the default malloc of Linux, tensors of more than 32 MiB get fresh pages from the system
with each call, which at T 1000 costs as much as the arithmetic; it is part of the time, as it
is in training on a CPU.""",
)


def types() -> list[str]:
    """Types that add something to the content."""
    return [name for name in TYPES if TYPES[name].encoding != "none"]


def make_step(name: str, batch_size: int, length: int, dim: int, setup: Setup) -> Step:
    """A call of the embedding `name`, with the addition if it ends so."""
    task = hosts.make_task(1000)
    tokens = hosts.make_sample(task, batch_size, length, setup)["net_input"]["src_tokens"]
    embedding = name.removesuffix(ADD)
    module = (
        make_module(embedding, length, dim, task.source_dictionary.pad())
        .to(setup.device, setup.dtype)
        .train()
    )
    draw = None
    if isinstance(module, TokenPositionEmbedding):
        draw = module.draw(batch_size, setup.device)

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
    """The stock lookup, or what takes its place in a cape model of type `name`."""
    if name == LOOKUP:
        return SinusoidalPositionalEmbedding(dim, pad, 1024)
    config = PositionConfig(name, "text", "encoder")
    if config.encoding == "table":
        table = LearnedPositionalEmbedding(length + pad + 1, dim, pad)
        return WrappingPositionalEmbedding.take_over(table)
    encoder = build_position_encoder(config, dim, frequencies="fairseq", layout="sin_cos_blocks")
    return TokenPositionEmbedding(encoder, pad)


def run(setup: Setup) -> Report:
    """Times and peaks of all types and lengths."""
    report = Report("The position embedding alone", TEXT)
    batch, dim, lengths = (4, 64, (10, 100)) if setup.quick else (BATCH, DIM, LENGTHS)
    names = [REFERENCE, LOOKUP, *types(), *(name + ADD for name in types())]
    for length in lengths:
        steps = {name: make_step(name, batch, length, dim, setup) for name in names}
        timings = interleave(steps, setup, setup.seconds(SECONDS), f"embedding T {length}")
        del steps
        for name in tqdm(timings, f"memory T {length}", leave=False, disable=None):
            row = {"T": length, "B": batch, "K": dim, "variant": name}
            row |= timing_columns(timings[name])
            if CONTROL not in name:
                row["mib"] = round(
                    peak_memory(setup, make_step, name, batch, length, dim, setup), 2
                )
            report.rows.append(row)
    report.tables = {
        **ratio_tables(report, "T"),
        "Nanoseconds per number of the result (constant: linear in B x T)": _per_number(report),
        "Peak memory, MiB": _memory_table(report, setup),
    }
    report.plot = partial(_plot, report)
    return report


def _per_number(report: Report) -> list[str]:
    """Constant where time is linear in B x T."""
    rows = []
    for name in report.column("variant"):
        found = [row for row in report.rows if row["variant"] == name]
        numbers = [row["milliseconds"] / (row["B"] * row["T"] * row["K"]) for row in found]
        rows.append([name, *(f"{1e6 * number:.2f}" for number in numbers)])
    return markdown_table(["", *(f"T {length}" for length in report.column("T"))], rows)


def _memory_table(report: Report, setup: Setup) -> list[str]:
    lengths = report.column("T")
    row = report.rows[0]
    size = row["B"] * row["K"] * setup.dtype.itemsize / MEBIBYTE
    rows = [["one tensor B x T x K", *(f"{length * size:.1f}" for length in lengths)]]
    for name in report.column("variant"):
        if CONTROL not in name:
            found = (report.find(variant=name, T=length) for length in lengths)
            rows.append([name, *(f"{row['mib']:.1f}" for row in found)])
    return markdown_table(["", *(f"T {length}" for length in lengths)], rows)


def _plot(report: Report, figure) -> None:
    ratios, times = figure.subplots(1, 2)
    plot_ratios(ratios, report, "T", 1.0)
    for name in (REFERENCE, LOOKUP, *types()):
        rows = [row for row in report.rows if row["variant"] == name]
        tokens = [row["B"] * row["T"] for row in rows]
        times.loglog(tokens, [row["milliseconds"] for row in rows], marker="o", label=name)
    times.set(xlabel="B x T", ylabel="milliseconds")
    times.legend(fontsize="small")
