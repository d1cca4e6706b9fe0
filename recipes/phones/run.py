"""Phone classification with and without position embeddings: from speech to tables and pictures.

    python -m recipes.phones.run
    python -m recipes.phones.run --compare nopos sinpos abspos relpos shape cape
    python -m recipes.phones.run --position-embedding cape --position-max-global-shift 5
    python -m recipes.phones.run --data TIMIT --paper

The built-in data are random words read by espeak-ng. Your own are a folder of recordings with
`.PHN` (TIMIT) or `.TextGrid` (Praat) files of the same names. Without --position-embedding or
--compare the positions are the sinusoid (sinpos). Finished models in --work are reused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cape_plugins import TYPES, PositionConfig
from cape_plugins.arguments import TYPE_ARG, add_position_args
from recipes.lab.options import (
    add_shared,
    check_shared,
    new_parser,
    number,
    positive,
    settings_to_compare,
)
from recipes.lab.steps import CommandError, run_main, write_lines
from recipes.lab.tables import how_made, shown_command
from recipes.phones.data import Corpus, read_folder, synthetic
from recipes.phones.experiment import Experiment, conditions_of, run_type
from recipes.phones.model import Sizes
from recipes.phones.report import PACKAGES, write_results
from recipes.phones.train import CONDITIONS, Training

BUILTIN_SIZES = {"train_size": 2000, "dev_size": 60, "test_size": 200}  # utterances
RATE = number(1e-9, 100)
# Sizes and training: type of the option, default, and that of --paper
SETTINGS = {
    "dim": (positive, 88, 768),
    "layers": (positive, 2, 6),
    "heads": (positive, 4, 8),
    "ffn": (positive, 256, 2048),
    "dropout": (number(0, 1, below=True), 0.0, 0.1),
    "epochs": (positive, 12, 80),
    "learning_rate": (RATE, 0.1, 0.05),
}
DEFAULT = "sinpos"  # type of position embedding
LEFT_OUT = "left_out.txt"
TRAINED = ("inc", "exc", "inc-scram", "exc-scram")


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = new_parser(__doc__, "recipes.phones.run")
    add = parser.add_argument
    text = "recordings with labels beside them (default: built-in speech)"
    add("--data", type=Path, metavar="FOLDER", help=text)
    add("--tier", metavar="NAME", help="of the TextGrids (default: phones, phonemes ...)")
    for option, count in BUILTIN_SIZES.items():
        text = f"utterances of the built-in speech (default: {count})"
        add(f"--{option.replace('_', '-')}", type=positive, metavar="N", help=text)
    text = f"train several types, of {', '.join(TYPES)}, with their defaults, or with others such "
    add_shared(parser, "compare", metavar="TYPE", help=f"{text}as cape:max_global_shift=0.2")
    add_position_args(parser, "audio", DEFAULT, "encoder")
    text = f"what to train, of {', '.join(CONDITIONS)} (default: the first {len(TRAINED)})"
    add("--models", nargs="+", choices=CONDITIONS, default=TRAINED, metavar="NAME", help=text)
    add("--paper", action="store_true", help="sizes and training of the thesis")
    for option, (parse, small, paper) in SETTINGS.items():
        text = f"(default: {small}; --paper: {paper})"
        add(f"--{option.replace('_', '-')}", type=parse, metavar="X", help=text)
    text = "of the last eighth of the epochs (default: %(default)s)"
    add("--final-learning-rate", type=RATE, default=0.001, metavar="X", help=text)
    add_shared(parser, "seeds", default=[1])
    text = "positions of the similarity maps (default: %(default)s)"
    add("--similarity-length", type=positive, default=3000, metavar="FRAMES", help=text)
    add_shared(parser, "device")
    add_shared(parser, "work", default=Path("build/phones"))
    add_shared(parser, "output", default=Path("results/phones"))
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    for option, (_, small, paper) in SETTINGS.items():
        if getattr(args, option) is None:
            setattr(args, option, paper if args.paper else small)
    for option, count in BUILTIN_SIZES.items():
        if getattr(args, option) is None:
            setattr(args, option, count)
        elif args.data:
            raise CommandError(
                f"--{option.replace('_', '-')} is for the built-in speech; --data has its own sizes"
            )
    if args.tier and not args.data:
        raise CommandError("--tier needs --data, a folder with TextGrids")
    args.models, args.seeds = list(dict.fromkeys(args.models)), list(dict.fromkeys(args.seeds))
    check_shared(args)
    return args


def position_configs(args: argparse.Namespace) -> dict[str, PositionConfig]:
    """The position embeddings that are to be trained, by name."""
    if not args.compare:
        setattr(args, TYPE_ARG, getattr(args, TYPE_ARG) or DEFAULT)
    configs = {}
    for name, settings in settings_to_compare(args, "audio", [DEFAULT]).items():
        configs[name] = PositionConfig.from_dict(settings, "audio")
        if not {*args.models} & {*conditions_of(configs[name])}:
            raise CommandError(
                f"--models {' '.join(args.models)}: {name} has no positions to put in; give exc"
            )
    return configs


def load(args: argparse.Namespace) -> Corpus:
    """The data, with a word about what was left out."""
    if not args.data:
        return synthetic([getattr(args, option) for option in BUILTIN_SIZES])
    corpus = read_folder(args.data, args.tier)
    if corpus.skipped:
        write_lines(args.output / LEFT_OUT, corpus.skipped)
        print(
            f"{len(corpus.skipped)} files left out, such as {corpus.skipped[0]}; all of them and "
            f"why: {args.output / LEFT_OUT}",
            file=sys.stderr,
        )
    return corpus


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    configs = position_configs(args)
    options = {name: getattr(args, name) for name in ("dim", "layers", "heads", "ffn", "dropout")}
    sizes = Sizes(**options)
    training = Training(args.epochs, args.learning_rate, args.final_learning_rate)
    if not args.paper:
        torch.set_num_threads(1)  # so small a model gains nothing by more
    corpus = load(args)
    experiment = Experiment(corpus, sizes, training, args.work, args.device)
    print(f"{corpus.description}: {corpus.sizes()}; {len(corpus.classes)} classes", flush=True)
    more = (args.models, args.seeds, args.output, args.similarity_length)
    results = [run_type(experiment, name, config, *more) for name, config in configs.items()]
    facts = how_made(
        shown_command("python -m recipes.phones.run", argv),
        PACKAGES,
        args.device,
        threads=str(torch.get_num_threads()),
        data=f"{corpus.description}; {corpus.sizes()}; {len(corpus.classes)} classes: "
        f"{' '.join(corpus.classes)}",
        left_out=f"{len(corpus.skipped)} files"
        + (f", [why]({LEFT_OUT})" if corpus.skipped else ""),
        model=", ".join(f"{key} {value}" for key, value in options.items()),
        training=f"SGD, one utterance per step, {training.epochs} epochs, learning rate "
        f"{training.learning_rate}, in the last eighth {training.final_learning_rate}",
    )
    print("\n".join(write_results(args.output, facts, corpus.classes, results)))
    print(f"tables: {args.output}/results.md and .csv files; pictures: {args.output}/*/*.png")


if __name__ == "__main__":
    run_main(main)
