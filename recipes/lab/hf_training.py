"""What the Hugging Face recipes share: options, training of one model after the other, evaluation.

Training is transformers' Trainer, and so accelerate: any of its flags may be given (``--bf16``,
``--gradient_accumulation_steps 4``, ``--fsdp full_shard``, ``--learning_rate 1e-4`` ...), under
``python``, ``accelerate launch`` or ``torchrun`` alike. A run that was interrupted goes on at its
last checkpoint.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

from cape_plugins import TYPES, PositionConfig
from cape_plugins.arguments import TYPE_ARG, add_position_args, given_settings, in_flags
from cape_plugins.config import options, parse_option
from hf_models import RankSeedCallback
from recipes.lab.steps import CommandError, check_model, matches, reason, record, usable_folder

TRAINER_DEFAULTS = (
    *("--report_to", "none", "--save_strategy", "steps", "--save_total_limit", "1"),
    *("--logging_steps", "50", "--save_steps", "200", "--remove_unused_columns", "False"),
)

# What a checkpoint raises that is no model of its type, or damaged, or of other shapes
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)

# What a model was trained with, so that no other run takes it for its own: options of the recipes
# and of the Trainer, as far as they are not about length, speed or output.
DATA_AND_MODEL = (
    *("model", "model_config", "dataset", "dataset_config", "train_file", "source_lang"),
    *("target_lang", "vocab_size", "max_length", "train_sizes", "univit", "max_seconds", "crop"),
    *("no_spec_augment", "train_split", "audio_column", "text_column", "image_column"),
    *("label_column", "padding_free", "image_size", "drop_path", "flip", "rand_augment"),
    *("random_erasing", "repeats", "mixup", "cutmix"),
)
HYPERPARAMETERS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "seed"),
    *("weight_decay", "label_smoothing_factor", "lr_scheduler_type", "warmup_steps", "optim"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_kwargs"),
)
# How long a run was trained; it goes on if more is asked for.
DURATION = ("max_steps", "num_train_epochs")
ARCHITECTURES = {"text": "seq2seq", "audio": "encoder", "image": "encoder"}


def make_parser(description: str, domain: str) -> argparse.ArgumentParser:
    """Options of every recipe; the position flags are those of fairseq."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other flags go to transformers' Seq2SeqTrainingArguments.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    text = "checkpoint to finetune, stock or cape; default: none, a model is trained from scratch"
    add("--model", metavar="PATH", help=text)
    add("--model-config", metavar="JSON", help="sizes of a model trained from scratch, a file or "
        """such as '{"hidden_size": 192}'""")  # fmt: skip
    add("--compare", nargs="+", metavar="TYPE", help="train several types, one after the other, "
        "with the defaults of each, or with others such as cape:max_global_scale=1; "
        "default without --position-embedding")  # fmt: skip
    add("--output", type=Path, help="folder for models, tables and plot")
    chosen = "cape with --position-... options, else see --compare"
    add_position_args(parser, domain, chosen, ARCHITECTURES[domain])
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
    if not torch.accelerator.is_available() and "--use_cpu" not in words:
        words.append("--use_cpu")
    training, *_, unknown = trainer_parser.parse_args_into_dataclasses(
        args=words, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        raise CommandError(
            f"unknown option {unknown[0]}; --help lists those of the recipe, all others are fields "
            "of transformers' Seq2SeqTrainingArguments, such as --learning_rate 1e-4"
        )
    if (size := training.per_device_train_batch_size) < 1:
        raise CommandError(f"--per_device_train_batch_size {size} is not allowed; allowed: >= 1")
    if args.output:
        usable_folder(args.output, "--output")
    if args.model:
        check_model(args.model)
    if args.model_config:
        if args.model:
            raise CommandError("--model-config has no effect on the checkpoint of --model")
        args.model_config = _read_sizes(args.model_config)
    return args, training


def _read_sizes(text: str) -> dict[str, Any]:
    """Of ``--model-config``: an object, or a file with one."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(
                f"--model-config {text}: {error.strerror}; give a JSON file, or an object such as "
                """'{"hidden_size": 192}'"""
            ) from None
    try:
        sizes = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"--model-config {text!r} is no JSON ({error})") from None
    if not isinstance(sizes, dict):
        raise CommandError(f"--model-config {text!r} is no JSON object")
    return sizes


def make_config(kind: type[Any], sizes: Mapping[str, Any], **more: Any) -> Any:
    """A configuration of a model from scratch.

    Raises:
        CommandError: for a size that this kind does not have, or a value that it refuses.
    """
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    unknown = sorted(set(sizes) - names - {"model_type", "architectures", "transformers_version"})
    if unknown:
        raise CommandError(f"--model-config: {kind.__name__} has no {', '.join(unknown)}")
    try:
        return kind(**{key: value for key, value in sizes.items() if key in names}, **more)
    except (ValueError, StrictDataclassError) as error:
        raise CommandError(f"the configuration of the model is refused: {error}") from None


def read_config(path: str, *kinds: type[Any]) -> Any:
    """The configuration of the checkpoint of ``--model``, read before there is any work.

    Args:
        path: Folder or name on the hub.
        kinds: Configurations of this package that the recipe can train, from their own checkpoints
            or from those of their stock models.

    Raises:
        CommandError: if it cannot be read, or is of another type of model.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"--model {path} cannot be loaded: {reason(error)}") from None
    own = [kind.model_type for kind in kinds]
    allowed = [name for name in (n.removeprefix("cape_") for n in own) if name in CONFIG_MAPPING]
    if config.model_type not in (*allowed, *own):
        raise CommandError(
            f"--model {path}: is of the type {config.model_type}; allowed: "
            f"{', '.join([*allowed, *own])}"
        )
    return config


def read_beside(kind: type[Any], path: str) -> Any:
    """The tokenizer or processor in the folder of ``--model``, by an auto class of transformers.

    Raises:
        CommandError: if there is none.
    """
    what = kind.__name__.removeprefix("Auto").lower()
    try:
        return kind.from_pretrained(path)
    except Exception as error:  # without its files each tokenizer fails in a way of its own
        raise CommandError(
            f"--model {path}: has no {what} that can be read ({reason(error)}); put its files "
            f"there, as {what}.save_pretrained writes them"
        ) from None


def load_model(kind: type[Any], path: str, settings: Mapping[str, Any], **more: Any) -> Any:
    """The checkpoint of ``--model`` with another position embedding."""
    try:
        # weights stored in half precision are trained in single precision, with or without autocast
        return kind.from_pretrained(
            path, position_embedding=dict(settings), dtype=torch.float32, **more
        )
    except UNREADABLE as error:
        raise CommandError(f"--model {path} cannot be loaded: {reason(error)}") from None


def variants(
    args: argparse.Namespace,
    domain: str,
    default: Sequence[str],
    defaults: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """``{name: position_embedding}`` of what is to be trained.

    Args:
        default: Types that are compared where the caller names none.
        defaults: Settings by type that hold where the caller gives none, such as a counted
            source scale.
    """
    given, chosen = given_settings(args, domain), getattr(args, TYPE_ARG)
    if args.compare and (chosen or given):
        raise CommandError(
            "--compare trains the types with their defaults, or with options of their own such as "
            "cape:max_global_scale=1; leave it out to train one type with --position-... options"
        )
    names = [chosen or "cape"] if chosen or given else args.compare or default
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise CommandError(f"--compare {twice[0]} is given twice; give each type once")
    found = {}
    for name in names:
        kind, own = _parse_variant(name, domain)
        found[name] = {"type": kind, **defaults.get(kind, {}), **own, **given}
        try:
            PositionConfig.from_dict(found[name], domain, ARCHITECTURES[domain])
        except ValueError as error:
            raise CommandError(f"position embedding {name}: {in_flags(str(error))}") from None
    return found


def _parse_variant(text: str, domain: str) -> tuple[str, dict[str, Any]]:
    """``TYPE`` or ``TYPE:option=value,...``."""
    kind, colon, rest = text.partition(":")
    if kind not in TYPES:
        raise CommandError(f"--compare {kind} is unknown; allowed: {', '.join(TYPES)}")
    known = [option.name for option in options(domain)]
    settings = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise CommandError(
                f"--compare {text}: {part!r} is no option=value; options: {', '.join(known)}"
            )
        try:
            settings[name] = parse_option(name, value)
        except ValueError as error:
            raise CommandError(f"--compare {text}: {error}") from None
    return kind, settings


# ---- training ----------------------------------------------------------------------------------


class SetEpoch(TrainerCallback):
    """Tells a sampler which epoch begins, also one that is resumed in its middle: accelerate does
    not reach the sampler of a resumed training of several processes."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch is loaded."""
        self.sampler.set_epoch(int(state.epoch or 0))


def train(
    name: str,
    settings: Mapping[str, Any],
    args: argparse.Namespace,
    training: Seq2SeqTrainingArguments,
    make_trainer: Callable[[Mapping[str, Any], Seq2SeqTrainingArguments], Trainer],
) -> Trainer:
    """Trains one variant in ``output/name``, goes on where it was interrupted, or takes what is
    finished.

    Args:
        name: Of the variant; what else than letters, digits, dots and underscores becomes a hyphen
            in the name of the folder.

    Returns:
        The trainer. Its model is that of the saved folder, whole on each process also where
        training had it in shards.

    Raises:
        CommandError: if the folder has a model of other settings.
    """
    folder = Path(training.output_dir) / re.sub(r"[^\w.]", "-", name)
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
    trainer = make_trainer(settings, own)
    trainer.add_callback(RankSeedCallback())
    if own.process_index == 0:
        record(folder, made_with)
    duration = {key: getattr(own, key) for key in DURATION}
    if not _finished(folder, duration):
        resume = _last_whole_checkpoint(folder)
        result = trainer.train(resume_from_checkpoint=own.resume_from_checkpoint or resume)
        trainer.save_model()
        trainer.save_metrics("train", {**result.metrics, **duration})
    trainer.accelerator.wait_for_everyone()
    kind = type(trainer.accelerator.unwrap_model(trainer.model))
    trainer.model = trainer.model_wrapped = kind.from_pretrained(folder).to(own.device).eval()
    # What wraps the model for several processes must go before their group does. Otherwise it
    # takes the group with it while it holds Python's lock, for which gloo's thread, that the group
    # waits for, may be waiting: a program that never ends.
    trainer.callback_handler.model = trainer.model
    trainer.accelerator.free_memory()
    return trainer


def _finished(folder: Path, duration: Mapping[str, Any]) -> bool:
    """The metrics are written after the model. Resuming would train one more step.

    Raises:
        CommandError: if it was trained for longer.
    """
    path = folder / "train_results.json"
    if not path.exists():
        return False
    done = json.loads(path.read_text("utf-8"))
    longer = "max_steps" if duration["max_steps"] > 0 else "num_train_epochs"
    if duration[longer] < done[longer]:
        raise CommandError(
            f"--{longer} {duration[longer]}: the model in {folder} was trained for {done[longer]}; "
            "give as many or more, or another --output folder"
        )
    return duration.items() <= done.items()


def _last_whole_checkpoint(folder: Path) -> str | None:
    """The state of the trainer is the last file that is written."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    numbered = [(int(path.parent.name.rpartition("-")[2]), str(path.parent)) for path in states]
    return max(numbered)[1] if numbered else None


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
        disable=None if state.is_main_process else True,
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
