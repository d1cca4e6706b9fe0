"""The analyses of translation models in the CAPE and SHAPE papers, for any trained model.

    python -m recipes.mt.analyze stack --model A/checkpoint_last.pt cape=FOLDER \\
        --test test.en test.de
    python -m recipes.mt.analyze length --model 'cape=runs/cape-seed*/checkpoint_last.pt' --test ...
    python -m recipes.mt.analyze swap --model shape=FOLDER sinpos=FOLDER --test ... --join 10
    python -m recipes.mt.analyze interpolate --text train.en train.de --output joined.en joined.de

Models are checkpoints of fairseq or folders of Hugging Face models, or both; several paths of one
name are seeds. Each analysis writes COMMAND.csv, COMMAND.md and COMMAND.png.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from recipes.lab.command_line import add_shared, check_shared, new_parser, positive
from recipes.lab.steps import CommandError, run_main
from recipes.mt import corpus
from recipes.mt.analysis import length, scores, similarity, stack, swap
from recipes.mt.analysis.arguments import add_model_options

ANALYSES = {
    "stack": (stack, "loss by position on stacked sentences (CAPE figure 8)"),
    "length": (length, "BLEU and exact match by source length (SHAPE figure 7)"),
    "swap": (swap, "BLEU with the first sentence moved to the end (SHAPE table 1)"),
    "similarity": (similarity, "encoder states at different offsets (SHAPE figure 2)"),
    "scores": (
        scores,
        "reference tokens that one model scores higher than another (SHAPE figure 4)",
    ),
}


def extrapolate(args: argparse.Namespace) -> None:
    encode = str
    for method, option in (("sentencepiece", "spm"), ("bpe", "bpe")):
        if path := getattr(args, option):
            encode = corpus.open_subwords(method, path, f"--{option}").encode
    seen = 0

    def short() -> Iterator[corpus.Pair]:
        nonlocal seen
        for seen, pair in enumerate(corpus.read_pairs(*args.text, "--text"), 1):  # noqa: B007
            if max(len(encode(text).split()) for text in pair) <= args.max_length:
                yield pair

    remedy = f"--max-length {args.max_length}: no pair is that short; give a larger number"
    count = _write(args, short(), remedy)
    print(f"{count} of {seen} pairs kept: {' '.join(map(str, args.output))}")


def interpolate(args: argparse.Namespace) -> None:
    if args.count < 2:
        raise CommandError(f"--count {args.count} joins no pairs; allowed: 2 or more")

    def checked() -> Iterator[corpus.Pair]:
        for number, pair in enumerate(corpus.read_pairs(*args.text, "--text"), 1):
            if any(corpus.SEPARATOR in text for text in pair):
                problem = f"line {number} has the separator {corpus.SEPARATOR}"
                files = " ".join(map(str, args.text))
                raise CommandError(f"--text {files}: {problem}; give text that is not joined")
            yield pair

    pairs = corpus.join_neighbours(checked(), args.count)
    count = _write(args, pairs, "--text: is empty")
    print(f"{count} joined pairs: {' '.join(map(str, args.output))}")


def _write(args: argparse.Namespace, pairs: Iterator[corpus.Pair], remedy: str) -> int:
    source, target = args.output
    if source.resolve() == target.resolve():
        raise CommandError(
            f"--output {source} {target}: both are the same file; give a name for each side"
        )
    for path in args.output:
        if any(path.resolve() == text.resolve() for text in args.text):
            raise CommandError(f"--output {path}: is a file of --text; give other names")
        if path.suffix == ".gz":
            raise CommandError(f"--output {path}: text is written uncompressed; leave out .gz")
    first = next(pairs, None)
    if first is None:
        raise CommandError(remedy)
    return corpus.write_columns(args.output, chain([first], pairs))


CORPORA = {
    extrapolate: "training pairs without the long ones (SHAPE section 3.1)",
    interpolate: "neighbouring training pairs joined (SHAPE section 3.1)",
}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in ANALYSES.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        add_model_options(command)
        module.add_options(command)
        command.set_defaults(run=module.run)
    for make, summary in CORPORA.items():
        command = commands.add_parser(make.__name__, help=summary, description=summary)
        command.set_defaults(run=make)
        pair = {"nargs": 2, "type": Path, "required": True, "metavar": ("SOURCE", "TARGET")}
        command.add_argument("--text", **pair, help="parallel text, plain or .gz")
        add_shared(command, "output", note="two files", **pair)
    commands.choices["interpolate"].add_argument(
        "--count",
        type=positive,
        default=10,
        metavar="N",
        help="number of neighbouring pairs that are joined to one pair (default: %(default)s)",
    )
    command = commands.choices["extrapolate"]
    command.add_argument(
        "--max-length",
        type=positive,
        default=50,
        metavar="N",
        help="largest length of a side of a pair that is kept (default: %(default)s)",
    )
    subwords = command.add_mutually_exclusive_group()
    subwords.add_argument(
        "--spm",
        type=Path,
        metavar="FILE",
        help="sentencepiece model, whose subwords --max-length counts (default: words)",
    )
    subwords.add_argument(
        "--bpe",
        type=Path,
        metavar="FILE",
        help="subword-nmt codes for tokenised text, whose subwords --max-length counts (default: "
        "words)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(map(str, argv))
    args = make_parser().parse_args(argv)
    args.argv = argv
    if args.command in ANALYSES:
        check_shared(args)
    args.run(args)


if __name__ == "__main__":
    run_main(main)
