"""Trains speech models of fairseq that differ in their positions, and compares them by duration.

    python -m recipes.asr.run                                # synthetic speech; six types
    python -m recipes.asr.run --batches padded padding-free --seeds 1 2 3
    python -m recipes.asr.run --data data/digits --recipe digits --study shift
    python -m recipes.asr.run --compare cape sinpos --hops 5 8 10 12 16 20
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
from recipes.asr.evaluate import MILLISECONDS, PACKAGES, calm_logging, decode, hop_rows
from recipes.asr.report import METRICS, by_duration, describe_models, in_training, write_hops
from recipes.lab.options import (
    add_shared,
    available_cores,
    check_increasing,
    check_shared,
    new_parser,
    positive,
)
from recipes.lab.runs import run_all, train
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError, digest, run_main
from recipes.lab.tables import Row, how_made, shown_command


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
        for name in args.compare or study
        for batches in args.batches
    ]


def run_model(args: argparse.Namespace, model: Model) -> tuple[list[Row], list[Row]]:
    """Trains one model, decodes the test set, scores it by duration; then at other hops."""
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
    texts, _ = decode(args.data, args.test, checkpoint, decoded, **options)
    columns = {"model": model.name, "seed": model.seed, "train_seconds": seconds}
    rows = [columns | row for row in by_duration(texts, args.bins)]
    hops = args.hops if args.hops and model.seed == args.seeds[0] else ()
    curve = hop_rows(args.data, args.test, checkpoint, decoded, hops, **options)
    return rows, [{"model": model.name, **row} for row in curve]


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    epilog = "Flags behind -- go to fairseq-train."
    parser = new_parser(__doc__, "recipes.asr.run", epilog=epilog)
    add = parser.add_argument
    add("--data", type=Path, help="folder of recipes.asr.prepare (default: synthetic speech)")
    text = "settings of the models (default: small; digits; wsj, tedlium3, librispeech need GPUs)"
    add("--recipe", choices=RECIPES, default="small", help=text)
    add("--study", choices=STUDIES, default="types", help="(default: types)")
    add_shared(parser, "compare", "--models", help="only these models of the study")
    text = "padded and padding-free (default: padded)"
    add("--batches", nargs="+", choices=BATCHES, default=["padded"], help=text)
    add_shared(parser, "seeds", default=[1])
    add("--updates", type=positive, help="training steps (default: those of the recipe)")
    add("--test", default="test", metavar="NAME", help="manifest of the test set (default: test)")
    text = "upper ends of the bins of durations (default: those of the recipe)"
    add("--bins", nargs="+", type=float, metavar="SECONDS", help=text)
    text = "also decode at these hops, by the models of the first seed"
    add("--hops", nargs="+", type=MILLISECONDS, metavar="MS", help=text)
    add_shared(parser, "jobs", default=available_cores())
    add_shared(parser, "threads", default=1)
    text = "folder for data and checkpoints, reused (default: build/asr/STUDY)"
    add_shared(parser, "work", help=text)
    add_shared(parser, "output", help="tables and figures (default: results/asr/STUDY)")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    own, fairseq = argv, []
    if "--" in argv:
        place = list(argv).index("--")
        own, fairseq = argv[:place], list(argv[place + 1 :])
    args = make_parser().parse_args(own)
    args.fairseq = fairseq
    unknown = [name for name in args.compare or () if name not in STUDIES[args.study]]
    if unknown:
        names = ", ".join(STUDIES[args.study])
        raise CommandError(f"--compare {unknown[0]}: study {args.study} has {names}")
    recipe = RECIPES[args.recipe]
    args.bins, args.updates = args.bins or recipe.bins, args.updates or recipe.updates
    check_increasing(args.bins, "--bins")
    args.work = args.work or Path("build/asr") / args.study
    args.output = args.output or Path("results/asr") / args.study
    check_shared(args)
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
    """Runs the command; see the module docstring."""
    calm_logging()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    wanted = models(args)
    print(
        f"{len(wanted)} trainings of {args.updates} updates, {args.jobs} side by side", flush=True
    )
    parts = run_all([partial(run_model, args, model) for model in wanted], args.jobs)
    names = list(dict.fromkeys(model.name for model in wanted))
    rows, hops = (
        sorted((row for part in column for row in part), key=lambda row: names.index(row["model"]))
        for column in zip(*parts, strict=True)
    )
    longest = max(line.seconds for line in read_manifest(str(args.data / "train.tsv")))
    facts = how_made(
        shown_command("python -m recipes.asr.run", argv),
        PACKAGES,
        side_by_side=f"{args.jobs} trainings, threads {args.threads}",
        corpus=f"{args.data.name}; training recordings up to {longest:.1f} s",
        training=f"{args.updates} updates; `{' '.join(RECIPES[args.recipe].train.split())}`",
    )
    write_scores(
        args.output,
        f"Speech recognition, study {args.study}",
        rows,
        "duration",
        METRICS,
        facts,
        trained=in_training(rows, args.bins, longest),
        more=describe_models(rows, {model.name: model.flags for model in wanted}),
    )
    if hops:
        write_hops(args.output, hops, facts)


if __name__ == "__main__":
    run_main(main)
