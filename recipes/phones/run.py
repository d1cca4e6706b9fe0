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
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cape_plugins import TYPES, PositionConfig
from cape_plugins.arguments import TYPE_ARG, add_position_args, given_settings
from recipes.lab.options import positive, usable_folder
from recipes.lab.steps import CommandError, run_main, write_lines
from recipes.lab.tables import machine, shown_command, versions
from recipes.phones.data import Corpus, read_folder, synthetic
from recipes.phones.experiment import Experiment, conditions_of, run_type
from recipes.phones.model import Sizes
from recipes.phones.report import PACKAGES, write_results
from recipes.phones.train import CONDITIONS, Training

BUILTIN_SIZES = {"train_size": 2000, "dev_size": 60, "test_size": 200}  # utterances
SMALL = {
    "dim": 88,
    "layers": 2,
    "heads": 4,
    "ffn": 256,
    "dropout": 0.0,
    "epochs": 12,
    "learning_rate": 0.1,
}
PAPER = {
    "dim": 768,
    "layers": 6,
    "heads": 8,
    "ffn": 2048,
    "dropout": 0.1,
    "epochs": 80,
    "learning_rate": 0.05,
}
DEFAULT = "sinpos"  # type of position embedding
LEFT_OUT = "left_out.txt"
TRAINED = ("inc", "exc", "inc-scram", "exc-scram")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.phones.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "recordings with labels beside them (default: built-in speech)"
    add("--data", type=Path, metavar="FOLDER", help=text)
    add("--tier", metavar="NAME", help="of the TextGrids (default: phones, phonemes ...)")
    for option, count in BUILTIN_SIZES.items():
        text = f"utterances of the built-in speech (default: {count})"
        add(f"--{option.replace('_', '-')}", type=positive, metavar="N", help=text)
    text = f"train several types with their defaults, of {', '.join(TYPES)}"
    add("--compare", nargs="+", metavar="TYPE", help=text)
    add_position_args(parser, "audio", DEFAULT, "encoder")
    text = f"what to train, of {', '.join(CONDITIONS)} (default: the first {len(TRAINED)})"
    add("--models", nargs="+", choices=CONDITIONS, default=TRAINED, metavar="NAME", help=text)
    add("--paper", action="store_true", help="sizes and training of the thesis")
    for option, kind in (
        *(("dim", positive), ("layers", positive), ("heads", positive), ("ffn", positive)),
        *(("dropout", float), ("epochs", positive), ("learning_rate", float)),
    ):
        text = f"(default: {SMALL[option]}; --paper: {PAPER[option]})"
        add(f"--{option.replace('_', '-')}", type=kind, metavar="X", help=text)
    text = "of the last eighth of the epochs (default: %(default)s)"
    add("--final-learning-rate", type=float, default=0.001, metavar="X", help=text)
    add("--seeds", nargs="+", type=positive, default=[1], metavar="N")
    text = "positions of the similarity maps (default: %(default)s)"
    add("--similarity-length", type=positive, default=3000, metavar="FRAMES", help=text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="(default: %(default)s)")
    text = "folder of trained models, reused (default: %(default)s)"
    add("--work", type=Path, default=Path("build/phones"), help=text)
    text = "folder for tables and pictures (default: %(default)s)"
    add("--output", type=Path, default=Path("results/phones"), help=text)
    args = parser.parse_args(argv)
    for option in (*SMALL, *BUILTIN_SIZES):
        if getattr(args, option) is None:
            default = {**(PAPER if args.paper else SMALL), **BUILTIN_SIZES}[option]
            setattr(args, option, default)
        elif args.data and option in BUILTIN_SIZES:
            raise CommandError(
                f"--{option.replace('_', '-')} is for the built-in speech; --data has its own sizes"
            )
    args.models, args.seeds = list(dict.fromkeys(args.models)), list(dict.fromkeys(args.seeds))
    check(args)
    for option in ("work", "output"):
        usable_folder(getattr(args, option), f"--{option}")
    return args


def check(args: argparse.Namespace) -> None:
    """Refuses settings that cannot work."""
    if args.tier and not args.data:
        raise CommandError("--tier needs --data, a folder with TextGrids")
    for option in ("learning_rate", "final_learning_rate"):
        value = getattr(args, option)
        if not 0 < value < math.inf:
            flag = option.replace("_", "-")
            raise CommandError(f"--{flag} {value}: allowed: numbers above 0, such as 0.05")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"--device {args.device} cannot be used ({reason}); try cpu") from None


def position_configs(args: argparse.Namespace) -> list[PositionConfig]:
    """The position embeddings that are to be trained."""
    given, chosen = given_settings(args, "audio"), getattr(args, TYPE_ARG)
    if args.compare and (chosen or given):
        raise CommandError(
            "--compare trains the defaults of each type; leave it out to train one type with "
            "--position-... options"
        )
    configs = []
    for name in dict.fromkeys(args.compare or [chosen or DEFAULT]):
        try:
            config = PositionConfig.from_dict({"type": name, **given}, "audio")
        except ValueError as error:
            raise CommandError(str(error)) from None
        if not {*args.models} & {*conditions_of(config)}:
            raise CommandError(
                f"--models {' '.join(args.models)}: {name} has no positions to put in; give exc"
            )
        configs.append(config)
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
    results = [
        run_type(experiment, config, args.models, args.seeds, args.output, args.similarity_length)
        for config in configs
    ]
    facts = {
        "Command": f"`{shown_command('python -m recipes.phones.run', argv)}`",
        "Machine": f"{machine()}; {args.device}, {torch.get_num_threads()} threads",
        "Versions": versions(PACKAGES),
        "Data": f"{corpus.description}; {corpus.sizes()}; {len(corpus.classes)} classes: "
        f"{' '.join(corpus.classes)}",
        "Left out": f"{len(corpus.skipped)} files"
        + (f", [why]({LEFT_OUT})" if corpus.skipped else ""),
        "Model": ", ".join(f"{key} {value}" for key, value in options.items()),
        "Training": f"SGD, one utterance per step, {training.epochs} epochs, learning rate "
        f"{training.learning_rate}, in the last eighth {training.final_learning_rate}",
    }
    print("\n".join(write_results(args.output, facts, corpus.classes, results)))
    print(f"tables: {args.output}/results.md and .csv files; pictures: {args.output}/*/*.png")


if __name__ == "__main__":
    run_main(main)
