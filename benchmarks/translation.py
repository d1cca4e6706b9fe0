"""fairseq's transformer-base, cape archs against the stock arch: a whole training step as in
`fairseq-train`, and beam search with fairseq's SequenceGenerator.

All models share one set of parameters, and the optimizer, so that nothing but the positions
differs. Untrained models do not stop by themselves, so every hypothesis in beam search gets the
same fixed length, and all variants decode the same number of steps.
"""

from functools import partial

from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from torch import nn

from benchmarks import hosts
from benchmarks.measure import Setup, Step, interleave
from benchmarks.report import Report

VOCABULARY = 10_000
# B x T: tokens that a step takes within a second on 2 CPU cores, or a usual batch of a GPU
SIZES = {"cpu": ((8, 50), (2, 250)), "cuda": ((80, 50), (16, 250))}
BATCH, BEAM, LENGTHS = 8, 4, (25, 50)  # of beam search
TRAINING_SECONDS, GENERATION_SECONDS = 100.0, 50.0
LIMIT = 1.02
TRAINING = (
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
GENERATION = (
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


def make_models(setup: Setup) -> tuple[TranslationTask, dict[str, nn.Module]]:
    """The stock model and a model of each type, with the task of the models."""
    task = hosts.make_task(1000 if setup.quick else VOCABULARY)
    sizes = hosts.TINY if setup.quick else hosts.BASE
    models = {
        name: hosts.make_model(task, positions, setup, **sizes)
        for name, positions in hosts.variants().items()
    }
    return task, models


def run_training(setup: Setup) -> Report:
    """Times all types at each size."""
    report = Report("A training step of transformer-base", TRAINING)
    task, models = make_models(setup)
    for batch, length in ((4, 20), (2, 40)) if setup.quick else SIZES[setup.device.type]:
        size = f"{batch} x {length}"
        sample = hosts.make_sample(task, batch, length, setup)
        steps = hosts.training_steps(task, models, sample)
        timings = interleave(steps, setup, setup.seconds(TRAINING_SECONDS), f"training {size}")
        report.add({"B x T": size}, timings)
    report.compare("B x T", LIMIT)
    return report


def run_generation(setup: Setup) -> Report:
    """Times all types at each length."""
    report = Report("Beam search", GENERATION)
    batch, lengths = (2, (5, 10)) if setup.quick else (BATCH, LENGTHS)
    task, models = make_models(setup)
    hosts.share_parameters(models.values())
    for model in models.values():
        model.eval().make_generation_fast_()
    for length in lengths:
        sample = hosts.make_sample(task, batch, length, setup)
        steps = {name: beam_search(task, model, sample, length) for name, model in models.items()}
        seconds = setup.seconds(GENERATION_SECONDS)
        report.add({"T": length}, interleave(steps, setup, seconds, f"generation T {length}"))
    report.compare("T", LIMIT)
    return report


def beam_search(
    task: TranslationTask, model: nn.Module, sample: dict, length: int, beam: int = BEAM
) -> Step:
    """A call of beam search with `length` steps."""
    generator = SequenceGenerator(
        [model], task.target_dictionary, beam_size=beam, max_len_b=length, min_len=length
    )
    return partial(task.inference_step, generator, [model], sample)
