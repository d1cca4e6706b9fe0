"""The translation recipes of the CAPE and SHAPE papers: one program, a recipe is a row of data.

    python -m recipes.mt.run wmt14_en_de prepare --train train.en train.de --valid ... --test ...
    python -m recipes.mt.run wmt14_en_de train select decode score
    python -m recipes.mt.run wmt14_en_de train select decode score --position-embedding sinpos
    python -m recipes.mt.run wmt14_en_de all --compare sinpos cape:max_global_shift=10 --seeds 1 2 3
    python -m recipes.mt.run wmt14_en_de all --sample

Stages: prepare (text to binary data), train, select (the best epoch by validation BLEU, or the
average of the last checkpoints), decode (test sets), score (sacreBLEU, and the papers' BLEU of
tokens); "all" means these five. Further tests: stack (loss by position on stacked sentences, CAPE
figure 8) and swap (another order of joined sentences, SHAPE table 1).

Options this program does not know go to fairseq-train and win over those of the recipe. Finished
work is reused, an interrupted training goes on. --sample runs a tiny model for a few updates, on
built-in number lists where no files are given: a check of the whole recipe.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from math import ceil
from pathlib import Path
from statistics import fmean

import torch
from sacrebleu.metrics import BLEU

from recipes.lab import options, runs, steps, tables
from recipes.lab.options import Settings, add_shared, positive
from recipes.lab.scores import write_scores
from recipes.lab.steps import CommandError
from recipes.lab.subwords import SEGMENTATIONS
from recipes.mt.analysis.options import open_translator, translations
from recipes.mt.analysis.stack import TABLE_BIN, position_rows, stack_pairs, totals_by_bin
from recipes.mt.analysis.swap import COLUMNS, swap_bleu
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.catalog import RECIPES, Recipe, sampled
from recipes.mt.corpus import Moses, Subwords, by_sentence, read_pairs
from recipes.mt.prepare import prepare

PACKAGES = ("torch", "fairseq-fixed", "sacrebleu")
STAGES, PROBES = ("prepare", "train", "select", "decode", "score"), ("stack", "swap")
SCORES = ("test set", "sentences", "sacreBLEU", "tokenised BLEU")
SELECTED = "checkpoint_selected.pt"
SWAPPED_SENTENCES = 10_000
GPU_FLAGS = ["--fp16", "--fp16-scale-window", "256"]
GPU_TRAIN_FLAGS = ["--threshold-loss-scale", "0.03125"]


class Experiment:
    """One training on prepared data, and its stages as methods."""

    def __init__(self, args: argparse.Namespace, name: str, settings: Settings, seed: int | None):
        recipe = self.recipe = args.settled
        gpus = torch.cuda.device_count() if args.device.type == "cuda" else 0
        self.args, self.work, self.name, self.seed = args, args.work, name, seed
        folder = args.name or steps.folder_name(name if seed is None else f"{name}-seed{seed}")
        self.run = args.work / "runs" / folder  # checkpoints and results
        flags = train_flags(recipe, settings, args.devices or max(1, gpus))
        flags += [] if seed is None else ["--seed", str(seed * runs.SEED_STEP)]
        self.train_flags = [*flags, *(GPU_TRAIN_FLAGS if gpus else []), *args.extra]
        # of every fairseq command
        self.device_flags = [*runs.device_flags(args.device), *(GPU_FLAGS if gpus else [])]
        decoding = f"--beam {recipe.beam} --lenpen {recipe.length_penalty} --batch-size 128"
        self.decode_flags = [*shlex.split(f"{decoding} {recipe.max_length}"), *runs.LIMITS]

    def prepare(self) -> None:
        """Make the data, or take those that are finished."""
        args = self.args
        files = {"train": args.train, "valid": args.valid, "test": args.test}
        prepare(self.recipe, files, self.work, args.sample, 1 if args.sample else args.workers)

    @property
    def data(self) -> Path:
        """The binarised corpus."""
        folder = self.work / "binary"
        if not folder.exists():
            problem = f"--work {self.work}: no prepared data there"
            raise CommandError(f"{problem}; run the stage prepare first")
        return folder

    @property
    def selected(self) -> Path:
        """The result of the stage select."""
        checkpoint = self.run / SELECTED
        if not checkpoint.exists():
            problem = f"--work {self.work}: {checkpoint} does not exist"
            raise CommandError(f"{problem}; run the stages train and select first")
        return checkpoint

    @property
    def subwords(self) -> Subwords:
        return SEGMENTATIONS[self.recipe.segmentation](self.work / "subwords" / "model")

    def lines(self, split: str, ending: str) -> list[str]:
        """Of prepared text: in the subwords of a language, or the ``reference``."""
        return steps.read_written(self.work / "subwords" / f"{split}.{ending}")

    def train(self) -> None:
        """Train, or go on with a training that was interrupted."""
        runs.train(
            self.data,
            self.run,
            [*self.train_flags, *self.device_flags],
            {"data": steps.recorded(self.data)},
            threads=self.args.threads,
            title=f"train {self.run.name}",
            remedy="give this training another --name",
        )

    def select(self) -> None:
        """Make ``checkpoint_selected.pt``: the average of the last checkpoints (SHAPE, table 4), or
        the epoch with the best BLEU on the validation set (CAPE, section 5.3)."""
        recipe, run = self.recipe, self.run
        if recipe.select == "average":
            steps.run_module(
                "fairseq_user_dir.average",
                *("--inputs", run, "--output", run / SELECTED),
                *(f"--num-{recipe.keep}-checkpoints", recipe.average),
                log=run / "average.log",
            )
            print(f"average of the last {recipe.average} checkpoints: {run / SELECTED}")
            return
        named = {path.stem.removeprefix("checkpoint"): path for path in run.glob("checkpoint*.pt")}
        epochs = {int(name): path for name, path in named.items() if name.isdecimal()}
        chosen = sorted(epoch for epoch in epochs if epoch >= recipe.first_epoch)
        if not chosen:
            raise CommandError(
                f"--first-epoch {recipe.first_epoch}: {run} has"
                f" {f'epochs {min(epochs)} to {max(epochs)}' if epochs else 'no epoch checkpoint'};"
                " train for longer or choose an earlier epoch"
            )
        scores = {}
        for epoch in chosen:
            pieces = self.decode_split(epochs[epoch], "valid", f"valid-epoch{epoch}")
            scores[epoch] = self.tokenised_bleu("valid", pieces)
            print(f"epoch {epoch}: validation BLEU {scores[epoch]:.2f}", flush=True)
        best = max(scores, key=scores.get)
        rows = ({"epoch": epoch, "valid_bleu": bleu} for epoch, bleu in scores.items())
        tables.write_csv(run / "selection.csv", rows, digits=2)
        with steps.writing(run / SELECTED, "wb") as file:
            shutil.copyfile(epochs[best], file.name)
        print(f"best epoch {best}: {run / SELECTED}")

    def decode_split(self, checkpoint: Path, split: str, name: str) -> list[str]:
        """Hypotheses of a split as subwords, in the order of the corpus, kept in ``decoded``."""
        return runs.generate(
            self.data,
            checkpoint,
            self.run / "decoded" / name,
            [*self.decode_flags, *self.device_flags, "--gen-subset", split],
            count=len(self.lines(split, "reference")),
            threads=self.args.threads,
        )

    def decode(self) -> dict[str, list[str]]:
        """Decode all test sets, by fairseq's names, with the selected checkpoint."""
        checkpoint = self.selected
        splits = sorted(path.stem for path in (self.work / "subwords").glob("test*.reference"))
        return {split: self.decode_split(checkpoint, split, split) for split in splits}

    def detokenise(self, tokens: Sequence[str]) -> list[str]:
        """Tokens to plain text; joined sentences one by one."""
        recipe = self.recipe
        if recipe.segmentation != "bpe":
            return list(tokens)
        moses = Moses(recipe.languages[1], recipe.aggressive_hyphens, recipe.lowercase)
        return [by_sentence(moses.detokenise, line) for line in tokens]

    def tokenised_bleu(self, split: str, pieces: Sequence[str]) -> float:
        """BLEU of tokens without smoothing: what multi-bleu.perl computes, the papers' BLEU."""
        target = self.lines(split, self.recipe.languages[1])
        hypotheses, references = (list(map(self.subwords.decode, x)) for x in (pieces, target))
        metric = BLEU(tokenize="none", smooth_method="none", force=True)
        return metric.corpus_score(hypotheses, [references]).score

    def score(self) -> list[tables.Row]:
        """Print and write (``run/scores.md``) sacreBLEU of plain text and BLEU of tokens."""
        metric = BLEU(lowercase=self.recipe.lowercase)
        rows = []
        for split, pieces in self.decode().items():
            references = self.lines(split, "reference")
            hypotheses = self.detokenise(list(map(self.subwords.decode, pieces)))
            sacre = metric.corpus_score(hypotheses, [references]).score
            rows.append((split, len(references), sacre, self.tokenised_bleu(split, pieces)))
        if len(rows) > 1:
            _, counts, *bleu = zip(*rows, strict=True)
            rows.append(("mean", sum(counts), *map(fmean, bleu)))
        table = tables.markdown(SCORES, rows)
        tokenised = "Moses tokens, no smoothing (multi-bleu.perl)"
        facts = {"sacreBLEU signature": str(metric.get_signature()), "Tokenised BLEU": tokenised}
        title = f"{self.recipe.title}: {self.run.name}"
        print("\n".join(tables.write_page(self.run / "scores.md", title, {"": table}, facts)))
        known = {"type": self.name, "seed": self.seed}
        return [{**known, **dict(zip(SCORES, row, strict=True))} for row in rows]

    def stack(self) -> None:
        """Loss by position on the stacked first test set: ``run/stacked.csv``, and a summary."""
        recipe, work, encode = self.recipe, self.work, self.subwords.encode
        length = recipe.stacked_length
        tokens = work / ("tokenised" if recipe.segmentation == "bpe" else "text")
        files = [tokens / f"test.{language}" for language in recipe.languages]
        pairs = read_pairs(*files, "--test")
        stacked = stack_pairs(pairs, lambda text: len(encode(text).split()), length)
        pieces = [(encode(source), encode(target)) for source, target in stacked]
        if not pieces:
            raise CommandError(
                f"--work {work}: its test set has fewer than {length} target subwords, too few for"
                " one stacked sentence; prepare a larger one"
            )
        model = self.open_selected()
        model.title = "stack"
        losses = [-scores for scores in model.log_probabilities(pieces)]
        tables.write_csv(self.run / "stacked.csv", position_rows(losses, length))
        print(f"{len(losses)} stacked sentences; mean negative log likelihood (nats) by position")
        shown = totals_by_bin([values[:length] for values in losses], TABLE_BIN).sum(1)
        for start, (total, count) in zip(range(0, length, TABLE_BIN), shown.T, strict=True):
            end = min(start + TABLE_BIN, length) - 1
            print(f"{start:5d}-{end:<5d} {total / count:8.3f}   {count:.0f} tokens")
        print(f"not shown: from {length} on, the ends of the texts (tail 1 in stacked.csv)")

    def swap(self) -> None:
        """BLEU on training sentences in original and in swapped order: ``run/swap.md``."""
        recipe = self.recipe
        if recipe.join == 1:
            remedy = "choose the recipe wmt16_en_de_interpolate"
            raise CommandError(f"the stage swap needs joined sentences; {remedy}")
        files = [self.work / "subwords" / f"train.{language}" for language in recipe.languages]
        pairs = islice(read_pairs(*files, "--train"), SWAPPED_SENTENCES)
        sources, targets = zip(*pairs, strict=True)
        model, metric = self.open_selected(), BLEU(lowercase=recipe.lowercase)
        _, share, _, more = recipe.max_length.split()
        decoding = Decoding(recipe.beam, recipe.length_penalty, float(share), int(more))
        translate = partial(translations, model, decoding, self.run / "swap")
        references = self.detokenise(list(map(model.plain, targets)))
        bleu = swap_bleu(translate, sources, references, metric, self.detokenise)
        table = tables.markdown(["model", *COLUMNS], [[self.run.name, *bleu.values()]])
        facts = {"Sentences": f"{len(sources)} of training", "BLEU": str(metric.get_signature())}
        page = tables.write_page(self.run / "swap.md", "Swapped sentences", {"": table}, facts)
        print("\n".join(page))

    def open_selected(self) -> Translator:
        """The selected checkpoint, for text in the subwords of the recipe."""
        torch.set_num_threads(self.args.threads)
        running = Running(self.args.device, half=self.args.device.type == "cuda")
        return open_translator(self.selected, running, data=self.data, segmented=True)


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our options, among them ``settled``, the recipe, and ``compared``, settings by name; and the
    rest, which is for fairseq-train."""
    parser = options.new_parser(__doc__)
    add = parser.add_argument
    add("recipe", choices=RECIPES, metavar="RECIPE", help=", ".join(RECIPES))
    stage_names = [*STAGES, "all", *PROBES]
    add("stages", nargs="+", choices=stage_names, metavar="STAGE", help=", ".join(stage_names))
    texts = {
        "train": "training text, plain or .gz; may be given several times, files are concatenated",
        "valid": "validation text, likewise (default: every n-th line of the training text)",
        "test": "test text; given several times, each is a test set (default: other n-th lines)",
    }
    pair = {"nargs": 2, "type": Path, "action": "append", "metavar": ("SOURCE", "TARGET")}
    for split, text in texts.items():
        add(f"--{split}", **pair, default=[], help=text)
    own = "that of the recipe"
    options.add_compared(parser, "text", own)
    add_shared(parser, "seeds", shown=f"one training, of {own}")
    text = "name of a single training, a folder under WORK/runs (default: TYPE, or TYPE-seedN)"
    add("--name", help=text)
    add_shared(parser, "work", shown="build/RECIPE")
    add_shared(parser, "device")
    text = "GPUs that share an update, for the accumulation steps (default: all there are)"
    add("--devices", type=positive, help=text)
    add("--max-tokens", type=positive, help="tokens per device and step (default: the paper's)")
    add_shared(parser, "beam", shown="the paper's")
    add_shared(parser, "length-penalty", "--lenpen", shown="the paper's")
    text = "checkpoint choice (default: the paper's)"
    add("--select", choices=("best", "average"), help=text)
    add("--first-epoch", type=positive, help="consider epochs from this one on for --select best")
    add("--average", type=positive, help="number of checkpoints for --select average")
    cores = options.available_cores()
    add_shared(parser, "threads", default=cores)
    text = f"processes for preparation (default: {cores})"
    add("--workers", type=positive, default=cores, metavar="N", help=text)
    add("--sample", action="store_true", help="check of the whole recipe at a tiny scale")
    args, extra = parser.parse_known_args(argv)
    if "all" in args.stages:
        args.stages = [*STAGES, *(name for name in PROBES if name in args.stages)]
    if "prepare" in args.stages and not args.train:
        if not args.sample:
            parser.error("--train: name the training text, or try the recipe with --sample")
        if args.valid or args.test:
            parser.error("--valid and --test need --train")
    args.work = args.work or Path("build") / f"{args.recipe}{'-sample' * args.sample}"
    options.check_shared(args)
    recipe = args.settled = settle_recipe(args)
    args.compared = options.settings_to_compare(args, "text", [recipe.position], recipe.positions)
    if args.name and max(len(args.compared), len(args.seeds or ())) > 1:
        raise CommandError(f"--name {args.name}: is for one training; leave it out")
    return args, extra


def settle_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes."""
    recipe = sampled(RECIPES[args.recipe]) if args.sample else RECIPES[args.recipe]
    names = ("max_tokens", "beam", "length_penalty", "select", "first_epoch", "average")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.select == "best":
        changes["keep"] = "epoch"
    return replace(recipe, **changes)


def train_flags(recipe: Recipe, settings: Settings, devices: int) -> list[str]:
    """The flags of fairseq-train that make up the recipe, without those of the user."""
    accumulate = max(1, ceil(recipe.tokens_per_update / (recipe.max_tokens * devices)))
    schedule = f"--max-tokens {recipe.max_tokens} --update-freq {accumulate}"
    if recipe.epochs:
        schedule += f" --max-epoch {recipe.epochs}"
    if recipe.updates:
        schedule += f" --max-update {recipe.updates}"
    if recipe.keep == "update":
        schedule += f" --save-interval-updates {recipe.save_every} --no-epoch-checkpoints"
        schedule += f" --keep-interval-updates {recipe.average}"
    elif recipe.select == "average":
        schedule += f" --keep-last-epochs {recipe.average}"
    elif recipe.epochs:
        schedule += f" --keep-last-epochs {recipe.epochs - recipe.first_epoch + 1}"
    return shlex.split(f"{recipe.train} {schedule} {options.position_flags(settings)}")


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args, args.extra = parse_arguments(argv)
    trainings = [
        Experiment(args, name, settings, seed)
        for (name, settings), seed in product(args.compared.items(), args.seeds or [None])
    ]
    if "prepare" in args.stages:
        trainings[0].prepare()
    scores: list[tables.Row] = []
    for training, stage in product(trainings, (*STAGES[1:], *PROBES)):
        if stage in args.stages:
            rows = getattr(training, stage)()
            scores += rows if stage == "score" else ()
    if len(trainings) > 1 and scores:
        facts = tables.how_made(tables.shown_command("python -m recipes.mt.run", argv), PACKAGES)
        metrics = dict(zip(SCORES[2:], SCORES[2:], strict=True))
        write_scores(args.work, "Scores of all trainings", scores, "test set", metrics, facts)


if __name__ == "__main__":
    steps.run_main(main)
