"""Switching a trained model to another position embedding: options for programs that compare types,
the trainings that a fair comparison needs, and what a switch gains and loses."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from cape_plugins.settings.arguments import TYPE_ARG, settings_to_compare
from cape_plugins.settings.registry import DEFAULT_TYPE

SWITCH_UPDATES = ("0", "10%", "25%", "50%")  # of the first training


class Step(NamedTuple):
    """A training, whose model is tested.

    Attributes:
        name: Name of the result.
        settings: ``{"type": ..., option: value}``.
        updates: Training steps; None if the program sets the duration elsewhere.
        continues: True if the training begins with the weights of the first training. Position
            parameters that the new type lacks are dropped; position parameters that only the new
            type has are initialised.
        rate: Highest learning rate, as a multiple of the first training's.
        yardstick: Name of the training that goes on with the first type for as long; None if there
            is none.
    """

    name: str
    settings: Mapping[str, Any]
    updates: int | None
    continues: bool = False
    rate: float = 1.0
    yardstick: str | None = None


def add_switch_args(parser: argparse.ArgumentParser) -> None:
    """Adds ``--switch-from``, ``--switch-updates`` and ``--switch-rate``."""
    parser.add_argument(
        "--switch-from",
        metavar="TYPE",
        help="train this type first, then go on with each type of --compare (default: "
        f"{DEFAULT_TYPE}) for the numbers of updates of --switch-updates; for comparison show the "
        "first type unchanged, the first type trained on for as long, and each type trained from "
        "scratch for as long as both trainings together",
    )
    percents = " ".join(SWITCH_UPDATES).replace("%", "%%")
    parser.add_argument(
        "--switch-updates",
        nargs="+",
        metavar="N",
        default=SWITCH_UPDATES,
        help="updates after the switch, as numbers or as shares of the first training (default: "
        f"{percents})",
    )
    parser.add_argument(
        "--switch-rate",
        type=_rate,
        metavar="X",
        default=1.0,
        help="highest learning rate after the switch, as a multiple of the first training's "
        "(default: 1)",
    )


def plan_trainings(
    args: argparse.Namespace,
    domain: str,
    default: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]],
    updates: int,
) -> list[Step]:
    """The trainings that ``--compare``, or ``--switch-from``, asks for.

    Args:
        args: Parsed flags.
        domain: Domain of the models.
        default: Names that are compared if neither flag is given.
        rows: See :func:`~cape_plugins.settings.arguments.settings_to_compare`.
        updates: Training steps of a training from scratch.

    Returns:
        The first training of ``--switch-from``, the trainings that continue this training, and
        trainings from scratch that are as long as the first training and the longest continuation
        together. Without ``--switch-from``, a training of each compared type.

    Raises:
        ValueError: names the flag, the value, what is allowed and what to do.
    """
    if args.switch_from is None:
        compared = settings_to_compare(args, domain, default, rows)
        return [Step(name, settings, updates) for name, settings in compared.items()]
    compared = settings_to_compare(args, domain, [DEFAULT_TYPE], rows)
    first_args = argparse.Namespace(compare=[args.switch_from], **{TYPE_ARG: None})
    ((first_name, first_settings),) = settings_to_compare(
        first_args, domain, default, rows, flag="--switch-from"
    ).items()
    if first_name in compared:
        raise ValueError(
            f"--switch-from {first_name} is among the types of --compare; allowed: another type; "
            "leave one out."
        )
    numbers = [number_of_updates(text, updates) for text in args.switch_updates]
    most = max(numbers)
    longer = f"{first_name}, {most} more updates" if most else first_name
    after_switch = {"continues": True, "rate": args.switch_rate}
    continued = [Step(longer, first_settings, most, **after_switch)] if most else []
    continued += [
        Step(
            f"{name}, {n} updates after {first_name}",
            settings,
            n,
            **after_switch,
            yardstick=longer if n == most else None,
        )
        for name, settings in compared.items()
        for n in numbers
    ]
    total = updates + most
    return [
        Step(first_name, first_settings, updates),
        *continued,
        *(
            Step(f"{name} from scratch, {total} updates", settings, total)
            for name, settings in compared.items()
        ),
    ]


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: above 0 to 100")
    return value


def number_of_updates(text: str, first_updates: int) -> int:
    """Number of updates after the switch, from a number or from a share of the first training.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"(\d+)(%?)", text)
    if match is None:
        raise ValueError(
            f"--switch-updates {text} is not allowed; allowed: whole numbers such as 300, and "
            "shares of the first training such as 25%."
        )
    number, percent = int(match[1]), match[2]
    return round(first_updates * number / 100) if percent else number


def gains_of_switches(
    trainings: Iterable[tuple[Step, float | None]],
    scores: Mapping[str, Mapping[Any, Sequence[float]]],
    trained: Collection[Any],
    *,
    lower_is_better: bool,
    digits: int,
) -> list[str]:
    """A line for the longest training of each switched type: gains and losses at the lengths of
    training and at other lengths, against the first type trained on for as long.

    Args:
        trainings: Trainings of all seeds, with their seconds; None for an unknown time.
        scores: Scores of all seeds, by name of the training and by length.
        trained: Lengths of training.
        lower_is_better: Whether scores are errors.
        digits: Decimal places of the scores.
    """
    seconds: dict[str, list[float | None]] = {}
    steps: dict[str, Step] = {}
    for step, time in trainings:
        if step.yardstick in scores and step.name in scores:
            steps[step.name] = step
            seconds.setdefault(step.name, []).append(time)
    most = max((step.updates or 0 for step in steps.values()), default=0)
    lines = []
    for name, step in steps.items():
        if step.updates != most:
            continue
        after, before = ({n: mean(v) for n, v in scores[x].items()} for x in (name, step.yardstick))
        shared = [length for length in after if length in before]
        parts = []
        for inside in (True, False):
            lengths = [length for length in shared if (length in trained) == inside]
            if lengths:
                gain = mean(after[length] - before[length] for length in lengths)
                gain = -gain if lower_is_better else gain
                average = " on average" if len(lengths) > 1 else ""
                change = f"{abs(gain):.{digits}f} {'gained' if gain > 0 else 'lost'}"
                parts.append(f"{change} at {', '.join(map(str, lengths))}{average}")
        line = f"* {name}: {'; '.join(parts)} (against {step.yardstick})"
        known = [time for time in seconds[name] if time is not None]
        lines.append(f"{line}, {mean(known):.0f} s of training" if known else line)
    return lines
