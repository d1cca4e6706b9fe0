"""The arguments of ``cape-plugins export``, and the exporters that the arguments ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from cape_plugins.serving.output import Exported, complete_folder
from cape_plugins.settings.arguments import FAIRSEQ, HUGGING_FACE, add_data, int_at_least, positive

GROUP = "cape_plugins.export"  # entry points, named HOST-ENGINE
_NAMES = {FAIRSEQ: "checkpoint of fairseq", HUGGING_FACE: "Hugging Face model"}
SOURCES = "checkpoint of fairseq, or folder of a Hugging Face model"
# Precisions of ctranslate2, except "auto" and "default", which have a meaning only for loading.
QUANTIZATIONS = (
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
)

SHORTEST = 8  # least number of rows of a table, enough for the texts that a check compares

# An exporter writes the model at the first path into the empty folder at the second path, as the
# arguments ask.
Exporter = Callable[[Path, Path, argparse.Namespace], Exported]


def add_export_args(parser: argparse.ArgumentParser) -> None:
    """Adds a subcommand for each engine."""
    engines = parser.add_subparsers(dest="engine", required=True)
    for name, add_args, text in (
        ("ctranslate2", _add_ctranslate2_args, "translation, language models of fairseq, Whisper"),
        (
            "onnx",
            _add_onnx_args,
            "image, speech and text models; translation and language models with a cache",
        ),
        ("ggml", _add_ggml_args, "Whisper for whisper.cpp, as one file"),
        ("stock", _add_stock_args, "a checkpoint of the stock class, without this package"),
    ):
        add_args(engines.add_parser(name, help=text, description=text))
    parser.set_defaults(run=run_export)


def _add_ctranslate2_args(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, SOURCES)
    add_data(parser)
    for side in ("source", "target"):
        parser.add_argument(
            f"--max-{side}-tokens",
            type=partial(int_at_least, minimum=2),
            default=1024,
            metavar="N",
            help=f"rows of the table of {side} positions, BOS and EOS included (default: 1024)",
        )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="precision of the weights (default: float32)",
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        type=Path,
        help="translate 200 sentences of this text, including its longest sentences, with both "
        "models, and compare; for Whisper, give a recording",
    )


def _add_onnx_args(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, "folder of a Hugging Face model")
    parser.add_argument("--opset", type=int, default=20, metavar="N", help="18 to 23 (default: 20)")
    parser.add_argument(
        "--check",
        action="store_true",
        help=("run both models on inputs of other sizes, and compare"),
    )


def _add_ggml_args(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, "folder of a Hugging Face Whisper model")
    for side, name in (("source", "n_audio_ctx, up to 1500"), ("target", "n_text_ctx")):
        parser.add_argument(
            f"--max-{side}-tokens",
            type=partial(int_at_least, minimum=SHORTEST),
            metavar="N",
            help=f"rows of the table of {side} positions: {name} (default: as in the stock model)",
        )


def _add_stock_args(parser: argparse.ArgumentParser) -> None:
    _add_paths(parser, SOURCES)
    add_data(parser)
    parser.add_argument(
        "--to",
        choices=(FAIRSEQ, HUGGING_FACE.replace("_", "-")),
        help="host of the stock model; a translation model of fairseq can become BART, mBART, "
        "Blenderbot or Marian of Hugging Face, by its layers (default: the host of SOURCE)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--max-tokens",
        type=_table_length,
        metavar="N",
        help="rows of the table of token positions (default: as in the stock model)",
    )
    size.add_argument(
        "--image-size",
        type=positive,
        nargs=2,
        metavar=("H", "W"),
        help="size in pixels of the images for which the table is made (default: as in the model)",
    )


def _table_length(text: str) -> int:
    """Argument type: a number of rows, enough for the texts on which an exporter compares both
    models."""
    number = positive(text)
    if number < SHORTEST:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; allowed: {SHORTEST} or more")
    return number


def _add_paths(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help=what)
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder")


def run_export(args: argparse.Namespace) -> str:
    """Writes the folder and describes its content.

    Raises:
        ValueError: if the source cannot be exported; names the reason, and what works instead.
        FileNotFoundError: if the source is missing.
        ImportError: if the host or the engine is not installed.
    """
    with complete_folder(args.out) as folder:
        exported = _exporter(args)(args.source, folder, args)
        (folder / "README.md").write_text(exported.readme, encoding="utf-8")
    return f"{exported.report}\n{args.out}: see README.md there"


def _exporter(args: argparse.Namespace) -> Exporter:
    host = _host(args.source)
    points = {point.name: point for point in entry_points(group=GROUP)}
    point = points.get(f"{host}-{args.engine}")
    if point is None:
        of_host = (name for name in sorted(points) if name.startswith(f"{host}-"))
        engines = " or ".join(f"export {name.removeprefix(f'{host}-')}" for name in of_host)
        raise ValueError(
            f"export {args.engine} takes no {_NAMES[host]} {args.source}; allowed for it: "
            f"{engines or 'none, because the package cape-plugins is not installed'}."
        )
    try:
        return point.load()
    except ImportError as error:
        raise ImportError(
            f"export {args.engine} of a {_NAMES[host]} needs a package that cannot be imported "
            f"({error}); install it: pip install 'cape-plugins[serve]'"
        ) from None


def _host(source: Path) -> str:
    """The host that wrote the checkpoint at `source`."""
    try:
        exists = source.exists()
    except OSError as error:  # a name that is too long, a folder without permission
        raise ValueError(
            f"SOURCE {source} cannot be read ({error.strerror}); check the path."
        ) from None
    if not exists:
        paths = str(source).split(os.pathsep)
        if len(paths) > 1 and all(os.path.exists(path) for path in paths):
            raise ValueError(
                f"SOURCE {source} is an ensemble, which no engine loads as one model; allowed: one "
                "checkpoint. Average the checkpoints (cape-average-checkpoints), or export each "
                "checkpoint."
            )
        raise FileNotFoundError(f"SOURCE {source} does not exist; check the path.")
    if source.is_file():
        return FAIRSEQ
    if not (source / "config.json").is_file():
        raise ValueError(
            f"SOURCE {source} has no config.json; give a folder that save_pretrained wrote, or a "
            "checkpoint file of fairseq."
        )
    return HUGGING_FACE
