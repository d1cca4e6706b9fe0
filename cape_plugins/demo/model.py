"""The model of the control experiment, its training and its test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.demo.tasks import SYMBOLS, TASKS, Task
from cape_plugins.mathematics.builders import build_position_encoder
from cape_plugins.mathematics.encodings import combine
from cape_plugins.mathematics.in_attention import (
    AttentionPositions,
    build_layer_bias,
    build_stack_positions,
)
from cape_plugins.mathematics.positions import Positions
from cape_plugins.mathematics.relative import relative_attention
from cape_plugins.mathematics.relative_tables import build_relative_positions
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.switching import Step

DIM, HEADS, LAYERS = 64, 4, 2
BATCH = 16
UPDATES = 600
LEARNING_RATE = 3e-3
FURTHER = 1000  # added to the seed of a continued training, which thus sees new inputs
TEST_SEED = 2**31  # seed of test inputs, the same for all models
TEST_PLACES = 5120  # least number of frames, tokens or patches in all inputs of a test together


class Layer(nn.Module):
    """Pre-norm self-attention with the positions that `config` sets, and a feed-forward network."""

    def __init__(self, config: PositionConfig, number: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.feed = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.has_positions = config.in_layer(number)
        self.relative = self.bias = None
        if self.has_positions:
            self.relative = build_relative_positions(config, DIM // HEADS, HEADS)
            self.bias = build_layer_bias(config, HEADS)

    def forward(
        self, x: Tensor, patches: Sequence[int] | None, positions: AttentionPositions | None
    ) -> Tensor:
        """``[B, T, DIM]`` to the same shape.

        Args:
            x: States.
            patches: (height, width) of images.
            positions: Positions that act in attention.
        """
        parts = self.project(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if self.relative is not None:
            heads, _ = relative_attention(query, key, value, self.relative, patches=patches)
        elif positions is not None and self.has_positions:
            query, key = positions.turn(query, key)
            bias = positions.bias_of(self.bias, query, key)
            heads = F.scaled_dot_product_attention(query, key, value, bias)
        else:
            heads = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class Labeller(nn.Module):
    """A Transformer encoder that gives each place of its input a label."""

    def __init__(self, config: PositionConfig, table_size: int | tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, DIM)
        self.encode = build_position_encoder(config, DIM, table_size=table_size)
        self.in_attention = build_stack_positions(config, DIM // HEADS, HEADS)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, SYMBOLS)

    def forward(self, symbols: Tensor, positions: Positions) -> Tensor:
        """Scores ``[B, T, SYMBOLS]`` of symbols ``[B, T]``; draws in training."""
        draw = self.encode.draw(len(symbols), symbols.device)
        x = combine(self.embed(symbols), self.encode(positions, draw))
        attention = None
        if self.in_attention is not None:
            random = self.encode.draws
            attention = self.in_attention(self.encode, positions, draw, random=random)
        for layer in self.layers:
            x = layer(x, positions.patches, attention)
        return self.head(self.norm(x))


class Job(NamedTuple):
    """Trainings that follow one another in one process.

    Attributes:
        domain: Key of :data:`~cape_plugins.demo.tasks.TASKS`.
        first: The training of a new model.
        seed: Seed of initial weights, inputs and augmentation.
        device: Device of the trainings.
        continued: Trainings that each begin with the weights of the first one.
    """

    domain: str
    first: Step
    seed: int
    device: torch.device
    continued: Sequence[Step] = ()


def train_and_test(job: Job) -> list[dict[str, Any]]:
    """Trains models on inputs of one size and tests them on inputs of all sizes. Uses one thread,
    so that the results do not depend on how many jobs run side by side.

    Returns:
        A row for each training: name, seed, CPU seconds of the training, and errors in percent by
        size.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[job.device] if job.device.type == "cuda" else []):
            model, row = _train_and_test(job, job.first, None)
            return [row, *(_train_and_test(job, step, model)[1] for step in job.continued)]
    finally:
        torch.set_num_threads(threads)


def _train_and_test(
    job: Job, step: Step, trained: Labeller | None
) -> tuple[Labeller, dict[str, Any]]:
    task, start = TASKS[job.domain], time.process_time()
    seed = job.seed if trained is None else job.seed + FURTHER
    torch.manual_seed(seed)
    config = PositionConfig.from_dict(step.settings, job.domain)
    table_size = task.positions(1, task.train, job.device).patches or task.train
    model = Labeller(config, table_size).to(job.device)
    if trained is not None:
        new = model.state_dict()  # parameters of positions may have other names or sizes
        new.update(
            (n, v) for n, v in trained.state_dict().items() if n in new and v.shape == new[n].shape
        )
        model.load_state_dict(new)
    train(model, task, step, seed, job.device)
    seconds = time.process_time() - start
    model.eval()
    errors = {size: percent_wrong(model, task, size, job.device) for size in task.tests}
    return model, {
        "type": step.name,
        "seed": job.seed,
        "train_seconds": seconds,
        "errors": errors,
    }


def train(model: Labeller, task: Task, step: Step, seed: int, device: torch.device) -> None:
    """AdamW with one cycle of the learning rate."""
    if not step.updates:
        return
    rate = LEARNING_RATE * step.rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, step.updates)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(step.updates):
        symbols, labels, scored = (
            part.to(device) for part in task.batch(BATCH, task.train, generator)
        )
        scores = model(symbols, task.positions(BATCH, task.train, device))
        loss = F.cross_entropy(scores[:, scored].flatten(0, 1), labels[:, scored].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def percent_wrong(model: Labeller, task: Task, size: int, device: torch.device) -> float:
    """Wrong labels in percent, on inputs of this size. The seed of tests differs from all seeds of
    trainings, so training has not seen these inputs."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    places = task.batch(1, size, generator).symbols.shape[1]
    batch = task.batch(-(-TEST_PLACES // places), size, generator)
    symbols, labels, scored = (part.to(device) for part in batch)
    best = model(symbols, task.positions(len(symbols), size, device)).argmax(-1)
    return 100 * (best != labels)[:, scored].float().mean().item()
