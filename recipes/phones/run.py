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

import numpy as np
import torch

from cape_plugins import PositionConfig
from cape_plugins.pictures import plot
from cape_plugins.pictures.views import similarity, similarity_by_distance
from recipes.lab import options
from recipes.lab.steps import CommandError, run_main, write_lines
from recipes.lab.tables import how_made, shown_command
from recipes.phones import report, train
from recipes.phones.analysis import class_changes, confusions, error_rate, error_types, head_rows
from recipes.phones.data import read_folder, synthetic
from recipes.phones.report import Result
from recipes.phones.train import CONDITIONS, Experiment, PhoneClassifier, Sizes, Training, targets

BUILTIN_SIZES = {"train_size": 2000, "dev_size": 60, "test_size": 200}  # utterances
RATE = options.number(1e-9, 100)
# Sizes and training: type of the option, default, and that of --paper
SETTINGS = {
    "dim": (options.positive, 88, 768),
    "layers": (options.positive, 2, 6),
    "heads": (options.positive, 4, 8),
    "ffn": (options.positive, 256, 2048),
    "dropout": (options.number(0, 1, below=True), 0.0, 0.1),
    "epochs": (options.positive, 12, 80),
    "learning_rate": (RATE, 0.1, 0.05),
}
DEFAULT = ("sinpos",)  # types
LEFT_OUT = "left_out.txt"
TRAINED = ("inc", "exc", "inc-scram", "exc-scram")
BY_DISTANCE = 50  # frames
SIMILARITIES = ("distance", "dot", "dot_min", "dot_max", "cosine", "cosine_min", "cosine_max")


def run_type(
    experiment: Experiment, name: str, config: PositionConfig, args: argparse.Namespace
) -> Result:
    """Everything about one position embedding, with models of these conditions of training;
    pictures, of the first seed, go to ``OUTPUT/NAME``."""
    classes, test = experiment.corpus.classes, experiment.corpus.splits["test"]
    models = [model for model in args.conditions if model in conditions_of(config)]
    result = Result(name, class_changes(targets(test)))
    folder = args.output / result.folder()
    for seed in args.seeds:
        for condition in models:
            model, history = experiment.model(name, config, condition, seed)
            columns = {"type": name, "trained": condition, "seed": seed}
            for tested in conditions_of(config):
                pair = targets(test), train.predict(model, test, CONDITIONS[tested])
                counts = (error_rate(*pair), class_changes(pair[1]), *error_types(*pair))
                measured = dict(zip(report.COUNTS, counts, strict=True))
                result.rows.append({**columns, "tested": tested, **measured})
                if tested == condition and seed == args.seeds[0]:
                    result.confusions[condition] = confusions(*pair, len(classes))
            if seed != args.seeds[0]:
                continue
            result.histories[condition] = history
            utterance = train.long_utterance(test)
            weights = train.attention(model, utterance, CONDITIONS[condition])
            rows = head_rows(weights, train.NEAR)
            result.heads += [{"trained": condition, **row} for row in rows]
            path = args.output / result.folder(condition) / f"attention-{condition}.png"
            title = f"M-{condition}, {path.parent.name}: {utterance.name}"
            report.draw_attention(path, weights, title)
            if condition == ("inc" if "inc" in models else models[0]):
                _compare_positions(model, folder, result, args.similarity_length)
    titles = {f"M-{condition}": matrix for condition, matrix in result.confusions.items()}
    report.draw_confusions(folder / "confusions.png", titles, classes)
    report.draw_histories(folder / "training.png", result.histories)
    return result


def conditions_of(config: PositionConfig) -> list[str]:
    """Those that make sense: without positions of any kind there is nothing to put in."""
    having = config.encoding.adds or config.relative_context > 0
    return [name for name, condition in CONDITIONS.items() if having or not condition.positions]


@torch.no_grad()
def _compare_positions(model: PhoneClassifier, folder: Path, result: Result, length: int) -> None:
    """Draws and tabulates similarities of the position embeddings, as used in tests."""
    embeddings = model.eval().embed(length, next(model.parameters()).device)
    if embeddings is None:
        return
    rows, title = embeddings[0].cpu().numpy(), f"position embeddings of {result.name}"
    report.save(plot.similarity_figure({"": rows}, title, "frames"), folder / "similarity.png")
    farthest = min(BY_DISTANCE, length - 1)
    columns = [similarity_by_distance(matrix, farthest) for matrix in similarity(rows).values()]
    for distance, values in enumerate(np.hstack(columns).tolist()):
        result.similarities.append(dict(zip(SIMILARITIES, (distance, *values), strict=True)))


def make_parser() -> argparse.ArgumentParser:
    parser = options.new_parser(__doc__)
    add = parser.add_argument
    text = "recordings with labels beside them (default: built-in speech)"
    add("--data", type=Path, metavar="FOLDER", help=text)
    add("--tier", metavar="NAME", help="of the TextGrids (default: phones, phonemes ...)")
    for option, count in BUILTIN_SIZES.items():
        text = f"utterances of the built-in speech (default: {count})"
        add(f"--{option.replace('_', '-')}", type=options.positive, metavar="N", help=text)
    options.add_compared(parser, "audio", DEFAULT)
    text = f"how to train, of {', '.join(CONDITIONS)} (default: the first {len(TRAINED)})"
    names = {"nargs": "+", "choices": CONDITIONS, "metavar": "NAME", "help": text}
    options.add_named(parser, "--conditions", "--models", default=TRAINED, **names)
    add("--paper", action="store_true", help="sizes and training of the thesis")
    for option, (parse, small, paper) in SETTINGS.items():
        text = f"(default: {small}; --paper: {paper})"
        add(f"--{option.replace('_', '-')}", type=parse, metavar="X", help=text)
    text = "of the last eighth of the epochs (default: %(default)s)"
    add("--final-learning-rate", type=RATE, default=0.001, metavar="X", help=text)
    options.add_shared(parser, "seeds", default=[1])
    text = "positions of the similarity maps (default: %(default)s)"
    add("--similarity-length", type=options.positive, default=3000, metavar="FRAMES", help=text)
    options.add_shared(parser, "device")
    options.add_shared(parser, "work", default=Path("build/phones"))
    options.add_shared(parser, "output", default=Path("results/phones"))
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    args = make_parser().parse_args(argv)
    for option in BUILTIN_SIZES:
        if args.data and getattr(args, option) is not None:
            shown = option.replace("_", "-")
            raise CommandError(f"--{shown} is for the built-in speech; --data has its own sizes")
    defaults = {option: values[1 + args.paper] for option, values in SETTINGS.items()}
    for option, value in {**BUILTIN_SIZES, **defaults}.items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    if args.tier and not args.data:
        raise CommandError("--tier needs --data, a folder with TextGrids")
    for name in ("conditions", "seeds"):
        setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    options.check_shared(args)
    return args


def position_configs(args: argparse.Namespace) -> dict[str, PositionConfig]:
    compared = options.settings_to_compare(args, "audio", DEFAULT)
    configs = {name: PositionConfig.from_dict(own, "audio") for name, own in compared.items()}
    for name, config in configs.items():
        if not {*args.conditions} & {*conditions_of(config)}:
            given = " ".join(args.conditions)
            raise CommandError(f"--conditions {given}: {name} has no positions to put in; give exc")
    return configs


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    configs = position_configs(args)
    sizes = Sizes(args.dim, args.layers, args.heads, args.ffn, args.dropout)
    training = Training(args.epochs, args.learning_rate, args.final_learning_rate)
    if not args.paper:
        torch.set_num_threads(1)  # so small a model gains nothing by more
    utterances = [getattr(args, option) for option in BUILTIN_SIZES]
    corpus = read_folder(args.data, args.tier) if args.data else synthetic(utterances)
    if skipped := corpus.skipped:
        path = args.output / LEFT_OUT
        write_lines(path, skipped)
        said = f"{len(skipped)} files left out, such as {skipped[0]}; all of them and why: {path}"
        print(said, file=sys.stderr)
    experiment = Experiment(corpus, sizes, training, args.work, args.device)
    numbers = f"{corpus.sizes()}; {len(corpus.classes)} classes"
    print(f"{corpus.description}: {numbers}", flush=True)
    results = [run_type(experiment, name, config, args) for name, config in configs.items()]
    facts = how_made(
        shown_command("python -m recipes.phones.run", argv),
        report.PACKAGES,
        args.device,
        threads=str(torch.get_num_threads()),
        data=f"{corpus.description}; {numbers}: {' '.join(corpus.classes)}",
        left_out=f"{len(skipped)} files" + f", [why]({LEFT_OUT})" * bool(skipped),
        model=", ".join(f"{key} {value}" for key, value in vars(sizes).items()),
        training=f"SGD, one utterance per step, {training.epochs} epochs, learning rate "
        f"{training.learning_rate}, in the last eighth {training.final_learning_rate}",
    )
    print("\n".join(report.write_results(args.output, facts, corpus.classes, results)))
    print(f"tables: {args.output}/results.md and .csv files; pictures: {args.output}/*/*.png")


if __name__ == "__main__":
    run_main(main)
