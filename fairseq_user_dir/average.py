"""Average the model parameters of several fairseq checkpoints (``cape-average-checkpoints``).

The usual last step of a translation recipe: the mean of the last N epochs translates better than
any of them. fairseq's own script is not in its wheel and does not load under torch 2.6 and later.

    cape-average-checkpoints --inputs checkpoints --num-epoch-checkpoints 5 --output avg5.pt
    cape-average-checkpoints --inputs run/checkpoint8.pt run/checkpoint9.pt --output avg.pt

The result holds the averaged ``model``; everything else, such as the configuration from which the
model is rebuilt, is that of the checkpoint trained longest. The optimizer state is left out: it
belongs to one point of the training, and is two thirds of the file.
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

from cape_plugins.arguments import Parser
from cape_plugins.fairseq_files import (
    DICTIONARIES,
    UnsafeSettingError,
    fairseq_arguments,
    fairseq_configs,
    load_fairseq,
)
from cape_plugins.files import writing
from fairseq_user_dir.compat import allow_fairseq_checkpoints

_EPOCH_FILE = re.compile(r"checkpoint(\d+)\.pt")
_UPDATE_FILE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
_BEST_FILE = re.compile(r"checkpoint\.best_(.+)_(-?\d+(?:\.\d+)?)\.pt")

# Settings of the position embedding: weights trained under different ones do not share a mean.
_SETTINGS_PREFIX = "position_"

# Batch normalisation counts its steps; no parameter and no statistic depends on the count.
_STEP_COUNTER = "num_batches_tracked"


def select_checkpoints(folder: str | Path, which: str, count: int, upper: int | None) -> list[Path]:
    """The last or best checkpoints of a folder.

    Args:
        folder: what ``fairseq-train --save-dir`` wrote.
        which: ``epoch`` (``checkpoint12.pt``), ``update`` (``checkpoint_3_4000.pt``) or ``best``
            (``checkpoint.best_bleu_34.12.pt``, from ``--keep-best-checkpoints``).
        count: how many, at least 1.
        upper: leave out later epochs or updates than this; None for no bound. Not for ``best``.

    Returns:
        ``count`` paths, oldest (or worst) first.

    Raises:
        ValueError: if a value is out of range, or the folder does not hold that many.
    """
    folder, option = Path(folder), f"--num-{which}-checkpoints"
    if count < 1:
        raise ValueError(f"{option} is {count}; it must be at least 1")
    if upper is not None and which == "best":
        raise ValueError(
            f"--checkpoint-upper-bound {upper} bounds epochs or updates and cannot go with "
            f"{option}; leave one of the two out"
        )
    if which == "best":
        chosen = _rank_best(folder)
    else:
        pattern = _EPOCH_FILE if which == "epoch" else _UPDATE_FILE
        matches = ((pattern.fullmatch(path.name), path) for path in _files(folder))
        numbered = sorted((int(match[1]), path) for match, path in matches if match)
        chosen = [path for number, path in numbered if upper is None or number <= upper]
    if len(chosen) < count:
        bound = "" if upper is None else f" up to --checkpoint-upper-bound {upper}"
        raise ValueError(
            f"{option} {count}: {folder} holds {len(chosen)} such checkpoints{bound} "
            f"({_listing(chosen)}); all its checkpoints: {_listing(_files(folder))}. "
            "Ask for fewer, or name files with --inputs"
        )
    return chosen[-count:]


def _rank_best(folder: Path) -> list[Path]:
    """Checkpoints kept by ``--keep-best-checkpoints``, worst first."""
    matches = ((_BEST_FILE.fullmatch(path.name), path) for path in _files(folder))
    scored = [(match[1], float(match[2]), path) for match, path in matches if match]
    metrics = sorted({metric for metric, _, _ in scored})
    if len(metrics) > 1:
        raise ValueError(
            f"--num-best-checkpoints: {folder} holds the best checkpoints of several metrics, "
            f"{', '.join(metrics)}; name the files of one of them with --inputs"
        )
    if not scored:
        return []
    # Whether a high value is good, as for BLEU, or bad, as for the loss, only the run knows.
    settings = fairseq_arguments(load_checkpoint(scored[0][2]), "checkpoint")
    maximize = bool(settings.get("maximize_best_checkpoint_metric", False))
    scored.sort(key=lambda item: (item[1] if maximize else -item[1], item[2].name))
    return [path for _, _, path in scored]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.pt") if path.is_file())


def _listing(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a fairseq checkpoint to the CPU, with ``weights_only`` on.

    Raises:
        ValueError: if the file is missing (the message lists what is there), is damaged, holds a
            type that is not known to be harmless or a setting that fairseq would run as code, or is
            not a fairseq checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        there = f"{path.parent} holds: {_listing(_files(path.parent))}"
        if not path.parent.is_dir():
            there = f"the folder {path.parent} does not exist"
        raise ValueError(f"--inputs: no checkpoint at {path}; {there}")
    allow_fairseq_checkpoints()
    try:
        state = load_fairseq(path)
    except UnsafeSettingError as error:
        raise ValueError(f"--inputs: {error}") from error
    except Exception as error:  # a damaged file can stop the reader anywhere, with anything
        detail = re.search(r"WeightsUnpickler error: (.*?)(?:\. |$)", str(error), re.MULTILINE)
        reason = detail[1] if detail else f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"--inputs: {path} cannot be loaded ({reason}); is it a complete fairseq checkpoint?"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
        raise ValueError(
            f"--inputs: {path} has no entry 'model'; give checkpoints written by fairseq-train"
        )
    return state


def _updates(state: Mapping[str, Any]) -> int:
    """Number of updates the checkpoint was trained for; -1 if it does not say."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", -1))


def average_checkpoints(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Average the parameters of checkpoints.

    Floating-point tensors (any shape) become the mean over the files, summed in float64 so that
    neither the order nor half precision matters, and cast back to their dtype. Integer and boolean
    tensors are counts and masks, of which a mean says nothing: they must be equal. Tensors that
    share their memory in the files, as tied embeddings do, share it in the result.

    Args:
        paths: one or more checkpoint files. Two of them at a time are in memory, besides the sum.

    Returns:
        A checkpoint: the entries of the file with the most updates (the last of these, if several),
        ``model`` averaged, without ``last_optimizer_state``.

    Raises:
        ValueError: if no file is given or one is given twice, cannot be loaded, or differs from
            another in its parameters' names, shapes or dtypes, or in its positional settings; or
            if a parameter is NaN. The message names file, key and remedy.
    """
    _check_distinct(paths)
    total: dict[str, Tensor] = {}
    longest, longest_path = None, paths[0]
    for path in tqdm(paths, desc="averaging", unit="checkpoint", disable=None):
        state = load_checkpoint(path)
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
        raise ValueError("--inputs: no checkpoint given; name at least one file")
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ValueError(
                f"--inputs: {path} is given twice, and would count twice in the mean; name it once"
            )
        seen.add(real)


def _check_same_run(names: str, state: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse checkpoints with different positional settings or different parameters."""
    ours, theirs = fairseq_arguments(state), fairseq_arguments(other)
    details = [
        f"{name}: {ours.get(name, 'unset')} and {theirs.get(name, 'unset')}"
        for name in sorted(ours.keys() | theirs.keys())
        if name.startswith(_SETTINGS_PREFIX)
        and ours.get(name, "unset") != theirs.get(name, "unset")
    ]
    if details and not _same_settings(state, other):
        raise ValueError(
            f"--inputs: {names} were trained with different positional settings "
            f"({', '.join(details)}); average checkpoints of one training run only"
        )
    marks = [(s.get("task_state") or {}).get(DICTIONARIES) for s in (state, other)]
    if None not in marks and marks[0] != marks[1]:
        raise ValueError(f"--inputs: {names} have different dictionaries; average those of one run")
    unmatched = sorted(state["model"].keys() ^ other["model"].keys())
    if unmatched:
        raise ValueError(
            f"--inputs: {names} have different parameters; only one of them has "
            f"{', '.join(unmatched[:3])} ({len(unmatched)} such keys in all); average checkpoints "
            "of one architecture only"
        )


def _same_settings(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the settings are the same once defaults, which older files leave out, are put in."""
    try:
        first, second = (fairseq_configs(fairseq_arguments(s), s["model"]) for s in (state, other))
    except ValueError:
        return False
    return bool(first) and first == second


def _check_entry(key: str, names: str, value: Any, other: Any) -> None:
    """Refuse two entries of the same name that have no mean."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        if type(value) is not type(other) or value != other:
            raise ValueError(
                f"--inputs: {key} of {names} differ and are no tensors; average checkpoints of one "
                "training run only"
            )
    elif (value.shape, value.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"--inputs: {key} of {names} differ: {tuple(value.shape)} {value.dtype} and "
            f"{tuple(other.shape)} {other.dtype}; average checkpoints of one architecture and "
            "precision only"
        )
    elif _has_mean(value):
        if value.isnan().any():
            raise ValueError(
                f"--inputs: {key} holds NaN in the first of {names}; that training has diverged, "
                "leave the file out"
            )
    elif not torch.equal(value, other) and not key.endswith(_STEP_COUNTER):
        raise ValueError(
            f"--inputs: {key} of {names} differ, and a mean of {value.dtype} values has no "
            "meaning; average checkpoints of one training run on the same data only"
        )


def _has_mean(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _add(total: dict[str, Tensor], key: str, value: Any) -> None:
    """Add to the running sum, kept in float64 (or complex128)."""
    if key in total:
        total[key] += value
    elif _has_mean(value):
        total[key] = value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


def _mean(value: Any, total: Tensor | None, count: int) -> Any:
    """The averaged entry in the dtype of the files, or the entry itself if it has no sum."""
    return value if total is None else (total / count).to(value.dtype)


def _share_again(model: Mapping[str, Any], means: dict[str, Any]) -> dict[str, Any]:
    """Entries that shared memory in the file share it again, unless their means differ."""
    owners: dict[tuple[Any, ...], str] = {}
    for key, value in model.items():
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        owner = owners.setdefault(place, key)
        if owner != key and torch.equal(means[owner], means[key]):
            means[key] = means[owner]
    return means


def save_atomically(state: Mapping[str, Any], output: str | Path) -> None:
    """Write a checkpoint in one step: the file at ``output`` is complete, or as it was before.

    Raises:
        OSError: if the folder cannot be written to or is full; nothing is left behind then.
    """
    try:
        with writing(Path(output), "wb") as file:
            torch.save(dict(state), file)
    except RuntimeError as error:  # torch.save raises it on a full disk
        raise OSError(f"--output {output} cannot be written; disk full? ({error})") from error


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Refuse an output that cannot be written or would destroy an input, before long reading."""
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder; name a file, such as {output / 'avg.pt'}")
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: the folder {output.parent} does not exist; create it")
    if any(os.path.realpath(output) == os.path.realpath(path) for path in inputs):
        raise ValueError(
            f"--output {output} is one of the inputs, which are never overwritten; name another"
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
        ("best", "the best N checkpoints kept by --keep-best-checkpoints"),
    ):
        number.add_argument(f"--num-{which}-checkpoints", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="E",
        help="with the last N epochs (updates): leave out those after epoch (update) E",
    )  # fmt: skip
    return parser


def _resolve_inputs(args: argparse.Namespace) -> list[Path]:
    """The files that the options ask for."""
    folders = [path for path in args.inputs if path.is_dir()]
    for which in ("epoch", "update", "best"):
        count = getattr(args, f"num_{which}_checkpoints")
        if count is None:
            continue
        if len(args.inputs) != 1 or not folders:
            raise ValueError(
                f"--num-{which}-checkpoints {count} chooses from one folder, but --inputs is "
                f"{' '.join(map(str, args.inputs))}; give one folder that exists, or leave it out"
            )
        return select_checkpoints(folders[0], which, count, args.checkpoint_upper_bound)
    if args.checkpoint_upper_bound is not None:
        raise ValueError(
            f"--checkpoint-upper-bound {args.checkpoint_upper_bound} bounds nothing here; add "
            "--num-epoch-checkpoints N or --num-update-checkpoints N"
        )
    if folders:
        raise ValueError(
            f"--inputs {folders[0]} is a folder; add --num-epoch-checkpoints N, "
            "--num-update-checkpoints N or --num-best-checkpoints N, or name its files: "
            f"{_listing(_files(folders[0]))}"
        )
    return list(args.inputs)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``cape-average-checkpoints``.

    Args:
        argv: the command line without the program's name; None for that of the process.

    Raises:
        SystemExit: with status 2 and a message if an option or an input is unusable; the output is
            then not written.
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
