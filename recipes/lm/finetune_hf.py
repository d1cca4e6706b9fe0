"""Trains language models (Llama) with any position embedding on short sequences, and tests them on
longer sequences:

    python recipes/lm/finetune_hf.py                        # copying letters, from scratch
    python recipes/lm/finetune_hf.py --task text            # built-in text: loss by position
    python recipes/lm/finetune_hf.py --task text --train-file book.txt --test-lengths 64 512
    accelerate launch recipes/lm/finetune_hf.py --task text --model LLAMA \\
        --position-embedding cape --train-file *.txt --train-length 1024

Without --model a small model is trained from scratch, on bytes. Llama turns queries and keys by
their positions, so this recipe compares the types for such models.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from cape_plugins.settings.registry import ROTARY, types_of
from hf_models import CapeLlamaConfig, CapeLlamaForCausalLM
from recipes.lab.command_line import (
    add_shared,
    check_increasing,
    check_reach,
    positive,
    settings_to_compare,
)
from recipes.lab.data import fingerprint
from recipes.lab.hf_checkpoints import load_model, make_config, read_beside, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.steps import CommandError, run_main
from recipes.lab.tables import Row
from recipes.lm.data import IGNORED, TASKS, Task, blocks, encode, exercises, read_texts
from recipes.lm.measure import (
    LOSS,
    by_position,
    positions_reaching,
    stretches,
    trained_ranges,
)

COMPARED = ("rope", "nopos", "cape", "randpos", "rfs")
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
MODEL |= {"initializer_range": 0.08}
TRAINING = (
    "--learning_rate 3e-3 --lr_scheduler_type cosine --warmup_steps 100 --adam_beta2 0.95 "
    "--per_device_eval_batch_size 50"
)


METRICS = {
    "exact_match": "Answers that are right as a whole",
    "token_accuracy": "Tokens that are right after right ones",
    **LOSS,
}


def read_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Task]:
    """Options of the recipe, options of the Trainer, and the task with its default lengths."""
    parser = make_parser(__doc__, "text", COMPARED, "results/lm/TASK", ROTARY)
    text = "; ".join(f"{name}: {task.summary}" for name, task in TASKS.items())
    parser.add_argument("--task", choices=TASKS, default="copy", help=f"{text} (default: copy)")
    files = {"nargs": "+", "type": Path, "metavar": "FILE"}
    parser.add_argument("--train-file", **files, help="files of text (default: made-up words)")
    parser.add_argument(
        "--validation-file",
        **files,
        help="files of text (default: the last tenth of the training text)",
    )
    parser.add_argument(
        "--train-length",
        type=positive,
        metavar="N",
        help="length of the longest training exercise; for texts, number of tokens of a block "
        "(default: depends on the task)",
    )
    parser.add_argument(
        "--test-lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help="lengths of exercises; for texts, ends of ranges of positions (default: up to 4 or 8 "
        "times --train-length)",
    )
    add_shared(
        parser, "limit", note="exercises of each length; for texts, stretches of text", default=200
    )
    first = parser.parse_known_args(argv)[0]
    task = TASKS[first.task]
    length = first.train_length or task.train_length
    tested = [round(times * length) or 1 for times in task.times]
    parser.set_defaults(
        output=Path("results/lm") / first.task, train_length=length, test_lengths=tested
    )
    args, training = parse(parser, [*TRAINING.split(), *task.training.split()], argv)
    check_increasing(args.test_lengths, "--test-lengths")
    if task.make and args.train_file:
        raise CommandError(f"--train-file has no effect on --task {args.task}; give --task text")
    if not task.make and (least := min(args.train_length, *args.test_lengths)) < 2:
        raise CommandError(f"length {least} has no token to predict; allowed for texts: >= 2")
    check_reach(args.test_lengths, args.train_length)
    if args.validation_file and not args.train_file:
        raise CommandError("--validation-file needs --train-file")
    return args, training, task


def build_model(
    args: argparse.Namespace, settings: Mapping[str, Any], tokenizer: Any
) -> CapeLlamaForCausalLM:
    """A model from a stock or cape checkpoint, or from scratch."""
    if args.model:
        return load_model(CapeLlamaForCausalLM, args.model, settings)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    special |= {"bos_token_id": None, "vocab_size": len(tokenizer)}
    more = {"position_embedding": dict(settings)}
    sizes = {**MODEL, **special, **(args.model_config or {})}
    return CapeLlamaForCausalLM(make_config(CapeLlamaConfig, sizes, **more))


@torch.no_grad()
def logits_of(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits ``[B, T - 1, V]`` float32 of the tokens after the first, and their labels."""
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
    logits = model(**inputs, use_cache=False).logits
    return logits[:, :-1].float(), batch["labels"][:, 1:].to(model.device)


def right_answers(
    model: Any, collate: Any, samples: Sequence[Mapping[str, list[int]]], batch_size: int
) -> list[tuple[float, float]]:
    """Two numbers for each exercise: whether the whole answer is right, as greedy decoding would
    write it, and the share of its tokens that are right if all tokens before them are right
    (teacher forcing)."""

    def run(rows: Sequence[int]) -> list[tuple[float, float]]:
        logits, labels = logits_of(model, collate([samples[row] for row in rows]))
        in_answer = labels != IGNORED
        right = (logits.argmax(-1) == labels) & in_answer
        shares = right.sum(1) / in_answer.sum(1)
        return [(float(part == 1), float(part)) for part in shares.tolist()]

    lengths = [len(sample["input_ids"]) for sample in samples]
    return share(batches(lengths, batch_size), run, "answer", len(samples))


def losses(model: Any, stretches: Sequence[list[int]], batch_size: int) -> Tensor:
    """Negative log likelihood ``[stretches, T - 1]`` in nats, of each token except the first."""

    def run(rows: Sequence[int]) -> list[Tensor]:
        ids = torch.tensor([stretches[row] for row in rows])
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        logits, labels = logits_of(model, batch)
        return list(F.cross_entropy(logits.mT, labels, reduction="none").cpu())

    work = batches(list(map(len, stretches)), batch_size)
    return torch.stack(share(work, run, "read", len(stretches)))


class Exam(NamedTuple):
    """Training data of a model, and its test.

    Attributes:
        make_train_set: Function that makes samples with ``input_ids`` and ``labels``.
        data: Fingerprint of the training data.
        longest: Number of tokens of the longest input of training and test.
        trained: Groups of the scores that occur in training.
        measure: Function that returns the scores of a model by group.
    """

    make_train_set: Callable[[], Sequence[Mapping[str, list[int]]]]
    data: str
    longest: int
    trained: Sequence[str]
    measure: Callable[[Any], Iterator[Row]]


def exam_of_exercises(args: argparse.Namespace, task: Task, tokenizer: Any, size: int) -> Exam:
    lengths = range(1, args.train_length + 1)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)
    tests = {
        str(n): encode([*exercises(task, [n], args.limit, f"test {n}")], tokenizer)
        for n in args.test_lengths
    }

    def measure(model: Any) -> Iterator[Row]:
        for label, samples in tests.items():
            whole, tokens = zip(*right_answers(model, collate, samples, size), strict=True)
            yield {"length": label, "exact_match": mean(whole), "token_accuracy": mean(tokens)}

    def make_train_set() -> Sequence[Mapping[str, list[int]]]:
        return encode([*exercises(task, lengths, task.samples, "train")], tokenizer)

    hardest = exercises(task, [max(*lengths, *args.test_lengths)], args.limit, "longest")
    longest = max(len(sample["input_ids"]) for sample in encode([*hardest], tokenizer))
    # The recorded options determine all exercises. The first exercises are in the fingerprint, so
    # that a change of the code shows.
    first = fingerprint([*map("".join, exercises(task, lengths, 100, "train"))])
    trained = [n for n in tests if int(n) in lengths]
    return Exam(make_train_set, first, longest, trained, measure)


def exam_of_texts(args: argparse.Namespace, tokenizer: Any, size: int) -> Exam:
    length, ends = args.train_length, args.test_lengths
    texts = read_texts({"train": args.train_file, "test": args.validation_file})

    def tokens(split: str) -> list[int]:
        return tokenizer(texts[split], add_special_tokens=False, verbose=False)["input_ids"]

    tested = stretches(tokens("test"), max(ends), args.limit)

    def measure(model: Any) -> Iterator[Row]:
        for label, value in by_position(losses(model, tested, size), ends).items():
            yield {"position": label, "loss": value}

    def make_train_set() -> Sequence[Mapping[str, list[int]]]:
        train_blocks = blocks(tokens("train"), length, "training")
        return [{"input_ids": ids, "labels": ids} for ids in train_blocks]

    data = fingerprint([texts["train"]])
    return Exam(make_train_set, data, max(length, *ends), trained_ranges(ends, length), measure)


def models(args: argparse.Namespace, longest: int) -> dict[str, dict[str, Any]]:
    """Position embeddings to train, by name. Positions drawn in training reach to the end of the
    longest test."""
    rows = {
        name: {"max_position": longest} for name, row in types_of(ROTARY).items() if row.sampling
    }
    compared = settings_to_compare(args, "text", COMPARED, rows, ROTARY)
    return {name: positions_reaching(row, longest) for name, row in compared.items()}


def main(argv: Sequence[str] | None = None) -> None:
    args, training, task = read_options(argv)
    if args.model:
        read_config(args.model, CapeLlamaConfig)
        tokenizer = read_beside(transformers.AutoTokenizer, args.model)
    else:
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
        torch.set_num_threads(1)  # more threads do not speed up such a small model
    size = training.per_device_eval_batch_size
    if task.make:
        exam = exam_of_exercises(args, task, tokenizer, size)
    else:
        exam = exam_of_texts(args, tokenizer, size)
    compared = models(args, exam.longest)
    train_set = exam.make_train_set()
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)

    def make_trainer(settings: Any, run_args: Any) -> transformers.Seq2SeqTrainer:
        model = build_model(args, settings, tokenizer)
        trainer = transformers.Seq2SeqTrainer
        return trainer(model, run_args, collate, train_set, processing_class=tokenizer)

    rows: list[Row] = []
    for columns, trainer in train_all(compared, args, training, make_trainer, exam.data):
        rows += [{**columns, **scores} for scores in exam.measure(trainer.model)]
    _, _, group, *metrics = rows[0]
    titles = {metric: METRICS[metric] for metric in metrics}
    report(args, f"Language model, {args.task}", rows, group, titles, trained=exam.trained)


if __name__ == "__main__":
    run_main(main)
