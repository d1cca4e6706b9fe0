"""Repairs faults of fairseq 0.12, for every model.

* ``--replace-unk`` without a value takes its default, ``"@@ "``, for the name of a file. With an
  empty name, generation stops at the first unknown word, because fairseq asks the generator for no
  alignment. ``fairseq-interactive`` would copy ``<unk>``, because the command takes the source word
  from text in which unknown words are ``<unk>``.
* Resumed trainings differ from uninterrupted trainings; see :mod:`fairseq_user_dir.host.resuming`.
* With numpy 2, language models can neither be used through the hub nor be trained with
  ``--sample-break-mode eos``: fairseq imports ``numpy.compat.long``, another name of ``int``, which
  numpy 2 has removed.
* ``--num-batch-buckets`` calls ``numpy.percentile`` with a keyword that only old versions have.
* ``--diverse-beam-groups`` uses the number of a sentence in the set as the row of the sentence in
  the batch. The search then counts the words of another sentence, or stops with an error.
* ``--dataset-impl cached`` cannot read sentences before an epoch has begun.
* The task ``translation_from_pretrained_bart`` looks for its settings under an old name.
* ``fairseq-validate`` requires ``--task``; the repair takes the task from the checkpoint.
* fairseq runs some data as code; see :mod:`fairseq_user_dir.host.data_only`.
* BLEU of an empty hypothesis, which CTC models may produce, ends in a segmentation fault.
* Evaluation leaves sentences out; see :mod:`fairseq_user_dir.host.whole_sets`. ``fairseq-generate``
  takes ``--num-shards``, but translates all sentences in each shard.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, options, utils
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.indexed_dataset import IndexedCachedDataset, IndexedDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.logging import progress_bar
from fairseq.scoring import bleu
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq.tokenizer import tokenize_line
from fairseq.trainer import Trainer
from torch import Tensor

from cape_plugins.checkpoints.fairseq_files import literal
from fairseq_user_dir.host.data_only import run_no_data
from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.host.reading import read_checkpoint, task_name
from fairseq_user_dir.host.resuming import with_batches_of_first_epoch, with_end, with_patience
from fairseq_user_dir.host.whole_sets import (
    with_batches_in_share,
    with_batches_of_training,
    with_last_batch,
    with_sentences,
    with_set_of_validation,
    with_shards,
    without_iterator_of_training,
)

_NO_DICTIONARY = "@@ "  # value of --replace-unk without a file


def repair_fairseq() -> None:
    """Applies the repairs; calling it again changes nothing."""
    if hasattr(FairseqTask.get_batch_iterator, "__wrapped__"):
        return
    FairseqTask.get_batch_iterator = with_batches_of_first_epoch(FairseqTask.get_batch_iterator)
    checkpoint_utils.load_checkpoint = with_end(checkpoint_utils.load_checkpoint)
    Trainer.save_checkpoint = with_patience(Trainer.save_checkpoint)
    checkpoint_utils.load_model_ensemble_and_task = _with_task_of_failure(
        checkpoint_utils.load_model_ensemble_and_task
    )
    data_utils.batch_by_size = with_last_batch(data_utils.batch_by_size)
    for wrap in (with_batches_of_training, with_set_of_validation):
        Trainer.get_train_iterator = wrap(Trainer.get_train_iterator)
    progress_bar.progress_bar = with_sentences(progress_bar.progress_bar)
    EpochBatchIterator.next_epoch_itr = with_batches_in_share(EpochBatchIterator.next_epoch_itr)
    Trainer.get_valid_iterator = without_iterator_of_training(Trainer.get_valid_iterator)
    FairseqTask.build_generator = _with_alignment(FairseqTask.build_generator)
    for repair in (_with_task_of_checkpoint, _with_scorer_of_task, with_shards, _with_overrides):
        options.parse_args_and_arch = repair(options.parse_args_and_arch)
    FairseqTask.get_interactive_tokens_and_lengths = _with_typed_words(
        FairseqTask.get_interactive_tokens_and_lengths
    )
    bleu.Scorer.add = _with_an_end(bleu.Scorer.add)
    utils.load_align_dict = _with_default(utils.load_align_dict)
    utils.post_process_prediction = _with_replacement(utils.post_process_prediction)
    run_no_data()
    DiverseBeamSearch.step = _with_rows_of_batch(DiverseBeamSearch.step)
    IndexedCachedDataset.__getitem__ = _with_file(IndexedCachedDataset.__getitem__)
    TranslationFromPretrainedBARTTask.args = property(lambda task: task.cfg)
    for module in (data_utils, bucket_pad_length_dataset):
        module.get_buckets = _buckets
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace(long=int)


# ------------------------------------------------------------------------------- fairseq-generate


def _with_an_end(stock: Any) -> Any:
    """Scores an empty hypothesis as EOS alone, which is the empty output of a model with a decoder:
    the BLEU library needs a last word in each sentence."""

    @functools.wraps(stock)
    def add(self: bleu.Scorer, ref: Tensor, pred: Tensor) -> None:
        end = torch.tensor([self.eos], dtype=torch.int)
        stock(self, *(words if words.ne(self.pad).any() else end for words in (ref, pred)))

    return add


def _with_scorer_of_task(stock: Any) -> Any:
    """Lets a task choose the scorer with an attribute `scorer`; ``--scoring`` overrides the
    task."""

    @functools.wraps(stock)
    def parse_args_and_arch(
        parser: argparse.ArgumentParser, input_args: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        arguments, _ = parser.parse_known_args(input_args)
        scorer = getattr(TASK_REGISTRY.get(getattr(arguments, "task", None)), "scorer", None)
        if scorer is not None and hasattr(arguments, "beam"):
            parser.set_defaults(scoring=scorer)
        return stock(parser, input_args, *args, **kwargs)

    return parse_args_and_arch


def _with_overrides(stock: Any) -> Any:
    """Parses ``--model-overrides`` as data when the command begins, so that a mistake is reported
    at once. fairseq reads this option only after the task of the model is built, and two commands
    run the text of the option as Python."""

    @functools.wraps(stock)
    def parse_args_and_arch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        parsed = stock(parser, *args, **kwargs)
        text = getattr(parsed, "model_overrides", "{}")
        try:
            settings = literal(text)
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            parser.error(
                f"--model-overrides {text or repr(text)} is not allowed; allowed: names of "
                "settings with numbers, quoted texts or lists of them, such as \"{'dropout': 0.1}\""
            )
        return parsed

    return parse_args_and_arch


# ------------------------------------------------------------------------------- fairseq-validate


def _with_task_of_checkpoint(stock: Any) -> Any:
    """Takes the task from the checkpoint in commands that have no default of ``--task``."""

    @functools.wraps(stock)
    def parse_args_and_arch(
        parser: argparse.ArgumentParser, input_args: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        arguments, _ = parser.parse_known_args(input_args)
        if getattr(arguments, "task", "") is None:
            if getattr(arguments, "path", None) is None:
                parser.error("give --path with a checkpoint, or --task")
            parser.set_defaults(task=task_name(read_checkpoint(arguments.path)))
        return stock(parser, input_args, *args, **kwargs)

    return parse_args_and_arch


# -------------------------------------------------------------------------- batches and beams


def _buckets(sizes: Any, num_buckets: int) -> np.ndarray:
    """fairseq's function, with the keyword that numpy 2 has."""
    shares = np.linspace(0, 100, num_buckets + 1)
    return np.unique(np.percentile(sizes, shares, method="lower")[1:])


def _with_file(stock: Any) -> Any:
    """Reads a sentence that is not in the cache from the file, and closes the file again: worker
    processes would share the position of an open file."""

    @functools.wraps(stock)
    def __getitem__(self: IndexedCachedDataset, index: int) -> Tensor:
        if index in self.cache_index:
            return stock(self, index)
        item = IndexedDataset.__getitem__(self, index)
        if self.data_file:
            self.data_file.close()
            self.data_file = None
        return item

    return __getitem__


def _with_rows_of_batch(stock: Any) -> Any:
    """Makes diverse beam search find the words of other groups by the row of a sentence in the
    batch, not by the number of the sentence in the set."""

    @functools.wraps(stock)
    def step(
        self: DiverseBeamSearch,
        step: int,
        lprobs: Tensor,
        scores: Tensor | None,
        prev_output_tokens: Tensor | None = None,
        original_batch_idxs: Tensor | None = None,
    ) -> Any:
        if step == 0:
            self.sentences = original_batch_idxs
        rows = original_batch_idxs[:, None].eq(self.sentences).long().argmax(1)
        return stock(self, step, lprobs, scores, prev_output_tokens, rows)

    return step


# ----------------------------------------------------------------------- checkpoints of other tasks


def _with_task_of_failure(stock: Any) -> Any:
    """Adds the task of training to the error of a model that cannot be built or loaded: the model
    may belong to another task."""

    @functools.wraps(stock)
    def load_model_ensemble_and_task(
        filenames: Sequence[str], arg_overrides: Any = None, task: Any = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        try:
            return stock(filenames, arg_overrides, task, *args, **kwargs)
        except (SettingsError, OSError):
            raise
        except Exception as error:
            task_here = next(
                (name for name, row in TASK_REGISTRY.items() if row is type(task)), None
            )
            for path in filter(os.path.isfile, filenames if task_here else ()):
                stored_task = task_name(read_checkpoint(path))
                if stored_task != task_here:
                    raise SettingsError(
                        f"{path} was trained with --task {stored_task}, not {task_here}, in which "
                        f"it cannot be used; give --task {stored_task} and a data folder of that "
                        "task."
                    ) from error
            raise

    return load_model_ensemble_and_task


# ---------------------------------------------------------------------------------- --replace-unk


def _with_default(stock: Any) -> Any:
    """Reads no file of replacements if ``--replace-unk`` has no value: source words are copied."""

    @functools.wraps(stock)
    def load_align_dict(replace_unk: str | None) -> dict[str, str] | None:
        return {} if replace_unk == _NO_DICTIONARY else stock(replace_unk)

    return load_align_dict


def _with_alignment(stock: Any) -> Any:
    """Makes the generator return alignments for ``--replace-unk``, unless other options do so."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def build_generator(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        keywords, options = call.arguments, call.arguments["args"]
        if (
            getattr(options, "replace_unk", None) is not None
            and not getattr(options, "print_alignment", None)
            and not getattr(options, "score_reference", False)
            and keywords["seq_gen_cls"] is None
        ):
            keywords["seq_gen_cls"] = SequenceGeneratorWithAlignment
            extra = keywords["extra_gen_cls_kwargs"] or {}
            keywords["extra_gen_cls_kwargs"] = {**extra, "print_alignment": "hard"}
        return stock(*call.args, **call.kwargs)

    return build_generator


class _SourceText(str):
    """The source sentence that fairseq prints; `words` holds the typed words, one for each
    token."""

    words: list[str]


def _with_typed_words(stock: Any) -> Any:
    """Stores the typed words of a block of lines. fairseq makes the source text from tokens, once a
    line and in the order of the lines, and may have left out lines that are too long."""

    @functools.wraps(stock)
    def get_interactive_tokens_and_lengths(
        self: FairseqTask, lines: list[str], encode_fn: Callable[[str], str]
    ) -> Any:
        tokens, lengths = stock(self, lines, encode_fn)
        dictionary = self.source_dictionary
        if dictionary is None:
            return tokens, lengths
        rows = [row.tolist() for row in tokens]
        typed = list(zip(rows, (tokenize_line(encode_fn(line)) for line in lines), strict=True))

        def string(tensor: Tensor, *args: Any, **kwargs: Any) -> str:
            source_text = type(dictionary).string(dictionary, tensor, *args, **kwargs)
            row = tensor.tolist()
            for number, (typed_row, words) in enumerate(typed):
                if row == typed_row:
                    del typed[: number + 1]
                    source_text = _SourceText(source_text)
                    source_text.words = words
                    break
            return source_text

        dictionary.string = string
        return tokens, lengths

    return get_interactive_tokens_and_lengths


def _with_replacement(stock: Any) -> Any:
    """Replaces unknown words by the typed source words that they are aligned with, or by the
    entries of these words in the file of ``--replace-unk``."""

    @functools.wraps(stock)
    def post_process_prediction(
        hypo_tokens: Tensor,
        src_str: str,
        alignment: Any,
        align_dict: dict[str, str] | None,
        tgt_dict: Any,
        remove_bpe: str | None = None,
        extra_symbols_to_ignore: set[int] | None = None,
    ) -> tuple[Tensor, str, Any]:
        if align_dict is None:
            return stock(
                hypo_tokens,
                src_str,
                alignment,
                align_dict,
                tgt_dict,
                remove_bpe,
                extra_symbols_to_ignore,
            )
        # before subwords are joined, because the alignment is between subwords
        words = tgt_dict.string(
            hypo_tokens, extra_symbols_to_ignore=extra_symbols_to_ignore
        ).split()
        sources = src_str.words if isinstance(src_str, _SourceText) else src_str.split()
        unknown = tgt_dict.unk_string()
        for number, word in enumerate(words):
            if word == unknown:
                source = sources[_aligned_source(alignment, number, len(sources))]
                words[number] = align_dict.get(source, source)
        sentence = data_utils.post_process(" ".join(words), remove_bpe)
        return tgt_dict.encode_line(sentence, add_if_not_exist=True), sentence, alignment

    return post_process_prediction


def _aligned_source(alignment: Sequence[Any], number: int, num_sources: int) -> int:
    """Index of the source word for the target word at `number`, from a hard alignment (pairs
    SOURCE, TARGET) or a soft alignment (a row of probabilities for each target word)."""
    entry = alignment[number]
    if isinstance(entry, tuple):
        return int(entry[0])
    return max(range(num_sources), key=lambda source: float(entry[source]))
