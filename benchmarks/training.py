"""A whole training step of transformer-base, cape archs against the stock arch.

Forward, label-smoothed loss, backward and Adam, as `fairseq-train` runs them. All models share one
set of parameters and the optimizer, so that nothing but the positions differs.
"""

from functools import partial

from benchmarks import hosts
from benchmarks.measure import Setup, interleave
from benchmarks.report import Report, legend_below, plot_ratios, ratio_tables, timing_columns

VOCABULARY = 10_000
# B x T: as many tokens as a step of 2 CPU cores takes within a second, or a batch of a GPU
SIZES = {"cpu": ((8, 50), (2, 250)), "cuda": ((80, 50), (16, 250))}
SECONDS = 100.0
LIMIT = 1.02
TEXT = (
    f"""\
A training step (forward, label-smoothed cross entropy, backward, fairseq's Adam) of fairseq's
`transformer` (6L-6L, 512/2048, 8 heads), joint dictionary of {VOCABULARY} symbols, sentences of
80 to 100 % of T tokens, padded. `stock` is the arch `transformer`, the reference; every other row
is `cape_transformer --position-embedding TYPE` with the defaults of the type. All take turns in
one process and share their parameters. To reach: cape and shape at most {LIMIT}.""",
    """\
`cape` puts a BOS token before each source: its encoder works on T + 1 positions. `cape, no BOS`
shows what the positions alone cost.""",
)


def run(setup: Setup) -> Report:
    """Times all types at each size."""
    report = Report("A training step of transformer-base", TEXT)
    architecture = hosts.TINY if setup.quick else hosts.BASE
    sizes = ((4, 20), (2, 40)) if setup.quick else SIZES[setup.device.type]
    task = hosts.make_task(1000 if setup.quick else VOCABULARY)
    models = {
        name: hosts.make_model(task, positions, setup, **architecture)
        for name, positions in hosts.variants().items()
    }
    for batch, length in sizes:
        sample = hosts.make_sample(task, batch, length, setup)
        steps = hosts.training_steps(task, models, sample)
        size = f"{batch} x {length}"
        timings = interleave(steps, setup, setup.seconds(SECONDS), f"training {size}")
        for name, timing in timings.items():
            report.rows.append({"B x T": size, "variant": name} | timing_columns(timing))
    report.tables = ratio_tables(report.rows, "B x T")
    report.plot = partial(_plot, report)
    return report


def _plot(report: Report, figure) -> None:
    axes = figure.subplots()
    plot_ratios(axes, report.rows, "B x T", LIMIT)
    legend_below(figure, axes)
