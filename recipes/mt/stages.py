"""The stages of a recipe after the data: train, select a checkpoint, decode, score."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sacrebleu.metrics import BLEU

from recipes.lab import runs
from recipes.lab.steps import CommandError, read_written, recorded, run_module
from recipes.lab.subwords import SEGMENTATIONS, SentencePiece, SubwordNMT
from recipes.lab.tables import markdown, write_csv, write_page
from recipes.mt.catalog import Recipe
from recipes.mt.moses import Moses
from recipes.mt.prepare import SEPARATOR

SELECTED = "checkpoint_selected.pt"


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

    def test_sets(self) -> list[str]:
        """fairseq's names of the test sets."""
        return sorted(path.stem for path in (self.work / "subwords").glob("test*.reference"))


def prepared_with(experiment: Experiment) -> dict[str, object]:
    """The settings of the data, for the record of what is made from them."""
    return recorded(experiment.data)


# ---- train -------------------------------------------------------------------------------------


def train(experiment: Experiment) -> None:
    """Train, or go on with a training that was interrupted."""
    flags = [*experiment.train_flags, *experiment.device_flags]
    runs.train(
        experiment.data,
        experiment.run,
        flags,
        {"data": prepared_with(experiment)},
        threads=experiment.threads,
        title=f"train {experiment.run.name}",
        remedy="give this training another --name",
    )


# ---- select ------------------------------------------------------------------------------------


def select(experiment: Experiment) -> None:
    """Make ``checkpoint_selected.pt`` by the rule of the recipe."""
    if experiment.recipe.select == "average":
        average_checkpoints(experiment)
    else:
        select_best_epoch(experiment)


def average_checkpoints(experiment: Experiment) -> None:
    """Average the last checkpoints (SHAPE, table 4; Transformer-Clinic)."""
    recipe = experiment.recipe
    run_module(
        "fairseq_user_dir.average",
        *("--inputs", experiment.run, "--output", experiment.run / SELECTED),
        *(f"--num-{recipe.keep}-checkpoints", recipe.average),
        log=experiment.run / "average.log",
    )
    print(f"average of the last {recipe.average} checkpoints: {experiment.run / SELECTED}")


def epoch_of(checkpoint: Path) -> int | None:
    """12 for ``checkpoint12.pt``; None for files that are not the end of an epoch."""
    number = checkpoint.stem.removeprefix("checkpoint")
    return int(number) if number.isdecimal() else None


def select_best_epoch(experiment: Experiment) -> None:
    """Take the epoch with the best BLEU on the validation set (CAPE, section 5.3)."""
    recipe, run = experiment.recipe, experiment.run
    epochs = {epoch: path for path in run.glob("checkpoint*.pt") if (epoch := epoch_of(path))}
    candidates = sorted(epoch for epoch in epochs if epoch >= recipe.first_epoch)
    if not candidates:
        raise CommandError(
            f"--first-epoch {recipe.first_epoch}: {run} has"
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
    references = experiment.work / "subwords" / f"{split}.reference"
    return runs.generate(
        experiment.data,
        checkpoint,
        experiment.run / "decoded" / name,
        [*experiment.decode_flags, *experiment.device_flags, "--gen-subset", split],
        count=len(read_written(references)),
        threads=experiment.threads,
    )


def selected_checkpoint(experiment: Experiment) -> Path:
    """The result of the stage select."""
    checkpoint = experiment.run / SELECTED
    if not checkpoint.exists():
        raise CommandError(
            f"--work {experiment.work}: {checkpoint} does not exist; run the stages train and"
            " select first"
        )
    return checkpoint


def decode(experiment: Experiment) -> dict[str, list[str]]:
    """Decode all test sets with the selected checkpoint."""
    checkpoint = selected_checkpoint(experiment)
    return {
        split: decode_split(experiment, checkpoint, split, split)
        for split in experiment.test_sets()
    }


def load_model(experiment: Experiment) -> SentencePiece | SubwordNMT:
    """The segmentation model."""
    return SEGMENTATIONS[experiment.recipe.segmentation](experiment.work / "subwords" / "model")


def undo_segmentation(experiment: Experiment, pieces: Sequence[str]) -> list[str]:
    """Subwords to tokens (BPE) or to text (sentencepiece)."""
    model = load_model(experiment)
    return [model.decode(line) for line in pieces]


def detokenise(experiment: Experiment, tokens: Sequence[str]) -> list[str]:
    """Tokens to plain text; joined sentences one by one."""
    recipe = experiment.recipe
    if recipe.segmentation != "bpe":
        return list(tokens)
    moses = Moses(recipe.languages[1], recipe.aggressive_hyphens, recipe.lowercase)
    separator = f" {SEPARATOR} "
    return [
        separator.join(moses.detokenise(part.strip()) for part in line.split(SEPARATOR))
        for line in tokens
    ]


def tokenised_bleu(experiment: Experiment, split: str, pieces: Sequence[str]) -> float:
    """BLEU of tokens without smoothing: what multi-bleu.perl computes, the papers' BLEU."""
    target = experiment.work / "subwords" / f"{split}.{experiment.recipe.languages[1]}"
    references = undo_segmentation(experiment, read_written(target))
    hypotheses = undo_segmentation(experiment, pieces)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(hypotheses, [references]).score


def score(experiment: Experiment) -> None:
    """Print and write (``run/scores.md``) sacreBLEU of plain text and BLEU of tokens."""
    metric = BLEU(lowercase=experiment.recipe.lowercase)
    rows = []
    for split, pieces in decode(experiment).items():
        references = read_written(experiment.work / "subwords" / f"{split}.reference")
        hypotheses = detokenise(experiment, undo_segmentation(experiment, pieces))
        sacre = metric.corpus_score(hypotheses, [references]).score
        rows.append((split, len(references), sacre, tokenised_bleu(experiment, split, pieces)))
    count = len(rows)
    if count > 1:
        totals = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
        rows.append(("mean", totals[0], totals[1] / count, totals[2] / count))
    table = markdown(["test set", "sentences", "sacreBLEU", "tokenised BLEU"], rows)
    facts = {
        "sacreBLEU signature": str(metric.get_signature()),
        "Tokenised BLEU": "Moses tokens, no smoothing (multi-bleu.perl)",
    }
    title = f"{experiment.recipe.title}: {experiment.run.name}"
    print("\n".join(write_page(experiment.run / "scores.md", title, {"": table}, facts)))
