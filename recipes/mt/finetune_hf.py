"""Trains Marian models with any position embedding on short texts, and tests them on longer texts:

    python recipes/mt/finetune_hf.py                        # built-in number lists, from scratch
    accelerate launch recipes/mt/finetune_hf.py --position-embedding cape \\
        --model Helsinki-NLP/opus-mt-en-de --train-file train.csv --validation-file valid.csv
    accelerate launch recipes/mt/finetune_hf.py --dataset opus_books --dataset-config de-en \\
        --source-lang en --target-lang de --position-embedding cape

Data are a hub name, a folder of `datasets`, or csv, tsv, json, jsonl or parquet files with one
column per language (or a column `translation` that holds both). Alpha is counted on the training
data and stored in the model.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import transformers
from sentencepiece import SentencePieceProcessor

from cape_plugins.corpus.alpha import TokenCounts, count_token_lists
from cape_plugins.settings.options import COUNTED
from hf_models import CapeMarianConfig, CapeMarianMTModel
from recipes.lab import data
from recipes.lab.command_line import add_shared, positive, settings_to_compare
from recipes.lab.hf_checkpoints import load_model, make_config, read_beside, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.steps import OTHER_OUTPUT, CommandError, run_main, step, write_lines
from recipes.lab.subwords import SentencePiece
from recipes.mt.corpus import Pair
from recipes.mt.number_lists import MAX_TRAIN_LENGTH, make_number_lists, spell
from recipes.mt.scoring import METRICS, groups_by_length, sacrebleu, score_groups

COMPARED = ("sinpos", "cape")
# As in the quickstart: shifts and offsets cover the longest test list.
LIST_SETTINGS = {"cape": {"max_global_shift": 30}, "shape": {"max_offset": 60}}
_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 384}
LIST_MODEL = {f"{side}_{name}": _SIDE[name] for side in ("encoder", "decoder") for name in _SIDE}
LIST_MODEL |= {"d_model": 96, "dropout": 0.0, "activation_function": "relu"}
# cape with larger parameters tends to count up to the training length instead of following the
# source. Pre-LN, the BOS hint and the start token made no such difference in trials.
LIST_MODEL |= {"scale_embedding": True, "init_std": 0.04}
LIST_TRAINING = (
    "--max_steps 1800 --per_device_train_batch_size 128 --learning_rate 1e-3 "
    "--warmup_steps 150 --lr_scheduler_type linear --label_smoothing_factor 0.1 "
    "--train_sampling_strategy group_by_length --per_device_eval_batch_size 64"
)
LIST_VOCABULARY = 140
LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # upper ends of bins of source words for other data


def number_lists() -> dict[str, list[Pair]]:
    """Lists of numbers written out in English and German, at most 4 in training, 12 in test."""
    lists = make_number_lists(0, {"train": 20000, "valid": 200, "test": 600})
    return {s: [(spell(n, "en"), spell(n, "de")) for n in rows] for s, rows in lists.items()}


def given_data(args: argparse.Namespace) -> dict[str, list[Pair]]:
    """The pairs of ``--dataset`` or ``--train-file``; splits train and test."""
    tables = data.given_tables(args, (args.source_lang, args.target_lang))
    pairs = {}
    for split, rows in data.train_and_test(tables, args.train_split, args.test_split).items():
        every = [_pair(row, args.source_lang, args.target_lang) for row in rows]
        pairs[split] = [pair for pair in every if all(text and text.strip() for text in pair)]
        if skipped := len(every) - len(pairs[split]):
            print(f"{split} data: {skipped} of {len(every)} pairs skipped (empty source or target)",
                  flush=True)  # fmt: skip
        if not pairs[split]:
            raise CommandError(f"{split} data: no pair of texts")
    return pairs


def _pair(row: Mapping[str, Any], source: str, target: str) -> Pair:
    texts = row.get("translation") or row
    problem = f"--source-lang {source} --target-lang {target}: the data have"
    if not texts.keys() >= {source, target}:
        raise CommandError(f"{problem} the columns {', '.join(texts)}; name two of them")
    for text in (texts[source], texts[target]):
        if not isinstance(text, str | None):
            remedy = "name columns of texts (json keeps numbers in quotes)"
            raise CommandError(f"{problem} {text!r}, which is no text; {remedy}")
    return texts[source], texts[target]


def make_tokenizer(folder: Path, pairs: Sequence[Pair], size: int) -> transformers.MarianTokenizer:
    """A Marian tokenizer with a joint sentencepiece model of the training text."""
    files = {"source_spm": "source.spm", "target_spm": "target.spm", "vocab": "vocab.json"}
    texts = [text for pair in pairs for text in pair]

    def make(partial: Path) -> None:
        write_lines(partial / "text", texts)
        SentencePiece.train([partial / "text"], partial / "source.spm", size)
        (partial / "text").unlink()
        shutil.copyfile(partial / "source.spm", partial / "target.spm")
        model = SentencePieceProcessor(model_file=str(partial / "source.spm"))
        pieces = map(model.id_to_piece, range(model.get_piece_size()))
        names = ["</s>", "<unk>", *(p for p in pieces if p not in ("<unk>", "</s>")), "<pad>"]
        with open(partial / "vocab.json", "w", encoding="utf-8") as file:
            json.dump({name: index for index, name in enumerate(names)}, file)

    made_of = {"vocab_size": size, "text": data.fingerprint(texts)}
    step(folder, made_of, make, remedy=OTHER_OUTPUT)
    return transformers.MarianTokenizer(**{name: str(folder / files[name]) for name in files})


def build_model(
    path: str | None, settings: Mapping[str, Any], sizes: Mapping[str, Any], tokenizer: Any
) -> CapeMarianMTModel:
    """Makes a model from a stock or cape checkpoint, or from scratch."""
    if path:
        return load_model(CapeMarianMTModel, path, settings)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
    special |= {"forced_eos_token_id": None, "bos_token_id": None, "vocab_size": len(tokenizer)}
    more = {"position_embedding": dict(settings)}
    return CapeMarianMTModel(make_config(CapeMarianConfig, {**sizes, **special}, **more))


def encode(pairs: Sequence[Pair], tokenizer: Any, longest: int) -> list[dict[str, list[int]]]:
    """Tokens of training pairs, at most `longest` on a side."""
    cut = {"truncation": True, "max_length": longest}
    sources, targets = map(list, zip(*pairs, strict=True))
    inputs = tokenizer(sources, **cut)["input_ids"]
    labels = tokenizer(text_target=targets, **cut)["input_ids"]
    rows = zip(inputs, labels, strict=True)
    return [{"input_ids": source, "labels": target} for source, target in rows]


def count_alpha(rows: Sequence[Mapping[str, Any]], tokenizer: Any, eos: bool) -> TokenCounts:
    """Numbers of target and source tokens (CAPE section 5.3), with or without end-of-sentence
    tokens."""
    end = None if eos else tokenizer.eos_token_id
    sides = (
        [[i for i in row[side] if i != end] for row in rows] for side in ("input_ids", "labels")
    )
    return count_token_lists(*sides)


def translate(
    model: Any, tokenizer: Any, sources: Sequence[list[int]], beams: int, batch_size: int
) -> list[str]:
    """Hypotheses in the order of the data."""

    def run(rows: Sequence[int]) -> list[str]:
        padded = tokenizer.pad({"input_ids": [sources[row] for row in rows]}, return_tensors="pt")
        batch = padded.to(model.device)
        limit = 10 + 2 * batch["input_ids"].shape[1]
        out = model.generate(**batch, num_beams=beams, max_new_tokens=limit, do_sample=False)
        return tokenizer.batch_decode(out, skip_special_tokens=True)

    work = batches(list(map(len, sources)), batch_size)
    return share(work, run, "translate", len(sources))


def read_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Any, bool]:
    """Options of the recipe, options of the Trainer, and whether the data are the built-in number
    lists."""
    parser = make_parser(__doc__, "text", COMPARED, "results/mt_hf")
    data.add_data_args(parser)
    parser.add_argument("--source-lang", default="en", help="column of sources (default: en)")
    parser.add_argument("--target-lang", default="de", help="column of targets (default: de)")
    parser.add_argument(
        "--vocab-size", type=positive, default=8000, help="size of a new tokenizer (default: 8000)"
    )
    parser.add_argument(
        "--max-length",
        type=positive,
        default=256,
        help="largest number of tokens of a training sentence (default: 256)",
    )
    add_shared(parser, "beam", default=1)
    first = parser.parse_known_args(argv)[0]
    lists = not data.has_data(first)
    sacrebleu(first.target_lang)  # an error now, and not after the training
    return *parse(parser, LIST_TRAINING.split() if lists else (), argv), lists


def main(argv: Sequence[str] | None = None) -> None:
    args, training, lists = read_options(argv)
    if args.model:
        read_config(args.model, CapeMarianConfig)
        tokenizer = read_beside(transformers.AutoTokenizer, args.model)
    splits = number_lists() if lists else given_data(args)
    if not args.model:
        size = LIST_VOCABULARY if lists else args.vocab_size
        with training.main_process_first():  # the main process writes files for the other processes
            tokenizer = make_tokenizer(args.output / "tokenizer", splits["train"], size)
    train_set = encode(splits["train"], tokenizer, args.max_length)
    sizes = {**(LIST_MODEL if lists else {}), **(args.model_config or {})}
    alphas = {word: count_alpha(train_set, tokenizer, eos) for word, eos in COUNTED.items()}
    if training.process_index == 0:
        for word, alpha in alphas.items():
            print(f"alpha = {alpha} = {alpha.alpha:.4f} target tokens per source token ({word})")

    def make_trainer(settings: Any, run_args: Any) -> transformers.Seq2SeqTrainer:
        model = build_model(args.model, settings, sizes, tokenizer)
        collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
        trainer = transformers.Seq2SeqTrainer
        return trainer(model, run_args, collator, train_set, processing_class=tokenizer)

    defaults = LIST_SETTINGS if lists else {}
    defaults = {**defaults, "cape": {"source_scale": "auto", **defaults.get("cape", {})}}
    compared = settings_to_compare(args, "text", COMPARED, defaults)
    for settings in compared.values():
        if (word := settings.get("source_scale")) in alphas:
            settings["source_scale"] = str(alphas[word])
    metric, group = ("exact_match", "numbers") if lists else ("bleu", "source words")
    sources, references = map(list, zip(*splits["test"], strict=True))
    source_ids = tokenizer(sources)["input_ids"]
    groups, labels = groups_by_length(sources, LENGTHS)
    if lists:
        groups = [str(source.count(",") + 1) for source in sources]
        labels = sorted(set(groups), key=int)
    rows, made_of = [], data.fingerprint([text for pair in splits["train"] for text in pair])
    for columns, trainer in train_all(compared, args, training, make_trainer, made_of):
        batch_size = training.per_device_eval_batch_size
        hypotheses = translate(trainer.model, tokenizer, source_ids, args.beam, batch_size)
        scored = score_groups(hypotheses, references, groups, labels, language=args.target_lang)
        for label, score in scored.items():
            rows.append({**columns, group: label, metric: score[metric]})
    trained = [str(n + 1) for n in range(MAX_TRAIN_LENGTH)] if lists else []
    report(args, "Translation", rows, group, {metric: METRICS[metric]}, trained=trained)


if __name__ == "__main__":
    run_main(main)
