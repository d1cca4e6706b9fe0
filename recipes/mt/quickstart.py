"""Train position embeddings on short sentences, test them on long ones: from data to plot.

    python -m recipes.mt.quickstart
    python -m recipes.mt.quickstart --seeds 1 2 3 --ablations
    python -m recipes.mt.quickstart --data train.en.gz train.de.gz
    DATA=train.en.gz,train.de.gz python -m recipes.mt.quickstart

The built-in data are lists of numbers in English and German (see number_lists.py): training lists
have up to 4 numbers, test lists up to 12. Your own files are split into train, valid and test
(unless --valid and --test name files); pairs longer than the median source sentence are kept out
of training, and scores are shown by source length.

All models share every setting but the position embedding. Finished work in --work is reused.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Lock

from recipes.lab.options import (
    add_shared,
    available_cores,
    check_shared,
    new_parser,
    positive,
)
from recipes.lab.runs import generate, is_finished, run_all, train
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError, run_main
from recipes.lab.subwords import SentencePiece
from recipes.lab.tables import Row, grouped, how_made, markdown, shown_command
from recipes.mt import number_lists
from recipes.mt.corpus import read_lines
from recipes.mt.length_corpus import Corpus, prepare_files, prepare_number_lists
from recipes.mt.scoring import METRICS, METRICS_ARE, Score, score_groups

PACKAGES = ("torch", "fairseq-fixed", "sentencepiece", "sacrebleu", "num2words")
# Shifts and offsets are alike: CAPE's U(-30, 30) is as wide as SHAPE's U{0..60}. Training lists
# have up to 17 tokens, test lists up to 48. relpos clips distances beyond its context.
_CAPE = "--position-embedding cape --position-max-global-shift 30"
VARIANTS = {
    "sinpos": "--position-embedding sinpos",
    "relpos": "--position-embedding relpos --position-relative-context 16",
    "shape": "--position-embedding shape --position-max-offset 60",
    "shape-sync": "--position-embedding shape --position-max-offset 60 --position-synchronize true",
    "cape": _CAPE,
}
OTHERS = {
    "nopos": "--position-embedding nopos",
    "abspos": "--position-embedding abspos",
}
ABLATIONS = {
    "cape-no-alpha": f"{_CAPE} --position-source-scale 1",
    "cape-unsync": f"{_CAPE} --position-synchronize false",
    "cape-no-bos": f"{_CAPE} --position-source-bos false",
    "cape-no-local": f"{_CAPE} --position-max-local-shift 0",
    "cape-shift5": "--position-embedding cape --position-max-global-shift 5",
}
ALL_VARIANTS = VARIANTS | OTHERS | ABLATIONS

MODEL = """--arch cape_transformer --share-all-embeddings --dropout 0
    --encoder-normalize-before --decoder-normalize-before
    --encoder-layers 2 --encoder-attention-heads 4 --encoder-embed-dim 128
    --decoder-layers 2 --decoder-attention-heads 4 --decoder-embed-dim 128
    --encoder-ffn-embed-dim 512 --decoder-ffn-embed-dim 512"""
OPTIMISATION = """--criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --max-tokens 1000
    --lr 0.002 --lr-scheduler polynomial_decay --warmup-updates 200
    --skip-invalid-size-inputs-valid-test --no-epoch-checkpoints --cpu --num-workers 0"""
DECODING = """--beam 1 --max-tokens 8000 --max-len-a 1.5 --max-len-b 20 --cpu --num-workers 0
    --max-source-positions 100000 --max-target-positions 100000"""
UPDATES = 2000
FIRST_LOOK = 400  # updates after which a model is tested for the first picture
# fairseq seeds update n with seed + n: neighbouring seeds would share their random numbers.
SEED_STEP = 100003


# ---- models ------------------------------------------------------------------------------------


@dataclass
class Progress:
    """The scores so far; tables and figure are written anew with each model that is tested."""

    args: argparse.Namespace
    corpus: Corpus
    facts: Mapping[str, str]
    rows: dict[tuple[str, int], list[Row]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def show(self, variant: str, name: str, seed: int, seconds: float, pieces: list[str]) -> None:
        """Takes the place of what was known of this variant and seed, and says where to look."""
        columns = {"variant": name, "seed": seed}
        scores = score_by_length(self.corpus, pieces)
        with self.lock:
            self.rows[variant, seed] = [
                {**columns, "length": label, "train_seconds": seconds, **vars(values)}
                for label, values in scores.items()
            ]
            self.write()
            print(f"{name}, seed {seed}: see {self.args.output / 'scores.png'}", flush=True)

    def write(self, shown: bool = False) -> None:
        """Writes what is known, in the order in which the variants were named."""
        order = self.args.compare.index
        known = sorted(self.rows, key=lambda key: order(key[0]))
        flags = {self.rows[key][0]["variant"]: ALL_VARIANTS[key[0]] for key in known}
        rows = [row for key in known for row in self.rows[key]]
        variants = [
            [name, f"`{flags[name]}`", f"{mean(row['train_seconds'] for row in trained):.0f}"]
            for name, trained in grouped(rows, "variant").items()
        ]
        lengths = self.corpus.lengths
        write_scores(
            self.args.output,
            "Quickstart: scores by length",
            rows,
            "length",
            METRICS,
            self.facts,
            groups_are=lengths.name,
            trained=lengths.labels[: lengths.trained],
            more={"Variants": markdown(["variant", "flags", "training time (s, mean)"], variants)},
            shown=shown,
        )


def run_variant(progress: Progress, variant: str, seed: int) -> None:
    """Trains one model, decodes the test set, scores it by length; long trainings once early,
    too."""
    args, corpus = progress.args, progress.corpus
    run = corpus.folder.parent / "runs" / f"{variant}-seed{seed}"
    n = args.updates
    schedule = f"--max-update {n} --total-num-update {n} --seed {seed * SEED_STEP}"
    flags = shlex.split(f"{MODEL} {OPTIMISATION} {schedule} {ALL_VARIANTS[variant]}")
    data, threads = corpus.folder / "binary", args.threads

    def learn(until: int | None = None) -> float:
        settings, title = {"corpus": corpus.settings}, f"{variant} seed {seed}"
        return train(data, run, flags, settings, threads=threads, title=title, until=until)

    def test(name: str, folder: Path, seconds: float) -> None:
        checkpoint, count = run / "checkpoint_last.pt", len(corpus.references())
        words = shlex.split(DECODING)
        pieces = generate(data, checkpoint, folder, words, count=count, threads=threads)
        progress.show(variant, name, seed, seconds, pieces)

    if n > 2 * FIRST_LOOK and not is_finished(run):
        seconds = learn(until=FIRST_LOOK)
        with TemporaryDirectory(dir=run) as folder:
            name = f"{variant} ({FIRST_LOOK} of {n} updates)"
            test(name, Path(folder) / "decoded", seconds)
    test(variant, run / "decoded", learn())


def score_by_length(corpus: Corpus, pieces: Sequence[str]) -> dict[str, Score]:
    """Scores by label and for all sentences; `pieces` are the hypotheses as subwords."""
    subwords = SentencePiece(corpus.folder / "sentencepiece.model")
    reference_pieces = read_lines(corpus.folder / f"test.pieces.{corpus.languages[1]}", "--test")
    groups = list(read_lines(corpus.folder / "test.group", "--test"))
    texts = list(map(subwords.decode, pieces))
    tokens = pieces, list(reference_pieces)
    return score_groups(texts, corpus.references(), groups, corpus.lengths.labels, tokens)


def in_order_of_contrast(variants: Sequence[str]) -> list[str]:
    """First what the first picture compares: the first and the last variant."""
    return list(dict.fromkeys([variants[0], variants[-1], *variants]))


# ---- command line ------------------------------------------------------------------------------


def file_pair(text: str) -> list[Path]:
    """Parses the environment variable ``DATA=source,target``."""
    parts = text.split(",")
    if len(parts) != 2 or not all(parts):
        raise CommandError(f"DATA={text}: give two files, as in DATA=train.en.gz,train.de.gz")
    return [Path(part) for part in parts]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__, "recipes.mt.quickstart")
    add = parser.add_argument
    pair = {"nargs": 2, "type": Path, "metavar": ("SOURCE", "TARGET")}
    add("--data", **pair, help="your own training text, plain or .gz (default: number lists)")
    add("--valid", **pair, help="validation text (default: split off --data)")
    add("--test", **pair, help="test text (default: split off --data)")
    for split in ("train", "test"):
        size = number_lists.SPLIT_SIZES[split]
        text = "number lists, without --data (default: %(default)s)"
        add(f"--{split}-size", type=positive, default=size, help=text)
    text = "keep pairs of --data with more words out of training (default: median of the source)"
    add("--max-train-length", type=positive, metavar="WORDS", help=text)
    add("--vocab-size", type=positive, help="subwords (default: 140; with --data 4000)")
    text = f"what to train, of {', '.join(ALL_VARIANTS)}"
    names = {"choices": ALL_VARIANTS, "default": list(VARIANTS), "help": text}
    add_shared(parser, "compare", "--variants", **names)
    add("--ablations", action="store_true", help=f"also train {', '.join(ABLATIONS)}")
    add_shared(parser, "seeds", default=[1])
    add("--updates", type=positive, default=UPDATES, help="training steps (default: %(default)s)")
    add_shared(parser, "jobs", default=available_cores())
    add_shared(parser, "threads", default=1)
    add_shared(parser, "work", default=Path("build/quickstart"))
    add_shared(parser, "output", default=Path("results/quickstart"))
    args = parser.parse_args(argv)
    if args.data is None and os.environ.get("DATA"):
        args.data = file_pair(os.environ["DATA"])
    for option in ("valid", "test", "max_train_length"):
        if args.data is None and getattr(args, option):
            flag = option.replace("_", "-")
            parser.error(f"--{flag} needs --data; the built-in number lists have their own splits")
    if args.ablations:
        args.compare = list(dict.fromkeys([*args.compare, *ABLATIONS]))
    check_shared(args)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    corpus = prepare_files(args) if args.data else prepare_number_lists(args)
    if args.data and "--data" not in argv:  # those of the environment
        argv = [*argv, "--data", *map(str, args.data)]
    facts = how_made(
        shown_command("python -m recipes.mt.quickstart", argv),
        PACKAGES,
        trainings=f"{args.jobs} at a time, threads {args.threads}",
        corpus=" ".join(f"{key} {value};" for key, value in corpus.settings.items()).strip(";"),
        model=f"`{' '.join(MODEL.split())}`",
        training=f"{args.updates} updates; `{' '.join(OPTIMISATION.split())}`",
        decoding=f"`{' '.join(DECODING.split())}`",
        metrics=METRICS_ARE,
    )
    progress = Progress(args, corpus, facts)
    jobs = [
        partial(run_variant, progress, variant, seed)
        for seed in args.seeds
        for variant in in_order_of_contrast(args.compare)
    ]
    print(f"{len(jobs)} trainings of {args.updates} updates, {args.jobs} side by side", flush=True)
    run_all(jobs, args.jobs)
    progress.write(shown=True)


if __name__ == "__main__":
    run_main(main)
