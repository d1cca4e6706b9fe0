"""Trains and tests the classifier, with or without positions, on ordered or scrambled frames."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from cape_plugins import PositionConfig
from recipes.lab.steps import CommandError, folder_name, read_written, step, write_lines
from recipes.phones.analysis import Frames, error_rate, near_attention
from recipes.phones.data import Corpus, Example
from recipes.phones.model import Output, PhoneClassifier, Sizes


class Condition(NamedTuple):
    """The input of a model, in training or in a test."""

    positions: bool  # False: the position channels are zero, relative attention is off
    scrambled: bool = False  # frames, and their labels, are in random order
    # scrambled frames keep their positions; otherwise positions stay in natural order
    with_positions: bool = False


CONDITIONS = {
    "inc": Condition(positions=True),
    "exc": Condition(positions=False),
    "inc-scram": Condition(positions=True, scrambled=True),
    "exc-scram": Condition(positions=False, scrambled=True),
    "inc-scram-both": Condition(positions=True, scrambled=True, with_positions=True),
}
NO_POSITIONS = PositionConfig("nopos", "audio")
HISTORY = ("epoch", "train_loss", "dev_per", "near_attention")
History = list[dict[str, float]]
NO_CLASS = -100  # label of padding
NEAR = 5  # frames; the share of attention up to this distance is recorded in each epoch


OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    final_learning_rate: float  # of the last eighth of the epochs
    optimizer: str = "sgd"  # key of OPTIMIZERS
    batch_size: int = 1  # number of utterances of one step
    kept_epochs: tuple[int, ...] = ()  # epochs, counted from 1, whose weights are stored

    def rate(self, epoch: int) -> float:
        """Learning rate of the epoch with this index, from 0."""
        first_part = max(1, self.epochs * 7 // 8)
        return self.learning_rate if epoch < first_part else self.final_learning_rate


def run_batch(
    model: PhoneClassifier,
    features: Sequence[Tensor],
    condition: Condition,
    orders: Sequence[Tensor],
    **more: bool,
) -> Output:
    """Output for utterances ``[T, 40]``, which are padded at their ends. If frames are scrambled,
    row i belongs to frame ``order[i]``."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(order) for order in orders])
    if condition.scrambled:
        features = [frames[order] for frames, order in zip(features, orders, strict=True)]
    padded = pad_sequence([*features], batch_first=True).to(device)
    order = None
    if condition.with_positions:  # padding does not move
        ends = [torch.arange(len(order), padded.shape[1]) for order in orders]
        order = torch.stack([*map(torch.cat, zip(orders, ends, strict=True))]).to(device)
    return model(padded, condition.positions, order, lengths=lengths, **more)


def run_model(
    model: PhoneClassifier, features: Tensor, condition: Condition, order: Tensor, **more: bool
) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, classes]`` and weights ``[H, T, T]`` of each layer for one utterance ``[T,
    40]``; see :func:`run_batch`."""
    output = run_batch(model, [features], condition, [order], **more)
    return output.logits[0], [weights[0] for weights in output.weights]


def permutations(utterances: Sequence[Example], seed: int) -> Iterator[Tensor]:
    """A random order of frames for each utterance."""
    generator = torch.Generator().manual_seed(seed)
    for utterance in utterances:
        yield torch.randperm(len(utterance.labels), generator=generator)


@torch.no_grad()
def predict(model: PhoneClassifier, utterances: Sequence[Example], condition: Condition) -> Frames:
    """Predicted classes of each utterance, in the natural order of its frames."""
    model.eval()
    predictions = []
    for utterance, order in zip(utterances, permutations(utterances, 0), strict=True):
        logits, _ = run_model(model, utterance.features, condition, order)
        classes = logits.argmax(-1).cpu()
        natural = classes[order.argsort()] if condition.scrambled else classes
        predictions.append(natural.numpy())
    return predictions


@torch.no_grad()
def attention(model: PhoneClassifier, utterance: Example, condition: Condition) -> np.ndarray:
    """``[layers, H, T, T]`` weights of one utterance, in the order in which the model sees it."""
    model.eval()
    (order,) = permutations([utterance], 0)
    _, weights = run_model(model, utterance.features, condition, order, need_weights=True)
    return torch.stack(weights).cpu().numpy()


def seen_labels(utterance: Example, condition: Condition) -> np.ndarray:
    """The labels ``[T]`` of the frames in the order of :func:`attention`."""
    (order,) = permutations([utterance], 0)
    return (utterance.labels[order] if condition.scrambled else utterance.labels).numpy()


def long_utterance(utterances: Sequence[Example]) -> Example:
    """The longest of the first ten utterances, whose attention is shown."""
    return max(utterances[:10], key=lambda utterance: len(utterance.labels))


def targets(utterances: Sequence[Example]) -> list[np.ndarray]:
    return [utterance.labels.numpy() for utterance in utterances]


def train_epoch(
    model: PhoneClassifier,
    utterances: Sequence[Example],
    condition: Condition,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    batch_size: int = 1,
) -> Iterator[float]:
    """Trains one step on each batch of utterances, in random order. Yields the loss of each step,
    which is a mean over frames."""
    model.train()
    shuffled = torch.randperm(len(utterances), generator=generator).tolist()
    for first in range(0, len(shuffled), batch_size):
        batch = [utterances[index] for index in shuffled[first : first + batch_size]]
        # drawn even if unused, so that all models see the utterances in the same order
        orders = [torch.randperm(len(item.labels), generator=generator) for item in batch]
        labels = [item.labels for item in batch]
        if condition.scrambled:
            labels = [names[order] for names, order in zip(labels, orders, strict=True)]
        expected = pad_sequence(labels, batch_first=True, padding_value=NO_CLASS).flatten()
        logits = run_batch(model, [item.features for item in batch], condition, orders).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), expected.to(logits.device), ignore_index=NO_CLASS
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@dataclass(frozen=True)
class Experiment:
    """Data, sizes and training that all models share. A model has a position embedding with a name,
    the name of a condition, and a seed for all random numbers."""

    corpus: Corpus
    sizes: Sizes
    training: Training
    work: Path
    device: torch.device

    def model(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """A trained model. All position embeddings share one training without positions; the tests
        add positions to this model."""
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
        """`model`, which was trained without positions, with positions of the type at their random
        initial values."""
        other = self.build(config, seed)
        other.load_state_dict({**other.state_dict(), **model.state_dict()})
        return other.to(next(model.parameters()).device)

    def trained(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """A model and its history; trains the model unless `work` holds it."""
        settings = {"condition": condition, "position_embedding": config.to_dict(), "seed": seed}
        settings |= {"data": self.corpus.fingerprint(), **vars(self.sizes), **vars(self.training)}
        folder = self._folder(name, condition, seed)
        make = partial(self._train, name=name, config=config, condition=condition, seed=seed)
        step(folder, settings, make)
        model = self._load(folder / "model.pt", config, seed)
        rows = [line.split(",") for line in read_written(folder / "history.csv")[1:]]
        history = [dict(zip(HISTORY, (int(n), *map(float, row)), strict=True)) for n, *row in rows]
        return model, history

    def _load(self, path: Path, config: PositionConfig, seed: int) -> PhoneClassifier:
        model = self.build(config, seed)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model.to(self.device)

    def at_epochs(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> dict[int, PhoneClassifier]:
        """The models after the ``kept_epochs`` of a finished training."""
        if not CONDITIONS[condition].positions:
            name, config = NO_POSITIONS.type, NO_POSITIONS
        folder = self._folder(name, condition, seed)
        epochs = self.training.kept_epochs
        return {n: self._load(folder / f"epoch{n}.pt", config, seed) for n in epochs}

    def _folder(self, name: str, condition: str, seed: int) -> Path:
        return self.work / f"{folder_name(name)}-{condition}-seed{seed}"

    def _train(
        self, folder: Path, name: str, config: PositionConfig, condition: str, seed: int
    ) -> None:
        """Writes the weights of the best epoch on dev, the weights of the ``kept_epochs``, and
        ``history.csv``."""
        inputs, title = CONDITIONS[condition], f"{name} {condition} seed {seed}"
        training, model = self.training, self.build(config, seed).to(self.device)
        optimizer = OPTIMIZERS[training.optimizer](model.parameters(), lr=training.learning_rate)
        generator = torch.Generator().manual_seed(seed)
        utterances, dev = self.corpus.splits["train"], self.corpus.splits["dev"]
        example, best = long_utterance(dev), float("inf")
        history = [",".join(HISTORY)]
        total = training.epochs * -(-len(utterances) // training.batch_size)
        with tqdm(total=total, desc=title, disable=None) as progress:
            for epoch in range(training.epochs):
                optimizer.param_groups[0]["lr"] = training.rate(epoch)
                losses = []
                steps = (model, utterances, inputs, optimizer, generator, training.batch_size)
                for loss in train_epoch(*steps):
                    if not math.isfinite(loss):
                        remedy = f"a smaller --learning-rate than {training.learning_rate}"
                        raise CommandError(f"{title}: the loss is {loss}; give {remedy}")
                    losses.append(loss)
                    progress.update()
                error = error_rate(targets(dev), predict(model, dev, inputs))
                near = near_attention(attention(model, example, inputs), NEAR)
                loss = float(np.mean(losses))
                history.append(f"{epoch + 1},{loss:.5f},{error:.3f},{near:.4f}")
                progress.set_postfix(loss=f"{loss:.3f}", dev=f"{error:.2f} %")
                if epoch + 1 in training.kept_epochs:
                    torch.save(model.state_dict(), folder / f"epoch{epoch + 1}.pt")
                if error < best:
                    best = error
                    torch.save(model.state_dict(), folder / "model.pt")
        write_lines(folder / "history.csv", history)
