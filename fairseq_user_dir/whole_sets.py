"""Evaluation on whole sets, for every task and model.

fairseq leaves out the last batch of a set if its size is no multiple of
``--required-batch-size-multiple``, 8 by default, and says nothing. Sets are sorted by length, so
that the longest sentences are lost, and how many depends on the size of the batches: two commands
score two sets. Here the batches of fairseq stay as they are, and what is left is one more. A
training keeps the batches of fairseq, which drop a rest, so that it repeats bit for bit.

A sentence that fits into no batch ends an evaluation with one line.
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

from fairseq_user_dir.errors import SettingsError

_training: ContextVar[bool] = ContextVar("training", default=False)


@contextmanager
def _batches_of_training() -> Iterator[None]:
    token = _training.set(True)
    try:
        yield
    finally:
        _training.reset(token)


def with_batches_of_training(stock: Any) -> Any:
    """Wraps ``Trainer.get_train_iterator``: what it makes is for a training."""

    @functools.wraps(stock)
    def get_train_iterator(*args: Any, **kwargs: Any) -> Any:
        with _batches_of_training():
            iterator = stock(*args, **kwargs)
        sampler = iterator.batch_sampler
        if callable(sampler) and not hasattr(sampler, "__wrapped__"):
            # makes the batches of a later epoch when that begins

            @functools.wraps(sampler)
            def batch_sampler(*args: Any) -> Any:
                with _batches_of_training():
                    return sampler(*args)

            iterator.batch_sampler = batch_sampler
        return iterator

    return get_train_iterator


def with_last_batch(stock: Any) -> Any:
    """Wraps ``data_utils.batch_by_size``, to which every task comes for its batches."""
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
        f"--max-tokens {max_tokens} (of a validation in training: --max-tokens-valid) is less than "
        f"the {num_tokens(longest)} tokens of sample {longest}; allowed: as many as the longest "
        "sample has. Give more, or --batch-size instead."
    )


def with_shards(stock: Any) -> Any:
    """Wraps ``options.parse_args_and_arch``: fairseq-generate shares a set out by the number of
    processes, which is always 1, and not as fairseq-eval-lm also by --num-shards."""

    @functools.wraps(stock)
    def parse_args_and_arch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsed = stock(parser, *args, **kwargs)
        if not (hasattr(parsed, "beam") and hasattr(parsed, "num_shards")):
            return parsed
        shards, shard = parsed.num_shards, parsed.shard_id
        if not 0 <= shard < shards:
            parser.error(
                f"--shard-id {shard} with --num-shards {shards} is not allowed; allowed: 0 to one "
                "less than the number of shards, which is at least 1"
            )
        if shards > 1 and hasattr(parsed, "buffer_size"):
            parser.error(
                f"--num-shards {shards} is not for fairseq-interactive, which translates all that "
                "it reads; split its input"
            )
        if shards > 1:
            parsed.distributed_world_size, parsed.distributed_rank = shards, shard
        return parsed

    return parse_args_and_arch
