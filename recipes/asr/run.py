"""Trains speech models of fairseq that differ in their positions, and compares them by duration.

    python -m recipes.asr.run                                # synthetic speech; six types
    python -m recipes.asr.run --batches padded padding-free --seeds 1 2 3
    python -m recipes.asr.run --data data/digits --recipe digits --study shift
    python -m recipes.asr.run --study batches --compare cape --hops 5 8 10 12 16 20
    python -m recipes.asr.run --data data/wsj --recipe wsj --study types -- --fp16 \\
        --distributed-world-size 16

Studies, with the figures of the CAPE paper: types (5, 6); augmentation, CAPE and SpecAugment (7);
batches, padded and without padding (15, 16, with --hops 17); shift (18); local (19); relpos, with
its contexts and in the first layer only, and scale (20, 21); dropout (22); decoder, CTC against a
decoder that has relative positions itself (23). All models of a study share every other setting;
cape has the settings of the figure. Finished work in --work is reused.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cape_plugins.utils.files import writing
from cape_plugins.utils.machine import available_cores
from fairseq_user_dir.asr.manifest import read_manifest
from fairseq_user_dir.host.reading import read_checkpoint
from recipes.asr import prepare
from recipes.asr.evaluate import PACKAGES, SECONDS, decode, measure
from recipes.asr.report import METRICS, rates, write_report
from recipes.lab import command_line
from recipes.lab.command_line import position_flags
from recipes.lab.runs import SEED_STEP, calm_logging, check_flags, run_trainings, train
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError, digest, folder_name, run_main
from recipes.lab.tables import Row, how_made, shown_command


class Recipe(NamedTuple):
    ctc: str  # flags of fairseq-train for models with CTC
    decoder: str  # flags of fairseq-train for models with a decoder
    decoding: str  # flags of fairseq-generate for models with a decoder
    updates: int
    bins: tuple[float, ...]  # upper ends of the bins of durations in seconds
    presets: tuple[str, ...] = ()  # settings of CAPE for this corpus


# Small models for strings of digits, trained in a minute on one CPU core.
SMALL = """--optimizer adam --adam-betas (0.9,0.98)
    --weight-decay 0.05 --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 100
    --max-tokens 4000 --frequency-mask-width 20 --time-masks 2
    --cpu --num-workers 0 --disable-validation --no-epoch-checkpoints"""
# Small models for few recordings of real speakers at 8 kHz: smaller batches, and no SpecAugment,
# with which such a short training learns next to nothing.
DIGITS = SMALL.replace("--max-tokens 4000", "--max-tokens 1500").replace("0.003", "0.005")
DIGITS = f"{DIGITS} --no-spec-augment"
CTC = "--arch cape_ctc_transformer_tiny"
DECODER = "--arch cape_seq2seq_transformer_tiny --position-decoder-relative-context 16"
SLOWER = "--lr 0.002 --no-spec-augment"  # small decoders do not learn with the flags of CTC

# CAPE Appendix C.2, on 16 GPUs: 36 layers of 768, Adagrad, 240 seconds per GPU. The paper gives the
# time of a training, not its number of updates. Learning rate, warm-up, clipping, the start of
# SpecAugment and TED-LIUM's narrower masks come from the released runs (C.2 has the masks of WSJ
# for both corpora).
PAPER = """--optimizer adagrad --lr-scheduler fixed --clip-norm 0.1 --num-workers 4
    --batch-size-valid 1 --keep-last-epochs 1"""
PAPER_CTC = f"""--arch cape_ctc_transformer {PAPER} --lr 0.01 --max-tokens 24000 --target-norm
    --best-checkpoint-metric wer"""
WSJ = f"""{PAPER_CTC} --attention-dropout 0.4 --activation-dropout 0.4 --encoder-layerdrop 0.4
    --warmup-updates 35000 --spec-augment-start 5000"""
TEDLIUM = f"""{PAPER_CTC} --attention-dropout 0.1 --activation-dropout 0.1 --encoder-layerdrop 0.1
    --warmup-updates 45000 --spec-augment-start 20000 --frequency-mask-width 20
    --time-mask-width 30"""
# Appendix C.5; the released code gives 50 seconds per GPU, learning rate and masks
PAPER_DECODER = f"""--arch cape_seq2seq_transformer {PAPER} --lr 0.02 --max-tokens 5000
    --warmup-updates 33000 --spec-augment-start 20000 --position-decoder-relative-context 320"""

# Greedy as in the paper. A decoder that attends to the wrong frames may never write the end of a
# text, so the output is limited to 6 words, or 30 letters, per second (100 frames).
WORDS, LETTERS = (f"--beam 1 --max-len-a {units} --max-len-b 3" for units in (0.06, 0.3))
OF_WSJ, OF_TEDLIUM = ("cape_wsj", "relpos_wsj"), ("cape_tedlium", "relpos_wsj")
RECIPES = {
    "small": Recipe(f"{CTC} {SMALL}", f"{DECODER} {SMALL} {SLOWER}", WORDS, 600, (1, 2, 4, 8, 16)),
    "digits": Recipe(
        f"{CTC} {DIGITS}", f"{DECODER} {DIGITS} {SLOWER}", WORDS, 1000, (1, 2, 4, 8, 16)
    ),
    "wsj": Recipe(WSJ, PAPER_DECODER, LETTERS, 200000, (10, 15, 20), OF_WSJ),
    "tedlium3": Recipe(TEDLIUM, PAPER_DECODER, LETTERS, 500000, (10, 15, 20), OF_TEDLIUM),
    # not in the paper; settings of TED-LIUM
    "librispeech": Recipe(TEDLIUM, PAPER_DECODER, LETTERS, 500000, (10, 15, 20), OF_TEDLIUM),
}


class Head(NamedTuple):
    """The part of a model that makes words from the states of the encoder."""

    recipe: str  # field of a recipe with the flags
    training: str
    decodes: bool = False  # whether the flags of the recipe for decoding apply


CTC_HEAD = Head("ctc", "--criterion cape_ctc")
# The decoder of the paper has relative positions for 320 tokens back, and no position beyond.
DECODER_HEAD = Head(
    "decoder",
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.05 "
    "--position-decoder-embedding relpos --position-decoder-relative-beyond zero",
    decodes=True,
)


class Variant(NamedTuple):
    """A model of a study. Settings of the type that are missing here come from the recipe."""

    settings: command_line.Settings
    flags: str = ""
    head: Head = CTC_HEAD


class Study(NamedTuple):
    """What is trained by default, and rows that only ``--compare`` takes."""

    models: dict[str, Variant]
    batches: tuple[str, ...] = ("padded",)
    units: tuple[str, ...] = ()  # options of recipes.asr.prepare for the built-in data
    more: Mapping[str, Variant] = {}


PAPER_TYPES = ("nopos", "sinpos", "abspos", "relpos", "shape", "cape")
NOPOS, SINPOS, CAPE = ({"type": name} for name in ("nopos", "sinpos", "cape"))
UNSCALED = {**CAPE, "max_global_scale": 1}  # lambda 1 of the figures
RELPOS = command_line.of_papers("relpos_wsj")["relpos"]
FIRST = command_line.of_papers("relpos_first_wsj")["relpos"]
NO_MASKS = "--no-spec-augment"
LESS = "--attention-dropout 0.1 --activation-dropout 0.1 --encoder-layerdrop 0.1"
WITH_DECODER = {"nopos": NOPOS, "sinpos": SINPOS, "cape": CAPE, "relpos": RELPOS}
# directed, because no causal mask tells an encoder before from after
LATER = {"alibi": {"type": "alibi", "directed": True}, **{n: {"type": n} for n in ("rope", "fire")}}
STUDIES = {
    "types": Study({name: Variant({"type": name}) for name in PAPER_TYPES}),
    "relpos": Study(  # contexts of 27 and 6 seconds at 30 ms
        {
            "relpos": Variant(RELPOS),
            "relpos-6s": Variant({**RELPOS, "relative_context": 199}),
            "relpos-first": Variant(FIRST),
            "cape": Variant(CAPE),
        }
    ),
    "augmentation": Study(
        {
            "baseline": Variant(SINPOS, NO_MASKS),
            "+CAPE": Variant(UNSCALED, NO_MASKS),
            "+SpecAug": Variant(SINPOS),
            "+CAPE +SpecAug": Variant(UNSCALED),
        }
    ),
    "batches": Study(
        {"sinpos": Variant(SINPOS), "cape": Variant(UNSCALED)}, ("padded", "padding-free")
    ),
    "shift": Study(  # global shifts that cover 15, 30, 60 seconds
        {
            f"covers-{2 * half:g}s": Variant({**UNSCALED, "max_global_shift": half})
            for half in (7.5, 15.0, 30.0)
        }
    ),
    "local": Study(
        {
            "global-and-local": Variant(UNSCALED),
            "global-only": Variant({**UNSCALED, "max_local_shift": 0}),
        }
    ),
    "scale": Study(
        {
            f"scale-{scale:g}": Variant({**CAPE, "max_global_scale": scale})
            for scale in (1, 1.1, 1.4, 2, 3)
        }
    ),
    "dropout": Study(
        {
            "nopos": Variant(NOPOS),
            "nopos-dropout-0.1": Variant(NOPOS, LESS),
            "cape": Variant(CAPE),
        }
    ),
    "decoder": Study(
        {f"ctc-{name}": Variant(row) for name, row in WITH_DECODER.items()}
        | {
            f"decoder-{name}": Variant(row, head=DECODER_HEAD) for name, row in WITH_DECODER.items()
        },
        units=("--word-units",),
        more={f"decoder-{name}": Variant(row, head=DECODER_HEAD) for name, row in LATER.items()},
    ),
}
# Suffix of a model's name, and more flags
BATCHES = {"padded": ("", ""), "padding-free": (" (padding-free)", " --padding-free")}


class Model(NamedTuple):
    name: str  # name in tables
    flags: str  # flags that differ between the models of a study
    seed: int
    head: Head


def models(args: argparse.Namespace) -> list[Model]:
    study = STUDIES[args.study]
    variants = {**study.models, **study.more}
    of_corpus = command_line.of_papers(*RECIPES[args.recipe].presets)
    rows = of_corpus | {
        name: {**of_corpus.get(variant.settings["type"], {}), **variant.settings}
        for name, variant in variants.items()
    }
    compared = command_line.settings_to_compare(args, "audio", list(study.models), rows)
    chosen = []
    for name, settings in compared.items():
        variant = variants.get(name.partition(":")[0], Variant({}))
        flags = f"{position_flags(settings)} {variant.flags}".strip()
        chosen.append((name, flags, variant.head))
    return [
        Model(f"{name}{suffix}", flags + more, seed, head)
        for seed in args.seeds
        for name, flags, head in chosen
        for suffix, more in map(BATCHES.get, args.batches or study.batches)
    ]


def training_flags(args: argparse.Namespace, model: Model) -> list[str]:
    """Flags of fairseq-train for a model, without the flags for folders and logs."""
    recipe = shlex.split(getattr(RECIPES[args.recipe], model.head.recipe))
    flags = ["--task", "cape_asr", *shlex.split(model.head.training), *recipe]
    flags += ["--max-update", str(args.updates), "--seed", str(model.seed * SEED_STEP)]
    if "polynomial_decay" in flags:
        flags += ["--total-num-update", str(args.updates)]
    return [*flags, *shlex.split(model.flags), *args.fairseq]


def state_after(updates: int, folder: Path, train_part: Callable[..., float]) -> Path:
    """Returns a copy of the checkpoint after `updates` updates; `train_part` trains up to this
    update."""
    copied, last = folder / f"checkpoint_after_{updates}.pt", folder / "checkpoint_last.pt"
    if not copied.is_file():
        train_part(until=updates)
        reached = read_checkpoint(str(last))["optimizer_history"][-1]["num_updates"]
        if reached != updates:
            why = f"{folder} has already reached update {reached}; give another --work folder"
            raise CommandError(f"--curve {updates}: {why}")
        with writing(copied, "wb") as file:
            file.write(last.read_bytes())
    return copied


def run_model(
    args: argparse.Namespace, model: Model, longest: float
) -> tuple[list[Row], list[Row], list[Row]]:
    """Trains one model, and scores the model by duration, by hop, and by update. Scores by update
    use recordings that are no longer than `longest`, the longest training recording."""
    folder = args.work / "runs" / f"{folder_name(model.name)}-seed{model.seed}"
    flags = training_flags(args, model)
    corpus = {"corpus": digest(args.data / "train.tsv")}
    title = f"{model.name} seed {model.seed}"
    train_part = partial(train, args.data, folder, flags, corpus, threads=args.threads, title=title)
    checkpoints = {updates: state_after(updates, folder, train_part) for updates in args.curve}
    seconds = train_part()
    best, last = (folder / f"checkpoint_{name}.pt" for name in ("best", "last"))
    shared = [word for word in ("--cpu", "--fp16") if word in flags]
    if model.head.decodes:
        shared += shlex.split(RECIPES[args.recipe].decoding)
    columns, decoding = {"model": model.name, "seed": model.seed}, {"flags": shared}
    decoding["threads"] = args.threads
    checkpoint = best if best.is_file() else last
    decode_args = (args.data, args.test, checkpoint, folder / args.test)
    rows, by_hop = measure(
        columns | {"train_seconds": seconds}, decode_args, args.bins, args.hops, **decoding
    )
    curve = []
    for updates, path in {**checkpoints, args.updates: last}.items() if checkpoints else ():
        where = folder / (args.test if path == checkpoint else f"{args.test}-{updates}")
        texts, _ = decode(args.data, args.test, path, where, **decoding)
        if texts := [text for text in texts if text.seconds <= longest]:
            curve.append({**columns, "updates": updates, **rates(texts)})
    return rows, by_hop, curve


def make_parser() -> argparse.ArgumentParser:
    epilog = "Flags after -- go to fairseq-train."
    parser = command_line.new_parser(__doc__, epilog=epilog)
    parser.add_argument(
        "--data", type=Path, help="folder of recipes.asr.prepare (default: synthetic speech)"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="small",
        help="settings of the models (default: small; digits; wsj, tedlium3, librispeech need "
        "GPUs)",
    )
    parser.add_argument(
        "--study", choices=STUDIES, default="types", help="see above (default: types)"
    )
    rows = {name: None for study in STUDIES.values() for name in {**study.models, **study.more}}
    command_line.add_compared(parser, "audio", "the models of the study", rows=list(rows))
    parser.add_argument(
        "--batches",
        nargs="+",
        choices=BATCHES,
        help="padded and padding-free (default: padded; both in the study batches)",
    )
    command_line.add_shared(parser, "seeds", default=[1])
    command_line.add_shared(parser, "updates", shown="as in the recipe")
    parser.add_argument(
        "--curve",
        nargs="+",
        type=command_line.positive,
        metavar="N",
        default=(),
        help="also score recordings no longer than the training recordings after N updates",
    )
    parser.add_argument(
        "--test", default="test", metavar="NAME", help="manifest of the test set (default: test)"
    )
    parser.add_argument(
        "--bins",
        nargs="+",
        type=SECONDS,
        metavar="SECONDS",
        help="upper ends of the bins of durations (default: as in the recipe)",
    )
    command_line.add_shared(parser, "hops")
    command_line.add_shared(parser, "jobs", default=available_cores())
    command_line.add_shared(parser, "threads", default=1)
    command_line.add_shared(parser, "work", shown="build/asr/STUDY")
    command_line.add_shared(parser, "output", shown="results/asr/STUDY")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    args = command_line.parse_with_fairseq(make_parser(), argv)
    recipe = RECIPES[args.recipe]
    args.bins, args.updates = args.bins or recipe.bins, args.updates or recipe.updates
    command_line.check_increasing(args.bins, "--bins")
    if args.curve:
        command_line.check_increasing(args.curve, "--curve")
        if args.curve[-1] >= args.updates:
            why = f"allowed: numbers below {args.updates}, the last update, which is always scored"
            raise CommandError(f"--curve {args.curve[-1]}: {why}")
    args.models = models(args)
    args.work = args.work or Path("build/asr") / args.study
    args.output = args.output or Path("results/asr") / args.study
    command_line.check_shared(args)
    for model in args.models:
        if model.seed == args.seeds[0]:
            check_flags(training_flags(args, model))
    if args.data is None:
        units = STUDIES[args.study].units
        args.data = Path("build/asr", "".join(("synthetic", *units)).replace("--", "-"))
        prepare.main(["synthetic", "--output", str(args.data), *units])
    for name in ("train", args.test):
        if not (args.data / f"{name}.tsv").is_file():
            remedy = "prepare a corpus by python -m recipes.asr.prepare, and name other test sets"
            raise CommandError(f"--data {args.data}: there is no {name}.tsv; {remedy} by --test")
    return args


def trained_by(args: argparse.Namespace) -> str:
    """The flags that all models share, for each kind of head."""
    recipe, heads = RECIPES[args.recipe], dict.fromkeys(model.head for model in args.models)
    flag_lists = (f"{head.training} {getattr(recipe, head.recipe)}".split() for head in heads)
    return "; ".join(f"`{' '.join(flags)}`" for flags in flag_lists)


def main(argv: Sequence[str] | None = None) -> None:
    calm_logging()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    longest = max(line.seconds for line in read_manifest(str(args.data / "train.tsv")))
    jobs = [partial(run_model, args, model, longest) for model in args.models]
    done = run_trainings(jobs, args.jobs, args.updates)
    parts = [(rows, hops) for rows, hops, _ in done]
    facts = how_made(
        shown_command("python -m recipes.asr.run", argv),
        PACKAGES,
        side_by_side=f"{args.jobs} trainings, threads {args.threads}",
        corpus=f"{args.data.name}; training recordings up to {longest:.1f} s",
        training=f"{args.updates} updates; {trained_by(args)}",
    )
    flags = {model.name: model.flags for model in args.models}
    title = f"Speech recognition, study {args.study}"
    write_report(args.output, title, parts, flags, facts, args.bins, longest)
    rows, names = [row for _, _, curve in done for row in curve], list(flags)
    if rows:
        rows.sort(key=lambda row: names.index(row["model"]))
        curve_title = f"{title}: durations of training by update"
        write_scores(args.output, curve_title, rows, "updates", METRICS, facts, name="curve")


if __name__ == "__main__":
    run_main(main)
