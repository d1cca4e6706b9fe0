"""The thesis's classifier, its training and its tests, with positions in or out, frames scrambled
or not: a Transformer encoder over frames, positions concatenated to features.

    [40 log-mel | d position channels] -> linear -> post-LN encoder layers -> linear -> classes

Without positions the d channels are zero, and the model has the same size.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import cape_plugins
from cape_plugins import PositionConfig
from cape_plugins.speech.features import HOP_SECONDS
from recipes.lab.steps import CommandError, folder_name, read_written, step, write_lines
from recipes.phones.analysis import Frames, error_rate, near_attention
from recipes.phones.data import BANDS, Corpus, Example


@dataclass(frozen=True)
class Sizes:
    dim: int  # d, channels of the positions; d + 40 must be divisible by the heads
    layers: int
    heads: int
    ffn: int  # width of the hidden layer of the feed-forward parts
    dropout: float  # of attention weights, hidden layers and what is added to the residual

    def __post_init__(self) -> None:
        width = self.dim + BANDS
        if width % self.heads:
            sizes = f"{BANDS} features and {self.dim} position channels make {width}"
            why = f"which is no multiple of --heads {self.heads}; change one of them"
            raise CommandError(f"--dim {self.dim}: {sizes}, {why}")
        if self.dim < 4 or self.dim % 2:
            raise CommandError(f"--dim {self.dim}: allowed: even numbers from 4 on, such as 88")


class Output(NamedTuple):
    logits: Tensor  # [B, T, classes]
    weights: list[Tensor]  # [B, H, T, T] of each layer, in the order of the frames, if asked for


class Layer(nn.Module):
    """Post-LN encoder layer (Vaswani et al.) that can show its attention weights."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, sizes.ffn)
        self.contract = nn.Linear(sizes.ffn, width)
        self.ffn_norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, relative: cape_plugins.RelativePositions | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout, weights = self.dropout if self.training else 0.0, None
        if relative is not None:
            how = {"dropout": dropout, "need_weights": need_weights}
            mixed, weights = cape_plugins.relative_attention(query, key, value, relative, **how)
        elif need_weights:
            weights = (query @ key.mT * key.shape[-1] ** -0.5).softmax(-1)
            mixed = F.dropout(weights, dropout) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        mixed = self.mix(mixed.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + F.dropout(mixed, dropout))
        hidden = F.dropout(self.expand(x).relu(), dropout)
        return self.ffn_norm(x + F.dropout(self.contract(hidden), dropout)), weights


class PhoneClassifier(nn.Module):
    """Classes of frames; a learned position table has `table_size` rows, one a frame."""

    def __init__(
        self, num_classes: int, config: PositionConfig, sizes: Sizes, table_size: int
    ) -> None:
        super().__init__()
        self.dim, width = sizes.dim, BANDS + sizes.dim
        self.project = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, sizes) for _ in range(sizes.layers))
        self.classify = nn.Linear(width, num_classes)
        # last, so that one seed draws the same other weights whatever the position embedding
        self.positions = cape_plugins.build_position_encoder(
            config,
            sizes.dim,
            unit=HOP_SECONDS,  # positions count frames, so that the sinusoid is the thesis's
            frequencies="marian",
            table_size=table_size,
            table_std=0.5**0.5,  # as large as sines are
        )
        self.relative = nn.ModuleList(
            cape_plugins.build_relative_positions(config, width // sizes.heads, sizes.heads)
            for _ in range(config.relative_depth(sizes.layers))
        )

    def embed(self, length: int, device: torch.device | str | None = None) -> Tensor | None:
        """``[1, T, d]`` embeddings of frames in natural order; None if the type has none."""
        lengths = torch.tensor([length], device=device)
        frames = cape_plugins.frame_positions(lengths, HOP_SECONDS, max_frames=length)
        return self.positions(frames, self.positions.draw(1, device))

    def forward(
        self,
        features: Tensor,
        positions: bool = True,
        order: Tensor | None = None,
        need_weights: bool = False,
    ) -> Output:
        """Classes of features ``[B, T, 40]``. Without `positions` they are left out, of whatever
        type; `order`, ``[T]``, is the position of each frame, by default 0, 1, 2 ..."""
        embedding = self.embed(features.shape[1], features.device) if positions else None
        if embedding is not None and order is not None:
            embedding = embedding[:, order]
        x = self.project(cape_plugins.combine(features, embedding, "concat", self.dim))
        # relative attention counts rows, so the frames stand in the order of their positions there
        moved = order is not None and positions and len(self.relative) > 0
        if moved:
            x = x[:, order.argsort()]
        all_weights = []
        relative = self.relative if positions else ()
        for layer, own in zip_longest(self.layers, relative):
            x, weights = layer(x, own, need_weights)
            if weights is not None:
                all_weights.append(weights[:, :, order][..., order] if moved else weights)
        return Output(self.classify(x[:, order] if moved else x), all_weights)


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
HISTORY = ("epoch", "train_loss", "dev_per", "near_attention")
History = list[dict[str, float]]
NEAR = 5  # frames; attention that is not farther is followed from epoch to epoch


@dataclass(frozen=True)
class Training:
    epochs: int
    learning_rate: float
    final_learning_rate: float  # of the last eighth of the epochs

    def rate(self, epoch: int) -> float:
        """Learning rate of the epoch with this index, from 0."""
        first_part = max(1, self.epochs * 7 // 8)
        return self.learning_rate if epoch < first_part else self.final_learning_rate


def run_model(
    model: PhoneClassifier, features: Tensor, condition: Condition, order: Tensor, **more: bool
) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[T, classes]`` and weights ``[H, T, T]`` by layer of features ``[T, 40]``; of
    scrambled ones, row i belongs to frame ``order[i]``."""
    device = next(model.parameters()).device
    features, order = features.to(device), order.to(device)
    features = features[order] if condition.scrambled else features
    order = order if condition.with_positions else None
    output = model(features[None], condition.positions, order, **more)
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
        order = torch.randperm(len(utterance.labels), generator=generator)
        labels = utterance.labels[order] if condition.scrambled else utterance.labels
        logits, _ = run_model(model, utterance.features, condition, order)
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
        other.load_state_dict({**other.state_dict(), **model.state_dict()})
        return other.to(next(model.parameters()).device)

    def trained(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """A model and its history, trained unless `work` has it."""
        settings = {"condition": condition, "position_embedding": config.to_dict(), "seed": seed}
        settings |= {"data": self.corpus.fingerprint(), **vars(self.sizes), **vars(self.training)}
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
                        remedy = f"a smaller --learning-rate than {self.training.learning_rate}"
                        raise CommandError(f"{title}: the loss is {loss}; give {remedy}")
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
