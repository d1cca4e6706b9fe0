"""Measures costs and writes tables and plots: ``python -m benchmarks.run [NAME ...]``."""

import argparse
import importlib.util
import logging
import os
import pkgutil
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import measure, report
from recipes.lab.command_line import add_shared, new_parser, positive

BENCHMARKS = {
    "embedding": "embedding:run",
    "training": "translation:run_training",
    "relative": "relative:run",
    "attention": "attention:run",
    "generation": "translation:run_generation",
    "huggingface": "huggingface:run",
    "families": "families:run",
    "speech": "speech:run",
    "vision": "vision:run",
    "serving": "serving:run",
    "whisper_cpp": "whisper_cpp:run",
}
CPU_ONLY = {"serving", "whisper_cpp"}  # in float32; engines set their precision themselves
NEEDED = {"whisper_cpp": "pywhispercpp"}  # packages that `make bench` does not install
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build") / "benchmarks-quick"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def lacking(name: str) -> str | None:
    """What a benchmark lacks on this machine, and the remedy."""
    package = NEEDED.get(name)
    if package is None or importlib.util.find_spec(package):
        return None
    return f"{name} needs {package}: pip install {package}"


def make_options() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default all"
    )
    add_shared(parser, "device", default="cpu", shown="cpu", choices=("cpu", "cuda"))
    add_shared(parser, "dtype", default="float32")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, to see that everything runs"
    )
    parser.add_argument(
        "--clock",
        choices=tuple(measure.CLOCKS),
        default="wall",
        help="cpu: CPU seconds, if a machine does other work (with OMP_NUM_THREADS=1); default: "
        "wall",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="timed rounds, in each of which all variants take a turn (default: as many as fit "
        "in the time that a benchmark has)",
    )
    parser.add_argument(
        "--warm-up",
        type=positive,
        default=measure.WARM_UP,
        metavar="N",
        help=f"rounds before the timed ones (default: {measure.WARM_UP})",
    )
    add_shared(parser, "output", shown="benchmarks/results")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_options()
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
        if message := lacking(name):
            parser.error(message)
    elsewhere = args.device != "cpu" or args.dtype != "float32"
    if elsewhere and CPU_ONLY & {*args.names}:
        names = ", ".join(sorted(CPU_ONLY & {*args.names}))
        parser.error(f"{names} takes no --device and no --dtype: leave them out")
    args.names = args.names or [name for name in BENCHMARKS if not (elsewhere and name in CPU_ONLY)]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if args.device == "cuda" and args.clock == "cpu":
        parser.error("--clock cpu cannot see the time of a GPU; use --clock wall")
    if args.output is None:
        args.output = QUICK_RESULTS if args.quick else RESULTS
    return args


def shown_command(name: str, args: argparse.Namespace) -> str:
    """The command that repeats a result, without folders of this machine."""
    command = ["python", "-m", "benchmarks.run", name]
    defaults = {"device": "cpu", "dtype": "float32", "clock": "wall"}
    for option, default in {**defaults, "rounds": None, "warm_up": measure.WARM_UP}.items():
        if getattr(args, option) != default:
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    if args.quick:
        command.append("--quick")
    threads = os.environ.get("OMP_NUM_THREADS")
    return ("" if threads is None else f"OMP_NUM_THREADS={threads} ") + shlex.join(command)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.disable(logging.INFO)  # fairseq logs everything that it builds
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    setup = measure.Setup(device, dtype, args.quick, args.clock, args.rounds, args.warm_up)
    for name in args.names:
        if message := lacking(name):
            print(f"left out: {message}", file=sys.stderr, flush=True)
            continue
        begin = time.monotonic()
        torch.manual_seed(0)
        result = pkgutil.resolve_name(f"benchmarks.{BENCHMARKS[name]}")(setup)
        facts = measure.facts(setup, shown_command(name, args), result.in_parentheses)
        path = report.write(result, name, setup, facts, args.output)
        print(f"{name}: {time.monotonic() - begin:.0f} s, {path}", flush=True)


if __name__ == "__main__":
    main()
