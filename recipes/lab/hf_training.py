"""Shared code of the Hugging Face recipes: options, training of several models, evaluation.

transformers' Trainer trains the models, with accelerate. All flags of the Trainer can be used, with
``python``, ``accelerate launch`` and ``torchrun``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import accelerate
import torch
from tqdm import tqdm
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from cape_plugins.utils.texts import first_line
from hf_models import RankSeedCallback
from recipes.lab.command_line import add_compared, add_shared, check_shared, new_parser
from recipes.lab.data import read_text
from recipes.lab.hf_switching import (
    add_switch_args,
    changed_arguments,
    plan_trainings,
    take_rate,
    warn_of_default_rate,
    with_adapters,
)
from recipes.lab.scores import write_scores
from recipes.lab.steps import (
    OTHER_OUTPUT,
    CommandError,
    folder_name,
    matches,
    record,
    recorded,
    started_as,
)
from recipes.lab.tables import Row, how_made, shown_command

TRAINER_DEFAULTS = (
    "--report_to none --save_strategy steps --save_total_limit 1 --logging_steps 50 "
    "--save_steps 200 --remove_unused_columns False"
)
PACKAGES = ("torch", "transformers", "accelerate")

# The record of a training holds all options except these, so that a run with other options does not
# reuse its model. These options set what is tested and where, or are recorded by their values
# (types, presets, recipes and training data).
UNRECORDED = """
    output compare seeds defaults recipe preset beam hop_seconds limit test_split test_file
    switch_updates switch_scratch trainings default_rate validation_file test_sizes test_lengths
    ctc_beam ctc_lm ctc_lexicon ctc_lm_weight
"""
# Beginnings of more such options: position settings, which are recorded as one entry; options of
# the Trainer for output, speed and devices; and options for the duration, because a finished
# training goes on if its duration is raised.
DURATION = ("max_steps", "num_train_epochs")
UNRECORDED_BEGINNINGS = """
    position_ output_dir log report_to run_name project trackio_ hub_ push_to_hub save_ disable_
    debug include_ eval_ batch_eval do_ per_device_eval prediction_ predict_ generation_ load_best
    metric_for_best greater_is bf16_full fp16_full resume_ restore_ enable_jit use_cpu local_rank
    ddp_ fsdp deepspeed parallelism_ accelerator_ torch_ gradient_checkpointing auto_find tf32
    activation_checkpointing skip_memory dataloader_num dataloader_p dataloader_multi
"""


def make_parser(
    description: str,
    domain: str,
    default: Sequence[str],
    output: str,
    architecture: str | None = None,
) -> argparse.ArgumentParser:
    """A parser with the options of every recipe. `default` are the types that the recipe compares,
    `architecture` its models' architecture (default: the architecture of the domain)."""
    epilog = "All other flags go to transformers' Seq2SeqTrainingArguments."
    parser = new_parser(description, epilog=epilog)
    add_shared(
        parser,
        "model",
        note="or name on the hub, stock or cape, from which training starts",
        shown="none, from scratch",
    )
    text = """sizes of a model trained from scratch, a file or such as '{"hidden_size": 192}'"""
    parser.add_argument("--model-config", metavar="JSON", help=text)
    add_compared(parser, domain, default, architecture=architecture)
    add_shared(parser, "seeds", shown="one training, of --seed")
    add_switch_args(parser)
    add_shared(parser, "output", note="models as well", default=Path(output))
    return parser


def parse(
    parser: argparse.ArgumentParser, defaults: Sequence[str], argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Seq2SeqTrainingArguments]:
    """Parses the options of the recipe and the options of the Trainer."""
    args, rest = parser.parse_known_args(argv)
    trainer_parser = HfArgumentParser(Seq2SeqTrainingArguments, allow_abbrev=False)
    trainer_parser.error = parser.error
    recipe_flags = [*TRAINER_DEFAULTS.split(), *defaults, "--output_dir", str(args.output)]
    if not torch.accelerator.is_available() or "--use_cpu" in rest:
        # also holds for the arguments parsed below: they share one state of processes and devices
        recipe_flags.append("--use_cpu")
    try:
        training, *_, unknown = trainer_parser.parse_args_into_dataclasses(
            args=[*recipe_flags, *rest], look_for_args_file=False, return_remaining_strings=True
        )
    except ValueError as error:  # the error names no option
        raise CommandError(f"{' '.join(rest)}: {first_line(error)}; give other values") from None
    if unknown:
        raise CommandError(
            f"unknown option {unknown[0]}; --help lists the options of the recipe, all others are "
            "fields of transformers' Seq2SeqTrainingArguments, such as --learning_rate 1e-4"
        )
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if (size := getattr(training, name)) < 1:
            raise CommandError(f"--{name} {size} is not allowed; allowed: >= 1")
    if args.seeds and any(word.split("=")[0] == "--seed" for word in rest):
        raise CommandError(f"--seeds {' '.join(map(str, args.seeds))}: leave --seed out")
    check_shared(args)
    has_rate = any(word.split("=")[0] == "--learning_rate" for word in (*defaults, *rest))
    has_rate |= take_rate(args, training, rest)
    args.default_rate = None if has_rate else Seq2SeqTrainingArguments.learning_rate
    args.trainings = []
    (plain,) = trainer_parser.parse_args_into_dataclasses(
        args=recipe_flags, look_for_args_file=False
    )
    args.defaults = {name: parser.get_default(name) for name in vars(args)} | _init_fields(plain)
    if args.model_config:
        if args.model:
            raise CommandError("--model-config has no effect on the checkpoint of --model")
        args.model_config = _read_sizes(args.model_config)
    return args, training


def _read_sizes(text: str) -> dict[str, Any]:
    try:
        if not text.lstrip().startswith("{"):
            text = read_text(Path(text))
        sizes = json.loads(text)
    except OSError as error:
        raise CommandError(
            f"--model-config {text}: {error.strerror}; give a JSON file, or an object such as "
            """'{"hidden_size": 192}'"""
        ) from None
    except json.JSONDecodeError as error:
        raise CommandError(f"--model-config {text!r} is no JSON ({error})") from None
    if not isinstance(sizes, dict):
        raise CommandError(f"--model-config {text!r} is no JSON object")
    return sizes


class SetEpoch(TrainerCallback):
    """Tells a sampler which epoch begins, also if a training resumes within an epoch: accelerate
    does not set the epoch of the sampler when a training of several processes resumes."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


def recorded_options(
    settings: Mapping[str, Any], args: argparse.Namespace, run_args: Seq2SeqTrainingArguments
) -> dict[str, Any]:
    """All options that may change a trained model. Only the options listed above are left out, so a
    new option is always recorded. A change of precision (``--bf16``) therefore needs another
    folder."""
    unrecorded = (*UNRECORDED_BEGINNINGS.split(), *DURATION)
    options = {
        name: value
        for name, value in {**vars(args), **_init_fields(run_args)}.items()
        if name not in UNRECORDED.split() and not name.startswith(unrecorded)
    }
    return {"position_embedding": dict(settings), **options}


def train_all(
    compared: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    training: Seq2SeqTrainingArguments,
    make_trainer: Callable[[Mapping[str, Any], Seq2SeqTrainingArguments], Trainer],
    data: str,
    first_name: str | None = None,
) -> Iterator[tuple[dict[str, Any], Trainer]]:
    """Trains each of the types that are compared, with each of ``--seeds``. An interrupted training
    goes on; a finished model is reused.

    Args:
        data: Fingerprint of the training data; a finished model is reused only for the data that it
            was trained on.
        first_name: See :func:`~recipes.lab.hf_switching.plan_trainings`.

    Notes each training with its seconds in ``args.trainings``.

    Yields:
        The first columns of the model's scores (variant and seed), and the trainer. The model of
        the trainer is loaded from the saved folder, complete on each process, even if it was
        sharded in training.
    """
    plan = plan_trainings(compared, args, first_name)
    if training.process_index == 0:
        warn_of_default_rate(compared, args, training)
    for row, seed in product(plan, args.seeds or [training.seed]):
        variant, settings = row.name, row.settings
        name = f"{variant}-seed{seed}" if args.seeds else variant
        folder = Path(training.output_dir) / folder_name(name)
        changes = changed_arguments(row, training)
        run_args = dataclasses.replace(training, seed=seed, output_dir=str(folder), **changes)
        accelerate.utils.set_seed(seed)
        made_with = {**recorded_options(settings, args, run_args), "training_data": data}
        # an older transformers recorded fewer options; new options with their defaults change no
        # model
        on_disk, default = recorded(folder), args.defaults.get
        expected = {
            n: value for n, value in made_with.items() if n in on_disk or value != default(n)
        }
        matches(folder, expected, OTHER_OUTPUT)
        if run_args.process_index == 0:
            print(f"{name}: {json.dumps(dict(settings))}", flush=True)
        trainer = make_trainer(settings, run_args)
        if args.model and not row.continues:
            _begin_anew(trainer)
        trainer.add_callback(RankSeedCallback())
        if run_args.process_index == 0:
            record(folder, made_with)
        rank = args.lora if row.continues else None
        train(trainer, folder, trains=row.updates != 0, rank=rank)
        args.trainings.append((row, _seconds(folder) if row.updates != 0 else 0.0))
        yield {"variant": variant, "seed": seed}, trainer


def _begin_anew(trainer: Trainer) -> None:
    """Takes a new model of the same configuration."""
    new_model = type(trainer.model)(trainer.model.config).to(trainer.args.device)
    trainer.model = trainer.model_wrapped = new_model


def train(trainer: Trainer, folder: Path, trains: bool = True, rank: int | None = None) -> None:
    """Trains the model, unless it is finished, and loads the saved model. Without updates, saves
    the model unchanged. With a `rank`, trains adapters and merges them into the saved model."""
    run_args = trainer.args
    duration = {key: getattr(run_args, key) for key in DURATION}
    if not trains:
        trainer.save_model()
    elif not _finished(folder, duration):  # resuming would train one more step
        resume = run_args.resume_from_checkpoint or _last_whole_checkpoint(folder)
        if rank:
            trainer.model = trainer.model_wrapped = with_adapters(trainer.model, rank)
        result = trainer.train(resume_from_checkpoint=resume)
        if rank:
            merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
            trainer.model = trainer.model_wrapped = merged
        trainer.save_model()
        trainer.save_state()  # says to a later --switch-updates how long the training was
        metrics = {**result.metrics, **duration}
        if resume:
            del metrics["train_runtime"]  # lacks the time before the interruption
        trainer.save_metrics("train", metrics)
    trainer.accelerator.wait_for_everyone()
    saved = type(trainer.accelerator.unwrap_model(trainer.model)).from_pretrained(folder)
    trainer.model = trainer.model_wrapped = saved.to(run_args.device).eval()
    # Free the DistributedDataParallel wrapper of the model before its process group. Otherwise the
    # wrapper frees the group while it holds Python's lock, and the group waits for a thread of
    # gloo, which may wait for this lock: the program never ends.
    trainer.callback_handler.model = trainer.model
    trainer.accelerator.free_memory()


def _finished(folder: Path, duration: Mapping[str, Any]) -> bool:
    path = folder / "train_results.json"  # written after the model
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


def _seconds(folder: Path) -> float | None:
    """Seconds of a training; None for a training that was resumed."""
    return json.loads((folder / "train_results.json").read_text("utf-8")).get("train_runtime")


def _last_whole_checkpoint(folder: Path) -> str | None:
    states = folder.glob("checkpoint-*/trainer_state.json")  # the last file that is written
    numbered = [(int(path.parent.name.rpartition("-")[2]), str(path.parent)) for path in states]
    return max(numbered)[1] if numbered else None


def _init_fields(training: Seq2SeqTrainingArguments) -> dict[str, Any]:
    fields = dataclasses.fields(training)
    return {field.name: getattr(training, field.name) for field in fields if field.init}


def share(
    work: Sequence[Sequence[int]], run: Callable[[Sequence[int]], Sequence], what: str, size: int
) -> list[Any]:
    """Calls `run` with batches of indices below `size`; each process runs some of the batches.
    Returns the results in the order of the indices, the same list on every process."""
    state = accelerate.PartialState()
    own_batches = work[state.process_index :: state.num_processes]
    results = []
    with torch.no_grad():
        for batch in tqdm(
            own_batches, what, leave=False, disable=None if state.is_main_process else True
        ):
            results += zip(batch, run(batch), strict=True)
    ordered = dict(accelerate.utils.gather_object(results))
    return [ordered[index] for index in range(size)]


def batches(lengths: Sequence[float], batch_size: int) -> list[list[int]]:
    """Batches of indices of items with similar lengths, so that batches have little padding."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def report(
    args: argparse.Namespace,
    title: str,
    rows: Sequence[Row],
    group_column: str,
    metrics: Mapping[str, str],
    **page_options: Any,
) -> None:
    """Writes scores in the main process, at the end of a program; for the arguments see
    :func:`~recipes.lab.scores.write_scores`.

    The process group is released here, after the trainer has released DistributedDataParallel. If
    DistributedDataParallel held the last reference, it would free the group while holding Python's
    lock. A thread of gloo may wait for this lock, and then the program never ends (torch 2.13, seen
    once).
    """
    state = accelerate.PartialState()
    main_process = state.is_main_process
    state.destroy_process_group()
    if not main_process:
        return
    program = started_as()
    if (processes := state.num_processes) > 1:
        program = f"torchrun --nproc_per_node {processes} {program.removeprefix('python ')}"
    facts = how_made(shown_command(program, sys.argv[1:]), PACKAGES, state.device)
    how = {**page_options, "trainings": args.trainings}
    write_scores(args.output, title, rows, group_column, metrics, facts, **how)
