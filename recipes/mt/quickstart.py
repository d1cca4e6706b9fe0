"""Trains models with different position embeddings on short sentences, and tests them on longer
sentences.

    python -m recipes.mt.quickstart
    python -m recipes.mt.quickstart --compare relpos shape shape-sync
    python -m recipes.mt.quickstart --seeds 1 2 3 --ablations
    python -m recipes.mt.quickstart --switch-from sinpos --updates 2000
    python -m recipes.mt.quickstart --data train.en.gz train.de.gz
    DATA=train.en.gz,train.de.gz python -m recipes.mt.quickstart

The built-in data are lists of numbers in English and German (see number_lists.py): training lists
have up to 4 numbers, test lists up to 12. Your own files are split into train, valid and test
(unless --valid and --test name files); pairs longer than the median source sentence are not used in
training, and scores are shown by source length.

All settings except the position embedding are the same for all models. Finished work in --work is
reused.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple

if __name__ == "__main__":  # also as a script, whose import path has only the folder of this file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cape_plugins.settings.switching import Step, add_switch_args
from cape_plugins.utils.machine import available_cores
from recipes.lab import command_line, runs
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError, folder_name, read_written, run_main, step, write_lines
from recipes.lab.subwords import SentencePiece
from recipes.lab.tables import Row, flags_and_times, how_made, shown_command
from recipes.mt import corpus, number_lists
from recipes.mt.scoring import METRICS, metrics_are, score_groups

PACKAGES = ("torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "num2words")
# Shifts and offsets have equal ranges: CAPE's U(-30, 30) is as wide as SHAPE's U{0..60}. Training
# lists have up to 17 tokens, test lists up to 48. relpos clips distances beyond its context.
_CAPE = {"type": "cape", "max_global_shift": 30}
_SHAPE = {"type": "shape", "max_offset": 60}
COMPARED = ("sinpos", "cape")  # two types, trained side by side on the two cores of a small machine
VARIANTS: dict[str, command_line.Settings] = {
    "relpos": {"relative_context": 16},
    "shape": _SHAPE,
    "shape-sync": {**_SHAPE, "synchronize": True},
    "cape": _CAPE,
}
ABLATIONS = {
    "cape-no-alpha": {**_CAPE, "source_scale": 1},
    "cape-unsync": {**_CAPE, "synchronize": False},
    "cape-no-bos": {**_CAPE, "source_bos": False},
    "cape-no-local": {**_CAPE, "max_local_shift": 0},
    "cape-shift5": {**_CAPE, "max_global_shift": 5},
}

MODEL = """--arch cape_transformer --share-all-embeddings --dropout 0
    --encoder-normalize-before --decoder-normalize-before
    --encoder-layers 2 --encoder-attention-heads 4 --encoder-embed-dim 128
    --decoder-layers 2 --decoder-attention-heads 4 --decoder-embed-dim 128
    --encoder-ffn-embed-dim 512 --decoder-ffn-embed-dim 512"""
LEARNING_RATE = 0.002
OPTIMISATION = f"""--criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --max-tokens 1000
    --lr {LEARNING_RATE} --lr-scheduler polynomial_decay --warmup-updates 200
    --skip-invalid-size-inputs-valid-test --no-epoch-checkpoints --num-workers 0"""
DECODING = """--beam 1 --max-tokens 8000 --max-len-a 1.5 --max-len-b 20 --num-workers 0
    --max-source-positions 100000 --max-target-positions 100000"""
FURTHER = 500  # added to the seed of a training that continues another one
FIRST_LOOK = 400  # updates after which a long training is tested for the first picture
MIN_PAIRS = 8  # fairseq drops a last batch that is no multiple of 8, and refuses an empty set


class Data(NamedTuple):
    folder: Path  # of a corpus, segmented and binarised
    settings: Mapping[str, object]
    languages: corpus.Pair
    lengths: str  # what the lengths count
    labels: Sequence[str]  # of the groups of test sentences, from short to long
    trained: Sequence[str]  # labels that occur in training


def make_data(folder: Path, settings: Mapping, languages: corpus.Pair, write: Callable) -> Path:
    """Makes a step from ``{train,valid,test}.{language}`` and ``test.group``, written by
    `write`."""

    def make(folder: Path) -> None:
        write(folder)
        files = [folder / f"train.{language}" for language in languages]
        model, size = folder / "sentencepiece.model", settings["vocab_size"]
        subwords = SentencePiece.train(files, model, size)
        prefixes = {split: folder / f"{split}.pieces" for split in ("train", "valid", "test")}
        for split, prefix in prefixes.items():
            for language in languages:
                lines = corpus.read_lines(folder / f"{split}.{language}", "--data")
                write_lines(Path(f"{prefix}.{language}"), map(subwords.encode, lines))
        runs.binarise(prefixes, languages, 1, folder / "binary")

    return step(folder, settings, make)


def prepare_number_lists(args: argparse.Namespace) -> Data:
    sizes = number_lists.SPLIT_SIZES | {"train": args.train_size, "test": args.test_size}
    settings = {"vocab_size": args.vocab_size or 140, "lists": sizes}
    write = partial(number_lists.write_number_lists, sizes=sizes)
    made_of = (settings, number_lists.LANGUAGES)
    folder = make_data(args.work / "number_lists" / "data", *made_of, write)
    labels = [str(length + 1) for length in range(number_lists.MAX_TEST_LENGTH)]
    trained = labels[: number_lists.MAX_TRAIN_LENGTH]
    return Data(folder, *made_of, "numbers in the list", labels, trained)


def word_count(text: str) -> int:
    return len(text.split())


def length_bins(limit: int) -> list[tuple[str, int, float]]:
    """Bins of source words around the training `limit`: two bins up to the limit, three above."""
    edges = {limit // 2, limit, limit * 3 // 2, limit * 2} - {0}
    (_, _, first), *longer = command_line.bins(sorted(edges), "--max-train-length")
    return [(f"1-{first}", 1, first), *longer]


def read_splits(args: argparse.Namespace) -> dict[str, list[corpus.Pair]]:
    """The user's pairs, except pairs with an empty side; missing splits are split off training."""
    splits = {}
    for split, option in (("train", "data"), ("valid", "valid"), ("test", "test")):
        if paths := getattr(args, option):
            pairs = list(corpus.read_pairs(*paths, f"--{option}"))
            splits[split] = [pair for pair in pairs if all(pair)]
            if empty := len(pairs) - len(splits[split]):
                some = f"{empty} of {len(pairs)} pairs"
                print(f"--{option}: {some} are empty on a side and left out", flush=True)
    total, flag = len(splits["train"]), f"--data {args.data[0]} {args.data[1]}: only"
    if total < 200:
        raise CommandError(f"{flag} {total} non-empty sentence pairs; at least 200 are needed")
    sizes = {"valid": max(40, min(500, total // 20)), "test": min(1000, total // 10)}
    missing = {split: size for split, size in sizes.items() if split not in splits}
    splits |= corpus.split_pairs(splits["train"], missing)
    if len(splits["train"]) < MIN_PAIRS:
        few = f"{len(splits['train'])} training pairs are not also in validation or test data"
        raise CommandError(f"{flag} {few}; give more, or more different sentences")
    return splits


def prepare_files(args: argparse.Namespace) -> Data:
    """Prepares the user's text files; training gets the shorter sentences."""
    splits = read_splits(args)
    counts = (word_count(source) for source, _ in splits["train"])
    limit = args.max_train_length or int(median(counts))
    for split in ("train", "valid"):
        splits[split] = [pair for pair in splits[split] if max(map(word_count, pair)) <= limit]
        if len(splits[split]) < MIN_PAIRS:
            few = f"only {len(splits[split])} {split} pairs are that short, {MIN_PAIRS} are needed"
            raise CommandError(f"--max-train-length {limit}: {few}; choose a larger length")
    bins = length_bins(limit)
    counts = [word_count(source) for source, _ in splits["test"]]
    if max(counts) <= limit:
        why = (
            f"no test sentence is longer, the longest has {max(counts)} words; choose a smaller "
            "number"
        )
        raise CommandError(f"--max-train-length {limit}: {why}, or give a longer --test")
    groups = [command_line.bin_of(count, bins) for count in counts]
    files = [path for paths in (args.data, args.valid, args.test) for path in paths or ()]
    settings = {
        "vocab_size": args.vocab_size or 4000,
        "max_train_length": limit,
        "files": [corpus.fingerprint(path, "--data") for path in files],
    }
    languages = corpus.languages_of(*args.data)

    def write(folder: Path) -> None:
        for split, pairs in splits.items():
            corpus.write_columns([folder / f"{split}.{code}" for code in languages], pairs)
        write_lines(folder / "test.group", groups)

    work = args.work / args.data[0].name.removesuffix(".gz")
    folder = make_data(work / "data", settings, languages, write)
    ends = {label: high for label, _, high in bins if label in groups}
    trained = [label for label, high in ends.items() if high <= limit]
    return Data(folder, settings, languages, "source words", list(ends), trained)


def _schedule(updates: int, seed: int) -> str:
    return f"--max-update {updates} --total-num-update {updates} --seed {seed * runs.SEED_STEP}"


class Comparison:
    """Collects scores; tables and figure are written again after each test of a model."""

    def __init__(self, args: argparse.Namespace, data: Data, facts: Mapping[str, str]):
        self.args, self.data, self.facts = args, data, facts
        self.flags = {step.name: command_line.position_flags(step.settings) for step in args.plan}
        self.device_flags = " ".join(runs.device_flags(args.device))
        self.rows: dict[tuple[str, int], list[Row]] = {}
        self.lock = Lock()

    def run(self, step: Step, seed: int) -> None:
        """Trains and tests one model; a long training is also tested after its first updates."""
        variant, n, folder = step.name, step.updates, self.data.folder
        run = self.run_folder(step, seed)
        schedule = self.continue_flags(step, seed) if step.continues else _schedule(n, seed)
        training = f"{OPTIMISATION} {self.device_flags} {schedule}"
        flags = shlex.split(f"{MODEL} {training} {self.flags[variant]}")
        made_of = (folder / "binary", run, flags, {"corpus": self.data.settings})
        how = {"threads": self.args.threads, "title": f"{variant} seed {seed}"}
        # a training that was interrupted later has a checkpoint of more updates
        begun = runs.is_finished(run) or (run / runs.FIRST_SECONDS).exists()
        look = self.args.first_look
        if look and n > 2 * look and not begun and not step.continues:
            seconds = runs.train(*made_of, **how, until=look)
            with TemporaryDirectory(dir=run) as temporary:
                name = f"{variant} ({look} of {n} updates)"
                self.test(variant, seed, name, run, Path(temporary), seconds)
        self.test(variant, seed, variant, run, run, runs.train(*made_of, **how))

    def run_folder(self, step: Step, seed: int) -> Path:
        return self.data.folder.parent / "runs" / f"{folder_name(step.name)}-seed{seed}"

    def continue_flags(self, step: Step, seed: int) -> str:
        """Flags of a training that begins with the weights of the first one."""
        start = self.run_folder(self.args.plan[0], seed) / "checkpoint_last.pt"
        if step.updates:
            flags = _schedule(step.updates, seed + FURTHER)
            flags += f" --warmup-updates {step.updates // 4} --lr {LEARNING_RATE * step.rate:g}"
        else:  # fairseq takes 0 updates for no limit; this one moves no weight
            flags = f"{_schedule(1, seed + FURTHER)} --warmup-updates 0 --lr 0"
        return f"{flags} --finetune-from-model {shlex.quote(str(start))}"

    def test(
        self, variant: str, seed: int, name: str, run: Path, folder: Path, seconds: float
    ) -> None:
        """Decodes in `folder`; the scores replace earlier scores of this variant and seed."""
        data, target = self.data.folder, self.data.languages[1]
        endings = ("group", target, f"pieces.{target}")
        groups, references, tokens = (read_written(data / f"test.{end}") for end in endings)
        paths = data / "binary", run / "checkpoint_last.pt", folder / "decoded"
        how = {"count": len(groups), "threads": self.args.threads}
        flags = shlex.split(f"{DECODING} {self.device_flags}")
        pieces = runs.generate(*paths, flags, **how)
        texts = list(map(SentencePiece(data / "sentencepiece.model").decode, pieces))
        made_of = texts, references, groups, self.data.labels, (pieces, tokens)
        scores = score_groups(*made_of, language=target)
        columns = {"variant": name, "seed": seed}
        with self.lock:
            self.rows[variant, seed] = [
                {**columns, "length": label, "train_seconds": seconds, **values}
                for label, values in scores.items()
            ]
            self.write()
            print(f"{name}, seed {seed}: see {self.args.output / 'scores.png'}", flush=True)

    def write(self, shown: bool = False) -> None:
        """Writes the scores so far, in the order in which the variants were named."""
        order = list(self.flags).index
        finished_keys = sorted(self.rows, key=lambda key: order(key[0]))
        flags = {self.rows[key][0]["variant"]: self.flags[key[0]] for key in finished_keys}
        rows = [row for key in finished_keys for row in self.rows[key]]
        how = {"groups_are": self.data.lengths, "trained": self.data.trained, "shown": shown}
        steps = {step.name: step for step in self.args.plan}
        how["trainings"] = [
            (steps[key[0]], self.rows[key][0]["train_seconds"]) for key in finished_keys
        ]
        more = flags_and_times(rows, flags)
        title, folder = "Quickstart: scores by length", self.args.output
        write_scores(folder, title, rows, "length", METRICS, self.facts, **how, more=more)


def in_order_of_contrast(steps: Sequence[Step]) -> list[Step]:
    """Puts the first and the last step first, for the first picture. This picture shows models
    after 400 of 1200 updates, and marks them as such. The training stops for the picture and
    continues from its checkpoint, bit for bit; the new start of fairseq takes about ten seconds."""
    first, *others = steps
    return [first, *others[-1:], *others[:-1]]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.new_parser(__doc__)
    add, positive, shared = parser.add_argument, command_line.positive, command_line.add_shared
    pair = {"nargs": 2, "type": Path, "metavar": ("SOURCE", "TARGET")}
    add("--data", **pair, help="your own training text, plain or .gz (default: number lists)")
    add("--valid", **pair, help="validation text (default: split off --data)")
    add("--test", **pair, help="test text (default: split off --data)")
    for split in ("train", "test"):
        more = {"type": positive, "help": "lists to make, without --data (default: %(default)s)"}
        add(f"--{split}-size", default=number_lists.SPLIT_SIZES[split], **more)
    add(
        "--max-train-length",
        type=positive,
        metavar="WORDS",
        help="train on pairs of --data with at most WORDS source words (default: median of the "
        "source)",
    )
    add("--vocab-size", type=positive, help="subwords (default: 140; with --data 4000)")
    rows = {**VARIANTS, **ABLATIONS}
    command_line.add_compared(parser, "text", COMPARED, rows=list(rows))
    add_switch_args(parser)
    add("--ablations", action="store_true", help=f"also train {', '.join(ABLATIONS)}")
    shared(parser, "seeds", default=[1])
    shared(parser, "updates", default=1200)
    add(
        "--first-look",
        type=command_line.int_at_least,
        default=FIRST_LOOK,
        metavar="N",
        help="updates after which a training of more than twice as many is also tested; 0 for "
        "none (default: %(default)s)",
    )
    shared(parser, "device", default="cpu")
    shared(parser, "jobs", default=available_cores())
    shared(parser, "threads", default=1)
    shared(parser, "work", default=Path("build/quickstart"))
    shared(parser, "output", default=Path("results/quickstart"))
    args = parser.parse_args(argv)
    if args.data is None and (text := os.environ.get("DATA")):
        args.data = [Path(part) for part in text.split(",") if part]
        if text.count(",") != 1 or len(args.data) != 2:
            raise CommandError(f"DATA={text}: give two files, as in DATA=train.en.gz,train.de.gz")
    for option in ("valid", "test", "max_train_length"):
        if args.data is None and getattr(args, option):
            flag = option.replace("_", "-")
            parser.error(f"--{flag} needs --data; the built-in number lists have their own splits")
    if args.ablations:
        args.compare = list(dict.fromkeys([*(args.compare or COMPARED), *ABLATIONS]))
    args.plan = command_line.plan_trainings(args, "text", COMPARED, rows, args.updates)
    command_line.check_shared(args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    data = prepare_files(args) if args.data else prepare_number_lists(args)
    if args.data and "--data" not in argv:  # files named in the environment
        argv = [*argv, "--data", *map(str, args.data)]
    facts = how_made(
        shown_command("python -m recipes.mt.quickstart", argv),
        PACKAGES,
        args.device,
        trainings=f"{args.jobs} at a time, threads {args.threads}",
        corpus=" ".join(f"{key} {value};" for key, value in data.settings.items()).strip(";"),
        model=f"`{' '.join(MODEL.split())}`",
        training=f"{args.updates} updates; `{' '.join(OPTIMISATION.split())}`",
        decoding=f"`{' '.join(DECODING.split())}`",
        metrics=metrics_are(data.languages[1]),
    )
    comparison = Comparison(args, data, facts)
    from_scratch = in_order_of_contrast([step for step in args.plan if not step.continues])
    continued = [step for step in args.plan if step.continues]
    for steps in filter(None, (from_scratch, continued)):
        jobs = [partial(comparison.run, step, seed) for seed in args.seeds for step in steps]
        runs.run_trainings(jobs, args.jobs, *{step.updates for step in steps})
    comparison.write(shown=True)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command goes on from what is done")
