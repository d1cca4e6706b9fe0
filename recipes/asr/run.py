"""Trains speech models of fairseq that differ in their positions, and compares them by duration.

    python -m recipes.asr.run                                # synthetic speech; six types
    python -m recipes.asr.run --batches padded padding-free --seeds 1 2 3
    python -m recipes.asr.run --data data/digits --recipe digits --study shift
    python -m recipes.asr.run --models cape sinpos --hops 5 8 10 12 16 20
    python -m recipes.asr.run --data data/wsj --recipe wsj --study types -- --fp16 \\
        --distributed-world-size 16

Studies: types; relpos (contexts, first layer only); augmentation (CAPE Figure 7: CAPE and
SpecAugment); shift, local, scale (Figures 18 to 21). --hops draws word error rate against
throughput (Figure 17). All models of a run share every other setting. Finished work in --work is
reused.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cape_plugins import PRESETS
from fairseq_user_dir.asr.manifest import read_manifest
from recipes.asr import prepare
from recipes.asr.catalog import BATCHES, RECIPES, SEED_STEP, STUDIES, position_flags
from recipes.asr.evaluate import (
    PACKAGES,
    calm_logging,
    check_bins,
    decode,
    hop_curve,
    milliseconds,
    write_hops,
)
from recipes.asr.report import ALL, by_duration, write_csv, write_markdown, write_plot
from recipes.lab.options import available_cores, positive
from recipes.lab.runs import Result, run_all, train
from recipes.lab.steps import CommandError, digest, run_main
from recipes.lab.tables import machine, shown_command, versions
from recipes.mt.report import markdown_table


class Model(NamedTuple):
    """One training: its name in tables, its flags, its seed."""

    name: str
    flags: str
    seed: int


def models(args: argparse.Namespace) -> list[Model]:
    """What is to be trained."""
    study, preset = STUDIES[args.study], PRESETS.get(RECIPES[args.recipe].preset)
    if preset and study is STUDIES["types"]:
        study = {**study, preset["type"]: position_flags(preset)}
    return [
        Model(
            name if batches == "padded" else f"{name} ({batches})",
            f"{study[name]} {BATCHES[batches]}".strip(),
            seed,
        )
        for seed in args.seeds
        for name in args.models or study
        for batches in args.batches
    ]


def run_model(args: argparse.Namespace, model: Model) -> tuple[Result, list | None]:
    """Train one model, decode the test set, score it by duration; then at other hops."""
    recipe = RECIPES[args.recipe]
    folder = args.work / "runs" / f"{model.name.replace(' ', '-')}-seed{model.seed}"
    flags = ["--task", "cape_asr", "--criterion", "cape_ctc", *shlex.split(recipe.train)]
    flags += ["--max-update", args.updates, "--seed", model.seed * SEED_STEP]
    if "polynomial_decay" in flags:
        flags += ["--total-num-update", args.updates]
    flags += [*shlex.split(model.flags), *args.fairseq]
    corpus = {"corpus": digest(args.data / "train.tsv")}
    seconds = train(
        args.data,
        folder,
        flags,
        corpus,
        threads=args.threads,
        title=f"{model.name} seed {model.seed}",
    )
    best = folder / "checkpoint_best.pt"
    checkpoint = best if best.is_file() else folder / "checkpoint_last.pt"
    options = {
        "flags": [flag for flag in ("--cpu", "--fp16") if flag in flags],
        "threads": args.threads,
    }
    decoded = folder / args.test
    texts, _ = decode(args.data, args.test, checkpoint, decoded / "hop-10ms", **options)
    curve = None
    if args.hops and model.seed == args.seeds[0]:
        curve = hop_curve(args.data, args.test, checkpoint, decoded, args.hops, **options)
    scores = by_duration(texts, args.bins or recipe.bins)
    return Result(model.name, model.seed, seconds, scores), curve


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    own, fairseq = argv, []
    if "--" in argv:
        place = list(argv).index("--")
        own, fairseq = argv[:place], list(argv[place + 1 :])
    parser = argparse.ArgumentParser(
        prog="python -m recipes.asr.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags behind -- go to fairseq-train.",
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of recipes.asr.prepare (default: synthetic speech)")
    text = "settings of the models (default: small; digits; wsj, tedlium3, librispeech need GPUs)"
    add("--recipe", choices=RECIPES, default="small", help=text)
    add("--study", choices=STUDIES, default="types", help="(default: types)")
    add("--models", nargs="+", metavar="NAME", help="only these models of the study")
    text = "padded and padding-free (default: padded)"
    add("--batches", nargs="+", choices=BATCHES, default=["padded"], help=text)
    add("--seeds", nargs="+", type=positive, default=[1])
    add("--updates", type=positive, help="training steps (default: those of the recipe)")
    add("--test", default="test", metavar="NAME", help="manifest of the test set (default: test)")
    text = "upper ends of the bins of durations (default: those of the recipe)"
    add("--bins", nargs="+", type=float, metavar="SECONDS", help=text)
    text = "also decode at these hops, by the models of the first seed"
    add("--hops", nargs="+", type=milliseconds, metavar="MS", help=text)
    text = "trainings side by side (default: one per core, %(default)s)"
    add("--jobs", type=positive, default=available_cores(), help=text)
    add("--threads", type=positive, default=1, help="threads of each (default: 1)")
    text = "folder for data and checkpoints, reused (default: build/asr/STUDY)"
    add("--work", type=Path, help=text)
    text = "folder for tables and plots (default: results/asr/STUDY)"
    add("--output", type=Path, help=text)
    args = parser.parse_args(own)
    args.fairseq = fairseq
    unknown = [name for name in args.models or () if name not in STUDIES[args.study]]
    if unknown:
        names = ", ".join(STUDIES[args.study])
        raise CommandError(f"--models {unknown[0]}: study {args.study} has {names}")
    check_bins(args.bins or ())
    args.updates = args.updates or RECIPES[args.recipe].updates
    args.work = args.work or Path("build/asr") / args.study
    args.output = args.output or Path("results/asr") / args.study
    if args.data is None:
        args.data = Path("build/asr/synthetic")
        prepare.main(["synthetic", "--output", str(args.data)])
    for name in ("train", args.test):
        if not (args.data / f"{name}.tsv").is_file():
            raise CommandError(
                f"--data {args.data}: there is no {name}.tsv; prepare a corpus by "
                "python -m recipes.asr.prepare, and name other test sets by --test"
            )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """The command; see the module docstring."""
    calm_logging()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    wanted = models(args)
    print(
        f"{len(wanted)} trainings of {args.updates} updates, {args.jobs} side by side", flush=True
    )
    found = run_all([partial(run_model, args, model) for model in wanted], args.jobs)
    order = list(dict.fromkeys(model.name for model in wanted))
    results = sorted((result for result, _ in found), key=lambda one: order.index(one.variant))
    recipe = RECIPES[args.recipe]
    longest = max(one.seconds for one in read_manifest(str(args.data / "train.tsv")))
    labels = list(results[0].scores)
    plotted = [label for label in labels if label != ALL]
    edges = [0, *(args.bins or recipe.bins)]
    trained = min(sum(edge < longest for edge in edges), len(plotted))
    facts = {
        "Command": f"`{shown_command('python -m recipes.asr.run', argv)}`",
        "Machine": f"{machine()}; {args.jobs} trainings at a time, threads {args.threads}",
        "Versions": versions(PACKAGES),
        "Corpus": f"{args.data.name}; training recordings up to {longest:.1f} s",
        "Training": f"{args.updates} updates; `{' '.join(recipe.train.split())}`",
    }
    flags = {model.name: model.flags for model in wanted}
    title = f"Speech recognition, study {args.study}"
    write_csv(args.output / "scores.csv", results)
    write_markdown(args.output / "scores.md", title, results, labels, facts, flags)
    write_plot(args.output / "scores.png", results, plotted, trained)
    curves = {model.name: curve for model, (_, curve) in zip(wanted, found, strict=True) if curve}
    if curves:
        write_hops(args.output, curves, facts)
    print("\n".join(markdown_table(results, "wer", labels)))
    print(f"tables and plots: {args.output}", flush=True)


if __name__ == "__main__":
    run_main(main)
