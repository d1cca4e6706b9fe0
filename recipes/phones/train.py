"""Training by SGD, one utterance per step, and tests, with positions in or out, frames scrambled or
not."""

import csv
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from cape_plugins import PositionConfig
from recipes.lab.steps import CommandError, step, write_lines
from recipes.phones.analysis import error_rate, near_attention
from recipes.phones.data import Corpus, Example
from recipes.phones.model import POSITION_PARAMETERS, PhoneClassifier, Sizes

History = list[dict[str, float]]  # epoch, train_loss, dev_per, near_attention
NEAR = 5  # frames; attention that is not farther is followed from epoch to epoch


class Condition(NamedTuple):
    """What a model is given, in training or in a test."""

    positions: bool  # False: the position channels are zero, relative attention is off
    scrambled: bool = False  # frames, and their labels, are in random order
    with_positions: bool = False  # of scrambled frames; else positions stay in natural order


CONDITIONS = {
    "inc": Condition(positions=True),
    "exc": Condition(positions=False),
    "inc-scram": Condition(positions=True, scrambled=True),
    "exc-scram": Condition(positions=False, scrambled=True),
    "inc-scram-both": Condition(positions=True, scrambled=True, with_positions=True),
}

NO_POSITIONS = PositionConfig("nopos", "audio")


@dataclasses.dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    final_learning_rate: float  # of the last eighth of the epochs

    def rate(self, epoch: int) -> float:
        """Learning rate of the epoch with this index, from 0."""
        first_part = max(1, self.epochs * 7 // 8)
        return self.learning_rate if epoch < first_part else self.final_learning_rate


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to train."""

    name: str  # of the position embedding
    condition: str  # a key of CONDITIONS
    config: PositionConfig
    seed: int  # of weights, dropout, draws, order of utterances and of frames


def folder_name(name: str) -> str:
    """The name of a position embedding without colons, commas and the like."""
    return re.sub(r"[^\w.]", "-", name)


def run_model(
    model: PhoneClassifier,
    features: Tensor,
    condition: Condition,
    permutation: Tensor,
    need_weights: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, classes]`` and weights ``[H, T, T]`` by layer of ``[T, 40]`` features.

    With scrambled frames, row i belongs to frame ``permutation[i]``.
    """
    device = next(model.parameters()).device
    features, permutation, order = features.to(device), permutation.to(device), None
    if condition.scrambled:
        features = features[permutation]
        order = permutation if condition.with_positions else None
    output = model(features[None], condition.positions, order, need_weights)
    return output.logits[0], [weights[0] for weights in output.weights]


def permutations(utterances: Sequence[Example], seed: int) -> Iterator[Tensor]:
    """A random order of frames for each utterance."""
    generator = torch.Generator().manual_seed(seed)
    for utterance in utterances:
        yield torch.randperm(len(utterance.labels), generator=generator)


@torch.no_grad()
def predict(
    model: PhoneClassifier, utterances: Sequence[Example], condition: Condition, seed: int = 0
) -> list[np.ndarray]:
    """Predicted classes of each utterance, in the natural order of its frames."""
    model.eval()
    predictions = []
    for utterance, permutation in zip(utterances, permutations(utterances, seed), strict=True):
        logits, _ = run_model(model, utterance.features, condition, permutation)
        classes = logits.argmax(-1)
        if condition.scrambled:
            classes = classes[permutation.argsort().to(classes.device)]
        predictions.append(classes.cpu().numpy())
    return predictions


@torch.no_grad()
def attention(
    model: PhoneClassifier, utterance: Example, condition: Condition, seed: int = 0
) -> np.ndarray:
    """``[layers, H, T, T]`` weights of one utterance, in the order in which the model sees it."""
    model.eval()
    (permutation,) = permutations([utterance], seed)
    _, weights = run_model(model, utterance.features, condition, permutation, need_weights=True)
    return torch.stack(weights).cpu().numpy()


def long_utterance(utterances: Sequence[Example]) -> Example:
    """The longest of the first ten, to look at its attention."""
    return max(utterances[:10], key=lambda utterance: len(utterance.labels))


def targets(utterances: Sequence[Example]) -> list[np.ndarray]:
    return [utterance.labels.numpy() for utterance in utterances]


def build(corpus: Corpus, config: PositionConfig, sizes: Sizes, seed: int) -> PhoneClassifier:
    """A model with the random weights of `seed`; a learned table has a row for each frame of the
    longest training utterance."""
    torch.manual_seed(seed)
    longest = max(len(utterance.labels) for utterance in corpus.splits["train"])
    return PhoneClassifier(len(corpus.classes), config, sizes, table_size=longest)


def train_epoch(
    model: PhoneClassifier,
    utterances: Sequence[Example],
    condition: Condition,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> Iterator[float]:
    """One step for each utterance, in random order; yields its loss, the mean over its frames."""
    model.train()
    for index in torch.randperm(len(utterances), generator=generator).tolist():
        utterance = utterances[index]
        # drawn also where it is not used, so that all models see the same order of utterances
        permutation = torch.randperm(len(utterance.labels), generator=generator)
        labels = utterance.labels[permutation] if condition.scrambled else utterance.labels
        logits, _ = run_model(model, utterance.features, condition, permutation)
        loss = F.cross_entropy(logits, labels.to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train(
    folder: Path, job: Job, corpus: Corpus, sizes: Sizes, training: Training, device: torch.device
) -> None:
    """Trains a model; writes the weights of its best epoch on dev and ``history.csv``."""
    condition = CONDITIONS[job.condition]
    model = build(corpus, job.config, sizes, job.seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=training.learning_rate)
    generator = torch.Generator().manual_seed(job.seed)
    utterances, dev = corpus.splits["train"], corpus.splits["dev"]
    shown, best = long_utterance(dev), float("inf")
    history = ["epoch,train_loss,dev_per,near_attention"]
    name = f"{job.name} {job.condition} seed {job.seed}"
    with tqdm(total=training.epochs * len(utterances), desc=name, disable=None) as progress:
        for epoch in range(training.epochs):
            for group in optimizer.param_groups:
                group["lr"] = training.rate(epoch)
            losses = []
            for loss in train_epoch(model, utterances, condition, optimizer, generator):
                if not math.isfinite(loss):
                    raise CommandError(
                        f"{name}: the loss is {loss}; give a smaller --learning-rate than "
                        f"{training.learning_rate}"
                    )
                losses.append(loss)
                progress.update()
            error = error_rate(targets(dev), predict(model, dev, condition))
            near = near_attention(attention(model, shown, condition), NEAR)
            loss = float(np.mean(losses))
            history.append(f"{epoch + 1},{loss:.5f},{error:.3f},{near:.4f}")
            progress.set_postfix(loss=f"{loss:.3f}", dev=f"{error:.2f} %")
            if error < best:
                best = error
                torch.save(model.state_dict(), folder / "model.pt")
    write_lines(folder / "history.csv", history)


def trained(
    work: Path, job: Job, corpus: Corpus, sizes: Sizes, training: Training, device: torch.device
) -> tuple[PhoneClassifier, History]:
    """The model of a job and its history, trained unless `work` has it."""
    settings = {
        "condition": job.condition,
        "position_embedding": job.config.to_dict(),
        "seed": job.seed,
        "data": corpus.fingerprint(),
        **dataclasses.asdict(sizes),
        **dataclasses.asdict(training),
    }
    folder = step(
        work / f"{folder_name(job.name)}-{job.condition}-seed{job.seed}",
        settings,
        lambda partial: train(partial, job, corpus, sizes, training, device),
    )
    model = build(corpus, job.config, sizes, job.seed)
    model.load_state_dict(torch.load(folder / "model.pt", map_location="cpu"))
    with open(folder / "history.csv", encoding="utf-8") as file:
        history = [
            {key: float(value) for key, value in row.items()} | {"epoch": int(row["epoch"])}
            for row in csv.DictReader(file)
        ]
    return model.to(device), history


def with_positions_of(
    config: PositionConfig, model: PhoneClassifier, corpus: Corpus, sizes: Sizes, seed: int
) -> PhoneClassifier:
    """A model trained without positions, with positions of another type put in: what was learned
    stays, learned positions have their random initial values."""
    other = build(corpus, config, sizes, seed)
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    if unexpected or not all(name.startswith(POSITION_PARAMETERS) for name in missing):
        raise ValueError(f"{unexpected} and {missing} of the two models do not fit")
    return other.to(next(model.parameters()).device)
