"""Error rates of speech models of fairseq by duration, and against the hop of the frames.

    python -m recipes.asr.evaluate CHECKPOINT ... --data data/libri100 --sets test_clean test_other
    python -m recipes.asr.evaluate CHECKPOINT ... --data data/digits --hops 5 8 10 12 16 20

Several checkpoints are compared, not averaged. Tables (CSV, Markdown) and plots (PNG) go to
--output.
"""

import argparse
import csv
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from cape_plugins.speech.manifest import Utterance
from fairseq_user_dir.asr.manifest import read_config, read_manifest
from recipes.asr.report import (
    ALL,
    Text,
    by_duration,
    rates,
    write_csv,
    write_hop_plot,
    write_markdown,
    write_plot,
)
from recipes.lab.options import positive
from recipes.lab.runs import USER_DIR, Result, child_environment
from recipes.lab.steps import (
    ChildError,
    CommandError,
    digest,
    run_main,
    run_module,
    step,
    write_lines,
    writing,
)
from recipes.lab.tables import machine, versions

PACKAGES = ("torch", "fairseq-fixed", "jiwer", "soundfile")
BINS = (10, 15, 20)
DECODED = "decoded.tsv"
OWN_FLAGS = ("--hop-seconds", "--gen-subset", "--path", "--scoring", "--task", "--user-dir")
_TIMING = re.compile(r"Translated [\d,]+ sentences .* in ([\d.]+)s")


def decode(
    data: Path,
    name: str,
    checkpoint: Path,
    folder: Path,
    *,
    hop: float = 0.010,
    flags: Sequence[object] = ("--cpu",),
    max_tokens: int = 20000,
    threads: int = 1,
) -> tuple[list[Text], float]:
    """Runs fairseq-generate on the set `name`, once.

    Returns:
        What was understood of recordings with a text, and the throughput in seconds of audio per
        second of computation, without the reading of recordings.

    Raises:
        CommandError: if no recording has a text.
        ChildError: if the command fails.
    """

    def make(partial: Path) -> None:
        log = partial / "generate.log"
        root = read_config(str(data)).get("audio_root")
        utterances = read_manifest(str(data / f"{name}.tsv"), root, texts=False)
        if not any(utterance.text for utterance in utterances):
            raise CommandError(
                f"--data {data}: no recording of {name}.tsv has a text to compare with; "
                "fairseq-generate transcribes it"
            )
        run_module(
            "fairseq_cli.generate",
            *(data, "--user-dir", USER_DIR, "--task", "cape_asr", "--path", checkpoint),
            *("--gen-subset", name, "--scoring", "cape_wer", "--max-tokens", max_tokens),
            *("--hop-seconds", hop, *flags),
            log=log,
            env=child_environment(threads),
        )
        write_lines(partial / DECODED, _decoded(log, utterances))

    settings = {"checkpoint": digest(checkpoint), "set": digest(data / f"{name}.tsv"), "hop": hop}
    settings |= {"flags": [str(flag) for flag in flags], "max_tokens": max_tokens}
    step(folder, settings, make)
    seconds, *lines = (folder / DECODED).read_text("utf-8").split("\n")[:-1]
    texts = []
    for line in lines:
        duration, reference, hypothesis = line.split("\t")
        texts.append(Text(float(duration), reference, hypothesis))
    speed = sum(text.seconds for text in texts) / max(float(seconds), 1e-3)
    return [text for text in texts if text.reference], speed


def _decoded(log: Path, utterances: Sequence[Utterance]) -> list[str]:
    """Seconds of computation; then duration, reference and hypothesis of each recording."""
    found: dict[str, dict[int, str]] = {"T": {}, "H": {}}
    seconds = None
    with open(log, encoding="utf-8", newline="\n") as file:
        for line in file:
            label, *fields = line.rstrip("\n").split("\t")
            kind, _, number = label.partition("-")
            if kind in found and number.isdecimal():
                found[kind][int(number)] = fields[-1] if fields else ""
            if match := _TIMING.search(line):
                seconds = match[1]
    scored = {index for index in found["H"] if utterances[index].text}
    if seconds is None or found["T"].keys() != scored or not scored:
        raise ChildError(f"{log}: not a complete log of fairseq-generate")
    rows = (
        (f"{utterances[index].seconds:.3f}", utterances[index].text, hypothesis)
        for index, hypothesis in sorted(found["H"].items())
    )
    return [seconds, *("\t".join(row) for row in rows)]


def hop_curve(
    data: Path, name: str, checkpoint: Path, folder: Path, hops: Sequence[float], **options: object
) -> list[tuple[float, float, float]]:
    """Hop, word error rate in percent and throughput, for each hop (CAPE Figure 17)."""
    points = []
    for hop in hops:
        texts, speed = decode(
            data, name, checkpoint, folder / f"hop-{1000 * hop:g}ms", hop=hop, **options
        )
        points.append((hop, rates(texts).wer, speed))
    return points


def write_hops(
    output: Path, curves: dict[str, list[tuple[float, float, float]]], facts: dict[str, str]
) -> None:
    """``hops.csv``, ``hops.md`` and ``hops.png``."""
    with writing(output / "hops.csv") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["model", "hop_ms", "wer", "audio_seconds_per_second"])
        for name, points in curves.items():
            for hop, wer, speed in points:
                table.writerow([name, f"{1000 * hop:g}", f"{wer:.4f}", f"{speed:.2f}"])
    hops = [f"{1000 * hop:g} ms" for hop, *_ in next(iter(curves.values()))]
    lines = ["# Word error rate and throughput by hop", ""]
    lines += [f"- **{name}**: {value}" for name, value in facts.items()]
    for title, place, digits in (
        ("Word error rate, %", 1, 2),
        ("Seconds of audio per second of computation", 2, 0),
    ):
        lines += ["", f"## {title}", "", f"| model | {' | '.join(hops)} |"]
        lines.append("|---" * (len(hops) + 1) + "|")
        lines += [
            f"| {name} | {' | '.join(f'{point[place]:.{digits}f}' for point in points)} |"
            for name, points in curves.items()
        ]
    write_lines(output / "hops.md", lines)
    write_hop_plot(output / "hops.png", curves)


def check_bins(bins: Sequence[float]) -> None:
    """Upper ends of bins must increase."""
    if list(bins) != sorted(set(bins)) or not all(0 < end < float("inf") for end in bins):
        shown = " ".join(f"{end:g}" for end in bins)
        raise CommandError(f"--bins {shown}: allowed: increasing seconds above 0, such as 10 15 20")


def calm_logging() -> None:
    """Warnings only: importing fairseq makes every library of the program log all it does."""
    logging.getLogger().setLevel(logging.WARNING)


def milliseconds(text: str) -> float:
    """Argument type: a hop of 1 to 100 ms, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a hop of 1 to 100 ms, such as 10")
    return value / 1000


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.asr.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags go to fairseq-generate, such as --fp16 or --ctc-beam 50.",
    )
    add = parser.add_argument
    add("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT")
    add("--data", type=Path, required=True, help="folder with manifests and dict.txt")
    add("--sets", nargs="+", default=["test"], metavar="NAME", help="manifests (default: test)")
    text = "upper ends of the bins of durations (default: 10 15 20)"
    add("--bins", nargs="+", type=float, default=BINS, metavar="SECONDS", help=text)
    text = "also decode at these hops, and plot word error rate against throughput"
    add("--hops", nargs="+", type=milliseconds, metavar="MS", help=text)
    add("--max-tokens", type=positive, default=20000, help="frames of a batch (default: 20000)")
    add("--threads", type=positive, default=1, help="(default: 1)")
    add("--gpu", action="store_true", help="decode on the GPU")
    add("--work", type=Path, default=Path("build/asr/decoded"), help="(default: %(default)s)")
    add("--output", type=Path, default=Path("results/asr"), help="(default: %(default)s)")
    args, args.flags = parser.parse_known_args(argv)
    if given := [flag for flag in OWN_FLAGS if flag in args.flags]:
        raise CommandError(
            f"{given[0]} is set by this command; see --sets, --hops and --max-tokens"
        )
    check_bins(args.bins)
    for path in args.checkpoints:
        if not path.is_file():
            raise CommandError(f"{path}: no such checkpoint")
    for name in args.sets:
        if not (args.data / f"{name}.tsv").is_file():
            raise CommandError(f"--sets {name}: there is no {args.data / name}.tsv")
    if not args.gpu:
        args.flags.append("--cpu")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """The command; see the module docstring."""
    calm_logging()
    args = parse_arguments(argv)
    options = {"flags": args.flags, "max_tokens": args.max_tokens, "threads": args.threads}
    facts = {"Machine": f"{machine()}; threads {args.threads}", "Versions": versions(PACKAGES)}
    facts["Flags"] = f"`{' '.join(args.flags)}`"
    names = [path.parent.name for path in args.checkpoints]
    names = names if len(set(names)) == len(names) else list(map(str, args.checkpoints))
    models = {name: str(path) for name, path in zip(names, args.checkpoints, strict=True)}
    for name in args.sets:
        results, curves = [], {}
        for model, path in zip(names, args.checkpoints, strict=True):
            folder = args.work / digest(path) / name
            texts, _ = decode(args.data, name, path, folder / "hop-10ms", **options)
            results.append(Result(model, None, None, by_duration(texts, args.bins)))
            if args.hops:
                curves[model] = hop_curve(args.data, name, path, folder, args.hops, **options)
        labels = list(results[0].scores)
        output = args.output / name
        write_csv(output / "scores.csv", results)
        write_markdown(output / "scores.md", f"Set {name}", results, labels, facts, models)
        write_plot(output / "scores.png", results, [one for one in labels if one != ALL], 0)
        if curves:
            write_hops(output, curves, facts)
        print((output / "scores.md").read_text("utf-8"))
        print(f"tables and plots: {output}", flush=True)


if __name__ == "__main__":
    run_main(main)
