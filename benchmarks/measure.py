"""Time as ratios within one run, memory as the peak of one process, and the machine.

A time in seconds tells more about the machine than about the code. So the variants of a benchmark
take turns: each round runs all of them once in random order, and a ratio is taken within a round.
The reference takes part twice, and ratios are to the mean of both times. The ratio of the reference
is the second time by the first; it would be 1 on a perfect machine and shows how far the other
ratios can be trusted.
"""

import ctypes
import gc
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.memory import peak_resident
from recipes.lab.steps import progress
from recipes.lab.tables import how_made

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PACKAGES = (
    "torch",
    "fairseq-fixed",
    "transformers",
    "numpy",
    "ctranslate2",
    "onnxruntime",
    "pywhispercpp",
)
MIN_ROUNDS, MAX_ROUNDS = 5, 500
WARM_UP = 2  # rounds: memory allocators and libraries settle in the first rounds

Step = Callable[[], object]


@dataclass(frozen=True)
class Setup:
    """Settings from the command line."""

    device: torch.device
    dtype: torch.dtype  # precision of parameters and activations
    quick: bool = False  # small models, few rounds: a check of the programs, not of their cost
    clock: str = "wall"  # or "cpu" (seconds of all threads) on a machine that does other work
    rounds: int | None = None  # timed rounds; None: as many as a benchmark has time for
    warm_up: int = WARM_UP  # rounds before the timed rounds

    def seconds(self, full: float) -> float:
        """Time to spend on a group of variants: `full`, or next to nothing."""
        return 0.0 if self.quick else full

    def synchronize(self) -> None:
        """Waits for the GPU, if there is any."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Timing:
    """Time of a variant: medians over the rounds, and the 95 % bootstrap interval of the ratio."""

    milliseconds: float
    ratio: float  # time of the variant by the mean time of the reference in the same round
    low: float
    high: float
    rounds: int


def interleave(
    steps: Mapping[str, Step], setup: Setup, seconds: float, label: str
) -> dict[str, Timing]:
    """Times variants in turns; see the module docstring. The first of the `steps` is the reference,
    which takes part twice; the ratio of the reference compares these two runs. The `seconds` to
    spend determine the number of rounds (5 to 500, 3 if quick), unless `setup` sets it."""
    reference, again = next(iter(steps)), object()
    steps = {again: steps[reference], **steps}
    for _ in range(setup.warm_up):
        begin = time.perf_counter()
        for step in steps.values():
            _time(step, setup)
        round_seconds = time.perf_counter() - begin
    affordable = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / round_seconds)))
    rounds = setup.rounds or (3 if setup.quick else affordable)
    times: dict[object, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in progress(range(rounds), label, unit="round"):
            shuffle(order)
            for name in order:
                times[name].append(_time(steps[name], setup))
            gc.collect()
    finally:
        gc.enable()
    both = np.mean([times[reference], times[again]], axis=0)
    timings = {name: _timing(times[name], both) for name in steps if name is not again}
    return timings | {reference: _timing(times[again], times[reference])}


def _time(step: Step, setup: Setup) -> float:
    clock = CLOCKS[setup.clock]
    setup.synchronize()
    begin = clock()
    step()
    setup.synchronize()
    return clock() - begin


def _timing(times: list[float], reference: Sequence[float] | np.ndarray) -> Timing:
    ratios = np.divide(times, reference)
    sample = np.random.default_rng(0).choice(ratios, (1000, len(ratios)))
    low, high = np.percentile(np.median(sample, axis=1), (2.5, 97.5))
    return Timing(1e3 * median(times), float(np.median(ratios)), low, high, len(times))


# ---- memory --------------------------------------------------------------------------------------

MEBIBYTE = 2**20


def peak_memory(setup: Setup, make: Callable[..., Step], *args: object) -> float:
    """Peak memory of a call of the step ``make(*args)`` in MiB, the result included.

    On a CPU the step runs in a new process, once to warm up and once for the measurement. Measured
    is the growth of the resident set, so pages that were never touched do not count. On a GPU the
    growth of torch's allocated memory is measured. `make` is a function of a module, because it is
    sent to the process by name.
    """
    if setup.device.type == "cuda":
        return peak_allocated(make(*args)) / MEBIBYTE
    return in_new_process(_peak_resident, make, args)


def peak_allocated(step: Step) -> int:
    """Peak memory of a step on the GPU, in bytes beyond the memory in use before the step."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_resident(make: Callable[..., Step], args: tuple) -> float:
    before, peak = peak_resident(make(*args))
    return peak - before


def in_new_process(function: Callable, *args: object) -> Any:
    """The result of ``function(*args)``, called in a process that has done nothing else yet."""
    context = multiprocessing.get_context("forkserver")  # imports torch and fairseq once
    context.set_forkserver_preload(["benchmarks.hosts"])
    with ProcessPoolExecutor(1, context, _start, (torch.get_num_threads(),)) as process:
        return process.submit(function, *args).result()


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable(logging.INFO)


def keep_pages() -> None:
    """Makes malloc reuse all memory of this process and never hand it back to the system."""
    mmap_max, trim_threshold = -4, -1  # mallopt(3)
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


# ---- machine -------------------------------------------------------------------------------------


def facts(setup: Setup, command: str, in_parentheses: str) -> dict[str, str]:
    """Facts to judge and repeat the numbers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    threads = torch.get_num_threads()
    return how_made(
        command,
        PACKAGES,
        setup.device,
        memory=f"{memory:.0f} GiB; {threads} thread{'s' if threads > 1 else ''}",
        numbers=f"{str(setup.dtype).removeprefix('torch.')}; medians of {setup.clock} time over "
        "rounds in which all variants take turns. Ratios are to the mean of two runs of the "
        "reference (the first row); its own ratio compares these two runs and shows the noise. In "
        f"parentheses: {in_parentheses}"
        + (". **Quick run: the numbers mean nothing**" if setup.quick else ""),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )
