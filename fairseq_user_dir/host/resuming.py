"""Repairs faults of fairseq in resuming a training, for every model. Without this module:

* A training that is resumed in the second epoch or later has other batches than an uninterrupted
  training: the order of sentences of equal length depends on the epoch in which the *program*
  started.
* A finished training that is started again trains for one more update and writes its checkpoints
  again.
* If the ``--restore-file`` is missing, a new training begins.
* ``--patience`` counts validations without progress from 0 in each start.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from fairseq_user_dir.host.errors import SettingsError

logger = logging.getLogger(__name__)

_LAST = "checkpoint_last.pt"  # default of --restore-file, meaning the file in --save-dir
_PATIENCE = "cape_patience"  # entry of a checkpoint's extra_state


def with_batches_of_first_epoch(stock: Any) -> Any:
    """Wraps ``FairseqTask.get_batch_iterator``. An uninterrupted training makes its batches in
    epoch 1 and keeps them; a resumed training must have the same batches. If fairseq makes new
    batches for every epoch, nothing changes."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def get_batch_iterator(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        task, dataset, epoch = arguments["self"], arguments["dataset"], arguments["epoch"]
        serves_all_epochs = task.can_reuse_epoch_itr(dataset) and not (
            arguments["disable_iterator_cache"] or arguments["update_epoch_batch_itr"]
        )
        if not serves_all_epochs or dataset in task.dataset_to_epoch_iter:
            return stock(*args, **kwargs)
        arguments["epoch"] = 1
        iterator = stock(*call.args, **call.kwargs)
        iterator.epoch = max(epoch, 1)
        dataset.set_epoch(epoch)
        return iterator

    return get_batch_iterator


def with_end(stock: Any) -> Any:
    """Wraps ``checkpoint_utils.load_checkpoint``. fairseq checks only after an update whether the
    training has reached its end, and never whether the restore file exists; this function checks
    both before the first update."""

    @functools.wraps(stock)
    def load_checkpoint(cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
        _check_restore_file(cfg, trainer.checkpoint_suffix)
        extra_state, epoch_itr = stock(cfg, trainer, **kwargs)
        limits, updates = trainer.cfg.optimization, trainer.get_num_updates()
        if updates and not cfg.reset_meters:  # without an update, training begins anew
            _restore_patience(extra_state)
        if limits.max_update and updates >= limits.max_update:
            end = f"--max-update {limits.max_update}"
        elif limits.max_epoch and epoch_itr.next_epoch_idx > limits.max_epoch:
            end = f"--max-epoch {limits.max_epoch}"
        elif 0 < limits.stop_time_hours < trainer.cumulative_training_time() / 3600:
            end = f"--stop-time-hours {limits.stop_time_hours}"
        elif updates and 0 < cfg.patience <= getattr(_early_stop(), "num_runs", 0):
            end = f"--patience {cfg.patience}"
        else:
            return extra_state, epoch_itr
        logger.info(
            "the training in %s is finished: %d updates, %s; nothing is written. Raise the limit "
            "to go on.",
            cfg.save_dir,
            updates,
            end,
        )
        limits.max_epoch = -1  # fairseq's loop over epochs ends before the first epoch
        return extra_state, epoch_itr

    return load_checkpoint


def _check_restore_file(cfg: Any, suffix: str) -> None:
    """Refuses a missing file, except the last checkpoint of this training, which does not exist
    when a job starts for the first time."""
    if cfg.restore_file == _LAST:
        return
    path = cfg.restore_file.replace(".pt", f"{suffix}.pt")  # fairseq's name of the file
    last = os.path.join(cfg.save_dir, _LAST.replace(".pt", f"{suffix}.pt"))
    if os.path.realpath(path) != os.path.realpath(last) and not PathManager.isfile(path):
        raise SettingsError(
            f"--restore-file {path}: no such file; give the path of a checkpoint, or leave the "
            f"option out, to go on from {last} if this file exists."
        )


# ------------------------------------------------------------------------------------- --patience


def _early_stop() -> Any:
    """The function of fairseq-train that counts validations without progress, in attributes; None
    in other programs."""
    for name in ("__main__", "fairseq_cli.train"):  # the first with python -m fairseq_cli.train
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function is not None:
            return function
    return None


def with_patience(stock: Any) -> Any:
    """Wraps ``Trainer.save_checkpoint``: stores the count of validations without progress, which
    fairseq does not store. Checkpoints written without this package have no count, and the count
    begins anew with ``--reset-meters``."""

    @functools.wraps(stock)
    def save_checkpoint(self: Trainer, filename: str, extra_state: dict[str, Any]) -> Any:
        count = getattr(_early_stop(), "__dict__", {})
        if "num_runs" in count:
            extra_state = {**extra_state, _PATIENCE: {n: count[n] for n in ("best", "num_runs")}}
        return stock(self, filename, extra_state)

    return save_checkpoint


def _restore_patience(extra_state: Mapping[str, Any] | None) -> None:
    count = (extra_state or {}).get(_PATIENCE)
    if count and (function := _early_stop()) is not None:
        function.__dict__.update(count)
