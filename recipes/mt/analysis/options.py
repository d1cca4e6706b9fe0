"""What the analysis commands share: options, models, tables and plots."""

import argparse
import csv
import glob
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from recipes.lab.options import positive
from recipes.lab.steps import CommandError, digest, step, write_lines, writing
from recipes.lab.tables import machine, shown_command, versions
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.corpus import Pair, fingerprint, read_pairs

PACKAGES = ("torch", "fairseq-fixed", "transformers", "sentencepiece", "sacrebleu")
Models = Mapping[str, Sequence[Translator]]  # by name; several are seeds
CONFIDENCE = 0.95


# ---- options -----------------------------------------------------------------------------------


def whole(text: str) -> int:
    """Argument type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Models, test text, and how models are run."""
    add = parser.add_argument
    text = "a name, and a fairseq checkpoint or a folder of a Hugging Face model; several paths, or"
    text += " one with *, are seeds: mean and 95%% band"
    add("--model", nargs="+", action="extend", required=True, metavar="NAME=PATH[,PATH]", help=text)
    text = "test text, plain or .gz, not segmented"
    add("--test", nargs=2, type=Path, required=True, metavar=("SOURCE", "TARGET"), help=text)
    add("--sentences", type=positive, metavar="N", help="of the test text, the first N")
    text = "folder for tables and plots (default: %(default)s)"
    add("--output", type=Path, default=Path("results/translation"), help=text)
    group = parser.add_argument_group("fairseq checkpoints, where not found beside them")
    add = group.add_argument
    many = {"action": "append", "default": []}
    add("--data", **many, metavar="[NAME=]DIR", help="folder of fairseq-preprocess")
    add("--spm", **many, metavar="[NAME=]FILE", help="sentencepiece model")
    add("--bpe", **many, metavar="[NAME=]FILE", help="subword-nmt codes, after Moses tokenisation")
    text = "the test text is in the subwords of the models; they are joined before it is scored"
    add("--segmented", action="store_true", help=text)
    add = parser.add_argument_group("computation").add_argument
    text = "such as cpu or cuda:1 (default: cuda if there is one)"
    add("--device", metavar="DEVICE", help=text)
    add("--fp16", action="store_true", help="half precision, on a GPU")
    text = "of a padded batch (default: %(default)s)"
    add("--max-tokens", type=positive, default=4000, metavar="N", help=text)
    text = "added to all positions: 0 as in the SHAPE paper (the default), or the maximum offset as"
    text += " in the code of its authors"
    add("--inference-offset", type=whole, default=0, metavar="K", help=text)


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """Beam search; the defaults are SHAPE's."""
    add = parser.add_argument_group("beam search").add_argument
    add("--beam", type=positive, default=4, help="(default: %(default)s)")
    add("--length-penalty", type=float, default=1.0, help="(default: %(default)s)")
    text = "longest hypothesis: A x source tokens + B (default: 2 20)"
    add("--max-length", nargs=2, type=float, default=(2.0, 20.0), metavar=("A", "B"), help=text)


def running(args: argparse.Namespace) -> Running:
    """How models are run."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device {name}: not available here ({error})") from None
    if args.fp16 and device.type == "cpu":
        raise CommandError("--fp16: needs a GPU; leave it out, or give --device cuda")
    return Running(device, args.fp16, args.max_tokens, args.inference_offset)


def decoding(args: argparse.Namespace) -> Decoding:
    """Beam search."""
    share, more = args.max_length
    if share < 0 or more < 0 or share + more < 1:
        raise CommandError(f"--max-length {share} {more}: allowed: not negative, at least 1 in all")
    return Decoding(args.beam, args.length_penalty, share, int(more))


def test_pairs(args: argparse.Namespace) -> list[Pair]:
    """The test text."""
    return list(islice(read_pairs(*args.test, "--test"), args.sentences))


# ---- models ------------------------------------------------------------------------------------


def open_models(args: argparse.Namespace) -> dict[str, list[Translator]]:
    """The models of ``--model``.

    Raises:
        CommandError: naming the model that cannot be read.
    """
    named = [word.partition("=") for word in args.model]
    names = [name for name, *_ in named]
    for name, _, paths in named:
        if not name or not paths:
            word = name or f"={paths}"
            raise CommandError(f"--model {word}: give a name and a path, as in cape=checkpoint.pt")
        if names.count(name) > 1:
            raise CommandError(f"--model: two models are named {name}; give seeds as {name}=A,B")
    files = {option: _by_name(getattr(args, option), names) for option in ("data", "spm", "bpe")}
    for option in ("spm", "bpe") if args.segmented else ():
        if files[option]:
            raise CommandError(f"--{option} segments plain text; leave it or --segmented out")
    models: dict[str, list[Translator]] = {}
    how = running(args)
    for name, _, paths in named:
        if args.segmented and any(path.is_dir() for path in _expand(paths)):
            raise CommandError(
                f"--segmented: {name} is a Hugging Face model, which segments plain text itself; "
                "give plain text, and --spm or --bpe for models of fairseq"
            )
        for option, found in files.items():
            if name in found and all(path.is_dir() for path in _expand(paths)):
                raise CommandError(
                    f"--{option} {name}={found[name]} has no effect: {name} is a Hugging Face "
                    "model, which has its own tokenizer; leave it out"
                )
        own = {option: found.get(name, found.get("")) for option, found in files.items()}
        models[name] = [
            open_translator(path, how, segmented=args.segmented, **own) for path in _expand(paths)
        ]
        first, *others = models[name]
        for other in others:
            if other.kind != first.kind:
                raise CommandError(
                    f"--model {name}: {first.path} is {first.kind}, {other.path} is {other.kind}; "
                    "seeds are of one kind; give the others names of their own"
                )
        if how.offset:
            first.check_offset(how.offset)
    return models


def _expand(paths: str) -> list[Path]:
    found = []
    for path in paths.split(","):
        matching = sorted(glob.glob(path)) if "*" in path else [path]
        if not matching:
            raise CommandError(f"--model {path}: nothing matches")
        found += map(Path, matching)
    return found


def _by_name(words: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """``[NAME=]FILE``; the name "" is that of all models that are not named."""
    result = {}
    for word in words:
        name, _, rest = word.partition("=")
        result[name if name in names and rest else ""] = Path(rest if name in names else word)
    return result


def open_translator(path: Path, how: Running, **files: Any) -> Translator:
    """The model of either host at this path.

    Args:
        path: A file is a checkpoint of fairseq, a folder a Hugging Face model.
        how: How it is run.
        files: ``data``, ``spm``, ``bpe`` and ``segmented``, for fairseq.
    """
    # The first to do so wins: an import of fairseq would let all libraries talk.
    logging.basicConfig(level=logging.WARNING)
    try:
        if path.is_dir():
            from recipes.mt.analysis.huggingface_host import HuggingFaceTranslator

            return HuggingFaceTranslator(path, how)
        if path.is_file():
            from recipes.mt.analysis.fairseq_host import FairseqTranslator

            return FairseqTranslator(path, how, **files)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--model {path}: needs {error.name}, which is not installed; `make setup` installs"
            " fairseq, `make setup-hf` transformers"
        ) from None
    raise CommandError(f"--model {path}: no such file or folder")


def translations(
    model: Translator, sources: Sequence[str], how: Decoding, folder: Path, title: str
) -> list[str]:
    """Hypotheses, kept in `folder` under a name made of all they depend on: a command that is
    repeated, or was interrupted, translates nothing twice."""
    settings = {
        "model": [digest(path) for path in model.files()],
        "text": _digest_text(sources),
        "read": _digest_text(str(model.source_ids(source)) for source in sources),
        "written": _digest_text(model.text(model.target_ids(source)) for source in sources),
        "decoding": vars(how),
        "offset": model.running.offset,
        "half": model.running.half,
    }
    name = f"{title.replace(' ', '-')}-{_digest_text([str(settings)])}"

    def make(partial: Path) -> None:
        hypotheses = model.translate(sources, how, title)
        write_lines(partial / "hypotheses", (" ".join(text.split()) for text in hypotheses))

    made = step(folder / name, settings, make)
    return (made / "hypotheses").read_text("utf-8").split("\n")[:-1]


def _digest_text(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# ---- numbers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Means with the ends of their 95 % confidence bands, arrays of the same shape; the ends are
    NaN where there is nothing to estimate them from."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def cell(self, index: int, digits: int) -> str:
        """For a table: the mean, and the band if there is one."""
        text = f"{self.mean[index]:.{digits}f}"
        if np.isnan(self.low[index]) or np.isnan(self.mean[index]):
            return text.replace("nan", "")
        return f"{text} ({self.low[index]:.{digits}f} to {self.high[index]:.{digits}f})"


def over_seeds(values: Sequence[np.ndarray]) -> Estimate:
    """Mean over seeds and Student's t interval; no band for a single one."""
    stacked = np.stack(values).astype(float)
    mean, count = stacked.mean(0), len(stacked)
    if count == 1:
        return Estimate(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    width = stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stacked.std(0, ddof=1) / count**0.5
    return Estimate(mean, mean - width, mean + width)


def bins(edges: Sequence[int], option: str) -> list[tuple[str, int, float]]:
    """Label, lowest and highest number of the bins with these upper ends, and of one beyond.

    >>> bins([5, 10], "--bins")
    [('0-5', 0, 5), ('6-10', 6, 10), ('over 10', 11, inf)]
    """
    if list(edges) != sorted(set(edges)):
        raise CommandError(f"{option} {' '.join(map(str, edges))}: the numbers must increase")
    lows = [0, *(edge + 1 for edge in edges)]
    result = [(f"{low}-{edge}", low, edge) for low, edge in zip(lows, edges, strict=False)]
    return [*result, (f"over {edges[-1]}", lows[-1], float("inf"))]


# ---- results -----------------------------------------------------------------------------------


def facts(args: argparse.Namespace, models: Models, **more: str) -> list[str]:
    """How a table was made: command, machine, versions, data, models."""
    where = machine()
    how = running(args)
    if how.device.type == "cuda":
        where += f"; {torch.cuda.get_device_name(how.device)}"
    kinds = (
        f"{name}: {seeds[0].kind}" + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")
        for name, seeds in models.items()
    )
    lines = {
        "Command": f"`{shown_command('python -m recipes.mt.analyze', args.argv)}`",
        "Machine": where,
        "Versions": versions(PACKAGES),
        "Test text": ", ".join(fingerprint(path, "--test") for path in args.test),
        "Models": "; ".join(kinds),
        **{name.replace("_", " ").capitalize(): text for name, text in more.items()},
    }
    return [f"- **{name}**: {text}" for name, text in lines.items()]


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """One table as CSV."""
    with writing(path) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header)
        table.writerows(rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """One table as Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


def joined(args: argparse.Namespace) -> list[str]:
    """What is to be said of scores of text that was segmented before."""
    if not args.segmented:
        return []
    return ["", "Subwords of the test text are joined before; its words are scored as they are."]


def write_report(
    args: argparse.Namespace, title: str, lines: Sequence[str], how_made: Sequence[str]
) -> None:
    """``COMMAND.md``, and the same table on the screen."""
    path = args.output / f"{args.command}.md"
    write_lines(path, [f"# {title}", "", *lines, "", *how_made])
    print("\n".join(lines))
    print(f"tables and plot: {path}, {args.command}.csv, {args.command}.png")


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Any) -> None:
    """As PNG."""
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def draw_band(axes: Any, places: Sequence[float], estimate: Estimate, **style: Any) -> None:
    """A line with its confidence band."""
    (line,) = axes.plot(places, estimate.mean, **style)
    axes.fill_between(
        places, estimate.low, estimate.high, alpha=0.18, color=line.get_color(), linewidth=0
    )


def draw_matrix(axes: Any, values: np.ndarray, texts: Sequence[Sequence[str]], **scale: Any) -> Any:
    """A heat map with a text in each cell, in a colour that can be read there."""
    picture = axes.imshow(values, aspect="auto", **scale)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if not np.isfinite(values[row, column]):
                continue
            colour = picture.cmap(picture.norm(values[row, column]))
            dark = 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] < 0.5
            axes.text(column, row, text, ha="center", va="center", fontsize="x-small",
                      color="white" if dark else "black")  # fmt: skip
    return picture
