"""One training of a recipe on prepared data, and its stages."""

import argparse
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate, islice, pairwise
from math import ceil
from pathlib import Path
from statistics import fmean

import torch
from sacrebleu.metrics import BLEU

from cape_plugins.utils.files import writing
from recipes.lab import command_line, runs, steps, tables
from recipes.lab.command_line import Settings
from recipes.lab.steps import CommandError
from recipes.lab.subwords import SEGMENTATIONS
from recipes.mt.analysis.arguments import open_translator, translations
from recipes.mt.analysis.stack import TABLE_BIN, position_rows, stack_pairs, totals_by_bin
from recipes.mt.analysis.swap import COLUMNS, swap_bleu
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.catalog import Recipe, Text
from recipes.mt.corpus import Moses, Subwords, by_sentence, read_pairs
from recipes.mt.prepare import part_sizes, prepare
from recipes.mt.scoring import sacrebleu

SCORES = ("test set", "sentences", "sacreBLEU", "tokenised BLEU")
PAGES = {"test": "scores.md", "valid": "valid.md"}
VALID_MEAN = "validation mean"
SELECTED = "checkpoint_selected.pt"
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
        self.average_flags = [f"--num-{recipe.keep}-checkpoints", recipe.average]
        # for every fairseq command
        self.device_flags = [*runs.device_flags(args.device), *(GPU_FLAGS if gpus else [])]
        decoding = f"--beam {recipe.beam} --lenpen {recipe.length_penalty} --batch-size 128"
        decoding += f" --max-len-a {recipe.length_factor:g} --max-len-b {recipe.length_extra}"
        self.decode_flags = [*shlex.split(decoding), *runs.LIMITS]

    def prepare(self) -> None:
        """Makes the data, or reuses finished data."""
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
        """Returns lines of prepared text; `ending` is a language (for subwords) or "reference"."""
        return steps.read_written(self.work / "subwords" / f"{split}.{ending}")

    def commands(self) -> list[str]:
        """Lines with the commands of train, select and decode, for printing. Steps without a
        command are comments."""
        recipe, data, common = self.recipe, self.work / "binary", ("--user-dir", runs.USER_DIR)
        prepared = ((key.name, getattr(recipe, key.name)) for key in fields(Text))
        text = ", ".join(
            f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in prepared
        )
        train = [data, *common, "--save-dir", self.run, *self.train_flags, *self.device_flags]
        average = ["--inputs", self.run, "--output", self.run / SELECTED, *self.average_flags]
        best = f"# select: the best BLEU on valid, from epoch {recipe.first_epoch} on"
        generate = [data, *common, "--path", self.run / SELECTED, *self.decode_flags]
        return [
            f"# {self.run.name}: {recipe.title}",
            f"# prepare: {text}",
            shlex.join(map(str, ["fairseq-train", *train])),
            best
            if recipe.select == "best"
            else shlex.join(map(str, ["cape-average-checkpoints", *average])),
            shlex.join(map(str, ["fairseq-generate", *generate, *self.device_flags])),
        ]

    def train(self) -> None:
        """Trains, or continues an interrupted training."""
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
        """Makes ``checkpoint_selected.pt``: the average of the last checkpoints (SHAPE, table 4),
        or the epoch with the best BLEU on the validation set (CAPE, section 5.3)."""
        recipe, run = self.recipe, self.run
        if recipe.select == "average":
            arguments = ["--inputs", run, "--output", run / SELECTED, *self.average_flags]
            steps.run_module("fairseq_user_dir.average", *arguments, log=run / "average.log")
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
            targets = self.lines("valid", self.recipe.languages[1])
            scores[epoch] = self.tokenised_bleu(targets, pieces)
            print(f"epoch {epoch}: validation BLEU {scores[epoch]:.2f}", flush=True)
        best = max(scores, key=scores.get)
        rows = ({"epoch": epoch, "valid_bleu": bleu} for epoch, bleu in scores.items())
        tables.write_csv(run / "selection.csv", rows, digits=2)
        with writing(run / SELECTED, "wb") as file:
            shutil.copyfile(epochs[best], file.name)
        print(f"best epoch {best}: {run / SELECTED}")

    def decode_split(self, checkpoint: Path, split: str, name: str) -> list[str]:
        """Hypotheses of a split as subwords, in the order of the corpus, stored in ``decoded``."""
        return runs.generate(
            self.data,
            checkpoint,
            self.run / "decoded" / name,
            [*self.decode_flags, *self.device_flags, "--gen-subset", split],
            count=len(self.lines(split, "reference")),
            threads=self.args.threads,
        )

    def decode(self) -> dict[str, list[str]]:
        """Decodes all test sets with the selected checkpoint; the keys are fairseq's names of the
        sets."""
        checkpoint = self.selected
        splits = sorted(
            (path.stem for path in (self.work / "subwords").glob("test*.reference")),
            key=lambda name: int(name.removeprefix("test") or 0),
        )
        return {split: self.decode_split(checkpoint, split, split) for split in splits}

    def detokenise(self, tokens: Sequence[str]) -> list[str]:
        """Turns tokens into plain text, joined sentences one by one."""
        recipe = self.recipe
        if recipe.segmentation != "bpe":
            return list(tokens)
        moses = Moses(recipe.languages[1], recipe.aggressive_hyphens, recipe.lowercase)
        return [by_sentence(moses.detokenise, line) for line in tokens]

    def tokenised_bleu(self, targets: Sequence[str], pieces: Sequence[str]) -> float:
        """Returns BLEU of tokens without smoothing, as multi-bleu.perl and the papers compute
        it."""
        hypotheses, references = (list(map(self.subwords.decode, x)) for x in (pieces, targets))
        metric = BLEU(tokenize="none", smooth_method="none", force=True)
        return metric.corpus_score(hypotheses, [references]).score

    def names(self, split: str, count: int) -> list[str]:
        """Names of the `count` sets of a split: the names of the user's files, ``newstest2014`` for
        newstest2014.en.gz, if all names differ; else ``test``, ``test1`` ..."""
        record = steps.recorded(self.work / "text")
        stems = {
            part: [
                Path(entry.rpartition(" ")[0].removesuffix(".gz")).stem
                for entry in record.get(part, [])[::2]  # source files, each with its digest
            ]
            for part in PAGES
        }
        names, all_names = stems[split], [stem for part in stems.values() for stem in part]
        if len(names) == count and len(set(all_names)) == len(all_names):
            return names
        return [f"{split}{number or ''}" for number in range(count)]

    def score(self) -> list[tables.Row]:
        """Prints and writes (``run/scores.md``) sacreBLEU of plain text and BLEU of tokens."""
        target, decoded = self.recipe.languages[1], self.decode()
        texts = [
            (pieces, self.lines(split, target), self.lines(split, "reference"))
            for split, pieces in decoded.items()
        ]
        return self.scores_of("test", texts, "mean")

    def validate(self) -> list[tables.Row]:
        """Scores the validation text, each file by itself (``run/valid.md``)."""
        pieces = self.decode_split(self.selected, "valid", "valid")
        targets = self.lines("valid", self.recipe.languages[1])
        columns = (pieces, targets, self.lines("valid", "reference"))
        sizes = part_sizes(self.work / "subwords", len(pieces))
        starts = [0, *accumulate(sizes)]
        texts = [[column[low:high] for column in columns] for low, high in pairwise(starts)]
        return self.scores_of("valid", texts, VALID_MEAN)

    def scores_of(
        self, split: str, texts: Sequence[Sequence[Sequence[str]]], mean_is: str
    ) -> list[tables.Row]:
        """Rows of scores, one for each set of hypotheses, references (both in subwords) and plain
        references; for several sets also a row of the mean, which `mean_is` names."""
        recipe, rows = self.recipe, []
        metric = sacrebleu(recipe.languages[1], lowercase=recipe.lowercase)
        for name, (pieces, targets, references) in zip(
            self.names(split, len(texts)), texts, strict=True
        ):
            if not references:  # preparation left out all lines of a file
                continue
            hypotheses = self.detokenise(list(map(self.subwords.decode, pieces)))
            sacre = metric.corpus_score(hypotheses, [list(references)]).score
            rows.append((name, len(references), sacre, self.tokenised_bleu(targets, pieces)))
        if len(rows) > 1:
            _, counts, *bleu = zip(*rows, strict=True)
            rows.append((mean_is, sum(counts), *map(fmean, bleu)))
        table = tables.markdown(SCORES, rows)
        tokenised = "Moses tokens, no smoothing (multi-bleu.perl)"
        facts = {"sacreBLEU signature": str(metric.get_signature()), "Tokenised BLEU": tokenised}
        title, page = f"{recipe.title}: {self.run.name}", PAGES[split]
        print("\n".join(tables.write_page(self.run / page, title, {"": table}, facts)))
        columns = {"type": self.name, "seed": self.seed}
        score_rows = [{**columns, **dict(zip(SCORES, row, strict=True))} for row in rows]
        return [{**row, "split": split if row[SCORES[0]] != mean_is else ""} for row in score_rows]

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
                f"--work {work}: its test set has fewer than {length} target subwords, too few "
                "for one stacked sentence; prepare a larger test set"
            )
        model = self.open_selected()
        model.title = "stack"
        losses = [-scores for scores in model.log_probabilities(pieces)]
        tables.write_csv(self.run / "stacked.csv", position_rows(losses, length))
        print(f"{len(losses)} stacked sentences; mean negative log likelihood (nats) by position")
        totals = totals_by_bin([values[:length] for values in losses], TABLE_BIN).sum(1)
        for start, (total, count) in zip(range(0, length, TABLE_BIN), totals.T, strict=True):
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
        pairs = islice(read_pairs(*files, "--train"), recipe.swapped_lines)
        sources, targets = zip(*pairs, strict=True)
        model = self.open_selected()
        metric = sacrebleu(recipe.languages[1], lowercase=recipe.lowercase)
        longest = recipe.length_factor, recipe.length_extra
        decoding = Decoding(recipe.beam, recipe.length_penalty, *longest)
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


def train_flags(recipe: Recipe, settings: Settings, devices: int) -> list[str]:
    """The flags of fairseq-train of the recipe, without the user's flags."""
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
    return shlex.split(f"{recipe.train} {schedule} {command_line.position_flags(settings)}")
