"""Phone classification with and without position embeddings: from speech to tables and pictures.

    python -m recipes.phones.run
    python -m recipes.phones.run --compare nopos sinpos abspos relpos shape cape
    python -m recipes.phones.run --position-embedding cape --position-max-global-shift 5
    python -m recipes.phones.run --optimizer adamw --batch-size 16 --conditions inc exc \\
        --compare nopos sinpos cape --train-length 0.6 --test-lengths 2.5 10 30
    python -m recipes.phones.run --data TIMIT --paper

The built-in data are random words spoken by espeak-ng. Your own data are a folder of recordings
with `.PHN` (TIMIT) or `.TextGrid` (Praat) files of the same names. Without --position-embedding or
--compare the positions are the sinusoid (sinpos). With --train-length and --test-lengths the speech
is joined and cut, to train on short pieces and test long ones. Finished models in --work are
reused.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from cape_plugins import PositionConfig
from recipes.lab import command_line
from recipes.lab.steps import CommandError, run_main, write_lines
from recipes.lab.tables import how_made, shown_command
from recipes.phones import report
from recipes.phones.data import join_and_cut, read_folder, synthetic
from recipes.phones.measure import conditions_of, run_lengths, run_type, trained_alone
from recipes.phones.model import Sizes, stack_positions
from recipes.phones.train import CONDITIONS, OPTIMIZERS, Experiment, Training

BUILTIN_SIZES = {"train_size": 2000, "dev_size": 60, "test_size": 200}  # utterances
RATE = command_line.number(1e-9, 100)
LENGTH = command_line.number(0.01, 1e4)  # seconds
THESIS_EPOCHS, OF_EPOCHS = (10, 30, 50, 79), 80  # of attention maps (Figures 5.15 and 5.23)
# Sizes and training: type of the option, default, default with --paper
SETTINGS = {
    "dim": (command_line.positive, 88, 768),
    "layers": (command_line.positive, 2, 6),
    "heads": (command_line.positive, 4, 8),
    "ffn": (command_line.positive, 256, 2048),
    "dropout": (command_line.number(0, 1, below=True), 0.0, 0.1),
    "epochs": (command_line.positive, 12, OF_EPOCHS),
}
# (learning rate, rate in the last eighth of the epochs): default, default with --paper
RATES = {"sgd": ((0.1, 0.001), (0.05, 0.001)), "adamw": ((0.002, 0.0002), None)}
DEFAULT = ("sinpos",)  # types
LEFT_OUT = "left_out.txt"
TRAINED = ("inc", "exc", "inc-scram", "exc-scram")


def make_parser() -> argparse.ArgumentParser:
    parser = command_line.new_parser(__doc__)
    _add_data_options(parser)
    command_line.add_compared(parser, "audio", DEFAULT)
    parser.add_argument(
        "--conditions",
        nargs="+",
        choices=CONDITIONS,
        metavar="NAME",
        help=f"conditions of training, of {', '.join(CONDITIONS)} (default: the first "
        f"{len(TRAINED)}, or with --test-lengths the first two)",
    )
    _add_training_options(parser)
    _add_length_options(parser)
    parser.add_argument(
        "--attention-epochs",
        nargs="+",
        type=command_line.positive,
        metavar="N",
        help="epochs whose attention is drawn (default: 10 30 50 79 of 80, as in the thesis)",
    )
    command_line.add_shared(parser, "seeds", default=[1])
    parser.add_argument(
        "--similarity-length",
        type=command_line.positive,
        default=3000,
        metavar="FRAMES",
        help="positions of the similarity maps (default: %(default)s)",
    )
    command_line.add_shared(parser, "device")
    command_line.add_shared(parser, "work", default=Path("build/phones"))
    command_line.add_shared(parser, "output", default=Path("results/phones"))
    return parser


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="recordings with labels beside them (default: built-in speech)",
    )
    parser.add_argument(
        "--tier", metavar="NAME", help="tier of the TextGrids (default: phones, phonemes ...)"
    )
    for option, count in BUILTIN_SIZES.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=command_line.positive,
            metavar="N",
            help=f"utterances of the built-in speech (default: {count})",
        )


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--paper", action="store_true", help="train with the sizes and the settings of the thesis"
    )
    for option, (parse, small, paper) in SETTINGS.items():
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=parse,
            metavar="X",
            help=f"(default: {small}; --paper: {paper})",
        )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="algorithm of the training (default: sgd, as in the thesis)",
    )
    parser.add_argument(
        "--batch-size",
        type=command_line.positive,
        default=1,
        metavar="N",
        help="number of utterances of one step (default: 1, as in the thesis)",
    )
    rates = {"learning-rate": "", "final-learning-rate": "of the last eighth of the epochs "}
    small, paper, adamw = *RATES["sgd"], RATES["adamw"][0]
    for number, (option, when) in enumerate(rates.items()):
        defaults = f"{small[number]}; --paper: {paper[number]}; adamw: {adamw[number]}"
        parser.add_argument(
            f"--{option}", type=RATE, metavar="X", help=f"{when}(default: {defaults})"
        )


def _add_length_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-length",
        type=LENGTH,
        metavar="SECONDS",
        help="join the speech and cut it into pieces of this length (default: whole utterances)",
    )
    parser.add_argument(
        "--test-lengths",
        nargs="+",
        type=LENGTH,
        default=(),
        metavar="SECONDS",
        help="join the test and cut it into pieces of each of these lengths and of "
        "--train-length, and test with each length",
    )


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    for option in BUILTIN_SIZES:
        if args.data and getattr(args, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise CommandError(f"{flag} is for the built-in speech; --data has its own sizes")
    defaults = {
        option: paper if args.paper else small for option, (_, small, paper) in SETTINGS.items()
    }
    for option, value in {**BUILTIN_SIZES, **defaults}.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    if args.conditions is None:
        args.conditions = TRAINED[:2] if args.test_lengths else TRAINED
    if args.test_lengths and args.train_length:
        command_line.check_reach(args.test_lengths, args.train_length)
    _complete_training(args)
    if args.tier and not args.data:
        raise CommandError("--tier needs --data, a folder with TextGrids")
    args.conditions = list(dict.fromkeys(args.conditions))
    command_line.check_shared(args)
    return args


def _complete_training(args: argparse.Namespace) -> None:
    """Sets learning rates and epochs of attention maps that the options do not set."""
    small, paper = RATES[args.optimizer]
    rates = paper if args.paper else small
    if rates is None and None in (args.learning_rate, args.final_learning_rate):
        raise CommandError(
            f"--optimizer {args.optimizer} with --paper has no learning rates, because the thesis "
            "trains by SGD; give --learning-rate and --final-learning-rate"
        )
    if args.learning_rate is None:
        args.learning_rate = rates[0]
    if args.final_learning_rate is None:
        args.final_learning_rate = rates[1]
    if args.test_lengths and args.attention_epochs:
        raise CommandError(
            "--attention-epochs has no effect with --test-lengths; leave the option out"
        )
    if args.attention_epochs is None and not args.test_lengths:
        args.attention_epochs = [
            max(1, round(epoch * args.epochs / OF_EPOCHS)) for epoch in THESIS_EPOCHS
        ]
    args.attention_epochs = sorted({*(args.attention_epochs or ())})
    if args.attention_epochs[-1:] > [args.epochs]:
        raise CommandError(
            f"--attention-epochs {args.attention_epochs[-1]}: allowed: 1 to {args.epochs}, the "
            "number of epochs"
        )


def position_configs(args: argparse.Namespace) -> dict[str, PositionConfig]:
    """Configurations whose positions are frame numbers, because the frequencies 10000^(-2i/d) of
    the thesis are for frame numbers; shifts in seconds are converted to frames. (CAPE's frequencies
    for audio are 0.3 times as high at 10 ms.)"""
    compared = command_line.settings_to_compare(args, "audio", DEFAULT)
    configs = {
        name: PositionConfig.from_dict(settings, "audio") for name, settings in compared.items()
    }
    option = f"--conditions {' '.join(args.conditions)}"
    for name, config in configs.items():
        if not {*args.conditions} & {*conditions_of(config)}:
            raise CommandError(f"{option}: {name} has no positions; give exc")
        if args.test_lengths and not trained_alone(config, args.conditions):
            raise CommandError(f"{option}: {name} is tested with positions; give inc")
        try:
            stack_positions(config, sizes_of(args))
        except ValueError as error:
            sizes = f"--dim {args.dim} --heads {args.heads}"
            raise CommandError(f"{sizes}: {name}: {error}") from None
    return configs


def sizes_of(args: argparse.Namespace) -> Sizes:
    return Sizes(args.dim, args.layers, args.heads, args.ffn, args.dropout)


def training_of(args: argparse.Namespace) -> Training:
    return Training(
        args.epochs,
        args.learning_rate,
        args.final_learning_rate,
        args.optimizer,
        args.batch_size,
        tuple(args.attention_epochs),
    )


def facts_of(experiment: Experiment, argv: Sequence[str]) -> dict[str, str]:
    """Facts for repeating and judging the numbers."""
    corpus, training = experiment.corpus, experiment.training
    skipped, numbers = corpus.skipped, f"{corpus.sizes()}; {len(corpus.classes)} classes"
    return how_made(
        shown_command("python -m recipes.phones.run", argv),
        report.PACKAGES,
        experiment.device,
        threads=str(torch.get_num_threads()),
        data=f"{corpus.description}; {numbers}: {' '.join(corpus.classes)}",
        left_out=f"{len(skipped)} files, [why]({LEFT_OUT})" if skipped else "0 files",
        model=", ".join(f"{key} {value}" for key, value in vars(experiment.sizes).items()),
        training=f"{OPTIMIZERS[training.optimizer].__name__}, utterances per step: "
        f"{training.batch_size}, {training.epochs} epochs, learning rate {training.learning_rate}, "
        f"in the last eighth {training.final_learning_rate}",
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    configs = position_configs(args)
    if not args.paper:
        torch.set_num_threads(1)  # more threads do not speed up such a small model
    utterances = [getattr(args, option) for option in BUILTIN_SIZES]
    corpus = read_folder(args.data, args.tier) if args.data else synthetic(utterances)
    if skipped := corpus.skipped:
        path = args.output / LEFT_OUT
        write_lines(path, skipped)
        example = f"such as {skipped[0]}; {path} lists all of them with reasons"
        print(f"{len(skipped)} files left out, {example}", file=sys.stderr)
    corpus = join_and_cut(corpus, args.train_length, args.test_lengths)
    experiment = Experiment(corpus, sizes_of(args), training_of(args), args.work, args.device)
    print(f"{corpus.description}: {corpus.sizes()}; {len(corpus.classes)} classes", flush=True)
    run = run_lengths if args.test_lengths else run_type
    results = [run(experiment, name, config, args) for name, config in configs.items()]
    facts = facts_of(experiment, argv)
    if args.test_lengths:
        rows, epochs = ([*chain(*lists)] for lists in zip(*results, strict=True))
        lines = report.write_lengths(args.output, facts, rows, epochs, args.train_length)
        pages = "results.md, lengths.csv and .png, training.csv"
    else:
        lines = report.write_results(args.output, facts, corpus.classes, results)
        pages = f"results.md, *.csv; pictures: {args.output}/*/*.png"
    print("\n".join(lines))
    print(f"tables: {args.output}/{pages}")


if __name__ == "__main__":
    run_main(main)
