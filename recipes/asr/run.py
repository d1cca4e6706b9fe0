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

from fairseq_user_dir.asr.manifest import read_manifest
from recipes.asr import prepare
from recipes.asr.evaluate import PACKAGES, SECONDS, calm_logging, measure
from recipes.asr.report import write_report
from recipes.lab import options
from recipes.lab.options import position_flags
from recipes.lab.runs import SEED_STEP, run_all, train
from recipes.lab.steps import CommandError, digest, folder_name, run_main
from recipes.lab.tables import Row, how_made, shown_command


class Recipe(NamedTuple):
    train: str  # flags of fairseq-train
    updates: int
    bins: tuple[float, ...]  # upper ends of the bins of durations in seconds
    preset: str | None = None  # settings of CAPE for this corpus, among the types


# Small models for strings of digits, trained in a minute on one CPU core.
SMALL = """--arch cape_ctc_transformer_tiny --optimizer adam --adam-betas (0.9,0.98)
    --weight-decay 0.05 --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 100
    --max-tokens 4000 --frequency-mask-width 20 --time-masks 2
    --cpu --num-workers 0 --disable-validation --no-epoch-checkpoints"""

# The same for few recordings of real speakers at 8 kHz: smaller batches, and no SpecAugment, with
# which so short a training learns next to nothing.
DIGITS = SMALL.replace("--max-tokens 4000", "--max-tokens 1500").replace("0.003", "0.005")
DIGITS = f"{DIGITS} --no-spec-augment"

# CAPE Appendix C, on 16 GPUs: 36 layers of 768, Adagrad, 240 seconds per GPU. The paper trains for
# a time, not for a number of updates.
PAPER = """--arch cape_ctc_transformer --optimizer adagrad --lr 0.01 --lr-scheduler fixed
    --clip-norm 0.1 --max-tokens 24000 --target-norm --num-workers 4
    --best-checkpoint-metric wer --batch-size-valid 1 --keep-last-epochs 1"""
WSJ = f"""{PAPER} --attention-dropout 0.4 --activation-dropout 0.4 --encoder-layerdrop 0.4
    --warmup-updates 35000 --spec-augment-start 5000"""
TEDLIUM = f"""{PAPER} --attention-dropout 0.1 --activation-dropout 0.1 --encoder-layerdrop 0.1
    --warmup-updates 45000 --spec-augment-start 20000 --frequency-mask-width 20
    --time-mask-width 30"""

RECIPES = {
    "small": Recipe(SMALL, 600, (1, 2, 4, 8, 16)),
    "digits": Recipe(DIGITS, 1000, (1, 2, 4, 8, 16)),
    "wsj": Recipe(WSJ, 200000, (10, 15, 20), "cape_wsj"),
    "tedlium3": Recipe(TEDLIUM, 500000, (10, 15, 20), "cape_tedlium"),
    # not in the paper; settings of TED-LIUM
    "librispeech": Recipe(TEDLIUM, 500000, (10, 15, 20), "cape_tedlium"),
}

SINPOS, CAPE = {"type": "sinpos"}, {"type": "cape"}
PAPER_TYPES = ("nopos", "sinpos", "abspos", "relpos", "shape", "cape")
RELPOS = options.of_papers("relpos_wsj")["relpos"]
# Each study is one figure of the paper; the position embedding of each of its models.
STUDIES: dict[str, dict[str, options.Settings]] = {
    "types": {name: {"type": name} for name in PAPER_TYPES},
    "relpos": {  # Figures 4, 20 and 21: contexts of 27 and 6 seconds at 30 ms
        "relpos": RELPOS,
        "relpos-6s": {**RELPOS, "relative_context": 199},
        "relpos-first": options.of_papers("relpos_first_wsj")["relpos"],
        "cape": CAPE,
    },
    # Figure 7
    "augmentation": {"baseline": SINPOS, "+CAPE": CAPE, "+SpecAug": SINPOS, "+CAPE +SpecAug": CAPE},
    "shift": {  # Figure 18: global shifts that cover 15, 30, 60 seconds
        f"covers-{2 * half:g}s": {**CAPE, "max_global_shift": half} for half in (7.5, 15.0, 30.0)
    },
    # Figure 19
    "local": {"global-and-local": CAPE, "global-only": {**CAPE, "max_local_shift": 0}},
    "scale": {  # Figures 20 and 21
        f"scale-{scale:g}": {**CAPE, "max_global_scale": scale} for scale in (1, 1.1, 1.4, 2, 3)
    },
}
WITHOUT_SPEC_AUGMENT = ("baseline", "+CAPE")
# What they add to a model's name, and to its flags
BATCHES = {"padded": ("", ""), "padding-free": (" (padding-free)", " --padding-free")}


class Model(NamedTuple):
    name: str  # in tables
    flags: str
    seed: int


def models(args: argparse.Namespace) -> list[Model]:
    rows, preset = STUDIES[args.study], RECIPES[args.recipe].preset
    if preset and rows is STUDIES["types"]:
        rows = rows | options.of_papers(preset)
    compared = options.settings_to_compare(args, "audio", list(rows), rows)
    return [
        Model(f"{name}{suffix}", position_flags(settings) + no_masks + flags, seed)
        for seed in args.seeds
        for name, settings in compared.items()
        for no_masks in (" --no-spec-augment" * (name in WITHOUT_SPEC_AUGMENT),)
        for suffix, flags in map(BATCHES.get, args.batches)
    ]


def run_model(args: argparse.Namespace, model: Model) -> tuple[list[Row], list[Row]]:
    """Trains one model; scores it by duration and hop."""
    recipe = RECIPES[args.recipe]
    folder = args.work / "runs" / f"{folder_name(model.name)}-seed{model.seed}"
    flags = ["--task", "cape_asr", "--criterion", "cape_ctc", *shlex.split(recipe.train)]
    flags += ["--max-update", args.updates, "--seed", model.seed * SEED_STEP]
    if "polynomial_decay" in flags:
        flags += ["--total-num-update", args.updates]
    flags += [*shlex.split(model.flags), *args.fairseq]
    corpus = {"corpus": digest(args.data / "train.tsv")}
    title = f"{model.name} seed {model.seed}"
    seconds = train(args.data, folder, flags, corpus, threads=args.threads, title=title)
    best = folder / "checkpoint_best.pt"
    checkpoint = best if best.is_file() else folder / "checkpoint_last.pt"
    shared = [word for word in ("--cpu", "--fp16") if word in flags]
    columns = {"model": model.name, "seed": model.seed, "train_seconds": seconds}
    place = (args.data, args.test, checkpoint, folder / args.test)
    hops = args.hops if model.seed == args.seeds[0] else ()
    return measure(columns, place, args.bins, hops, flags=shared, threads=args.threads)


def make_parser() -> argparse.ArgumentParser:
    epilog = "Flags behind -- go to fairseq-train."
    parser = options.new_parser(__doc__, epilog=epilog)
    add = parser.add_argument
    add("--data", type=Path, help="folder of recipes.asr.prepare (default: synthetic speech)")
    text = "settings of the models (default: small; digits; wsj, tedlium3, librispeech need GPUs)"
    add("--recipe", choices=RECIPES, default="small", help=text)
    add("--study", choices=STUDIES, default="types", help="(default: types)")
    rows = dict.fromkeys(name for study in STUDIES.values() for name in study)
    options.add_compared(parser, "audio", list(STUDIES["types"]), "--models", rows=list(rows))
    text = "padded and padding-free (default: padded)"
    add("--batches", nargs="+", choices=BATCHES, default=["padded"], help=text)
    options.add_shared(parser, "seeds", default=[1])
    options.add_shared(parser, "updates", shown="those of the recipe")
    add("--test", default="test", metavar="NAME", help="manifest of the test set (default: test)")
    text = "upper ends of the bins of durations (default: those of the recipe)"
    add("--bins", nargs="+", type=SECONDS, metavar="SECONDS", help=text)
    options.add_shared(parser, "hops", note="by the models of the first seed")
    options.add_shared(parser, "jobs", default=options.available_cores())
    options.add_shared(parser, "threads", default=1)
    options.add_shared(parser, "work", shown="build/asr/STUDY")
    options.add_shared(parser, "output", shown="results/asr/STUDY")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    place = [*argv, "--"].index("--")
    args = make_parser().parse_args(argv[:place])
    args.fairseq = argv[place + 1 :]
    recipe = RECIPES[args.recipe]
    args.bins, args.updates = args.bins or recipe.bins, args.updates or recipe.updates
    options.check_increasing(args.bins, "--bins")
    args.models = models(args)
    args.work = args.work or Path("build/asr") / args.study
    args.output = args.output or Path("results/asr") / args.study
    options.check_shared(args)
    if args.data is None:
        args.data = Path("build/asr/synthetic")
        prepare.main(["synthetic", "--output", str(args.data)])
    for name in ("train", args.test):
        if not (args.data / f"{name}.tsv").is_file():
            remedy = "prepare a corpus by python -m recipes.asr.prepare, and name other test sets"
            raise CommandError(f"--data {args.data}: there is no {name}.tsv; {remedy} by --test")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    calm_logging()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    wanted, updates = args.models, f"{args.updates} updates"
    print(f"{len(wanted)} trainings of {updates}, {args.jobs} side by side", flush=True)
    parts = run_all([partial(run_model, args, model) for model in wanted], args.jobs)
    longest = max(line.seconds for line in read_manifest(str(args.data / "train.tsv")))
    facts = how_made(
        shown_command("python -m recipes.asr.run", argv),
        PACKAGES,
        side_by_side=f"{args.jobs} trainings, threads {args.threads}",
        corpus=f"{args.data.name}; training recordings up to {longest:.1f} s",
        training=f"{updates}; `{' '.join(RECIPES[args.recipe].train.split())}`",
    )
    flags = {model.name: model.flags for model in wanted}
    title = f"Speech recognition, study {args.study}"
    write_report(args.output, title, parts, flags, facts, args.bins, longest)


if __name__ == "__main__":
    run_main(main)
