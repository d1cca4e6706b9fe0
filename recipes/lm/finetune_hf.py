"""Language models (Llama) with any position embedding, trained on short sequences.

Tested on longer ones:

    python recipes/lm/finetune_hf.py                        # copying letters, from scratch
    python recipes/lm/finetune_hf.py --task text            # built-in text: loss by position
    python recipes/lm/finetune_hf.py --task text --train-file book.txt --test-lengths 64 512
    accelerate launch recipes/lm/finetune_hf.py --task text --model LLAMA \\
        --position-embedding cape --train-file *.txt --train-length 1024

Without --model a small model is trained from scratch, on bytes. The types are those of models that
turn queries and keys by their positions.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from cape_plugins.registry import ROTARY, types_of
from hf_models import CapeLlamaConfig, CapeLlamaForCausalLM
from recipes.lab.hf_checkpoints import load_model, make_config, read_beside, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.options import add_shared, check_increasing, positive, settings_to_compare
from recipes.lab.steps import CommandError, run_main
from recipes.lm.data import IGNORED, TASKS, Exercise, Task, blocks, encode, exercises, read_texts

COMPARED = ("rope", "nopos", "cape", "randpos", "rfs")
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
MODEL |= {"initializer_range": 0.08}
TRAINING = (
    "--per_device_train_batch_size 32 --learning_rate 2e-3 --lr_scheduler_type cosine "
    "--warmup_steps 100 --adam_beta2 0.95 --per_device_eval_batch_size 50"
)


def read_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, Task]:
    """Options, those of the Trainer, and the task; lengths are completed by those of the task."""
    parser = make_parser(__doc__, "text", ROTARY)
    add = parser.add_argument
    text = "; ".join(f"{name}: {task.summary}" for name, task in TASKS.items())
    add("--task", choices=TASKS, default="copy", help=f"{text} (default: copy)")
    files = {"nargs": "+", "type": Path, "metavar": "FILE"}
    add("--train-file", **files, help="text; default: made-up words")
    add("--validation-file", **files, help="default: the last tenth of the training text")
    text = "longest exercise of the training, of texts tokens of a block (default: of the task)"
    add("--train-length", type=positive, metavar="N", help=text)
    text = "lengths of exercises, of texts ends of ranges of positions; default: up to 4 and 8 "
    text += "times that of training"
    add("--test-lengths", nargs="+", type=positive, metavar="N", help=text)
    text = "exercises of each length, or stretches of the text (default: 200)"
    add_shared(parser, "limit", default=200, help=text)
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
        raise CommandError("--train-file has no effect on this --task; give --task text")
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
    """Of each exercise whether all of the answer is right, which is what greedy decoding would
    write, and the share of its tokens that are right after the right ones before them."""

    def run(rows: Sequence[int]) -> list[tuple[float, float]]:
        logits, labels = logits_of(model, collate([samples[row] for row in rows]))
        asked = labels != IGNORED
        right = (logits.argmax(-1) == labels) & asked
        shares = right.sum(1) / asked.sum(1)
        return [(float(share == 1), float(share)) for share in shares]

    lengths = [len(sample["input_ids"]) for sample in samples]
    return share(batches(lengths, batch_size), run, "answer", len(samples))


def losses(model: Any, stretches: Sequence[list[int]], batch_size: int) -> Tensor:
    """Negative log likelihood ``[stretches, T - 1]``, nats, of each token but the first."""

    def run(rows: Sequence[int]) -> list[Tensor]:
        ids = torch.tensor([stretches[row] for row in rows])
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        logits, labels = logits_of(model, batch)
        return list(F.cross_entropy(logits.mT, labels, reduction="none").cpu())

    work = batches(list(map(len, stretches)), batch_size)
    return torch.stack(share(work, run, "read", len(stretches)))


def by_position(values: Tensor, ends: Sequence[int]) -> dict[str, float]:
    """Means of losses ``[stretches, T - 1]`` over ranges of positions with these ends; the first
    token, at position 0, is not predicted."""
    edges = zip((0, *ends), ends, strict=False)
    return {
        f"{low}-{end - 1}": values[:, max(low - 1, 0) : end - 1].mean().item() for low, end in edges
    }


def main(argv: Sequence[str] | None = None) -> None:
    args, training, task = read_options(argv)
    if args.model:
        read_config(args.model, CapeLlamaConfig)
        tokenizer = read_beside(transformers.AutoTokenizer, args.model)
    else:
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
        torch.set_num_threads(1)  # so small a model gains nothing by more
    ends = args.test_lengths
    if task.make:
        lengths = range(1, args.train_length + 1)
        train_set = encode([*exercises(task, lengths, task.samples, "train")], tokenizer)
        tests = {n: [*exercises(task, [n], args.limit, f"test {n}")] for n in ends}
        test_sets = {str(n): encode(work, tokenizer) for n, work in tests.items()}
        longest = max(len(row["input_ids"]) for rows in test_sets.values() for row in rows)
    else:
        texts = read_texts({"train": args.train_file, "test": args.validation_file})
        train_blocks = blocks(texts["train"], tokenizer, args.train_length, "training")
        train_set = [{"input_ids": ids, "labels": ids} for ids in train_blocks]
        longest = max(ends)
        stretches = blocks(texts["test"], tokenizer, longest, "validation")[: args.limit]
    # as many positions as the tests have
    defaults = {
        name: {"max_position": longest}
        for name, row in types_of(ROTARY).items()
        if "max_position" in row.options
    }
    compared = settings_to_compare(args, "text", COMPARED, defaults, ROTARY)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)

    def make_trainer(settings: Any, own: Any) -> transformers.Seq2SeqTrainer:
        model = build_model(args, settings, tokenizer)
        trainer = transformers.Seq2SeqTrainer
        return trainer(model, own, collate, train_set, processing_class=tokenizer)

    rows = []
    size = training.per_device_eval_batch_size
    for columns, trainer in train_all(compared, args, training, make_trainer):
        if task.make:
            for label, samples in test_sets.items():
                whole, tokens = zip(*right_answers(trainer.model, collate, samples, size))
                scores = {"exact_match": sum(whole) / len(whole), "token_accuracy": sum(tokens) / len(tokens)}
                rows.append({**columns, "length": label, **scores})
        else:
            read = by_position(losses(trainer.model, stretches, size), ends)
            rows += [{**columns, "position": label, "loss": value} for label, value in read.items()]
    print(rows)


if __name__ == "__main__":
    run_main(main)
