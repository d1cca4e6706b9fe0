"""Beam search with fairseq's SequenceGenerator, cape archs against the stock arch.

Untrained models do not stop by themselves, so every hypothesis gets the same fixed length: all
variants decode the same number of steps.
"""

from functools import partial

from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from benchmarks import hosts
from benchmarks.measure import Setup, Step, interleave
from benchmarks.report import Report, legend_below, plot_ratios, ratio_tables, timing_columns

VOCABULARY, BATCH, BEAM, LENGTHS = 10_000, 8, 4, (25, 50)
SECONDS = 50.0
LIMIT = 1.02
TEXT = (
    f"""\
Translation of {BATCH} sentences with beam {BEAM} by fairseq's `SequenceGenerator`, prepared as
`fairseq-generate` does: `transformer` (6L-6L, 512/2048, 8 heads), joint dictionary of
{VOCABULARY} symbols, sources of 80 to 100 % of T tokens, exactly T decoded. `stock` is the arch
`transformer`, the reference; the others are `cape_transformer --position-embedding TYPE` with the
defaults of the type. All take turns in one process and share their parameters. To reach: at most
{LIMIT}.""",
    """\
`cape` puts a BOS token before each source: its encoder and the attention to it work on T + 1
positions. `cape, no BOS` shows what the positions alone cost.""",
)


def run(setup: Setup) -> Report:
    """Times all types at each length."""
    report = Report("Beam search", TEXT)
    architecture = hosts.TINY if setup.quick else hosts.BASE
    batch, lengths = (2, (5, 10)) if setup.quick else (BATCH, LENGTHS)
    task = hosts.make_task(1000 if setup.quick else VOCABULARY)
    models = {
        name: hosts.make_model(task, positions, setup, **architecture).eval()
        for name, positions in hosts.variants().items()
    }
    hosts.share_parameters(models.values())
    for model in models.values():
        model.make_generation_fast_()
    for length in lengths:
        sample = hosts.make_sample(task, batch, length, setup)
        steps = {name: make_step(task, model, sample, length) for name, model in models.items()}
        timings = interleave(steps, setup, setup.seconds(SECONDS), f"generation T {length}")
        for name, timing in timings.items():
            report.rows.append({"T": length, "variant": name} | timing_columns(timing))
    report.tables = ratio_tables(report.rows, "T")
    report.plot = partial(_plot, report)
    return report


def make_step(task, model: nn.Module, sample: dict, length: int) -> Step:
    """One call of beam search, `length` steps."""
    generator = SequenceGenerator(
        [model], task.target_dictionary, beam_size=BEAM, max_len_b=length, min_len=length
    )
    return partial(task.inference_step, generator, [model], sample)


def _plot(report: Report, figure) -> None:
    axes = figure.subplots()
    plot_ratios(axes, report.rows, "T", LIMIT)
    legend_below(figure, axes)
