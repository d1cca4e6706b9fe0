"""Averages the model parameters of several fairseq checkpoints (``cape-average-checkpoints``).

The usual last step of a translation recipe: the mean of the last N epochs translates better than
any single epoch. fairseq's script for this average is not in the wheel of fairseq, and cannot load
checkpoints under torch 2.6 and later.

    cape-average-checkpoints --inputs checkpoints --num-epoch-checkpoints 5 --output avg5.pt
    cape-average-checkpoints --inputs run/checkpoint8.pt run/checkpoint9.pt --output avg.pt

The result holds the averaged ``model``. Everything else, such as the configuration for rebuilding
the model, comes from the checkpoint that was trained longest. The optimizer state is left out,
because the state belongs to one update of the training and takes two thirds of the file.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cape_plugins.checkpoints.fairseq_files import (
    DICTIONARIES,
    fairseq_arguments,
    fairseq_configs,
)
from cape_plugins.settings.arguments import Parser, positive
from cape_plugins.utils.files import writing
from fairseq_user_dir.host.reading import read_checkpoint

_FILES = {
    "epoch": re.compile(r"checkpoint(\d+)\.pt"),
    "update": re.compile(r"checkpoint_\d+_(\d+)\.pt"),
}

# Settings of the position embedding; an average of weights trained with different settings is
# meaningless.
_SETTINGS_PREFIX = "position_"

# The count of steps in batch normalisation may differ: no parameter and no statistic depends on it.
_STEP_COUNTER = "num_batches_tracked"


def select_checkpoints(folder: Path, which: str, count: int, upper: int | None) -> list[Path]:
    """The last checkpoints of a folder.

    Args:
        folder: Folder that ``fairseq-train --save-dir`` wrote.
        which: ``epoch`` (``checkpoint12.pt``) or ``update`` (``checkpoint_3_4000.pt``).
        count: Number of checkpoints.
        upper: Number of the last epoch or update to use; None for no bound.

    Returns:
        ``count`` paths, the oldest first.

    Raises:
        ValueError: if the folder has fewer checkpoints.
    """
    matches = ((_FILES[which].fullmatch(path.name), path) for path in folder.glob("*.pt"))
    numbered = sorted((int(match[1]), path) for match, path in matches if match)
    paths = [path for number, path in numbered if upper is None or number <= upper]
    if len(paths) < count:
        bound = "" if upper is None else f" up to --checkpoint-upper-bound {upper}"
        listing = ", ".join(path.name for _, path in numbered) or "none"
        raise ValueError(
            f"--num-{which}-checkpoints {count}: {folder} has {len(paths)} such "
            f"checkpoints{bound} (all: {listing}). Ask for fewer, or name files"
        )
    return paths[-count:]


def _updates(state: Mapping[str, Any]) -> int:
    """Number of updates that the checkpoint was trained for; -1 if the checkpoint does not store
    this number."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", -1))


def average_checkpoints(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Averages the parameters of checkpoints.

    Floating-point tensors (any shape) become the mean over the files. The sum is in float64, so
    that neither the order nor half precision matters, and the mean is cast back to the dtype of the
    files. Integer and boolean tensors are counts and masks, whose mean makes no sense, and must be
    equal in all files. Tensors that share memory in the files, such as tied embeddings, share
    memory in the result.

    Args:
        paths: one or more checkpoint files. Memory holds two files at a time, and the sum.

    Returns:
        A checkpoint with the entries of the file with the most updates (the last such file, if
        there are several), except that ``model`` is averaged and ``last_optimizer_state`` is left
        out.

    Raises:
        ValueError: if no file is given; if a file is given twice or cannot be loaded; if files
            differ in names, shapes or dtypes of parameters or in positional settings; or if a
            parameter is NaN. The message names file, key and remedy.
    """
    _check_distinct(paths)
    total: dict[str, Tensor] = {}
    longest, longest_path = None, paths[0]
    for path in tqdm(paths, desc="averaging", unit="checkpoint", disable=None):
        state = read_checkpoint(path)
        state.pop("last_optimizer_state", None)
        if longest is None:
            longest = state
        names = f"{path} and {longest_path}"
        _check_same_run(names, state, longest)
        for key, value in state["model"].items():
            _check_entry(key, names, value, longest["model"][key])
            _add(total, key, value)
        if _updates(state) >= _updates(longest):
            longest, longest_path = state, path
    model = longest["model"]
    means = {key: _mean(value, total.pop(key, None), len(paths)) for key, value in model.items()}
    longest["model"] = type(model)(_share_again(model, means))
    return longest


def _check_distinct(paths: Sequence[str | Path]) -> None:
    if not paths:
        raise ValueError("no checkpoint given; name at least one file")
    real_paths: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in real_paths:
            raise ValueError(
                f"{path} is given twice, and would count twice in the mean; give each file once"
            )
        real_paths.add(real)


def _check_same_run(names: str, state: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuses checkpoints with different positional settings or different parameters."""
    ours, theirs = fairseq_arguments(state), fairseq_arguments(other)
    details = [
        f"{name}: {ours.get(name, 'unset')} and {theirs.get(name, 'unset')}"
        for name in sorted(ours.keys() | theirs.keys())
        if name.startswith(_SETTINGS_PREFIX)
        and ours.get(name, "unset") != theirs.get(name, "unset")
    ]
    if details and not _same_settings(state, other):
        raise ValueError(
            f"{names} were trained with different positional settings "
            f"({', '.join(details)}); average checkpoints of one training run only"
        )
    marks = [(s.get("task_state") or {}).get(DICTIONARIES) for s in (state, other)]
    if None not in marks and marks[0] != marks[1]:
        raise ValueError(f"{names} have different dictionaries; average checkpoints of one run")
    unmatched = sorted(state["model"].keys() ^ other["model"].keys())
    if unmatched:
        raise ValueError(
            f"{names} have different parameters; only one of them has "
            f"{', '.join(unmatched[:3])} ({len(unmatched)} such keys in all); average checkpoints "
            "of one architecture only"
        )


def _same_settings(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both checkpoints have the same settings, after defaults are filled in; a stock model
    stores no settings."""
    try:
        first, second = (fairseq_configs(fairseq_arguments(s), s["model"]) for s in (state, other))
    except ValueError:
        return False
    return bool(first) and first == second


def _check_entry(key: str, names: str, value: Any, other: Any) -> None:
    """Refuses two entries with the same name whose mean is not defined."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        if type(value) is not type(other) or value != other:
            raise ValueError(
                f"{key} of {names} differ and are no tensors; average checkpoints of one "
                "training run only"
            )
    elif (value.shape, value.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"{key} of {names} differ: {tuple(value.shape)} {value.dtype} and "
            f"{tuple(other.shape)} {other.dtype}; average checkpoints of one architecture and "
            "precision only"
        )
    elif _has_mean(value):
        if value.isnan().any():
            raise ValueError(
                f"{key} holds NaN in the first of {names}; its training has diverged; leave the "
                "file out"
            )
    elif not torch.equal(value, other) and not key.endswith(_STEP_COUNTER):
        raise ValueError(
            f"{key} of {names} differ, and a mean of {value.dtype} values has no "
            "meaning; average checkpoints of one training run on the same data only"
        )


def _has_mean(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _add(total: dict[str, Tensor], key: str, value: Any) -> None:
    """Adds to the running sum, kept in float64 (or complex128)."""
    if key in total:
        total[key] += value
    elif _has_mean(value):
        total[key] = value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


def _mean(value: Any, total: Tensor | None, count: int) -> Any:
    """The averaged entry in the dtype of the files; the entry unchanged if it has no sum."""
    return value if total is None else (total / count).to(value.dtype)


def _share_again(model: Mapping[str, Any], means: dict[str, Any]) -> dict[str, Any]:
    """Makes entries that shared memory in the file share memory again, unless their means
    differ."""
    owners: dict[tuple[Any, ...], str] = {}
    for key, value in model.items():
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        memory = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        owner = owners.setdefault(memory, key)
        if owner != key and torch.equal(means[owner], means[key]):
            means[key] = means[owner]
    return means


def save_atomically(state: Mapping[str, Any], output: str | Path) -> None:
    """Writes a checkpoint in one step: the file at ``output`` is complete, or unchanged.

    Raises:
        OSError: if the folder cannot be written to, or the disk is full; no partial file is left
            behind.
    """
    try:
        with writing(Path(output), "wb") as file:
            torch.save(dict(state), file)
    except RuntimeError as error:  # torch.save raises this type on a full disk
        raise OSError(f"--output {output} cannot be written; disk full? ({error})") from error


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Refuses, before long reading, an output that cannot be written or would destroy an input."""
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file, such as {output / 'avg.pt'}")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist; create it")
    if any(os.path.realpath(output) == os.path.realpath(path) for path in inputs):
        raise ValueError(
            f"--output {output} is one of the inputs, which are never overwritten; name another "
            "file"
        )


def make_parser() -> argparse.ArgumentParser:
    """The options of ``cape-average-checkpoints``."""
    summary = "Average the model parameters of fairseq checkpoints."
    parser = Parser(prog="cape-average-checkpoints", description=summary)
    parser.add_argument(
        "--inputs", nargs="+", required=True, type=Path, metavar="PATH",
        help="checkpoint files, or one folder together with one of the --num-... options",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write")
    number = parser.add_mutually_exclusive_group()
    for which, meaning in (
        ("epoch", "the last N checkpoints written at the end of an epoch"),
        ("update", "the last N checkpoints written by --save-interval-updates"),
    ):
        number.add_argument(f"--num-{which}-checkpoints", type=positive, metavar="N", help=meaning)
    parser.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="E",
        help="with the last N epochs (updates): leave out checkpoints after epoch (update) E",
    )  # fmt: skip
    return parser


def _resolve_inputs(args: argparse.Namespace) -> list[Path]:
    """The files that the options ask for."""
    for which in _FILES:
        if (count := getattr(args, f"num_{which}_checkpoints")) is not None:
            if len(args.inputs) != 1 or not args.inputs[0].is_dir():
                raise ValueError(
                    f"--inputs {' '.join(map(str, args.inputs))} is not one folder, from which "
                    f"--num-{which}-checkpoints {count} chooses; give a folder that exists, or "
                    "leave the option out"
                )
            return select_checkpoints(args.inputs[0], which, count, args.checkpoint_upper_bound)
    if args.checkpoint_upper_bound is not None:
        raise ValueError(
            f"--checkpoint-upper-bound {args.checkpoint_upper_bound} bounds nothing here; add "
            "--num-epoch-checkpoints N or --num-update-checkpoints N"
        )
    for path in args.inputs:
        if path.is_dir():
            raise ValueError(
                f"--inputs {path} is a folder; add --num-epoch-checkpoints N or "
                "--num-update-checkpoints N, or name its files"
            )
    return args.inputs


def main(argv: Sequence[str] | None = None) -> None:
    """Runs ``cape-average-checkpoints``.

    Args:
        argv: the command line without the program's name; None for the command line of the process.

    Raises:
        SystemExit: with status 2 and a message if an option or an input is unusable; then no output
            is written.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        inputs = _resolve_inputs(args)
        _check_output(args.output, inputs)
        print("averaging", ", ".join(map(str, inputs)), flush=True)
        save_atomically(average_checkpoints(inputs), args.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print("wrote", args.output)


if __name__ == "__main__":
    main()
