"""Evaluation on whole sets, for every task and model.

fairseq silently leaves out the last batch of a set if the size of the batch is no multiple of
``--required-batch-size-multiple``, 8 by default. Sets are sorted by length, so the longest
sentences are lost. The number of lost sentences depends on the batch size, so two commands may
score different sets. With this module the remaining sentences form one more batch, after fairseq's
batches. A training keeps fairseq's batches without this batch, so that it repeats bit for bit.

If a training validates on its training set (``--valid-subset train``), fairseq gives one dataset
with one iterator to both: then validation loses the remaining sentences, and ends the epoch of the
training. With this module validation has a separate dataset and iterator.

A sentence that fits into no batch ends an evaluation with an error of one line; so does a set or a
share without sentences.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from fairseq.data.iterators import EpochBatchIterator
from fairseq.trainer import Trainer
from torch import distributed

from fairseq_user_dir.host.errors import SettingsError

_training: ContextVar[bool] = ContextVar("training", default=False)


@contextmanager
def _batches_of_training() -> Iterator[None]:
    token = _training.set(True)
    try:
        yield
    finally:
        _training.reset(token)


def with_batches_of_training(stock: Any) -> Any:
    """Wraps ``Trainer.get_train_iterator``: the batches of this function are for training, all
    other batches for evaluation, in tasks of other packages too."""

    @functools.wraps(stock)
    def get_train_iterator(*args: Any, **kwargs: Any) -> Any:
        with _batches_of_training():
            iterator = stock(*args, **kwargs)
        sampler = iterator.batch_sampler
        if callable(sampler) and not hasattr(sampler, "__wrapped__"):
            # the iterator makes the batches of a later epoch when the epoch begins

            @functools.wraps(sampler)
            def batch_sampler(*args: Any) -> Any:
                with _batches_of_training():
                    return sampler(*args)

            iterator.batch_sampler = batch_sampler
        return iterator

    return get_train_iterator


def with_set_of_validation(stock: Any) -> Any:
    """Wraps ``Trainer.get_train_iterator``, which loads the training set. If fairseq-train has
    loaded this set before, the set was loaded for validation, and this function keeps that dataset
    for :func:`without_iterator_of_training`."""

    @functools.wraps(stock)
    def get_train_iterator(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "set_of_validation"):
            self.set_of_validation = self.task.datasets.get(self.cfg.dataset.train_subset)
        return stock(self, *args, **kwargs)

    return get_train_iterator


def without_iterator_of_training(stock: Any) -> Any:
    """Wraps ``Trainer.get_valid_iterator``. Validation on the training set uses the dataset that
    was loaded for validation. This dataset has a separate epoch, on which draws of a dataset
    depend."""

    @functools.wraps(stock)
    def get_valid_iterator(self: Trainer, subset: str, *args: Any, **kwargs: Any) -> Any:
        datasets = self.task.datasets
        validation_set = getattr(self, "set_of_validation", None)
        if subset != self.cfg.dataset.train_subset or validation_set is None:
            return stock(self, subset, *args, **kwargs)
        training_set = datasets[subset]
        datasets[subset] = validation_set
        try:
            return stock(self, subset, *args, **kwargs)
        finally:
            datasets[subset] = training_set

    return get_valid_iterator


def with_last_batch(stock: Any) -> Any:
    """Wraps ``data_utils.batch_by_size``, which makes the batches of every task."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if not len(indices):
            return []  # fairseq looks for a last batch
        try:
            batches = stock(indices, *args, **kwargs)
        except AssertionError as error:
            call = signature.bind(indices, *args, **kwargs).arguments
            raise _too_long(indices, call["num_tokens_fn"], call["max_tokens"]) from error
        batched = sum(map(len, batches))
        if batched == len(indices) or _training.get():
            return batches
        return [*batches, indices[batched:]]

    return batch_by_size


def _too_long(indices: np.ndarray, num_tokens: Any, max_tokens: int) -> SettingsError:
    longest = max(indices.tolist(), key=num_tokens)
    return SettingsError(
        f"--max-tokens {max_tokens} (of a validation in training: --max-tokens-valid) is less "
        f"than the {num_tokens(longest)} tokens of sample {longest}; allowed: at least this "
        "number. Raise the limit, or give --batch-size instead."
    )


def with_sentences(stock: Any) -> Any:
    """Wraps ``progress_bar.progress_bar``, which gets all batches of a set from a command. Without
    batches fairseq-generate and fairseq-validate stop with a Python error, and fairseq-eval-lm
    reports a perplexity of 1."""

    @functools.wraps(stock)
    def progress_bar(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if not len(iterator):
            raise SettingsError(
                "no sentence is left in the set: it is empty, or all its sentences are longer "
                "than --max-source-positions or --max-target-positions and left out by "
                "--skip-invalid-size-inputs-valid-test; raise these limits, or give another set."
            )
        return stock(iterator, *args, **kwargs)

    return progress_bar


def with_batches_in_share(stock: Any) -> Any:
    """Wraps ``EpochBatchIterator.next_epoch_itr``, which gives all shares the same number of
    batches by adding empty batches. The ranks of a distributed training or validation need these
    empty batches."""

    @functools.wraps(stock)
    def next_epoch_itr(self: EpochBatchIterator, *args: Any, **kwargs: Any) -> Any:
        batches = len(self.frozen_batches)
        if 0 < batches <= self.shard_id and not distributed.is_initialized():
            raise SettingsError(
                f"--shard-id {self.shard_id} has no sentences: the set has {batches} batches, too "
                f"few for --num-shards {self.num_shards}. Give fewer shards, or smaller batches "
                "by --batch-size or --max-tokens."
            )
        return stock(self, *args, **kwargs)

    return next_epoch_itr


def with_shards(stock: Any) -> Any:
    """Wraps ``options.parse_args_and_arch``. fairseq-generate splits a set by the number of
    processes, which is always 1; fairseq-eval-lm splits a set by --num-shards, too. The other
    commands accept the option and ignore it."""

    @functools.wraps(stock)
    def parse_args_and_arch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsed = stock(parser, *args, **kwargs)
        if not (hasattr(parsed, "num_shards") and hasattr(parsed, "shard_id")):
            return parsed  # fairseq also parses once without the options that a line does not name
        shards, shard = parsed.num_shards, parsed.shard_id
        if not 0 <= shard < shards:
            parser.error(
                f"--shard-id {shard} with --num-shards {shards} is not allowed; allowed: 0 to one "
                "less than the number of shards, which is at least 1"
            )
        if shards == 1 or hasattr(parsed, "context_window"):  # fairseq-eval-lm
            return parsed
        if hasattr(parsed, "buffer_size"):
            parser.error(
                f"--num-shards {shards} is not for fairseq-interactive, which translates all of "
                "its input; split the input"
            )
        if not hasattr(parsed, "beam"):
            parser.error(
                f"--num-shards {shards} is not for this command, which reads whole sets; "
                "fairseq-generate and fairseq-eval-lm split a set into shares"
            )
        parsed.distributed_world_size, parsed.distributed_rank = shards, shard
        return parsed

    return parse_args_and_arch
