"""Switching the positions of a trained Hugging Face model: the trainings of a comparison, with the
length and learning rate that follow from the first training."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedModel, Seq2SeqTrainingArguments

from cape_plugins.checkpoints.families import find_family
from cape_plugins.settings.config import PositionConfig
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
        "without training. The type of the model is always compared as well: unchanged, and "
        "trained on for as long. Default of --learning_rate: the highest rate of the model's "
        "training",
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
        help="with --switch-updates: also trains each type of --compare from scratch, for as long "
        "as the model's training and the longest of --switch-updates together",
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


def positions_of_model(
    path: str, compared: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the position embedding of ``--model``: of the compared row that has the
    same settings, or of a new row."""
    config = AutoConfig.from_pretrained(path).to_dict()
    family = find_family(config["model_type"], config)
    side_name, side = next(iter(family.sides.items()))

    def completed(settings: Mapping[str, Any]) -> PositionConfig:
        return PositionConfig.from_dict(settings, side.domain, side.architecture)

    settings = config.get(side.field) or {"type": family.stock_type(config, side_name)}
    for name, row in compared.items():
        if completed(row) == completed(settings):
            return name, row
    name = settings["type"]
    return (f"{name} of the model" if name in compared else name), settings


def plan_trainings(
    compared: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    first_name: str | None = None,
) -> list[Step]:
    """One training of each type, or the trainings of ``--switch-updates``. A
    training without a number of updates has the duration in the Trainer's arguments.

    Args:
        compared: Settings of the position embeddings by name.
        args: Parsed options.
        first_name: Name of the rows of the unchanged model; by default the name of its position
            embedding, which is added to the compared ones.

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
    continued = compared
    if first_name is None:
        first_name, settings = positions_of_model(args.model, compared)
        continued = compared if first_name in compared else {first_name: settings, **compared}
    plan = []
    for name, settings in continued.items():
        is_first = name == first_name
        for updates in dict.fromkeys((0, *numbers) if is_first else numbers):
            yardstick = None if is_first else f"{first_name}, {updates} updates"
            row = f"{name}, {updates} updates", settings, updates
            plan.append(Step(*row, continues=True, yardstick=yardstick))
    total = first_updates + max(numbers)
    if args.switch_scratch:
        plan += [
            Step(f"{name} from scratch, {total} updates", settings, total)
            for name, settings in compared.items()
        ]
    return plan


def take_rate(
    args: argparse.Namespace, training: Seq2SeqTrainingArguments, flags: Sequence[str]
) -> bool:
    """Sets the highest learning rate of the model's training, unless the command line has one.
    Returns whether the rate was set."""
    if not args.switch_updates or any(word.split("=")[0] == "--learning_rate" for word in flags):
        return False
    first = first_training(args.model) if args.model else None
    if first is None or not first.rate:
        return False
    training.learning_rate = first.rate
    return True


def warn_of_default_rate(
    compared: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    training: Seq2SeqTrainingArguments,
) -> None:
    """Warns if a switched model is trained at the Trainer's default rate, which nobody asked
    for."""
    if not args.model or training.learning_rate != args.default_rate:
        return
    name, settings = positions_of_model(args.model, compared)
    switched = [row for row in compared if row != name]
    if not switched:
        return
    epochs = f"{training.num_train_epochs:g} epochs"
    duration = f"{training.max_steps} updates" if training.max_steps > 0 else epochs
    if args.switch_updates:
        duration = f"{' '.join(args.switch_updates)} updates"
    print(
        f"warning: --model {args.model} has {settings['type']}; {', '.join(switched)}: trained for "
        f"{duration} at the Trainer's default rate of {training.learning_rate:g}, which teaches a "
        "switched model little. Give --learning_rate (the highest rate of the model's first "
        "training), and --switch-updates (numbers of updates to compare)",
        flush=True,
    )


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
