"""What the CAPE and SHAPE papers show about translation models, for any trained model.

    python -m recipes.mt.analyze stack --model sinpos=A/checkpoint_last.pt cape=FOLDER \\
        --test test.en test.de
    python -m recipes.mt.analyze length --model 'cape=runs/cape-seed*/checkpoint_last.pt' --test ...
    python -m recipes.mt.analyze swap --model shape=FOLDER sinpos=FOLDER --test ... --join 10
    python -m recipes.mt.analyze interpolate --text train.en train.de --output joined.en joined.de

Models are checkpoints of fairseq or folders of Hugging Face models, in any mixture; several paths
of one name are seeds. Each analysis writes COMMAND.csv, COMMAND.md and COMMAND.png.
"""

import argparse
import sys
from collections.abc import Sequence

from recipes.lab.options import check_shared, new_parser
from recipes.lab.steps import run_main
from recipes.mt.analysis import corpora, length, scores, similarity, stack, swap
from recipes.mt.analysis.options import add_model_options

ANALYSES = {
    "stack": (stack, "loss by position on stacked sentences (CAPE figure 8)"),
    "length": (length, "BLEU and exact match by source length (SHAPE figure 3)"),
    "swap": (swap, "BLEU with the first sentence moved to the end (SHAPE table 1)"),
    "similarity": (similarity, "encoder states at different offsets (SHAPE figure 2)"),
    "scores": (scores, "right tokens scored higher than by another model (SHAPE figure 4)"),
}
CORPORA = {
    "extrapolate": (
        corpora.add_extrapolate_options,
        corpora.extrapolate,
        "training pairs without the long ones (SHAPE section 3.1)",
    ),
    "interpolate": (
        corpora.add_interpolate_options,
        corpora.interpolate,
        "neighbouring training pairs joined (SHAPE section 3.1)",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "recipes.mt.analyze")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in ANALYSES.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_model_options(command)
        module.add_options(command)
        command.set_defaults(run=module.run)
    for name, (add_options, make, summary) in CORPORA.items():
        command = commands.add_parser(name, help=summary, description=summary)
        add_options(command)
        command.set_defaults(run=make)
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
