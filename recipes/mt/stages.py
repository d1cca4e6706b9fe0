"""The stages of a recipe after the data: train, select a checkpoint, decode, score; and tests of
the papers, by recipes/mt/analysis:

stack   sentences stacked to 300 and more target tokens, loss by position (CAPE 5.3, figure 8)
swap    the first of ten joined sentences moved to the end (SHAPE 3.2, table 1)
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from sacrebleu.metrics import BLEU

from recipes.lab import runs
from recipes.lab.steps import CommandError, read_written, recorded, run_module
from recipes.lab.subwords import SEGMENTATIONS, SentencePiece, SubwordNMT
from recipes.lab.tables import markdown, write_csv, write_page
from recipes.mt.analysis.options import open_translator, translations
from recipes.mt.analysis.stack import TABLE_BIN, position_rows, stack_pairs
from recipes.mt.analysis.swap import COLUMNS, swap_bleu
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.catalog import Recipe
from recipes.mt.corpus import Moses, by_sentence, read_pairs

SELECTED = "checkpoint_selected.pt"
SWAPPED_SENTENCES = 10_000


@dataclass(frozen=True)
class Experiment:
    """One training on prepared data: where it is, and how it is run."""

    recipe: Recipe
    work: Path  # of prepare()
    run: Path  # checkpoints and results
    train_flags: Sequence[str]
    device_flags: Sequence[str]  # of every fairseq command
    decode_flags: Sequence[str]
    threads: int

    @property
    def data(self) -> Path:
        """The binarised corpus."""
        folder = self.work / "binary"
        if not folder.exists():
            raise CommandError(
                f"--work {self.work}: no prepared data there; run the stage prepare first"
            )
        return folder

    @property
    def selected(self) -> Path:
        """The result of the stage select."""
        checkpoint = self.run / SELECTED
        if not checkpoint.exists():
            raise CommandError(
                f"--work {self.work}: {checkpoint} does not exist; run the stages train and"
                " select first"
            )
        return checkpoint

    @property
    def subwords(self) -> SentencePiece | SubwordNMT:
        """The segmentation model."""
        return SEGMENTATIONS[self.recipe.segmentation](self.work / "subwords" / "model")

    def lines(self, split: str, ending: str) -> list[str]:
        """Of prepared text: in the subwords of a language, or the ``reference``."""
        return read_written(self.work / "subwords" / f"{split}.{ending}")


# ---- train and select --------------------------------------------------------------------------


def train(experiment: Experiment) -> None:
    """Train, or go on with a training that was interrupted."""
    runs.train(
        experiment.data,
        experiment.run,
        [*experiment.train_flags, *experiment.device_flags],
        {"data": recorded(experiment.data)},
        threads=experiment.threads,
        title=f"train {experiment.run.name}",
        remedy="give this training another --name",
    )


def select(experiment: Experiment) -> None:
    """Make ``checkpoint_selected.pt``: the average of the last checkpoints (SHAPE, table 4;
    Transformer-Clinic), or the epoch with the best BLEU on the validation set (CAPE, section
    5.3)."""
    recipe, run = experiment.recipe, experiment.run
    if recipe.select != "average":
        select_best_epoch(experiment)
        return
    run_module(
        "fairseq_user_dir.average",
        *("--inputs", run, "--output", run / SELECTED),
        *(f"--num-{recipe.keep}-checkpoints", recipe.average),
        log=run / "average.log",
    )
    print(f"average of the last {recipe.average} checkpoints: {run / SELECTED}")


def select_best_epoch(experiment: Experiment) -> None:
    first, run = experiment.recipe.first_epoch, experiment.run
    named = {path.stem.removeprefix("checkpoint"): path for path in run.glob("checkpoint*.pt")}
    epochs = {int(name): path for name, path in named.items() if name.isdecimal()}
    candidates = sorted(epoch for epoch in epochs if epoch >= first)
    if not candidates:
        raise CommandError(
            f"--first-epoch {first}: {run} has"
            f" {f'epochs {min(epochs)} to {max(epochs)}' if epochs else 'no epoch checkpoint'};"
            " train for longer or choose an earlier epoch"
        )
    scores = {}
    for epoch in candidates:
        pieces = decode_split(experiment, epochs[epoch], "valid", f"valid-epoch{epoch}")
        scores[epoch] = tokenised_bleu(experiment, "valid", pieces)
        print(f"epoch {epoch}: validation BLEU {scores[epoch]:.2f}", flush=True)
    best = max(scores, key=scores.get)
    rows = ({"epoch": epoch, "valid_bleu": bleu} for epoch, bleu in scores.items())
    write_csv(run / "selection.csv", rows, digits=2)
    temporary = run / f".{SELECTED}"
    shutil.copyfile(epochs[best], temporary)
    os.replace(temporary, run / SELECTED)
    print(f"best epoch {best}: {run / SELECTED}")


# ---- decode and score --------------------------------------------------------------------------


def decode_split(experiment: Experiment, checkpoint: Path, split: str, name: str) -> list[str]:
    """Hypotheses of a split as subwords, in the order of the corpus; kept in ``run/decoded``."""
    return runs.generate(
        experiment.data,
        checkpoint,
        experiment.run / "decoded" / name,
        [*experiment.decode_flags, *experiment.device_flags, "--gen-subset", split],
        count=len(experiment.lines(split, "reference")),
        threads=experiment.threads,
    )


def decode(experiment: Experiment) -> dict[str, list[str]]:
    """Decode all test sets, by fairseq's names, with the selected checkpoint."""
    checkpoint = experiment.selected
    files = (experiment.work / "subwords").glob("test*.reference")
    return {
        split: decode_split(experiment, checkpoint, split, split)
        for split in sorted(path.stem for path in files)
    }


def detokenise(experiment: Experiment, tokens: Sequence[str]) -> list[str]:
    """Tokens to plain text; joined sentences one by one."""
    recipe = experiment.recipe
    if recipe.segmentation != "bpe":
        return list(tokens)
    moses = Moses(recipe.languages[1], recipe.aggressive_hyphens, recipe.lowercase)
    return [by_sentence(moses.detokenise, line) for line in tokens]


def tokenised_bleu(experiment: Experiment, split: str, pieces: Sequence[str]) -> float:
    """BLEU of tokens without smoothing: what multi-bleu.perl computes, the papers' BLEU."""
    target = experiment.lines(split, experiment.recipe.languages[1])
    hypotheses, references = (list(map(experiment.subwords.decode, x)) for x in (pieces, target))
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(hypotheses, [references]).score


def score(experiment: Experiment) -> None:
    """Print and write (``run/scores.md``) sacreBLEU of plain text and BLEU of tokens."""
    metric = BLEU(lowercase=experiment.recipe.lowercase)
    rows = []
    for split, pieces in decode(experiment).items():
        references = experiment.lines(split, "reference")
        hypotheses = detokenise(experiment, list(map(experiment.subwords.decode, pieces)))
        sacre = metric.corpus_score(hypotheses, [references]).score
        rows.append((split, len(references), sacre, tokenised_bleu(experiment, split, pieces)))
    if len(rows) > 1:
        _, counts, *bleu = zip(*rows, strict=True)
        rows.append(("mean", sum(counts), *map(fmean, bleu)))
    table = markdown(["test set", "sentences", "sacreBLEU", "tokenised BLEU"], rows)
    facts = {"sacreBLEU signature": str(metric.get_signature())}
    facts["Tokenised BLEU"] = "Moses tokens, no smoothing (multi-bleu.perl)"
    title = f"{experiment.recipe.title}: {experiment.run.name}"
    print("\n".join(write_page(experiment.run / "scores.md", title, {"": table}, facts)))


# ---- tests of the papers -----------------------------------------------------------------------


def stack(experiment: Experiment) -> None:
    """Loss by position on the stacked first test set: ``run/stacked.csv``, and a summary."""
    recipe, work, length = experiment.recipe, experiment.work, experiment.recipe.stacked_length
    tokens = work / ("tokenised" if recipe.segmentation == "bpe" else "text")
    encode = experiment.subwords.encode
    pairs = read_pairs(*(tokens / f"test.{language}" for language in recipe.languages), "--test")
    stacked = stack_pairs(pairs, lambda text: len(encode(text).split()), length)
    pieces = [(encode(source), encode(target)) for source, target in stacked]
    if not pieces:
        raise CommandError(
            f"--work {work}: its test set has fewer than {length} target subwords, too few for"
            " one stacked sentence; prepare a larger one"
        )
    model = open_selected(experiment, "stack")
    losses = [-scores for scores in model.log_probabilities(pieces)]
    rows = position_rows(losses, length)
    write_csv(experiment.run / "stacked.csv", rows)
    print(f"{len(losses)} stacked sentences; mean negative log likelihood (nats) by position")
    for start in range(0, length, TABLE_BIN):
        part = rows[start : min(start + TABLE_BIN, length)]
        total = sum(row["count"] for row in part)
        loss = sum(row["mean_nll"] * row["count"] for row in part) / total
        print(f"{start:5d}-{start + len(part) - 1:<5d} {loss:8.3f}   {total} tokens")
    print(f"not shown: from {length} on, the ends of the texts (tail 1 in stacked.csv)")


def swap(experiment: Experiment) -> None:
    """BLEU on training sentences in original and in swapped order: ``run/swap.md``."""
    recipe = experiment.recipe
    if recipe.join == 1:
        raise CommandError(
            "the stage swap needs joined sentences; choose the recipe wmt16_en_de_interpolate"
        )
    files = [experiment.work / "subwords" / f"train.{language}" for language in recipe.languages]
    pairs = islice(read_pairs(*files, "--train"), SWAPPED_SENTENCES)
    sources, targets = zip(*pairs, strict=True)
    model, metric = open_selected(experiment), BLEU(lowercase=recipe.lowercase)
    _, share, _, more = recipe.max_length.split()
    decoding = Decoding(recipe.beam, recipe.length_penalty, float(share), int(more))

    translate = partial(translations, model, decoding, experiment.run / "swap")
    references = detokenise(experiment, list(map(model.plain, targets)))
    readable = partial(detokenise, experiment)
    bleu = swap_bleu(translate, sources, references, metric, readable)
    table = markdown(["model", *COLUMNS], [[experiment.run.name, *bleu.values()]])
    facts = {"Sentences": f"{len(sources)} of training", "BLEU": str(metric.get_signature())}
    page = write_page(experiment.run / "swap.md", "Swapped sentences", {"": table}, facts)
    print("\n".join(page))


def open_selected(experiment: Experiment, title: str = "") -> Translator:
    """The selected checkpoint, for text in the subwords of the recipe."""
    torch.set_num_threads(experiment.threads)
    gpu = torch.cuda.is_available()
    running = Running(torch.device("cuda" if gpu else "cpu"), half=gpu)
    files = {"data": experiment.data, "segmented": True}
    model = open_translator(experiment.selected, running, **files)
    model.title = title
    return model
