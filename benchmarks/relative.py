"""Relative attention against attention without positions: Table 9 of the CAPE appendix, and memory.

A Transformer layer, the encoder and the decoder (six layers) are measured, forward and backward.
The paper uses batches of 50, 10 updates of warm-up and 100 timed updates (appendix D.2):

    python -m benchmarks.run relative --device cuda --warm-up 10 --rounds 100
"""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import hosts
from benchmarks.measure import MEBIBYTE, Setup, Step, interleave, peak_memory
from benchmarks.report import Report, distinct, plot_columns, ratio_cell, variant_table
from recipes.lab.steps import progress
from recipes.lab.tables import markdown

DIM, HEADS, LAYERS = 768, 8, 6
PARTS = ("layer", "encoder", "decoder")
LENGTHS, CONTEXTS = (10, 100, 1000), (100, 1000)
MEMORY_LENGTHS, MEMORY_CONTEXTS = (1000, 2000), (0, 10, 100, 250, 500, 1000)
# B by T: the paper's batch of 50 fits a GPU; a CPU gets as many tokens as a few seconds allow
BATCHES = {"cpu": {10: 50, 100: 10, 1000: 1}, "cuda": dict.fromkeys(LENGTHS, 50)}
SECONDS = {"layer": 8.0, "encoder": 15.0, "decoder": 15.0}
LIMIT = 1.5
# CAPE, Table 9, in fp32 and fp16 on a V100, by context and part, for T = 10, 100, 1000
PAPER = {
    "fp32": {
        1000: {"layer": (2.3, 2.3, 1.7), "encoder": (2.2, 1.7, 1.6), "decoder": (1.7, 1.4, 1.4)},
        100: {"layer": (2.1, 1.2, 1.2), "encoder": (2.4, 1.1, 1.2), "decoder": (1.7, 1.1, 1.1)},
    },
    "fp16": {
        1000: {"layer": (2.1, 3.3, 2.2), "encoder": (2.2, 2.6, 2.0), "decoder": (1.8, 1.9, 1.6)},
        100: {"layer": (2.1, 1.9, 1.4), "encoder": (2.3, 1.5, 1.4), "decoder": (1.7, 1.2, 1.2)},
    },
}
TEXT = (
    f"""\
Forward and backward of fairseq's encoder layer, encoder and decoder (6 layers, K 768, 8 heads,
feed-forward 3072, dropout 0.1, no padding, decoder without its output projection) with relative
positions in all layers (`cape_transformer --position-embedding relpos`), as a ratio to the same
without positions (`transformer --no-token-positional-embeddings`). All take turns in one
process and share their parameters. To reach: at most {LIMIT} with context 100 at T 100 and T
1000; peak memory linear in the context, without any T x T x d tensor.""",
    """\
Attention without positions goes through torch's `scaled_dot_product_attention`, a fused kernel
that never holds the T x T scores; relative scores are added before the softmax and need a
gradient, which no fused kernel of torch gives.""",
)


def run(setup: Setup) -> Report:
    """Times every part, length and context, then the memory of a layer."""
    report = Report("Relative attention: Table 9 of the CAPE appendix", TEXT)
    shape = (64, 4, 2) if setup.quick else (DIM, HEADS, LAYERS)
    batches = {10: 4, 20: 2} if setup.quick else BATCHES[setup.device.type]
    contexts = (5, 20) if setup.quick else CONTEXTS
    task = hosts.make_task(1000)
    models = {context: make_model(task, context, shape, setup) for context in (0, *contexts)}
    hosts.share_parameters(models.values())
    for part in PARTS:
        for length, batch in batches.items():
            steps = {
                label(context): make_step(model, part, batch, length, setup)
                for context, model in models.items()
            }
            seconds = setup.seconds(SECONDS[part])
            timings = interleave(steps, setup, seconds, f"relative {part} T {length}")
            report.add({"part": part, "T": length, "B": batch}, timings)
    _measure_memory(report, setup, shape)
    report.tables = _tables(report, setup, contexts, batches)
    report.plot = partial(_plot, report)
    return report


def label(context: int) -> str:
    return f"context {context}" if context else "no positions"


def make_model(task, context: int, shape: tuple[int, int, int], setup: Setup) -> nn.Module:
    """The stock model without positions, or with relative positions if `context` is not 0."""
    dim, heads, layers = shape
    arguments: dict[str, object] = {"no_token_positional_embeddings": True}
    for side in ("encoder", "decoder"):
        arguments[f"{side}_embed_dim"] = dim
        arguments[f"{side}_ffn_embed_dim"] = 4 * dim
        arguments[f"{side}_attention_heads"] = heads
        arguments[f"{side}_layers"] = layers
    positions = {"position_embedding": "relpos", "position_relative_context": context}
    return hosts.make_model(task, positions if context else {}, setup, **arguments).train()


def make_step(model: nn.Module, part: str, batch: int, length: int, setup: Setup) -> Step:
    """Forward and backward of a part of `model`, from a fixed gradient of the output."""
    vocabulary, dim = model.encoder.embed_tokens.weight.shape
    tokens = torch.randint(4, vocabulary, (batch, length), device=setup.device)
    lengths = torch.full((batch,), length, device=setup.device)
    states = torch.randn(length, batch, dim, device=setup.device, dtype=setup.dtype)
    states.requires_grad_()
    memory = {"encoder_out": [states], "encoder_padding_mask": []}

    def forward() -> Tensor:
        if part == "layer":
            return model.encoder.layers[0](states, encoder_padding_mask=None)
        if part == "encoder":
            return model.encoder(tokens, lengths)["encoder_out"][0]
        return model.decoder(tokens, memory, features_only=True)[0]

    with torch.no_grad():
        gradient = torch.randn_like(forward())

    def step() -> None:
        forward().backward(gradient)
        states.grad = None
        model.zero_grad()

    return step


def make_layer_step(
    context: int, batch: int, length: int, shape: tuple[int, int], setup: Setup
) -> Step:
    """A layer and the step of the layer, for a process that measures memory."""
    model = make_model(hosts.make_task(1000), context, (*shape, 1), setup)
    return make_step(model, "layer", batch, length, setup)


def _measure_memory(report: Report, setup: Setup, shape: tuple[int, int, int]) -> None:
    """Measures the peak memory of a layer for one sample, forward and backward, for each length and
    context."""
    lengths, contexts = MEMORY_LENGTHS, MEMORY_CONTEXTS
    if setup.quick:
        lengths, contexts = (20,), (0, 5, 20)
    sizes = [(length, context) for length in lengths for context in contexts]
    for length, context in progress(sizes, "relative memory"):
        mib = peak_memory(setup, make_layer_step, context, 1, length, shape[:2], setup)
        row = {"part": "layer", "T": length, "B": 1, "variant": label(context)}
        report.rows.append(row | {"context": context, "mib": round(mib, 1)})


def _tables(report: Report, setup: Setup, contexts: tuple, batches: dict) -> dict[str, list[str]]:
    timed = [row for row in report.rows if "ratio" in row]
    row_of = {(row["part"], row["T"], row["variant"]): row for row in timed}
    header = ["", *(f"T {length}, B {batch}" for length, batch in batches.items())]
    precision = "fp32" if setup.dtype == torch.float32 else "fp16"
    tables = {}
    for name in map(label, (*contexts, 0)):
        rows = [
            [part, *(ratio_cell(row_of[part, length, name]) for length in batches)]
            for part in PARTS
        ]
        for context, values in PAPER[precision].items():
            if name == label(context) and tuple(batches) == LENGTHS:
                rows += [
                    [f"{part} (paper, V100, B 50, {precision})", *values[part]] for part in PARTS
                ]
        tables[f"Time / time without positions, {name} (95 % interval)"] = markdown(header, rows)
    rows = [
        [part, *(f"{row_of[part, length, label(0)]['milliseconds']:.0f}" for length in batches)]
        for part in PARTS
    ]
    tables["Milliseconds without positions"] = markdown(header, rows)
    tables["Peak memory of a layer, forward and backward, B 1, MiB"] = _memory_table(report, setup)
    return tables


def _memory_table(report: Report, setup: Setup) -> list[str]:
    rows = [row for row in report.rows if "mib" in row]
    width = DIM // HEADS
    for name, factor in {
        f"(the T x T scores of {HEADS} heads)": HEADS,
        f"(a T x T x d tensor, d {width})": width,
    }.items():
        for length in distinct(rows, "T"):
            mib = factor * length**2 * setup.dtype.itemsize / MEBIBYTE
            rows.append({"variant": name, "T": length, "mib": mib})
    return variant_table(rows, "T", lambda row: f"{row['mib']:.1f}")


def _plot(report: Report, figure) -> None:
    *panels, memory = figure.subplots(1, len(PARTS) + 1)
    for axes, part in zip(panels, PARTS, strict=True):
        rows = [row for row in report.rows if row["part"] == part and "ratio" in row]
        for name in distinct(rows, "variant"):
            points = [row for row in rows if row["variant"] == name]
            colour = "0.7" if name == label(0) else None
            plot_columns(axes, points, "T", "ratio", label=name, color=colour)
        axes.axhline(LIMIT, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=part, xlabel="T", xscale="log", ylim=(0.8, None))
    panels[0].set_ylabel("time / time without positions")
    panels[0].legend(fontsize="small")
    rows = [row for row in report.rows if "mib" in row]
    for length in distinct(rows, "T"):
        points = [row for row in rows if row["T"] == length]
        plot_columns(memory, points, "context", "mib", label=f"T {length}")
    memory.set(title="peak memory of a layer", xlabel="context (0: none)", ylabel="MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
