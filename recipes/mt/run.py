"""Runs the translation recipes of the CAPE and SHAPE papers; each recipe is a row of
recipes/mt/catalog.py.

    python -m recipes.mt.run wmt14_en_de prepare --train train.en train.de --valid ... --test ...
    python -m recipes.mt.run wmt14_en_de train select decode score
    python -m recipes.mt.run wmt14_en_de train select decode score --position-embedding sinpos
    python -m recipes.mt.run wmt14_en_de all --compare sinpos cape:max_global_shift=10 --seeds 1 2 3
    python -m recipes.mt.run wmt16_en_de_extrapolate train select validate \\
        --compare shape:max_offset=10 shape:max_offset=40 shape:max_offset=100 shape
    python -m recipes.mt.run wmt14_en_de all --sample
    python -m recipes.mt.run wmt14_en_de all --dry-run

Stages: prepare (text to binary data), train, select (the best epoch by validation BLEU, or the
average of the last checkpoints), decode (test sets), score (sacreBLEU, and the papers' BLEU of
tokens); "all" means these five. More: validate (scores of the validation text, file by file, SHAPE
table 5; for several settings, their order by these scores, SHAPE appendix B), curve (validation
perplexity by updates and by elapsed time, and training time, SHAPE appendix E), stack (loss by
position on stacked sentences, CAPE figure 8), swap (another order of joined sentences, SHAPE table
1), analyze (the analyses of recipes.mt.analyze on the first test set, for all trainings together).

All other options go to fairseq-train and replace flags of the recipe. Finished work is reused, and
an interrupted training continues. --sample checks the whole recipe: it trains a tiny model for a
few updates, on built-in number lists if no files are named.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path

from cape_plugins.utils.machine import available_cores
from recipes.lab import command_line, runs, steps, tables
from recipes.lab.command_line import add_shared, int_at_least, positive
from recipes.lab.steps import CommandError, recorded
from recipes.mt import analyze
from recipes.mt.catalog import RECIPES, Recipe, sampled
from recipes.mt.corpus import Pair, languages_of
from recipes.mt.experiment import Experiment, train_flags
from recipes.mt.reports import write_all_scores, write_curves
from recipes.mt.scoring import sacrebleu

__all__ = ["Experiment", "main", "parse_arguments", "train_flags"]

PACKAGES = ("torch", "fairseq-fixed", "sacrebleu")
STAGES = ("prepare", "train", "select", "decode", "score")
SCORED = ("score", "validate")  # stages that return rows for the page of all trainings
PROBES = ("stack", "swap")
SPLITS, SIDES = ("train", "valid", "test"), ("source", "target")
LONGEST_STACK = 6  # number of joined sentences, for the analysis by length
TOGETHER = ("curve", "analyze")  # stages that run for all trainings together
MORE = ("validate", *PROBES, *TOGETHER)


def language(text: str) -> str:
    """Argument type: a code that fairseq accepts as the name of a language."""
    if not re.fullmatch(r"\w+", text):
        why = f"{text!r} is not the name of a language; allowed: letters, digits and _, such as de"
        raise argparse.ArgumentTypeError(why)
    return text


def make_parser() -> command_line.Parser:
    parser = command_line.new_parser(__doc__)
    parser.add_argument("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    stage_names = [*STAGES, "all", *MORE]
    parser.add_argument(
        "stages", nargs="+", choices=stage_names, metavar="STAGE", help=", ".join(stage_names)
    )
    texts = (
        "training text, plain or .gz; if the option is repeated, the files are concatenated",
        "validation text, likewise (default: every n-th line of the training text)",
        "test text; if the option is repeated, each pair of files is a test set (default: other "
        "n-th lines)",
    )
    pair = {"nargs": 2, "type": Path, "action": "append", "metavar": ("SOURCE", "TARGET")}
    for split, text in zip(SPLITS, texts, strict=True):
        parser.add_argument(f"--{split}", **pair, default=[], help=text)
    for side in SIDES:
        parser.add_argument(
            f"--{side}-lang",
            type=language,
            metavar="LANG",
            help=f"language of the {side} text, part of the names of the data (default: the "
            "language of WORK, or of the recipe)",
        )
    command_line.add_compared(parser, "text", "the type of the recipe")
    add_shared(parser, "seeds", shown="one training, with the seed of the recipe")
    parser.add_argument(
        "--name",
        help="name of a single training, a folder under WORK/runs (default: TYPE, or TYPE-seedN)",
    )
    add_shared(parser, "jobs", default=1)
    add_shared(parser, "work", shown="build/RECIPE")
    add_shared(parser, "device")
    _add_changes(parser)
    cores = available_cores()
    add_shared(parser, "threads", default=cores)
    parser.add_argument(
        "--workers",
        type=positive,
        default=cores,
        metavar="N",
        help=f"processes for preparation (default: {cores})",
    )
    parser.add_argument(
        "--sample", action="store_true", help="check the whole recipe at a tiny scale"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the commands of train, select and decode, whatever stages are named; run "
        "nothing",
    )
    return parser


def _add_changes(parser: command_line.Parser) -> None:
    """Adds options that replace settings of the recipe."""
    parser.add_argument(
        "--devices",
        type=positive,
        help="GPUs that share an update, for the accumulation steps (default: all there are)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, help="tokens per device and step (default: the paper's)"
    )
    add_shared(parser, "beam", shown="the paper's")
    add_shared(parser, "length-penalty", shown="the paper's")
    parser.add_argument(
        "--max-epoch",
        type=int_at_least,
        dest="epochs",
        metavar="N",
        help="largest number of training epochs (default: the recipe's number; recipes that end "
        "by updates have no limit)",
    )
    parser.add_argument(
        "--select", choices=("best", "average"), help="checkpoint choice (default: the paper's)"
    )
    parser.add_argument(
        "--first-epoch", type=positive, help="first epoch to consider for --select best"
    )
    parser.add_argument(
        "--average", type=positive, help="number of checkpoints for --select average"
    )


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of this program, and the remaining flags, which go to fairseq-train. The options
    include ``settled``, the recipe, and ``compared``, settings by name."""
    parser = make_parser()
    args, extra = parser.parse_known_args(argv)
    if "all" in args.stages:
        args.stages = [*STAGES, *(name for name in MORE if name in args.stages)]
    if "prepare" in args.stages and not args.train and not args.dry_run:
        if not args.sample:
            parser.error("--train: name the training text, or try the recipe with --sample")
        if args.valid or args.test:
            parser.error("--valid and --test need --train: name the training text, too")
    folder = f"{args.recipe}-sample" if args.sample else args.recipe
    args.work = args.work or Path("build") / folder
    command_line.check_shared(args)
    recipe = args.settled = settle_recipe(args)
    if recipe.select == "best" and recipe.epochs and recipe.first_epoch > recipe.epochs:
        why = f"allowed: at most {recipe.epochs}, the epochs of training (--max-epoch)"
        raise CommandError(f"--first-epoch {recipe.first_epoch}: {why}")
    args.compared = command_line.settings_to_compare(
        args, "text", [recipe.position], recipe.positions
    )
    if args.name and max(len(args.compared), len(args.seeds or ())) > 1:
        raise CommandError(f"--name {args.name}: names a single training; leave the option out")
    return args, extra


def settle_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with the changes of the command line."""
    recipe = sampled(RECIPES[args.recipe]) if args.sample else RECIPES[args.recipe]
    languages = settle_languages(args, recipe.languages)
    if languages != recipe.languages:
        title = f"{recipe.title}, here {' to '.join(languages)}"
        recipe = replace(recipe, languages=languages, title=title)
    names = ["max_tokens", "epochs", "beam", "length_penalty", "select", "first_epoch", "average"]
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.select == "best":
        changes["keep"] = "epoch"
    return replace(recipe, **changes)


def settle_languages(args: argparse.Namespace, of_recipe: Pair) -> Pair:
    """The languages of the options; if there are none, the languages of the prepared text, or else
    of the recipe. Refuses text whose file names show other languages. File names do not choose the
    languages, because a pair of files in the wrong order would not be noticed."""
    made_with = recorded(args.work / "text")
    prepared = tuple(made_with["languages"]) if made_with else of_recipe
    chosen = args.source_lang, args.target_lang
    languages = tuple(code or default for code, default in zip(chosen, prepared, strict=True))
    if languages[0] == languages[1]:
        raise CommandError(
            f"{language_flags(languages)}: both languages are the same; give the languages of the "
            "text"
        )
    if made_with and languages != prepared:
        has, wanted = (" to ".join(codes) for codes in (prepared, languages))
        why = f"its text is {has}, not {wanted}; give another --work folder"
        raise CommandError(f"--work {args.work}: {why}")
    for split, paths in ((s, paths) for s in SPLITS for paths in getattr(args, s)):
        named = languages_of(*paths)
        # an option may spell the language differently; longer endings, such as .src, are not
        # language codes
        checked = [n for n, code in enumerate(named) if len(code) == 2 and not chosen[n]]
        if any(named[n] != languages[n] for n in checked):
            by_name, has = (" and ".join(codes) for codes in (named, languages))
            raise CommandError(
                f"--{split} {paths[0]} {paths[1]}: by their names {by_name}, but {args.recipe} "
                f"has {has}; give {language_flags(named)}, or the languages of the two files"
            )
    sacrebleu(languages[1])  # an error now, and not after the training
    return languages


def language_flags(languages: Pair) -> str:
    return " ".join(f"--{s}-lang {code}" for s, code in zip(SIDES, languages, strict=True))


def run_stages(training: Experiment, stages: Sequence[str]) -> list[tables.Row]:
    """Runs the stages of one training; returns the rows of the stages that score."""
    rows_by_stage = [(stage, getattr(training, stage)()) for stage in stages]
    return [row for stage, rows in rows_by_stage if stage in SCORED for row in rows]


def analyze_all(args: argparse.Namespace, trainings: Sequence[Experiment]) -> None:
    """Runs the analyses that fit the recipe on its first test set: ``WORK/analysis``."""
    recipe, models = args.settled, {}
    for training in trainings:  # no "=" in a name of recipes.mt.analyze
        models.setdefault(training.name.replace("=", " "), []).append(str(training.selected))
    shared = ["--model", *(f"{name}={','.join(paths)}" for name, paths in models.items())]
    shared += ["--test", *(args.work / "text" / f"test.{code}" for code in recipe.languages)]
    shared += ["--output", args.work / "analysis", "--device", args.device]
    decoding = ["--beam", recipe.beam, "--length-penalty", recipe.length_penalty]
    if recipe.join > 1:
        commands = [["swap", *shared, *decoding, "--join", recipe.join]]
    else:
        stacked = ["--stack", *map(str, range(1, 1 + LONGEST_STACK))]
        length = ["length", *shared, *decoding]
        target = ["--target-tokens", recipe.stacked_length]
        commands = [["stack", *shared, *target], length, [*length, *stacked]]
    for command in commands:
        analyze.main(command)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, args.extra = parse_arguments(argv)
    trainings = [
        Experiment(args, name, settings, seed)
        for (name, settings), seed in product(args.compared.items(), args.seeds or [None])
    ]
    if args.dry_run or "train" in args.stages:
        for training in {training.name: training for training in trainings}.values():
            runs.check_flags([*training.train_flags, *training.device_flags])
    if args.dry_run:
        print("\n".join(line for training in trainings for line in training.commands()))
        return
    if "prepare" in args.stages:
        trainings[0].prepare()
    each = ("train", "select", "validate", "decode", "score", *PROBES)
    stages = [stage for stage in each if stage in args.stages]
    jobs = [partial(run_stages, training, stages) for training in trainings]
    scores = list(chain.from_iterable(runs.run_all(jobs, args.jobs)))
    command = tables.shown_command("python -m recipes.mt.run", argv)
    if len(trainings) > 1 and scores:
        facts = tables.how_made(command, PACKAGES)
        write_all_scores(args.work, scores, args.compared, facts)
    if "curve" in args.stages:
        facts = tables.how_made(command, PACKAGES, trainings=f"{args.jobs} at a time")
        write_curves(args.work, trainings, facts)
    if "analyze" in args.stages:
        analyze_all(args, trainings)


if __name__ == "__main__":
    steps.run_main(main)
