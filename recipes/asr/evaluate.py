"""Measures error rates of speech models of fairseq by duration, and by hop of the frames.

    python -m recipes.asr.evaluate --model A.pt B.pt --data data/libri100 --sets test_clean
    python -m recipes.asr.evaluate --model cape=A.pt,B.pt --data data/digits --hops 5 8 10 12 16 20

Models are compared, not averaged. Tables (CSV, Markdown) and plots (PNG) go to --output.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cape_plugins.speech.manifest import Utterance
from fairseq_user_dir.asr.manifest import read_config, read_manifest
from recipes.asr.report import SPEED, Text, by_duration, rates, write_report
from recipes.lab import command_line, steps
from recipes.lab.runs import USER_DIR, calm_logging, child_environment, device_flags
from recipes.lab.steps import ChildError, CommandError, run_main, run_module, write_lines
from recipes.lab.tables import Row, how_made, shown_command

PACKAGES = ("torch", "fairseq-fixed", "jiwer", "soundfile")
BINS = (10, 15, 20)
DECODED = "decoded.tsv"
SECONDS = command_line.number(0, 1e6)
OWN_FLAGS = {
    **dict.fromkeys(("--hop-seconds", "--gen-subset"), "--hops and --sets"),
    **dict.fromkeys(("--path", "--scoring", "--task", "--user-dir"), "the checkpoints"),
    **dict.fromkeys(("--cpu", "--gpu"), "--device"),
}
_TEXT_LINE = re.compile(r"^([TH])-(\d+)(?:\t|$)(?:.*\t)?(.*)$", re.MULTILINE)  # the last column
_TIMING = re.compile(r"Translated [\d,]+ sentences .* in ([\d.]+)s")


def decode(
    data: Path,
    name: str,
    checkpoint: Path,
    folder: Path,
    *,
    hop_ms: float = 10,
    flags: Sequence[object] = ("--cpu",),
    max_tokens: int = 20000,
    threads: int = 1,
) -> tuple[list[Text], float]:
    """Runs fairseq-generate on the set `name` once, in a step below `folder`.

    Returns references and hypotheses of the recordings that have a text, and the throughput in
    seconds of audio per second of computation, without the time for reading recordings.
    """

    def make(partial: Path) -> None:
        log = partial / "generate.log"
        root = read_config(str(data)).get("audio_root")
        utterances = read_manifest(str(data / f"{name}.tsv"), root, texts=False)
        if not any(utterance.text for utterance in utterances):
            why = f"no recording of {name}.tsv has a text to compare with"
            raise CommandError(f"--data {data}: {why}; fairseq-generate transcribes it")
        arguments = [data, "--user-dir", USER_DIR, "--task", "cape_asr", "--path", checkpoint]
        arguments += ["--gen-subset", name, "--scoring", "cape_wer", "--max-tokens", max_tokens]
        arguments += ["--hop-seconds", hop_ms / 1000, *flags]
        run_module("fairseq_cli.generate", *arguments, log=log, env=child_environment(threads))
        write_lines(partial / DECODED, _decoded(log, utterances))

    settings = {"checkpoint": steps.digest(checkpoint), "set": steps.digest(data / f"{name}.tsv")}
    settings |= {"hop": hop_ms / 1000, "max_tokens": max_tokens, "flags": list(map(str, flags))}
    folder = steps.step(folder / f"hop-{hop_ms:g}ms", settings, make)
    seconds, *lines = steps.read_written(folder / DECODED)
    cells = (line.split("\t") for line in lines)
    texts = [Text(float(length), *pair) for length, *pair in cells]
    speed = sum(text.seconds for text in texts) / max(float(seconds), 1e-3)
    return [text for text in texts if text.reference], speed


def _decoded(log: Path, utterances: Sequence[Utterance]) -> list[str]:
    """Lines for DECODED: the seconds of computation, then a line with duration, reference and
    hypothesis for each recording."""
    with open(log, encoding="utf-8", newline="\n") as file:
        lines = file.read()
    texts: dict[str, dict[int, str]] = {"T": {}, "H": {}}
    for letter, index, text in _TEXT_LINE.findall(lines):
        texts[letter][int(index)] = text
    seconds = _TIMING.findall(lines)[-1:]
    scored = {index for index in texts["H"] if utterances[index].text}
    if not seconds or texts["T"].keys() != scored or not scored:
        raise ChildError(f"{log}: not a complete log of fairseq-generate")
    pairs = [(utterances[index], text) for index, text in sorted(texts["H"].items())]
    return seconds + [f"{item.seconds:.3f}\t{item.text}\t{text}" for item, text in pairs]


def measure(
    columns: Row,
    decode_args: Sequence[Any],
    bins: Sequence[float],
    hops: Sequence[float],
    **decode_options: Any,
) -> tuple[list[Row], list[Row]]:
    """Rows of error rates by duration, and rows of word error rate and throughput by hop in ms.

    The rows by hop are for CAPE Figure 17. `columns` name the model; `decode_args` and
    `decode_options` go to :func:`decode`.
    """
    texts, _ = decode(*decode_args, **decode_options)
    rows, curve = [columns | row for row in by_duration(texts, bins)], []
    for hop in hops:
        texts, speed = decode(*decode_args, hop_ms=hop, **decode_options)
        curve.append(
            {
                "model": columns["model"],
                "seed": columns["seed"],
                "hop_ms": int(hop) if hop.is_integer() else hop,
                "wer": rates(texts)["wer"],
                SPEED: speed,
            }
        )
    return rows, curve


def make_parser() -> argparse.ArgumentParser:
    epilog = "All other flags go to fairseq-generate, such as --fp16 or --ctc-beam 50."
    parser = command_line.new_parser(__doc__, epilog=epilog)
    command_line.add_shared(parser, "models")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with manifests and dict.txt"
    )
    parser.add_argument(
        "--sets", nargs="+", default=["test"], metavar="NAME", help="manifests (default: test)"
    )
    parser.add_argument(
        "--bins",
        nargs="+",
        type=SECONDS,
        default=BINS,
        metavar="SECONDS",
        help="upper ends of the bins of durations (default: 10 15 20)",
    )
    command_line.add_shared(parser, "hops", note="plot word error rate against throughput")
    parser.add_argument(
        "--max-tokens",
        type=command_line.positive,
        default=20000,
        help="frames of a batch (default: 20000)",
    )
    command_line.add_shared(parser, "device")
    command_line.add_shared(parser, "threads", default=1)
    command_line.add_shared(parser, "work", default=Path("build/asr/decoded"))
    command_line.add_shared(parser, "output", default=Path("results/asr"))
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        raise CommandError(f"{argv[0]}: give checkpoints by --model, as in --model {argv[0]}")
    args, args.flags = make_parser().parse_known_args(argv)
    if refused := [flag for flag in args.flags if flag in OWN_FLAGS]:
        raise CommandError(f"{refused[0]} is set by this command; see {OWN_FLAGS[refused[0]]}")
    command_line.check_increasing(args.bins, "--bins")
    command_line.check_shared(args)
    args.models = command_line.named_models(args.model)
    for path in chain(*args.models.values()):
        if not Path(path).is_file():
            raise CommandError(f"--model {path}: no such file; give a checkpoint of fairseq")
    for name in args.sets:
        if not (args.data / f"{name}.tsv").is_file():
            remedy = "name manifests of --data, without .tsv"
            raise CommandError(f"--sets {name}: there is no {args.data / name}.tsv; {remedy}")
    args.flags += device_flags(args.device)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    calm_logging()
    args = parse_arguments(argv)
    decoding = {"flags": args.flags, "max_tokens": args.max_tokens, "threads": args.threads}
    command = shown_command(steps.started_as(), sys.argv[1:] if argv is None else argv)
    facts = how_made(command, PACKAGES, args.device, flags=f"`{' '.join(args.flags)}`")
    checkpoints = {model: ", ".join(paths) for model, paths in args.models.items()}
    for name in args.sets:
        parts = []
        for model, paths in args.models.items():
            for number, path in enumerate(map(Path, paths), 1):
                seed = number if len(paths) > 1 else None
                columns = {"model": model, "seed": seed, "train_seconds": None}
                decode_args = (args.data, name, path, args.work / steps.digest(path) / name)
                parts.append(measure(columns, decode_args, args.bins, args.hops, **decoding))
        write_report(args.output / name, f"Set {name}", parts, checkpoints, facts, args.bins)


if __name__ == "__main__":
    run_main(main)
