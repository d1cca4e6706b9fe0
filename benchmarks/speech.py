"""Speech: the cost of position embeddings in a training step, the gain of batches without padding,
and the speed of features."""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_user_dir  # noqa: F401
from benchmarks.measure import Setup, Step, interleave, peak_memory
from benchmarks.report import (
    Report,
    legend_below,
    plot_ratios,
    ratio_cell,
    ratio_tables,
    timing_columns,
)
from cape_plugins.settings.config import TYPES
from cape_plugins.speech.audio import read_audio
from cape_plugins.speech.batching import PaddingFreeBatches, equal_length, frame_nanoseconds
from cape_plugins.speech.features import log_mel
from fairseq_user_dir.asr.criterion import CapeCtcCriterion
from recipes.lab.tables import markdown

SECONDS = 60.0
ARCH, TINY = "cape_ctc_transformer_small", "cape_ctc_transformer_tiny"
BINS, UNITS = 80, 30
SIZES = {"cpu": ((8, 400), (2, 1600)), "cuda": ((60, 400), (15, 1600))}  # frames of 10 ms
# durations as in TED-LIUM 3: 6 s, standard deviation 3 s
RECORDINGS, MEAN, DEVIATION = {"cpu": 48, "cuda": 400}, 6.0, 3.0
BATCH_SECONDS = {"cpu": 40.0, "cuda": 240.0}
SORTED, PADDED, FREE = "sorted, padded", "perturbed, padded", "padding-free"  # batches
TEXT = (
    """\
**Types**: a training step (forward, CTC, backward; no optimizer) of `cape_ctc_transformer_small`
(12 layers of 256) by position embedding, in padded batches of B recordings of 80 to 100 % of T
frames; `sinpos` is the reference. **Batches**: the same model with cape on one set of recordings
with durations as in TED-LIUM 3, cut into batches of the same number of seconds:
sorted by duration and padded (the reference), perturbed by U(0.85, 1.15) and padded, perturbed
without padding. Times are for all batches together; frames count recordings only, not padding.""",
    """\
**Features**: seconds of audio per second of one core, from a 16-bit wav file to 80 log-mel bins,
reading included. To reach: 50.""",
)


def run(setup: Setup) -> Report:
    """Measures all three parts."""
    report = Report("Speech", TEXT)
    for batch, length in ((2, 60), (2, 90)) if setup.quick else SIZES[setup.device.type]:
        size = f"{batch} x {length}"
        timings = interleave(type_steps(setup, batch, length), setup, setup.seconds(SECONDS), size)
        report.add({"B x T": size}, timings)
    report.tables = ratio_tables(report.rows, "B x T")
    batch_rows(setup, report)
    feature_rows(setup, report)
    report.plot = partial(_plot, report)
    return report


# ---- steps ---------------------------------------------------------------------------------------


def make_model(setup: Setup, type_name: str) -> tuple[Any, CapeCtcCriterion]:
    """A model in training mode with its criterion."""
    dictionary = Dictionary()
    for number in range(UNITS):
        dictionary.add_symbol(str(number))
    arch = TINY if setup.quick else ARCH
    args = argparse.Namespace(arch=arch, position_embedding=type_name)
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(0)
    task = SimpleNamespace(target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
    return model.to(setup.device, setup.dtype).train(), CapeCtcCriterion(task)


def training_step(model: Any, criterion: CapeCtcCriterion, samples: list[dict]) -> None:
    for sample in samples:
        model.zero_grad()
        criterion(model, sample)[0].backward()


def make_sample(setup: Setup, features: list[torch.Tensor], **times: torch.Tensor) -> dict:
    """A batch in the form of the task, with three labels for each second."""
    lengths = torch.tensor([len(frames) for frames in features])
    padded = torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
    units = [torch.randint(4, UNITS, (max(1, int(0.03 * n)),)) for n in lengths]
    target = torch.nn.utils.rnn.pad_sequence(units, True, 1)
    inputs = {"src_tokens": padded.to(setup.dtype), "src_lengths": lengths, **times}
    return {
        "net_input": {key: value.to(setup.device) for key, value in inputs.items()},
        "target": target.to(setup.device),
        "nsentences": len(features),
    }


def type_steps(setup: Setup, batch: int, length: int) -> dict[str, Step]:
    lengths = torch.linspace(0.8, 1.0, batch).mul(length).long().tolist()
    sample = make_sample(setup, [torch.randn(n, BINS) for n in lengths])
    order = ["sinpos", *(name for name in TYPES if name != "sinpos")]
    models = {name: make_model(setup, name) for name in order}
    return {name: partial(training_step, *both, [sample]) for name, both in models.items()}


def make_batches(setup: Setup, name: str) -> list[dict]:
    """An epoch of random recordings in batches of one kind."""
    rng = np.random.default_rng(0)
    count = 6 if setup.quick else RECORDINGS[setup.device.type]
    seconds = rng.gamma((MEAN / DEVIATION) ** 2, DEVIATION**2 / MEAN, count).clip(0.5)
    limit = 10.0 if setup.quick else BATCH_SECONDS[setup.device.type]
    batches, samples = PaddingFreeBatches(seconds, limit, shuffle=name != SORTED), []
    for batch in batches:
        hops = [hop.seconds if name == FREE else 0.01 for hop in batch]
        frames = [
            torch.randn(int((seconds[hop.index] - 0.025) / distance) + 1, BINS)
            for hop, distance in zip(batch, hops, strict=True)
        ]
        times = {}
        if name == FREE:
            features, kept_frames = equal_length(frames)
            frames = list(features)
            times = {"frame_nanoseconds": frame_nanoseconds(kept_frames, hops)}
        samples.append(make_sample(setup, frames, **times))
    return samples


def epoch_step(setup: Setup, name: str) -> Step:
    return partial(training_step, *make_model(setup, "cape"), make_batches(setup, name))


def batch_rows(setup: Setup, report: Report) -> None:
    steps = {name: epoch_step(setup, name) for name in (SORTED, PADDED, FREE)}
    lines = []
    timings = interleave(steps, setup, setup.seconds(2 * SECONDS), "batches")
    for name, timing in timings.items():
        inputs = [sample["net_input"] for sample in steps[name].args[-1]]
        real = sum(int(batch["src_lengths"].sum()) for batch in inputs)
        whole = sum(batch["src_tokens"].shape[:2].numel() for batch in inputs)
        memory = peak_memory(setup, epoch_step, setup, name)
        speed = real / timing.milliseconds * 1000
        padding = 100 * (1 - real / whole)
        row = {"part": "batches", "variant": name, "frames_per_second": round(speed, 1)}
        row |= {"padding_percent": round(padding, 2), "peak_mib": round(memory, 1)}
        row |= timing_columns(timing)
        report.rows.append(row)
        lines.append([name, f"{padding:.1f} %", ratio_cell(row), f"{speed:.0f}", f"{memory:.0f}"])
    header = ["batches", "padding", "time / time of sorted", "frames per second", "peak MiB"]
    report.tables["Batches"] = markdown(header, lines)


# ---- features ------------------------------------------------------------------------------------


def feature_rows(setup: Setup, report: Report) -> None:
    """Adds the speed of features on one CPU core, for any device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    hops, lines = (0.005, 0.010, 0.020), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rate, seconds in ((16000, 2), (16000, 15), (8000, 15)):
                path = Path(folder) / f"{rate}-{seconds}.wav"
                noise = np.random.default_rng(0).normal(0, 0.1, rate * seconds)
                soundfile.write(path, noise, rate)
                name = f"{seconds} s at {rate // 1000} kHz"
                speeds = [_speed(path, seconds, hop, setup) for hop in hops]
                report.rows += [
                    {"part": "features", "variant": name, "hop_ms": 1000 * hop}
                    | {"times_real_time": round(speed, 1)}
                    for hop, speed in zip(hops, speeds, strict=True)
                ]
                lines.append([name, *(f"{speed:.0f}" for speed in speeds)])
    finally:
        torch.set_num_threads(threads)
    header = ["recording", *(f"hop {1000 * hop:g} ms" for hop in hops)]
    report.tables["Features, times real time on one core"] = markdown(header, lines)


def _speed(path: Path, seconds: int, hop: float, setup: Setup) -> float:
    log_mel(read_audio(path), hop_seconds=hop)
    count = 2 if setup.quick else max(5, 600 // seconds)
    begin = time.process_time()
    for _ in range(count):
        log_mel(read_audio(path), hop_seconds=hop)
    return count * seconds / (time.process_time() - begin)


def _plot(report: Report, figure) -> None:
    left, right = figure.subplots(1, 2)
    plot_ratios(left, [row for row in report.rows if "B x T" in row], "B x T", 1.02)
    rows = [row for row in report.rows if row.get("part") == "batches"]
    right.bar([row["variant"] for row in rows], [row["frames_per_second"] for row in rows])
    right.set_ylabel("frames per second")
    legend_below(figure, left)
