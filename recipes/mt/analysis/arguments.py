"""Options, models and reports that the analysis commands share."""

import argparse
import logging
import pkgutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.lab import command_line
from recipes.lab.command_line import add_shared, int_at_least, number, positive
from recipes.lab.data import fingerprint as digest_text
from recipes.lab.figures import write_figure
from recipes.lab.steps import CommandError, digest, read_written, step, write_lines
from recipes.lab.tables import Row, how_made, shown_command, write_csv, write_page
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.corpus import Pair, fingerprint, read_pairs

PACKAGES = ("torch", "fairseq-fixed", "transformers", "sentencepiece", "sacrebleu")
Models = dict[str, list[Translator]]  # by name; several models of one name are seeds


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, test text, and how models are run."""
    add_shared(parser, "models")
    parser.add_argument(
        "--test",
        nargs=2,
        type=Path,
        required=True,
        metavar=("SOURCE", "TARGET"),
        help="test text, plain or .gz, not segmented",
    )
    add_shared(parser, "limit", note="the first lines")
    add_shared(parser, "output", default=Path("results/translation"))
    group = parser.add_argument_group("fairseq checkpoints, where not found beside them")
    for option, metavar, text in (
        ("--data", "[NAME=]DIR", "folder of fairseq-preprocess"),
        ("--spm", "[NAME=]FILE", "sentencepiece model"),
        ("--bpe", "[NAME=]FILE", "subword-nmt codes, after Moses tokenisation"),
    ):
        group.add_argument(option, action="append", default=[], metavar=metavar, help=text)
    group.add_argument(
        "--segmented",
        action="store_true",
        help="the test text is in the subwords of the models; subwords are joined before scoring",
    )
    group = parser.add_argument_group("computation")
    add_shared(group, "device")
    group.add_argument("--fp16", action="store_true", help="half precision, on a GPU")
    group.add_argument(
        "--max-tokens",
        type=positive,
        default=4000,
        metavar="N",
        help="tokens of a padded batch (default: %(default)s)",
    )
    group.add_argument(
        "--inference-offset",
        type=int_at_least,
        default=0,
        metavar="K",
        help="added to all positions: 0 as in the SHAPE paper (the default), or the maximum "
        "offset as in the code of its authors",
    )


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Adds options of the beam search. The default beam is the beam of SHAPE and of most recipes;
    the default penalty is the penalty of fairseq and of the recipes of Multi30k. For SHAPE, give a
    penalty of 0: paper and code of SHAPE name no penalty, and OpenNMT-py, which they use, has none
    by default."""
    group = parser.add_argument_group("beam search")
    add_shared(group, "beam", default=4)
    add_shared(
        group,
        "length-penalty",
        default=1.0,
        note="0 in SHAPE's recipes; 0.6 and 0.8 in CAPE's recipes",
    )
    text = "longest hypothesis: A x source tokens + B (default: 2 20)"
    pair = {"nargs": 2, "type": number(0, 1e6), "metavar": ("A", "B")}
    group.add_argument("--max-length", **pair, default=(2.0, 20.0), help=text)


def decoding(args: argparse.Namespace) -> Decoding:
    share, more = args.max_length
    if share + more < 1:
        raise CommandError(f"--max-length {share:g} {more:g}: allowed: at least 1 in all")
    return Decoding(args.beam, args.length_penalty, share, int(more))


def test_pairs(args: argparse.Namespace) -> list[Pair]:
    return list(islice(read_pairs(*args.test, "--test"), args.limit))


def open_models(args: argparse.Namespace) -> Models:
    """The models of ``--model``; an error names the model that cannot be read."""
    if args.fp16 and args.device.type == "cpu":
        raise CommandError("--fp16: needs a GPU; leave it out, or give --device cuda")
    paths = command_line.named_models(args.model)
    files = {option: _by_name(getattr(args, option), paths) for option in ("data", "spm", "bpe")}
    for option in ("spm", "bpe") if args.segmented else ():
        if files[option]:
            raise CommandError(f"--{option} segments plain text; leave it or --segmented out")
    return {name: _open_seeds(args, name, list(map(Path, paths[name])), files) for name in paths}


def _open_seeds(
    args: argparse.Namespace, name: str, paths: list[Path], files: Mapping
) -> list[Translator]:
    if args.segmented and any(path.is_dir() for path in paths):
        raise CommandError(
            f"--segmented: {name} is a Hugging Face model, which segments plain text itself; "
            "give plain text, and --spm or --bpe for models of fairseq"
        )
    for option, by_name in files.items():
        if name in by_name and all(path.is_dir() for path in paths):
            why = f"{name} is a Hugging Face model, which has a tokenizer; leave the option out"
            raise CommandError(f"--{option} {name}={by_name[name]} has no effect: {why}")
    files_of_model = {
        option: by_name.get(name, by_name.get("")) for option, by_name in files.items()
    }
    running = Running(args.device, args.fp16, args.max_tokens, args.inference_offset)
    seeds = [
        open_translator(path, running, segmented=args.segmented, **files_of_model) for path in paths
    ]
    first = seeds[0]
    for count, seed in enumerate(seeds, 1):
        seed.title = f"{name} {count}"
        if seed.kind != first.kind:
            raise CommandError(
                f"--model {name}: {first.path} is {first.kind}, {seed.path} is {seed.kind}; all "
                "seeds of a name must be of one kind; give other models another name"
            )
    if running.offset:
        first.check_offset(running.offset)
    return seeds


def _by_name(words: Sequence[str], names: Container[str]) -> dict[str, Path]:
    """Files by model, from ``[NAME=]FILE``; "" stands for all models that are not named."""
    result = {}
    for word in words:
        name, _, rest = word.partition("=")
        result[name if name in names and rest else ""] = Path(rest if name in names else word)
    return result


def open_translator(path: Path, running: Running, **files: Any) -> Translator:
    """The checkpoint of fairseq in a file, or the Hugging Face model in a folder; `files` are
    ``data``, ``spm``, ``bpe`` and ``segmented``, for fairseq."""
    if not path.is_dir() and not path.is_file():
        remedy = "give a checkpoint of fairseq, or a folder of a Hugging Face model"
        raise CommandError(f"--model {path}: no such file or folder; {remedy}")
    # Set before the import of fairseq, which would make all libraries log: only the first call of
    # basicConfig has an effect.
    logging.basicConfig(level=logging.WARNING)
    host = "HuggingFace" if path.is_dir() else "Fairseq"
    module = f"recipes.mt.analysis.{host.lower()}_host"
    try:  # imports only one of fairseq and transformers, because the other may not be installed
        return pkgutil.resolve_name(f"{module}:{host}Translator")(path, running, **files)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--model {path}: needs {error.name}, which is not installed; `make setup` installs"
            " fairseq, `make setup-hf` transformers"
        ) from None


def translations(
    model: Translator, decoding: Decoding, folder: Path, sources: Sequence[str], order: str = ""
) -> list[str]:
    """Returns hypotheses, and stores them in `folder` for the next run. The name of the file is
    computed from everything that the hypotheses depend on."""
    settings = {
        "model": [digest(path) for path in model.files()],
        "text": digest_text(sources),
        "read": digest_text(str(model.source_ids(source)) for source in sources),
        "written": digest_text(model.text(model.target_ids(source)) for source in sources),
        "decoding": vars(decoding),
        "offset": model.running.offset,
        "half": model.running.half,
    }
    title = f"{model.title} {order}".strip().replace(" ", "-")

    def make(partial: Path) -> None:
        hypotheses = (" ".join(text.split()) for text in model.translate(sources, decoding, order))
        write_lines(partial / "hypotheses", hypotheses)

    folder = step(folder / f"{title}-{digest_text([str(settings)])}", settings, make)
    return read_written(folder / "hypotheses")


def each(measured: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Row, Any]]:
    """Columns that name a model and its seed (1, 2 ...), and the value for this seed."""
    for name, seeds in measured.items():
        for count, seed in enumerate(seeds, 1):
            yield {"model": name, "seed": count}, seed


def facts(args: argparse.Namespace, models: Models, **more: str) -> dict[str, str]:
    """Facts about a table: command, machine, versions, data, models."""
    names = (
        f"{name}: {seeds[0].kind}" + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")
        for name, seeds in models.items()
    )
    if args.segmented:
        more["scored"] = "Subwords of the test text are joined, but its words not detokenised"
    files = ", ".join(fingerprint(path, "--test") for path in args.test)
    more = {"test_text": files, "models": "; ".join(names), **more}
    command = shown_command("python -m recipes.mt.analyze", args.argv)
    return how_made(command, PACKAGES, args.device, **more)


def write_report(
    args: argparse.Namespace,
    models: Models,
    title: str,
    rows: Iterable[Row],
    figure: Any,
    lines: Sequence[str],
    digits: int = 6,
    **more: str,
) -> None:
    """Writes ``COMMAND.csv``, ``COMMAND.png`` and ``COMMAND.md``, and prints the last file."""
    csv, png, page = (args.output / f"{args.command}.{end}" for end in ("csv", "png", "md"))
    write_csv(csv, rows, digits)
    write_figure(png, figure)
    print("\n".join(write_page(page, title, {"": lines}, facts(args, models, **more))))
    print(f"tables and figure: {page}, {csv.name}, {png.name}")
