"""Tests image classifiers at sizes other than their size of training (CAPE section 5.1 and Appendix
B).

    python recipes/vit/evaluate.py --model results/vit/abspos results/vit/cape --protocol whole
    python recipes/vit/evaluate.py --model cape=runs/a,runs/b,runs/c google/vit-base-patch16-224 \\
        --dataset imagenet-1k --sizes 160 224 384 672 --tta --bins --throughput

Models are checkpoints of transformers that classify images, stock or cape; several checkpoints may
be seeds of one model. Without --dataset the data are the test digits of finetune_hf.py. Tables
(CSV, Markdown) and plots (PNG) go to --output.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

if __name__ == "__main__":  # as a script, like finetune_hf.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cape_plugins.utils.machine import available_cores
from recipes.lab import command_line, tables
from recipes.lab.data import fingerprint
from recipes.lab.figures import Panel, new_figure, widen, write_figure, write_lines_figure
from recipes.lab.steps import CommandError, digest, progress, run_main, started_as, write_lines
from recipes.lab.tables import ALL, Cells, Row
from recipes.vit.classifier import Classifier, match_classes, throughput
from recipes.vit.data import COLUMNS, load_data
from recipes.vit.measure import BIN_EDGES, GAMMA_RULES, MAX, MIN, check, measure

TTA_STEP, DIGIT_TTA_STEP = 32, 8  # two patches
SIZE_RATIOS = (5 / 7, 1, 12 / 7, 3)  # 160, 224, 384 and 672 for a model trained at 224
CPU_BATCH, CUDA_BATCH = 32, 16384
NEEDED = {  # option: the option without which it has no effect
    "tta_step": "tta",
    "trained_size": "gamma",
    **dict.fromkeys(("runs", "warmup", "max_batch"), "throughput"),
}
PROTOCOLS = {"crop": "shorter side to size / 0.875, centre crop", "whole": "whole image squeezed"}
WEIGHTS = (".json", ".safetensors", ".bin")
UNFINISHED = ".unfinished-evaluation"  # folder in --output, for --resume
PACKAGES = ("torch", "transformers", "datasets", "scikit-learn")
# options that do not change the measurements
UNIMPORTANT = ("model", "models", "output", "resume", "workers")

TITLES = {
    "accuracy": "Accuracy by size",
    "tta": "Test-time augmentation",
    "gamma": "Factor on the grid of positions",
    "bins": "Best size by size of the original",
    "throughput": "Accuracy against throughput",
}
TOP = {"top1": "Top-1 accuracy, %", "top5": "Top-5 accuracy, %"}
BEST = "best of each bin"


def make_options() -> argparse.ArgumentParser:
    parser = command_line.new_parser(__doc__)
    command_line.add_shared(parser, "models", note="or names on the hub")
    command_line.add_shared(parser, "output", default=Path("results/vit-evaluation"))
    parser.add_argument(
        "--dataset",
        nargs="+",
        default=[None],
        metavar="NAME",
        help="hub names, folders of images by class, parquet, csv or json; default: built-in "
        "digits",
    )
    parser.add_argument(
        "--dataset-config", metavar="NAME", help="configuration of a data set of the hub"
    )
    parser.add_argument(
        "--test-split",
        metavar="NAME",
        help="split to test as a whole (default: the only split, or else test, validation, valid "
        "or dev)",
    )
    for what, names in (("image", COLUMNS["image_column"]), ("label", COLUMNS["label_column"])):
        parser.add_argument(
            f"--{what}-column",
            metavar="NAME",
            help=f"column of the {what}s (default: the first of {', '.join(names)} that is there)",
        )
    command_line.add_shared(parser, "limit", note="evenly spread")
    _add_measurements(parser)
    _add_computation(parser)
    parser.add_argument(
        "--resume", action="store_true", help="keep the measurements of an interrupted run"
    )
    return parser


def _add_measurements(parser: argparse.ArgumentParser) -> None:
    pixels = {"type": command_line.positive, "metavar": "PIXELS"}
    parser.add_argument(
        "--sizes",
        nargs="+",
        **pixels,
        help="sizes to test (default: 5/7, 1, 12/7 and 3 times the size of the first model: 160 "
        "224 384 672 for 224)",
    )
    parser.add_argument(
        "--protocol",
        choices=("crop", "whole"),
        default="crop",
        help="crop: resize the shorter side to SIZE/0.875, then crop the centre square (paper; "
        "default); whole: resize the whole image to a square",
    )
    parser.add_argument(
        "--tta",
        action="store_true",
        help="test-time augmentation: also add up the log-probabilities at SIZE - STEP, SIZE and "
        "SIZE + STEP (--tta-step)",
    )
    parser.add_argument(
        "--tta-step", **pixels, help="STEP of --tta (default: 32, for the digits 8)"
    )
    parser.add_argument(
        "--gamma",
        action="store_true",
        help=f"also multiply the grid of positions by {', '.join(GAMMA_RULES)} (sinusoids only)",
    )
    parser.add_argument(
        "--trained-size",
        **pixels,
        help="size of training, for --gamma; default: image_size of the model",
    )
    parser.add_argument(
        "--bins",
        nargs="*",
        type=command_line.positive,
        metavar="EDGE",
        help="also find the best size for each bin of images, by their shorter side in pixels; "
        f"edges of the bins if none are given: {' '.join(map(str, BIN_EDGES))}",
    )
    parser.add_argument(
        "--throughput", action="store_true", help="also measure images per second at each size"
    )
    parser.add_argument(
        "--runs", type=command_line.positive, help="timed runs of --throughput (default: 30)"
    )
    parser.add_argument(
        "--warmup", type=command_line.positive, help="runs before the timed ones (default: 30)"
    )
    parser.add_argument(
        "--max-batch",
        type=command_line.positive,
        metavar="N",
        help=f"largest batch of --throughput to try (default: {CPU_BATCH}, on cuda {CUDA_BATCH})",
    )


def _add_computation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=command_line.positive, default=64, help="images (default: 64)"
    )
    command_line.add_shared(parser, "dtype", default="float32")
    command_line.add_shared(parser, "device")
    parser.add_argument(
        "--workers",
        type=command_line.positive,
        metavar="N",
        help="threads that read images (default: 1 on cpu; otherwise one per core, at most 16)",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options, sets defaults, and checks all that can be checked without a model."""
    args = make_options().parse_args(argv)
    command_line.check_shared(args)
    cpu = args.device.type == "cpu"
    args.workers = args.workers or (1 if cpu else min(16, available_cores()))
    for name, other in NEEDED.items():
        if getattr(args, name) and not getattr(args, other):
            raise CommandError(f"--{name.replace('_', '-')} has no effect without --{other}")
    args.runs, args.warmup = args.runs or 30, args.warmup or 30
    args.max_batch = args.max_batch or (CPU_BATCH if cpu else CUDA_BATCH)
    builtin = args.dataset == [None]
    args.tta_step = args.tta_step or (DIGIT_TTA_STEP if builtin else TTA_STEP)
    if args.bins is not None:
        args.bins = args.bins or list(BIN_EDGES)
        command_line.check_increasing(args.bins, "--bins")
    if builtin and (args.dataset_config or args.test_split):
        raise CommandError("--dataset-config and --test-split need --dataset")
    args.models = command_line.named_models(args.model)
    return args


def default_sizes(train: int, patch: int) -> list[int]:
    """The sizes of the paper for a model trained at 224; for other models, sizes in the same
    proportion, in whole patches."""
    return [max(1, round(train * ratio / patch)) * patch for ratio in SIZE_RATIOS]


def measure_speed(classifier: Classifier, args: argparse.Namespace) -> dict[str, list[Row]]:
    counts = {"limit": args.max_batch, "warmup": args.warmup, "runs": args.runs}
    sizes = progress(args.sizes, f"{classifier.path}: throughput")
    return {"throughput": [throughput(classifier, size, **counts) for size in sizes]}


def remembered(folder: Path, settings: Any, work: Callable[[], Any]) -> Any:
    """The result of `work`, from `folder` if an earlier run has stored it there."""
    file = folder / f"{fingerprint([json.dumps(settings, sort_keys=True)])}.json"
    if not file.exists():
        write_lines(file, [json.dumps(work())])
    return json.loads(file.read_text("utf-8"))


def evaluate(
    args: argparse.Namespace, groups: Mapping[str, Sequence[Classifier]]
) -> dict[str, list[Row]]:
    """Rows of all tables by name; all checks come before the first measurement."""
    every = [model for group in groups.values() for model in group]
    data = {channels: load_data(args, channels) for channels in {model.channels for model in every}}
    for model in every:
        for part in data[model.channels]:
            match_classes(part.images.names, model.labels)
        with model.on(args.device):
            check(model, args)
    done = args.output / UNFINISHED
    if not args.resume:
        shutil.rmtree(done, ignore_errors=True)
    options = {key: str(value) for key, value in vars(args).items() if key not in UNIMPORTANT}
    rows: dict[str, list[Row]] = {}
    for name, group in groups.items():
        for model in group:
            # no files for a checkpoint on the hub, only its name
            files = [file for file in sorted(Path(model.path).glob("*")) if file.suffix in WEIGHTS]
            made_with = [options, [model.path, *map(digest, files)]]
            work = {part.name: partial(measure, model, part, args) for part in data[model.channels]}
            if args.throughput and model is group[0]:  # seeds of a model are equally fast
                work[None] = partial(measure_speed, model, args)
            with model.on(args.device):
                for part, run in work.items():
                    columns = {"model": name, "checkpoint": model.path}
                    columns |= {} if part is None else {"data": part}
                    for table, measured in remembered(done, [*made_with, part], run).items():
                        rows.setdefault(table, []).extend({**columns, **row} for row in measured)
    shutil.rmtree(done, ignore_errors=True)
    return rows


def write_all(
    folder: Path, rows: Mapping[str, Sequence[Row]], facts: Mapping[str, str]
) -> Iterator[list[str]]:
    """Writes ``TABLE.csv``, ``TABLE.md`` and ``TABLE.png``, and yields the lines of the page. Facts
    under the name of a table are for this table only."""
    for table, measured in rows.items():
        figure = folder / f"{table}.png"
        if table == "bins":
            sections = _write_bins(figure, measured)
        elif table == "throughput":
            sections = _write_throughput(figure, measured, rows["accuracy"])
        else:
            sections = _write_sizes(figure, measured)
        tables.write_csv(folder / f"{table}.csv", measured)
        of_page = {
            name: text for name, text in facts.items() if name not in TITLES or name == table
        }
        yield tables.write_page(folder / f"{table}.md", TITLES[table], sections, of_page)


def _write_sizes(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    lines, panel = [], ["data"]
    for row in rows:
        line = f"{row['model']} TTA" if row.get("tta") == "+" else row["model"]
        if "gamma" in row:
            line, panel = f"{line}, gamma {row['gamma']}", ["data", "model"]
        lines.append({**row, "line": line})
    panels = [
        Panel(tables.pivot(group, "line", "size", "top1"), TOP["top1"], title)
        for title, group in tables.grouped(lines, *panel).items()
    ]
    write_lines_figure(path, panels, "size in pixels")
    return {
        f"{title} ({name}, {group[0]['images']} images)": tables.seed_table(
            tables.pivot(group, "line", "size", metric), "model"
        )
        for name, group in tables.grouped(lines, "data").items()
        for metric, title in TOP.items()
    }


def _write_bins(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    panels, sections = [], {}
    for title, group in tables.grouped(rows, "data", "model").items():
        labels = dict.fromkeys(row["bin"] for row in group)
        # each line has all bins, so that the bins stay in order
        lines = {
            name: {label: tried.get(label, []) for label in labels}
            for name, tried in tables.pivot(group, "strategy", "bin", "top1").items()
        }
        panels.append(Panel(lines, TOP["top1"], title))
        sections[f"{TOP['top1']} ({title})"] = bin_table(group)
    write_lines_figure(path, panels, "shorter side of the original in pixels")
    return sections


def bin_table(rows: Sequence[Row]) -> list[str]:
    """Returns lines of the table of one model on one data set. Each bin has a row, with the best
    strategy (by the mean over the seeds) in bold. The last row, for all images, shows means over
    the bins, weighted by number of images, of :data:`BEST` and of the strategies that were tried in
    every bin."""
    cells = tables.pivot(rows, "bin", "strategy", "top1")
    images = {row["bin"]: row["images"] for row in rows}
    sizes = {(row["bin"], row["strategy"]): row["size"] for row in rows}
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    lines, chosen = [], {name: [] for name in (*names, BEST)}
    for label, tried in cells.items():
        best = max(tried, key=lambda name, tried=tried: mean(tried[name]))
        texts = []
        for name in names:
            text = tables.cell(tried.get(name, ()))
            text = f"**{text}**" if name == best else text
            with_size = name in (MIN, MAX) and name in tried
            texts.append(f"{text} ({sizes[label, name]})" if with_size else text)
        lines.append([label, images[label], *texts, tables.cell(tried[best])])
        for name, values in (*tried.items(), (BEST, tried[best])):
            chosen[name].append(values)
    totals = {
        name: [fmean(seeds, images.values()) for seeds in zip(*bins, strict=True)]
        for name, bins in chosen.items()
        if len(bins) == len(cells)
    }
    texts = [tables.cell(totals.get(name, ())) for name in chosen]
    lines.append([ALL, sum(images.values()), *texts])
    return tables.markdown([f"shorter side ({tables.of_seeds(cells)})", "images", *chosen], lines)


def draw_throughput(path: Path, rates: Cells, accuracies: Cells) -> None:
    """Draws accuracy against images per second, with one line through the sizes of each model (CAPE
    Fig. 4)."""
    figure, ((axes,),) = new_figure(7, 4.8)
    for name, row in rates.items():
        points = [(mean(row[size]), mean(accuracies[name][size])) for size in row]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in map(accuracies[name].get, row)]
        style = {"yerr": spread if any(spread) else None, "capsize": 2, "marker": "o", "ms": 4}
        axes.errorbar(*zip(*points, strict=True), label=name, **style)
        for size, point in zip(row, points, strict=True):
            axes.annotate(str(size), point, (4, 4), textcoords="offset points", fontsize="small")
    axes.set(xscale="log", xlabel="images per second (numbers: size in pixels)")
    axes.set_ylabel(f"{TOP['top1']}\n({tables.of_seeds(accuracies)})")
    widen(axes, 100)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    write_figure(path, figure)


def _write_throughput(
    path: Path, rows: Sequence[Row], accuracies: Sequence[Row]
) -> dict[str, list[str]]:
    """Writes accuracy on the first data set, and throughput."""
    name, accuracies = next(iter(tables.grouped(accuracies, "data").items()))
    title = f"{TOP['top1']} ({name}, {accuracies[0]['images']} images)"
    rates = tables.pivot(rows, "model", "size", "images_per_second")
    right = tables.pivot(accuracies, "model", "size", "top1")
    draw_throughput(path, rates, right)
    return {
        "Images per second": tables.seed_table(rates, "model"),
        "Batch size": tables.seed_table(tables.pivot(rows, "model", "size", "batch"), "model"),
        title: tables.seed_table(right, "model"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    dtype = getattr(torch, args.dtype)
    groups = {
        name: [Classifier(path, dtype) for path in paths] for name, paths in args.models.items()
    }
    first = next(iter(groups.values()))[0]
    args.sizes = sorted(set(args.sizes or default_sizes(first.size, first.patch)))
    rows = evaluate(args, groups)
    images = f"{PROTOCOLS[args.protocol]}, bilinear; {args.dtype}"
    command = tables.shown_command(started_as(), argv)
    facts = tables.how_made(command, PACKAGES, args.device, images=images)
    facts |= {
        "gamma": f"train is {args.trained_size or 'the image_size of each model'}",
        "bins": (
            "sizes by centre crop; the best size is chosen on the tested images (CAPE Table 5)"
        ),
        "throughput": f"largest batch that fits, at most {args.max_batch}; {args.warmup} runs to "
        f"warm up, {args.runs} timed",
    }
    for lines in write_all(args.output, rows, facts):
        print("\n".join([*lines, ""]))
    print(f"tables and plots: {args.output}/{{{','.join(rows)}}}.{{md,csv,png}}")


if __name__ == "__main__":
    run_main(main)
