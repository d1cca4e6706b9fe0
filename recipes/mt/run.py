"""The translation recipes of the CAPE and SHAPE papers: one program, a recipe is a row of data.

    python -m recipes.mt.run wmt14_en_de prepare --train train.en train.de --valid ... --test ...
    python -m recipes.mt.run wmt14_en_de train select decode score
    python -m recipes.mt.run wmt14_en_de train select decode score --position-embedding sinpos
    python -m recipes.mt.run wmt14_en_de all --sample

Stages: prepare (text to binary data), train, select (the best epoch by validation BLEU, or the
average of the last checkpoints), decode (test sets), score (sacreBLEU, and the papers' BLEU of
tokens); "all" means these five. Further tests: stack (loss by position on stacked sentences, CAPE
figure 8) and swap (another order of joined sentences, SHAPE table 1).

Options this program does not know go to fairseq-train and win over those of the recipe. Finished
work is reused, an interrupted training goes on. --sample runs a tiny model for a few updates, on
built-in number lists where no files are given: a check of the whole recipe.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from cape_plugins.config import TYPES
from recipes.lab import runs
from recipes.lab.options import add_shared, available_cores, check_shared, new_parser, positive
from recipes.lab.steps import run_main
from recipes.mt import stages
from recipes.mt.catalog import RECIPES, Recipe, sampled
from recipes.mt.prepare import prepare

STAGES = {name: getattr(stages, name) for name in ("train", "select", "decode", "score")}
PROBES = {name: getattr(stages, name) for name in ("stack", "swap")}
GPU_FLAGS = ["--fp16", "--fp16-scale-window", "256"]
GPU_TRAIN_FLAGS = ["--threshold-loss-scale", "0.03125"]
CPU_FLAGS = ["--cpu"]


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the rest, which is for fairseq-train."""
    parser = new_parser(__doc__, "recipes.mt.run")
    add = parser.add_argument
    add("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    stage_names = ["prepare", *STAGES, "all", *PROBES]
    add("stages", nargs="+", choices=stage_names, metavar="STAGE", help=", ".join(stage_names))
    pair = {"nargs": 2, "type": Path, "action": "append", "metavar": ("SOURCE", "TARGET")}
    text = "training text, plain or .gz; may be given several times, files are concatenated"
    add("--train", **pair, default=[], help=text)
    text = "validation text, likewise (default: every n-th line of the training text)"
    add("--valid", **pair, default=[], help=text)
    text = "test text; given several times, each is a test set (default: other n-th lines)"
    add("--test", **pair, default=[], help=text)
    text = "position embedding: %(choices)s (default: that of the recipe)"
    add("--position-embedding", choices=TYPES, metavar="TYPE", help=text)
    text = "name of this training, a folder under WORK/runs (default: the position embedding)"
    add("--name", help=text)
    add_shared(parser, "work", help="folder for everything (default: build/RECIPE)")
    text = "GPUs that share an update, for the accumulation steps (default: all there are)"
    add("--devices", type=positive, help=text)
    add("--max-tokens", type=positive, help="tokens per device and step (default: the paper's)")
    add("--beam", type=positive, help="beam size (default: the paper's)")
    text = "length penalty (default: the paper's)"
    add("--lenpen", dest="length_penalty", type=float, metavar="LENPEN", help=text)
    text = "checkpoint choice (default: the paper's)"
    add("--select", choices=("best", "average"), help=text)
    add("--first-epoch", type=positive, help="consider epochs from this one on for --select best")
    add("--average", type=positive, help="number of checkpoints for --select average")
    add_shared(parser, "threads", default=available_cores(), help="of the CPU")
    add("--workers", type=positive, default=available_cores(), help="processes for preparation")
    add("--sample", action="store_true", help="check of the whole recipe at a tiny scale")
    args, extra = parser.parse_known_args(argv)
    if "prepare" in args.stages or "all" in args.stages:
        if not args.train and not args.sample:
            parser.error("--train: name the training text, or try the recipe with --sample")
        if not args.train and (args.valid or args.test):
            parser.error("--valid and --test need --train")
    check_shared(args)
    if "all" in args.stages:
        args.stages = ["prepare", *STAGES, *(name for name in PROBES if name in args.stages)]
    return args, extra


def settle_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes."""
    recipe = sampled(RECIPES[args.recipe]) if args.sample else RECIPES[args.recipe]
    names = ("max_tokens", "beam", "length_penalty", "select", "first_epoch", "average")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.select == "best":
        changes["keep"] = "epoch"
    return replace(recipe, **changes)


def train_flags(recipe: Recipe, position: str, devices: int) -> list[str]:
    """The flags of fairseq-train that make up the recipe, without those of the user."""
    accumulate = max(1, ceil(recipe.tokens_per_update / (recipe.max_tokens * devices)))
    schedule = f"--max-tokens {recipe.max_tokens} --update-freq {accumulate}"
    if recipe.epochs:
        schedule += f" --max-epoch {recipe.epochs}"
    if recipe.updates:
        schedule += f" --max-update {recipe.updates}"
    if recipe.keep == "update":
        schedule += f" --save-interval-updates {recipe.save_every} --no-epoch-checkpoints"
        schedule += f" --keep-interval-updates {recipe.average}"
    elif recipe.select == "average":
        schedule += f" --keep-last-epochs {recipe.average}"
    elif recipe.epochs:
        schedule += f" --keep-last-epochs {recipe.epochs - recipe.first_epoch + 1}"
    position_flags = f"--position-embedding {position} {recipe.positions.get(position, '')}"
    return shlex.split(f"{recipe.train} {schedule} {position_flags}")


def main(argv: Sequence[str] | None = None) -> None:
    args, extra = parse_arguments(argv)
    recipe = settle_recipe(args)
    position = args.position_embedding or recipe.position
    work = args.work or Path("build") / (f"{args.recipe}-sample" if args.sample else args.recipe)
    if "prepare" in args.stages:
        files = {split: getattr(args, split) for split in ("train", "valid", "test")}
        prepare(recipe, files, work, args.sample, workers=1 if args.sample else args.workers)
    gpus = torch.cuda.device_count()
    flags = train_flags(recipe, position, args.devices or max(1, gpus))
    decoding = f"--beam {recipe.beam} --lenpen {recipe.length_penalty} --batch-size 128"
    experiment = stages.Experiment(
        recipe=recipe,
        work=work,
        run=work / "runs" / (args.name or position),
        train_flags=[*flags, *(GPU_TRAIN_FLAGS if gpus else []), *extra],
        device_flags=GPU_FLAGS if gpus else CPU_FLAGS,
        decode_flags=[*shlex.split(f"{decoding} {recipe.max_length}"), *runs.LIMITS],
        threads=args.threads,
    )
    for name, stage in (STAGES | PROBES).items():
        if name in args.stages:
            stage(experiment)


if __name__ == "__main__":
    run_main(main)
