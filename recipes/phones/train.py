"""Training by SGD, one utterance per step, and tests, with positions in or out, frames scrambled or
not."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from cape_plugins import PositionConfig
from recipes.lab.steps import CommandError, read_written, step, write_lines
from recipes.phones.analysis import error_rate, near_attention
from recipes.phones.data import Corpus, Example
from recipes.phones.model import POSITION_PARAMETERS, PhoneClassifier, Sizes

HISTORY = ("epoch", "train_loss", "dev_per", "near_attention")
History = list[dict[str, float]]
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


@dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    final_learning_rate: float  # of the last eighth of the epochs

    def rate(self, epoch: int) -> float:
        """Learning rate of the epoch with this index, from 0."""
        first_part = max(1, self.epochs * 7 // 8)
        return self.learning_rate if epoch < first_part else self.final_learning_rate


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
    features, permutation = features.to(device), permutation.to(device)
    features = features[permutation] if condition.scrambled else features
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


@dataclass(frozen=True)
class Experiment:
    """What all models have in common; each has a position embedding with a name, the name of a
    condition, and a seed of all that is random."""

    corpus: Corpus
    sizes: Sizes
    training: Training
    work: Path
    device: torch.device

    def model(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """A trained model. Training without positions is the same for all position embeddings and
        done once; for the tests the positions are put in."""
        if CONDITIONS[condition].positions:
            return self.trained(name, config, condition, seed)
        model, history = self.trained(NO_POSITIONS.type, NO_POSITIONS, condition, seed)
        return self.with_positions(config, model, seed), history

    def build(self, config: PositionConfig, seed: int) -> PhoneClassifier:
        """A model with the random weights of `seed`; a learned table has a row for each frame of
        the longest training utterance."""
        torch.manual_seed(seed)
        longest = max(len(utterance.labels) for utterance in self.corpus.splits["train"])
        return PhoneClassifier(len(self.corpus.classes), config, self.sizes, longest)

    def with_positions(
        self, config: PositionConfig, model: PhoneClassifier, seed: int
    ) -> PhoneClassifier:
        """`model`, trained without positions, with random initial ones put in."""
        other = self.build(config, seed)
        missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
        if unexpected or not all(name.startswith(POSITION_PARAMETERS) for name in missing):
            raise ValueError(f"{unexpected} and {missing} of the two models do not fit")
        return other.to(next(model.parameters()).device)

    def trained(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """A model and its history, trained unless `work` has it."""
        settings = {
            "condition": condition,
            "position_embedding": config.to_dict(),
            "seed": seed,
            "data": self.corpus.fingerprint(),
            **vars(self.sizes),
            **vars(self.training),
        }
        folder = self.work / f"{folder_name(name)}-{condition}-seed{seed}"
        step(folder, settings, lambda new: self._train(new, name, config, condition, seed))
        model = self.build(config, seed)
        model.load_state_dict(torch.load(folder / "model.pt", map_location="cpu"))
        rows = [line.split(",") for line in read_written(folder / "history.csv")[1:]]
        history = [dict(zip(HISTORY, (int(n), *map(float, row)), strict=True)) for n, *row in rows]
        return model.to(self.device), history

    def _train(
        self, folder: Path, name: str, config: PositionConfig, condition: str, seed: int
    ) -> None:
        """Writes the weights of the best epoch on dev and ``history.csv``."""
        given, title = CONDITIONS[condition], f"{name} {condition} seed {seed}"
        model = self.build(config, seed).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.training.learning_rate)
        generator = torch.Generator().manual_seed(seed)
        utterances, dev = self.corpus.splits["train"], self.corpus.splits["dev"]
        shown, best = long_utterance(dev), float("inf")
        history = [",".join(HISTORY)]
        total = self.training.epochs * len(utterances)
        with tqdm(total=total, desc=title, disable=None) as progress:
            for epoch in range(self.training.epochs):
                optimizer.param_groups[0]["lr"] = self.training.rate(epoch)
                losses = []
                for loss in train_epoch(model, utterances, given, optimizer, generator):
                    if not math.isfinite(loss):
                        raise CommandError(
                            f"{title}: the loss is {loss}; give a smaller --learning-rate than "
                            f"{self.training.learning_rate}"
                        )
                    losses.append(loss)
                    progress.update()
                error = error_rate(targets(dev), predict(model, dev, given))
                near = near_attention(attention(model, shown, given), NEAR)
                loss = float(np.mean(losses))
                history.append(f"{epoch + 1},{loss:.5f},{error:.3f},{near:.4f}")
                progress.set_postfix(loss=f"{loss:.3f}", dev=f"{error:.2f} %")
                if error < best:
                    best = error
                    torch.save(model.state_dict(), folder / "model.pt")
        write_lines(folder / "history.csv", history)
