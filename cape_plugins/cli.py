"""The command ``cape-plugins``: shows in two minutes the errors of position embeddings on longer
inputs, prints the folder for fairseq, counts alpha of a corpus, advises on settings, prints the
table of options, draws pictures, exports to engines that serve models, checks models on the
installed hosts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cape_plugins.checkpoints.families import FAIRSEQ_FAMILIES, find_family
from cape_plugins.corpus.advise import add_advise_args, advice
from cape_plugins.corpus.alpha import TokenCounts, by_tokenizer, count_binarized, count_text_files
from cape_plugins.demo.command import add_demo_args, run_demo
from cape_plugins.doctor.command import add_doctor_args
from cape_plugins.pictures.command import add_plot_args, draw_picture
from cape_plugins.serving.command import add_export_args
from cape_plugins.settings.arguments import Parser, text_in_flags
from cape_plugins.settings.config import PositionConfig, applies, option_fields
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.options import unit_of
from cape_plugins.settings.registry import DEFAULT_TYPE, ROTARY, types_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Arguments after the name of the command; None for the arguments of the process.

    Returns:
        Exit status 0. A bad argument or input ends the process with status 2 and one line that
        names the argument or input; `doctor` ends with status 1 for a difference.
    """
    args = _parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        print(args.run(args), flush=True)
    except BrokenPipeError:  # the program that reads the pipe, such as head, has ended
        # Python flushes stdout again at exit, which would raise the error a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {text_in_flags(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="cape-plugins", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)

    summary = (
        "train small models of each type in two minutes, and see their errors on longer inputs"
    )
    demo = commands.add_parser("demo", help=summary, description=summary)
    add_demo_args(demo)
    demo.set_defaults(run=run_demo)

    user_dir = commands.add_parser(
        "user-dir", help="print the folder to give to fairseq's --user-dir"
    )
    user_dir.set_defaults(run=user_dir_path)

    alpha = commands.add_parser(
        "alpha", help="count a corpus: source scale alpha = target tokens / source tokens"
    )
    _add_alpha_args(alpha)
    alpha.set_defaults(run=alpha_report)

    summary = "print the type and settings for the lengths of a corpus and the longest input in use"
    advise = commands.add_parser("advise", help=summary, description=summary)
    add_advise_args(advise)
    advise.set_defaults(run=_advice)

    flags = commands.add_parser("flags", help="print the table of all options in Markdown")
    flags.add_argument(
        "--domain",
        choices=DOMAINS,
        default="text",
        help="domain whose defaults are shown (default: text)",
    )
    flags.set_defaults(run=option_table)

    plot = commands.add_parser("plot", help="draw position embeddings into a PNG file")
    add_plot_args(plot)
    plot.set_defaults(run=draw_picture)

    summary = "write a trained model for an engine that serves it without this package"
    export = commands.add_parser("export", help=summary, description=summary)
    add_export_args(export)

    summary = "check whether models compute what they should with the installed hosts"
    doctor = commands.add_parser("doctor", help=summary, description=summary)
    add_doctor_args(doctor)
    return parser


def _advice(args: argparse.Namespace) -> str:
    """See :func:`advice`; the folder of a tokenizer tells what kind of model it belongs to."""
    args.rotary = args.rotary or bool(args.tokenizer and _turns_queries(args.tokenizer))
    sides = [side for family in FAIRSEQ_FAMILIES for side in family.sides.values()]
    return advice(args, not args.rotary and args.domain in {side.domain for side in sides})


def _turns_queries(model: str) -> bool:
    """Whether a folder holds a model of transformers that turns queries and keys by their
    positions; False for names of the hub, and for a tokenizer alone."""
    try:
        saved = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    family = find_family(saved.get("model_type", ""), saved) if isinstance(saved, dict) else None
    sides = () if family is None else family.sides.values()
    return any(side.architecture == ROTARY for side in sides)


def _add_alpha_args(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(refuse=parser.error)
    parser.add_argument(
        "files", nargs="*", metavar="SOURCE TARGET", help="the same as --text SOURCE TARGET"
    )
    corpus = parser.add_mutually_exclusive_group()
    corpus.add_argument(
        "--text",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="parallel text files, one sentence a line, after subword segmentation or with "
        "--tokenizer; .gz is read",
    )
    corpus.add_argument(
        "--binarized",
        metavar="DATA",
        help="folder that fairseq-preprocess wrote; several with : between them",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="with --text: folder or hub name of a Hugging Face model, whose tokenizer splits raw "
        "text (default: the text is split already, at white space)",
    )
    parser.add_argument("--source-lang", metavar="S", help="with --binarized: source language")
    parser.add_argument("--target-lang", metavar="T", help="with --binarized: target language")
    parser.add_argument("--split", help="with --binarized: training subset (default: train)")
    parser.add_argument(
        "--no-eos",
        action="store_true",
        help="leave out end-of-sentence tokens, as the CAPE paper's notebook does (default: they "
        "count, as in preprocess.log)",
    )


def user_dir_path(args: argparse.Namespace) -> str:
    """The absolute path of this package; fairseq finds a package by path only."""
    return str(Path(__file__).absolute().parent)


def alpha_report(args: argparse.Namespace) -> str:
    """Token counts, alpha and the flag that sets alpha, one a line.

    Raises:
        FileNotFoundError: if data are missing.
        ValueError: if data are damaged or arguments do not fit together.
    """
    counts = _count(args)
    if counts.doubt:
        print(f"warning: {counts.doubt}", file=sys.stderr)
    return (
        f"source tokens  {counts.source}\n"
        f"target tokens  {counts.target}\n"
        f"alpha          {counts.alpha:.6g}\n"
        f"--position-source-scale {counts}"
    )


def _count(args: argparse.Namespace) -> TokenCounts:
    if args.files:
        option_and_files = f"SOURCE TARGET {' '.join(args.files)}"
        if len(args.files) != 2:
            raise ValueError(f"{option_and_files}: give two files, the source and its translation.")
        if option := "--text" if args.text else "--binarized" if args.binarized else "":
            raise ValueError(f"{option_and_files}: give them once, without {option}.")
        args.text = args.files
    if not (args.text or args.binarized):
        args.refuse("one of the arguments SOURCE TARGET --text --binarized is required")
    if args.tokenizer and not args.text:
        raise ValueError(
            f"--tokenizer {args.tokenizer} belongs to --text; binarised data have their tokens."
        )
    eos = not args.no_eos
    binarized_only = {name: getattr(args, name) for name in ("source_lang", "target_lang", "split")}
    for name, value in binarized_only.items():
        flag = "--" + name.replace("_", "-")
        if args.text and value is not None:
            raise ValueError(f"{flag} {value} belongs to --binarized; leave it out with --text.")
        if args.binarized and value is None and name != "split":
            raise ValueError(f"{flag} is missing; --binarized needs it, as in {flag} de.")
    if args.text:
        if args.tokenizer:
            return by_tokenizer("tokenizer")(*args.text, args.tokenizer, eos=eos)
        return count_text_files(*args.text, eos=eos)
    languages = args.source_lang, args.target_lang
    return count_binarized(args.binarized, *languages, args.split or "train", eos=eos)


def option_table(args: argparse.Namespace) -> str:
    """The options of PositionConfig as a Markdown table, with the defaults of each type."""
    rows = [("option", "default", "allowed", "unit", "meaning"), ("---",) * 5]
    types = types_of(DOMAINS[args.domain].architecture, args.domain)
    rows.append(
        ("`--position-embedding`", DEFAULT_TYPE, ", ".join(types), "", "type of position embedding")
    )
    for option in option_fields():  # of all domains; the meaning names the domain
        name = option.name
        rows.append(
            (
                f"`--position-{name.replace('_', '-')}`",
                _defaults(option, args.domain),
                option.metadata["range"],
                unit_of(option.metadata),
                option.metadata["help"],
            )
        )
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _defaults(option: Any, domain: str) -> str:
    """Each type whose default has an effect, with this default; if there is no such type, the value
    that has no effect."""
    architecture = DOMAINS[domain].architecture
    values = {
        name: getattr(PositionConfig(name, domain, architecture), option.name)
        for name in types_of(architecture, domain)
        if applies(option.name, name)
    }
    off = option.metadata["off"]
    special = [f"{name} {_show(value)}" for name, value in values.items() if value != off]
    return ", ".join(special) or _show(off)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
