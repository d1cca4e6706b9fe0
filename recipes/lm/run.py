"""Trains language models of fairseq that differ in their positions, and tests them on longer text.

    python -m recipes.lm.run                                 # made-up words; all types
    python -m recipes.lm.run --train-file train.en.gz --validation-file val.en.gz \\
        --train-length 128 --test-lengths 64 128 192 256 384 512 768 1024 --seeds 1 2 3
    python -m recipes.lm.run --compare cape cape:max_global_shift=256 -- --decoder-layers 6

Models read bytes in blocks of --train-length. The test measures loss by position, as
`recipes/lm/finetune_hf.py --task text` does for models that turn queries and keys. Shifts, offsets
and drawn positions reach to the end of the longest of --test-lengths. All other settings are the
same for all models. Finished work in --work is reused.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cape_plugins.settings.registry import types_of
from cape_plugins.utils.machine import available_cores
from fairseq_user_dir.serving.source_checkpoint import load_trained
from recipes.lab import command_line
from recipes.lab.data import fingerprint
from recipes.lab.runs import (
    SEED_STEP,
    calm_logging,
    check_flags,
    device_flags,
    run_trainings,
    train,
)
from recipes.lab.scores import write_scores
from recipes.lab.steps import (
    CommandError,
    folder_name,
    progress,
    run_main,
    run_module,
    step,
    write_lines,
)
from recipes.lab.tables import Row, flags_and_times, how_made, shown_command
from recipes.lm.data import TASKS, blocks, read_texts
from recipes.lm.measure import (
    LOSS,
    by_position,
    positions_reaching,
    stretches,
    trained_ranges,
)

PACKAGES = ("torch", "fairseq-fixed")
ARCHITECTURE = "decoder"
COMPARED = tuple(types_of(ARCHITECTURE, "text"))
CONTEXT = 16  # of relative positions, as in SHAPE

# Size, optimiser and learning rate of recipes/lm/finetune_hf.py; its Llama has different layers of
# the same sizes
MODEL = """--arch cape_transformer_lm --decoder-layers 4 --decoder-attention-heads 4
    --decoder-embed-dim 64 --decoder-ffn-embed-dim 128 --share-decoder-input-output-embed
    --dropout 0"""
OPTIMISATION = """--task language_modeling --sample-break-mode none --criterion cross_entropy
    --batch-size 8 --optimizer adam --adam-betas (0.9,0.95) --clip-norm 1
    --lr 0.003 --lr-scheduler cosine
    --disable-validation --no-epoch-checkpoints --save-interval-updates 200
    --keep-interval-updates 1 --num-workers 0"""
UPDATES, WARMUP = 600, 100
TEST_TOKENS = 8192  # of a batch

LINE_END = "</s>"  # fairseq's symbol for the end of a line


def symbol(byte: int) -> str:
    """The symbol for a byte in the text that fairseq reads; printable bytes do not change.

    >>> symbol(65), symbol(32), symbol(10)
    ('A', '<0x20>', '</s>')
    """
    if byte == ord("\n"):
        return LINE_END
    return chr(byte) if ord(" ") < byte <= ord("~") else f"<0x{byte:02X}>"


SYMBOLS = tuple(map(symbol, range(256)))


def symbols(text: str) -> list[str]:
    """Symbols for the bytes of a text, see :func:`symbol`."""
    return [SYMBOLS[byte] for byte in text.encode()]


class Data(NamedTuple):
    train: str
    test: Sequence[Sequence[str]]  # stretches of symbols, each as long as the longest test


def read_data(args: argparse.Namespace) -> Data:
    """The training text, and the stretches of the test text; refuses texts that are too short."""
    texts = read_texts({"train": args.train_file, "test": args.validation_file})
    blocks(symbols(texts["train"]), args.train_length, "training")
    tested = stretches(symbols(texts["test"]), args.test_lengths[-1], args.limit)
    return Data(texts["train"], tested)


def binarise(folder: Path, text: str) -> Path:
    """Binarises a stream of bytes in a step; fairseq's symbol for the end of a line stands for the
    line feed. The dictionary has all 256 bytes, also bytes that the text lacks."""

    def make(folder: Path) -> None:
        signs = (sign for sign in SYMBOLS if sign != LINE_END)  # fairseq adds LINE_END itself
        write_lines(folder / "symbols.txt", (f"{sign} 1" for sign in signs))
        lines = text.removesuffix("\n").split("\n")
        write_lines(folder / "train", (" ".join(symbols(line)) for line in lines))
        arguments = ["--only-source", "--srcdict", folder / "symbols.txt"]
        arguments += ["--trainpref", folder / "train", "--destdir", folder / "binary"]
        run_module("fairseq_cli.preprocess", *arguments, log=folder / "preprocess.log")

    return step(folder, {"text": fingerprint([text])}, make) / "binary"


def settings_of_types(train_length: int, longest: int) -> dict[str, dict[str, Any]]:
    """Settings of each type that follow from the lengths: positions in training reach the end of
    the longest test."""
    beyond = max(0, longest - train_length)
    follow = {
        "max_offset": beyond,
        "max_global_shift": float(beyond),
        "relative_context": CONTEXT,
    }
    rows = {}
    for name, row in types_of(ARCHITECTURE, "text").items():
        rows[name] = {option: value for option, value in follow.items() if option in row.options}
        if row.sampling:
            rows[name]["max_position"] = max(train_length, longest)
    return rows


class Model(NamedTuple):
    name: str  # in tables
    flags: str  # of its positions
    seed: int


def models(args: argparse.Namespace) -> list[Model]:
    rows = settings_of_types(args.train_length, args.test_lengths[-1])
    longest = max(args.train_length, args.test_lengths[-1])
    compared = command_line.settings_to_compare(args, "text", COMPARED, rows, ARCHITECTURE)
    flags = {
        name: command_line.position_flags(positions_reaching(settings, longest))
        for name, settings in compared.items()
    }
    return [Model(name, flags[name], seed) for name in flags for seed in args.seeds]


def training_flags(args: argparse.Namespace, model: Model) -> list[str]:
    """Flags of fairseq-train for a model, without the flags for folders and logs."""
    warmup = min(WARMUP, args.updates // 2)
    schedule = f"--max-update {args.updates} --warmup-updates {warmup}"
    lengths = f"--tokens-per-sample {args.train_length} --seed {model.seed * SEED_STEP}"
    flags = shlex.split(f"{MODEL} {OPTIMISATION} {schedule} {lengths} {model.flags}")
    return [*flags, *device_flags(args.device), *args.fairseq]


def run_folder(args: argparse.Namespace, model: Model) -> Path:
    return args.work / "runs" / f"{folder_name(model.name)}-seed{model.seed}"


def losses(model: Any, ids: Tensor) -> Tensor:
    """Negative log likelihood ``[B, T - 1]`` float32 in nats, of tokens ``[B, T]`` except the first
    token, which is read and not predicted."""
    logits, _ = model(ids[:, :-1])
    return F.cross_entropy(logits.float().mT, ids[:, 1:], reduction="none")


@torch.no_grad()
def score(args: argparse.Namespace, model: Model, data: Path, test: Sequence) -> dict[str, float]:
    """Loss of a trained model by range of positions, on stretches of symbols."""
    trained, _, task = load_trained(run_folder(args, model) / "checkpoint_last.pt", str(data))
    trained.to(args.device)
    index = task.source_dictionary.index
    ids = torch.tensor([list(map(index, stretch)) for stretch in test], device=args.device)
    batches = ids.split(max(1, TEST_TOKENS // ids.shape[1]))
    title = f"{model.name} seed {model.seed}: test"
    values = torch.cat([losses(trained, batch).cpu() for batch in progress(batches, title)])
    return by_position(values, args.test_lengths)


def make_parser() -> argparse.ArgumentParser:
    epilog = "Flags after -- go to fairseq-train."
    parser = command_line.new_parser(__doc__, epilog=epilog)
    task = TASKS["text"]
    files = {"nargs": "+", "type": Path, "metavar": "FILE"}
    parser.add_argument("--train-file", **files, help="files of text (default: made-up words)")
    parser.add_argument(
        "--validation-file",
        **files,
        help="files of text (default: the last tenth of the training text)",
    )
    length = {"type": command_line.positive, "metavar": "N"}
    parser.add_argument(
        "--train-length",
        **length,
        default=task.train_length,
        help=f"bytes of a training block (default: {task.train_length})",
    )
    ends = [round(times * task.train_length) for times in task.times]
    parser.add_argument(
        "--test-lengths",
        **length,
        nargs="+",
        default=ends,
        help=f"ends of ranges of positions (default: {' '.join(map(str, ends))})",
    )
    command_line.add_shared(parser, "limit", note="here stretches of text", default=200)
    command_line.add_compared(parser, "text", COMPARED, architecture=ARCHITECTURE)
    command_line.add_shared(parser, "seeds", default=[1])
    command_line.add_shared(parser, "updates", default=UPDATES)
    command_line.add_shared(parser, "device")
    command_line.add_shared(parser, "jobs", default=available_cores())
    command_line.add_shared(parser, "threads", default=1)
    command_line.add_shared(parser, "work", shown="build/lm/FILE")
    command_line.add_shared(parser, "output", default=Path("results/lm/fairseq"))
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    args = command_line.parse_with_fairseq(make_parser(), argv)
    command_line.check_increasing(args.test_lengths, "--test-lengths")
    if (least := min(args.train_length, *args.test_lengths)) < 2:
        raise CommandError(f"length {least} has no token to predict; allowed: >= 2")
    command_line.check_reach(args.test_lengths, args.train_length)
    if args.validation_file and not args.train_file:
        raise CommandError("--validation-file needs --train-file")
    name = args.train_file[0].name.removesuffix(".gz") if args.train_file else "made-up"
    args.work = args.work or Path("build/lm") / name
    args.models = models(args)
    command_line.check_shared(args)
    for model in args.models:
        if model.seed == args.seeds[0]:
            check_flags(training_flags(args, model))
    return args


def positions_are(length: int, longest: int) -> str:
    """Sentence about the settings that follow from the lengths, and about the rows of the table."""
    follow = [
        f"{name} {' '.join(f'{option} {value:g}' for option, value in row.items())}"
        for name, row in settings_of_types(length, longest).items()
        if row
    ]
    return (
        "shift and offset are the longest test minus the training block, max_position is the "
        f"longest test ({', '.join(follow)}), unless a variant says otherwise; the learned table "
        f"has {length} rows and begins again at the first row after them"
    )


def facts_of(args: argparse.Namespace, argv: Sequence[str], data: Data) -> dict[str, str]:
    length, longest = args.train_length, args.test_lengths[-1]
    return how_made(
        shown_command("python -m recipes.lm.run", argv),
        PACKAGES,
        args.device,
        trainings=f"{args.jobs} at a time, threads {args.threads}",
        text=f"{len(data.train.encode())} bytes, trained in blocks of {length}; tested on "
        f"{len(data.test)} stretches of {longest} bytes",
        positions=positions_are(length, longest),
        model=f"`{' '.join(MODEL.split())}`",
        training=f"{args.updates} updates; `{' '.join(OPTIMISATION.split())}`",
    )


def train_all(args: argparse.Namespace, binary: Path, text: str) -> list[float]:
    """Trains the models that are not finished. Returns the seconds of each."""
    made_of = {"text": fingerprint([text])}
    jobs = [
        partial(
            train,
            data=binary,
            run=run_folder(args, model),
            flags=training_flags(args, model),
            settings=made_of,
            threads=args.threads,
            title=f"{model.name} seed {model.seed}",
        )
        for model in args.models
    ]
    return run_trainings(jobs, args.jobs, args.updates)


def main(argv: Sequence[str] | None = None) -> None:
    calm_logging()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    data = read_data(args)
    binary = binarise(args.work / "data", data.train)
    seconds = train_all(args, binary, data.train)
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    for model, train_seconds in zip(args.models, seconds, strict=True):
        columns = {"variant": model.name, "seed": model.seed}
        for label, loss in score(args, model, binary, data.test).items():
            rows.append(
                {**columns, "position": label, "loss": loss, "train_seconds": train_seconds}
            )
    trained = trained_ranges(args.test_lengths, args.train_length)
    facts = facts_of(args, argv, data)
    flags = {model.name: model.flags for model in args.models}
    title, more = "Language model of fairseq", flags_and_times(rows, flags)
    write_scores(args.output, title, rows, "position", LOSS, facts, trained=trained, more=more)


if __name__ == "__main__":
    run_main(main, "interrupted; the same command goes on from what is done")
