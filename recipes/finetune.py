"""What the Hugging Face recipes share: options, training of one model after the other, tables.

Training is transformers' Trainer, and so accelerate: any of its flags may be given (``--bf16``,
``--gradient_accumulation_steps 4``, ``--fsdp full_shard``, ``--learning_rate 1e-4`` ...), under
``python``, ``accelerate launch`` or ``torchrun`` alike. A run that was interrupted goes on at its
last checkpoint.
"""

import argparse
import csv
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from tqdm import tqdm
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer
from transformers.trainer_utils import get_last_checkpoint

from cape_plugins.arguments import TYPE_ARG, add_position_args, given_settings
from cape_plugins.config import applies
from hf_models import RankSeedCallback
from recipes.steps import CommandError, machine, matches, record, versions, writing

# name of the variant: scores by group (length, duration, size ...)
Scores = Mapping[str, Mapping[str, float]]

TRAINER_DEFAULTS = (
    *("--report_to", "none", "--save_strategy", "steps", "--save_total_limit", "1"),
    *("--logging_steps", "50", "--save_steps", "200", "--remove_unused_columns", "False"),
)

# What a model was trained with, so that no other run takes it for its own: options of the recipes
# and of the Trainer, as far as they are not about length, speed or output.
DATA_AND_MODEL = (
    *("model", "model_config", "dataset", "dataset_config", "train_file", "source_lang"),
    *("target_lang", "vocab_size", "max_length", "train_sizes", "univit", "max_seconds", "crop"),
)
HYPERPARAMETERS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "seed"),
    *("weight_decay", "label_smoothing_factor", "lr_scheduler_type", "warmup_steps", "optim"),
)


def make_parser(description: str, domain: str) -> argparse.ArgumentParser:
    """Options of every recipe; the position flags are those of fairseq."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags go to transformers' Seq2SeqTrainingArguments.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="checkpoint to finetune, stock or cape; default: none, a "
        "small model is trained from scratch")  # fmt: skip
    add("--model-config", metavar="JSON", help="sizes of a model trained from scratch, a file or "
        """such as '{"hidden_size": 192}'""")  # fmt: skip
    add("--compare", nargs="+", metavar="TYPE", help="train several types, one after the other, "
        "with the defaults of each; default without --position-embedding")  # fmt: skip
    add("--output", type=Path, required=False, help="folder for models, tables and plot")
    add_position_args(parser, domain)
    return parser


def parse(
    parser: argparse.ArgumentParser,
    defaults: Sequence[str],
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, Seq2SeqTrainingArguments]:
    """The recipe's own options and the Trainer's."""
    args, rest = parser.parse_known_args(argv)
    trainer_parser = HfArgumentParser(Seq2SeqTrainingArguments, allow_abbrev=False)
    words = [*TRAINER_DEFAULTS, *defaults, *rest, "--output_dir", str(args.output)]
    if not torch.cuda.is_available() and "--use_cpu" not in words:
        words.append("--use_cpu")
    training, *_, unknown = trainer_parser.parse_args_into_dataclasses(
        args=words, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        raise CommandError(
            f"unknown option {unknown[0]}; --help lists those of the recipe, all others are fields "
            "of transformers' Seq2SeqTrainingArguments, such as --learning_rate 1e-4"
        )
    if args.model_config:
        try:
            if Path(args.model_config).is_file():
                args.model_config = Path(args.model_config).read_text(encoding="utf-8")
            args.model_config = json.loads(args.model_config)
        except json.JSONDecodeError as error:
            raise CommandError(
                f"--model-config {args.model_config!r} is no JSON ({error}); give an object such "
                """as '{"hidden_size": 192}'"""
            ) from None
    return args, training


def variants(
    args: argparse.Namespace, domain: str, default: Sequence[str], extra: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """``{name: position_embedding}`` of what is to be trained.

    Args:
        extra: Settings of every type that has them, such as a counted source scale.
    """
    given, chosen = given_settings(args, domain), getattr(args, TYPE_ARG)
    if args.compare and (chosen or given):
        raise CommandError(
            "--compare trains the defaults of each type; leave it out to train one type with "
            "--position-... options"
        )
    if chosen or given:
        names = [chosen or "cape"]
    else:
        names = args.compare or default
    return {
        name: {
            "type": name,
            **{key: value for key, value in extra.items() if applies(key, name)},
            **given,
        }
        for name in names
    }


# ---- data --------------------------------------------------------------------------------------

TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def open_dataset(name: str, config: str | None = None) -> Mapping[str, Any]:
    """Splits of a hub data set, of a folder that ``save_to_disk`` wrote, or of a folder or file of
    tables or images."""
    from datasets import Dataset, load_dataset, load_from_disk

    path = Path(name)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        data = load_from_disk(name)
        return {"train": data} if isinstance(data, Dataset) else data
    if path.is_file():
        return open_tables({"train": name}, "--dataset")
    try:
        return load_dataset(name, config)
    except (OSError, ValueError) as error:  # unknown, empty, without network, no such config
        raise CommandError(
            f"--dataset {name} cannot be read ({error}); give the name of a data set of the hub, a "
            "folder of save_to_disk, or a folder or file of tables, images or recordings"
        ) from None


def open_tables(files: Mapping[str, str], option: str = "--train-file") -> Mapping[str, Any]:
    """Splits of csv, tsv, json, jsonl or parquet files, all of one format."""
    from datasets import load_dataset

    for name in files.values():
        if not Path(name).is_file():
            raise CommandError(f"{name}: no such file; give {', '.join(TABLES)}")
    suffix = Path(files["train"]).suffix
    if suffix not in TABLES:
        raise CommandError(
            f"{option} {files['train']}: unknown format; allowed: {', '.join(TABLES)}"
        )
    more = {"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {}
    return load_dataset(TABLES[suffix], data_files=dict(files), **more)


def given_tables(args: argparse.Namespace) -> Mapping[str, Any]:
    """Those of ``--train-file`` and ``--test-file``, or ``--validation-file``."""
    files = {"train": args.train_file, "test": args.test_file or args.validation_file}
    return open_tables({split: name for split, name in files.items() if name})


def train_and_test(data: Mapping[str, Any]) -> dict[str, Any]:
    """The splits that are used; without a test split at most 1000 rows of training are."""
    if "train" not in data:
        raise CommandError(f"the data have the splits {', '.join(data)}; one must be named train")
    test = next((name for name in ("test", "validation", "valid", "dev") if name in data), None)
    if test is not None:
        return {"train": data["train"], "test": data[test]}
    size = min(1000, max(1, len(data["train"]) // 10))
    return dict(data["train"].train_test_split(size, seed=0))


def check_columns(args: argparse.Namespace, data: Any, *options: str) -> None:
    """Options that name columns must name some of the data."""
    for option in options:
        if getattr(args, option) not in data.column_names:
            raise CommandError(
                f"--{option.replace('_', '-')} {getattr(args, option)}: the data have the columns "
                f"{', '.join(data.column_names)}; name one of them"
            )


# ---- training ----------------------------------------------------------------------------------


def train(
    name: str,
    settings: Mapping[str, Any],
    args: argparse.Namespace,
    training: Seq2SeqTrainingArguments,
    make_trainer: Callable[[Mapping[str, Any], Seq2SeqTrainingArguments], Trainer],
) -> Trainer:
    """Trains one variant in ``output/name``, or goes on where it was interrupted.

    Returns:
        The trainer. Its model is that of the saved folder, whole on each process also where
        training had it in shards.

    Raises:
        CommandError: if the folder has a model of other settings.
    """
    folder = Path(training.output_dir) / name
    own = Seq2SeqTrainingArguments(**{**_init_fields(training), "output_dir": str(folder)})
    accelerate.utils.set_seed(own.seed)
    made_with = {
        "position_embedding": dict(settings),
        **{key: value for key, value in vars(args).items() if key in DATA_AND_MODEL},
        **{key: getattr(own, key) for key in HYPERPARAMETERS},
    }
    made_with = json.loads(json.dumps(made_with, default=str))
    matches(folder, made_with, "give another --output folder")
    if own.process_index == 0:
        print(f"{name}: {json.dumps(dict(settings))}", flush=True)
        record(folder, made_with)
    trainer = make_trainer(settings, own)
    trainer.add_callback(RankSeedCallback())
    resume = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    result = trainer.train(resume_from_checkpoint=own.resume_from_checkpoint or resume)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.accelerator.wait_for_everyone()
    kind = type(trainer.accelerator.unwrap_model(trainer.model))
    trainer.model = kind.from_pretrained(folder).to(own.device).eval()
    return trainer


def _init_fields(training: Seq2SeqTrainingArguments) -> dict[str, Any]:
    return {
        field.name: getattr(training, field.name)
        for field in dataclasses.fields(training)
        if field.init
    }


# ---- evaluation --------------------------------------------------------------------------------


def share(
    work: Sequence[Sequence[int]],
    run: Callable[[Sequence[int]], Sequence[Any]],
    what: str,
    size: int,
) -> list[Any]:
    """Runs batches, each on one of the processes, and puts their results together.

    Args:
        work: Batches of indices below `size`.
        run: From a batch to a result for each of its indices.
        what: Shown by the progress bar.
        size: Number of results.

    Returns:
        The result of each index, the same list on every process.
    """
    state = accelerate.PartialState()
    results = []
    bar = tqdm(
        work[state.process_index :: state.num_processes],
        what,
        leave=False,
        disable=not state.is_main_process,
    )
    with torch.no_grad():
        for batch in bar:
            results += zip(batch, run(batch), strict=True)
    ordered = dict(accelerate.utils.gather_object(results))
    return [ordered[index] for index in range(size)]


def batches(lengths: Sequence[float], batch_size: int) -> list[list[int]]:
    """Batches of indices, those of similar length together, so that there is little padding."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


# ---- results -----------------------------------------------------------------------------------


def report(folder: Path, scores: Scores, metric: str, group: str, trained: Sequence[str]) -> None:
    """Writes ``scores.json``, ``.csv``, ``.md`` and ``.png``, and prints the table; the last thing
    that the processes of a training do.

    Args:
        scores: By variant and group.
        metric: What the numbers are.
        group: What the groups are.
        trained: Groups that occur in training, marked in the plot.
    """
    state = accelerate.PartialState()
    main_process = state.is_main_process
    state.destroy_process_group()
    if not main_process:
        return
    groups = list(next(iter(scores.values())))
    with writing(folder / "scores.json") as file:
        json.dump(scores, file, indent=1)
    with writing(folder / "scores.csv") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["variant", group, metric])
        for name, row in scores.items():
            table.writerows((name, key, f"{value:.4f}") for key, value in row.items())
    lines = [f"{metric} by {group}", "", f"| variant | {' | '.join(groups)} |"]
    lines.append("|---" * (len(groups) + 1) + "|")
    lines += [
        f"| {name} | {' | '.join(f'{row[key]:.2f}' for key in groups)} |"
        for name, row in scores.items()
    ]
    script = "/".join(Path(sys.argv[0]).parts[-3:])
    lines += [
        "",
        f"`{shlex.join(['python', script, *sys.argv[1:]])}`",
        f"{machine()}; {versions(('torch', 'transformers', 'accelerate'))}",
    ]
    with writing(folder / "scores.md") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    _plot(folder / "scores.png", scores, metric, group, trained)
    print(f"tables and plot: {folder}/scores.md, scores.csv, scores.json, scores.png")


def _plot(path: Path, scores: Scores, metric: str, group: str, trained: Sequence[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    groups = list(next(iter(scores.values())))
    for name, row in scores.items():
        axes.plot(groups, [row[key] for key in groups], marker="o", label=name)
    for index, key in enumerate(groups):
        if key in trained:
            axes.axvspan(index - 0.5, index + 0.5, color="0.92")
    axes.set(xlabel=f"{group} (grey: in training)", ylabel=metric)
    axes.legend()
    axes.grid(alpha=0.3)
    with writing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
