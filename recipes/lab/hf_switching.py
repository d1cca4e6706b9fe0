"""Switching the positions of a trained Hugging Face model: the trainings of a comparison, with the
length and learning rate that follow from the first training."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, Seq2SeqTrainingArguments

from cape_plugins.settings.switching import Step, number_of_updates
from recipes.lab.command_line import positive
from recipes.lab.steps import CommandError

# weights that only the new type has: of relpos, of fire, and of abspos in place of sinusoids
NEW_MODULES = ("relative", "layer_bias", "encoding")
STATE = "trainer_state.json"  # written by the Trainer: updates, and the rate at each logged update


class FirstTraining(NamedTuple):
    """What the training of ``--model`` has logged.

    Attributes:
        updates: Training steps.
        rate: Highest learning rate; None if no rate was logged.
    """

    updates: int
    rate: float | None


def add_switch_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a comparison of switched models."""
    parser.add_argument(
        "--switch-updates",
        nargs="+",
        metavar="N",
        help="with --model: trains each type of --compare for each of these numbers of updates, "
        "such as 0 10%% 25%% 50%% of the updates of the model's training; 0 tests the model "
        "without training. Default of --learning_rate: the highest rate of the model's training",
    )
    parser.add_argument(
        "--lora",
        type=positive,
        metavar="RANK",
        help="with --model: trains adapters of this rank beside all linear layers, and modules "
        "that only the new type has; the adapters are merged into the saved model. From scratch, "
        "all weights are trained",
    )
    parser.add_argument(
        "--switch-scratch",
        action="store_true",
        help="with --switch-updates: also trains each type from scratch, for as long as the "
        "model's training and the longest of --switch-updates together",
    )


def first_training(path: str) -> FirstTraining | None:
    """Reads what the Trainer stored beside a model, or beside its last checkpoint; None if nothing
    is there, as beside most models of the hub."""
    checkpoints = sorted(
        Path(path).glob(f"checkpoint-*/{STATE}"),
        key=lambda file: int(file.parent.name.rpartition("-")[2]),
    )
    files = [file for file in (Path(path, STATE), *checkpoints[::-1]) if file.is_file()]
    if not files:
        return None
    state = json.loads(files[0].read_text("utf-8"))
    rates = [entry["learning_rate"] for entry in state["log_history"] if "learning_rate" in entry]
    return FirstTraining(state["global_step"], max(rates, default=None))


def plan_trainings(
    compared: Mapping[str, Mapping[str, Any]], args: argparse.Namespace
) -> list[Step]:
    """One training of each type, or the trainings of ``--switch-updates``. A
    training without a number of updates has the duration in the Trainer's arguments.

    Raises:
        CommandError: if the updates are shares of a training that is not known.
    """
    begins_with_model = args.model is not None
    if args.lora and not begins_with_model:
        raise CommandError(f"--lora {args.lora}: adapts a trained model; give the model by --model")
    if not args.switch_updates:
        if args.switch_scratch:
            raise CommandError("--switch-scratch belongs to --switch-updates; give both")
        return [Step(name, row, None, begins_with_model) for name, row in compared.items()]
    words = f"--switch-updates {' '.join(args.switch_updates)}"
    if not begins_with_model:
        raise CommandError(f"{words}: switches a trained model; give the model by --model")
    first = first_training(args.model)
    needs_first = args.switch_scratch or any(text.endswith("%") for text in args.switch_updates)
    if first is None and needs_first:
        flag = "--switch-scratch" if args.switch_scratch else words
        raise CommandError(
            f"{flag}: {args.model} has no {STATE}, which says how long it was trained; give whole "
            "numbers of updates, and no --switch-scratch"
        )
    first_updates = first.updates if first else 0
    try:
        numbers = [number_of_updates(text, first_updates) for text in args.switch_updates]
    except ValueError as error:
        raise CommandError(str(error)) from None
    plan = [
        Step(f"{name}, {updates} updates", settings, updates, continues=True)
        for name, settings in compared.items()
        for updates in numbers
    ]
    total = first_updates + max(numbers)
    if args.switch_scratch:
        plan += [
            Step(f"{name} from scratch, {total} updates", settings, total)
            for name, settings in compared.items()
        ]
    return plan


def take_rate(
    args: argparse.Namespace, training: Seq2SeqTrainingArguments, flags: Sequence[str]
) -> None:
    """Sets the highest learning rate of the model's training, unless the command line has one."""
    if not args.switch_updates or any(word.split("=")[0] == "--learning_rate" for word in flags):
        return
    first = first_training(args.model) if args.model else None
    if first is not None and first.rate:
        training.learning_rate = first.rate


def changed_arguments(row: Step, training: Seq2SeqTrainingArguments) -> dict[str, Any]:
    """The Trainer's arguments of a row: its updates, and a warm-up of a quarter at most."""
    if not row.updates:
        return {}
    warm_up = training.warmup_steps
    return {
        "max_steps": row.updates,
        # the Trainer takes a number below 1 for a share of the updates
        "warmup_steps": min(warm_up, row.updates // 4) if warm_up >= 1 else warm_up,
    }


def with_adapters(model: PreTrainedModel, rank: int) -> Any:
    """Freezes the model and adds low-rank adapters beside all its linear layers. Modules of the
    new type, which a checkpoint with another type does not have, are trained as a whole.

    Raises:
        CommandError: if the package peft is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        why = f"--lora {rank} needs the package peft ({error}); pip install peft"
        raise CommandError(why) from None
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if next(module.parameters(), None) is not None
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        modules_to_save=sorted(names.intersection(NEW_MODULES)) or None,
    )
    return get_peft_model(model, config)
